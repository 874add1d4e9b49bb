"""A base on AWS: the part of a fleet's surroundings that Terraform makes and that outlives fleets.

`terraform/aws` reads its rights, rules and names from files that this module writes, so that Terraform and `up` without
Terraform make the same:

    python -m spotfleet.providers.aws.base terraform/aws/data

`found` reads the contract of a base from the account.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from spotfleet.errors import NeedsPerson
from spotfleet.plugins import BASE_VERSION
from spotfleet.providers.aws.account import event_parser, network, queue, ssh_ingress
from spotfleet.providers.aws.mapping import names, policies, template
from spotfleet.providers.aws.session import Account
from spotfleet.providers.aws.types import DRIVEN
from spotfleet.version import __version__

NAME, REGION, ACCOUNT, PARTITION = "${name}", "${region}", "${account}", "${partition}"  # Terraform fills these in


def files() -> dict[str, Any]:
    """Return the contents of the module's data files by name."""
    return {"base.json": _base(), "gpus.json": _gpus()}


def _base() -> dict[str, Any]:
    kms = "arn:${partition}:kms:${region}:${%s_account}:key/${%s_key}"
    host_role = f"arn:{PARTITION}:iam::{ACCOUNT}:role{names.IAM_PATH}{names.role(NAME, 'host', REGION)}"
    scope = policies.Scope(NAME, (REGION,), ACCOUNT, PARTITION, host_role, kms % ("disk", "disk"), queue=True,
                           base=True)
    dispatcher = policies.dispatcher(scope)
    host = policies.host("s3://${bucket}/${prefix}", PARTITION, kms % ("bucket", "bucket"), ACCOUNT)
    return {
        "contract": BASE_VERSION,
        "module": __version__,
        "tags": {"base": names.BASE, "manager": names.MANAGER},
        "names": {
            "base": names.group(NAME), "hosts_group": names.group(NAME), "dispatcher_group": names.door(NAME),
            "dispatcher_role": names.role(NAME, "dispatcher", REGION), "host_role": names.role(NAME, "host", REGION),
            "boundary": names.boundary(NAME), "iam_path": names.IAM_PATH, "queue": names.queue(NAME),
            "template": names.template(NAME), "parameter": names.parameter(NAME),
        },
        "groups": {"hosts": {"description": network.GROUP_TEXT},
                   "dispatcher": {"description": network.DOOR_TEXT, "port": ssh_ingress.PORT}},
        "trust": {"usual": policies.trust(), "china": policies.trust("aws-cn")},
        "policies": {"dispatcher": dispatcher, "host": host,
                     "boundary": policies.boundary(scope, dispatcher, host)},
        "queue": {"retention_s": queue.KEPT_S, "visibility_s": queue.HIDDEN_S, "target": queue.TARGET,
                  "description": queue.RULE_TEXT, "patterns": list(event_parser.PATTERNS),
                  "policy": _queue_policy()},
        "machine": {"metadata": template.METADATA, "volume": template.VOLUME, "tagged": list(template.MADE)},
    }


def _queue_policy() -> dict[str, Any]:
    begin = f"arn:{PARTITION}"
    rules = [f"{begin}:events:{REGION}:{ACCOUNT}:rule/{queue.rule(NAME, n)}" for n in range(len(event_parser.PATTERNS))]
    return queue.policy(f"{begin}:sqs:{REGION}:{ACCOUNT}:{names.queue(NAME)}", rules)


def _gpus() -> dict[str, list[str]]:
    """Return GPU -> the types with the fewest of them, for each GPU that the default image drives."""
    from spotfleet.catalog.store import Store

    part = Store().part("aws", packaged=True)
    assert part is not None and part.catalog is not None
    machines = [m for m in part.catalog.machines.values() if m.accelerator and m.name.partition(".")[0] in DRIVEN]
    least = {m.accelerator: min(n.count for n in machines if n.accelerator == m.accelerator) for m in machines}
    return {gpu: sorted(m.name for m in machines if m.accelerator == gpu and m.count == count)
            for gpu, count in sorted(least.items())}


def found(account: Account, name: str) -> str:
    """Return the contract of base `name` in the configuration's regions, as JSON. Raises NeedsPerson for none."""
    for region in account.regions:
        ssm = account.client("ssm", region)
        tagged = list(ssm.pages("describe_parameters", "Parameters", ParameterFilters=[
            {"Key": f"tag:{names.BASE}", "Values": [name]}]))
        if tagged:
            return ssm.get_parameter(Name=tagged[0]["Name"])["Parameter"]["Value"]
    raise NeedsPerson(f"aws: no base {name} is in {', '.join(account.regions)}",
                      hint="name its region under `aws.regions` of the fleet file, or read the output of Terraform: "
                           "--from-terraform DIR")


def main(folder: Path) -> None:
    for name, content in files().items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
