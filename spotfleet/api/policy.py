"""What `check --policy` prints: the IAM policy of the user, of a fleet's dispatcher, or of its hosts. Asks nobody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spotfleet import config
from spotfleet.api.house import House
from spotfleet.errors import UsageError
from spotfleet.model import AwsSpec, FleetSpec
from spotfleet.providers.aws import names, policy

ROLES = ("laptop", "dispatcher", "host")  # who has one
LONGEST = 6144  # characters of a managed policy, white space not counted
A_FILE = "spotfleet check --policy {role} FILE"


def document(house: House, role: str, file: Path | None) -> dict[str, Any]:
    """For any fleet; exactly for that of `file`, or for the only one there is.

    Raises UsageError where the role's policy depends on a fleet and there is none.
    """
    name, spec = _fleet(house, file)
    aws = (spec.aws if spec else None) or AwsSpec()
    target = spec.checkpoint.url if spec else ""
    if role == "host":
        if not target.startswith("s3://"):
            raise UsageError("hosts have no permissions but those of a checkpoint bucket, and none is named",
                             hint=f"{A_FILE.format(role=role)}, in it `checkpoint: {{target: s3://BUCKET/PREFIX}}`")
        return policy.host(target)
    own = aws.image if aws.image.startswith("/") and not aws.image.startswith("/aws/service/") else ""
    if role == "laptop":  # in all regions: each that is named makes it half as long again
        return _fitting(policy.laptop(policy.Scope(
            kms_key=aws.kms_key, image=own, target=target, queue=aws.event_queue,
            dispatcher_profile=aws.dispatcher_profile, host_profile=aws.host_profile)))
    if not name:
        raise UsageError("a dispatcher's permissions are limited to its fleet, and none is named",
                         hint=A_FILE.format(role=role))
    regions = aws.regions or _named(spec)
    region = regions[0] if regions else policy.ANY
    own_role = f"{names.IAM_PATH}{names.role(name, 'host', region)}"
    host_role = f"arn:aws:iam::{policy.ANY}:role{'/*' if aws.host_profile else own_role}"  # of a named one, whichever
    return policy.dispatcher(policy.Scope(
        name, regions, host_role=host_role if target.startswith("s3://") or aws.host_profile else "",
        kms_key=aws.kms_key, image=own, target=target, queue=aws.event_queue))


def _fitting(document: dict[str, Any]) -> dict[str, Any]:
    """Without the statements' names, which IAM does not need, where it would be too long with them."""
    if len(json.dumps(document, separators=(",", ":"))) <= LONGEST:
        return document
    return {**document, "Statement": [{k: v for k, v in s.items() if k != "Sid"} for s in document["Statement"]]}


def _fleet(house: House, file: Path | None) -> tuple[str, FleetSpec | None]:
    """Its name in the cloud, or what that of any life of it is like; and what it is."""
    if file is not None:
        spec = config.load(file).spec
        if spec.provider != "aws":
            raise UsageError(f"{file} is of provider {spec.provider}, which has no policies",
                             hint="name a fleet file with `provider: aws`")
        return names.any_life(spec.name), spec
    ours = [f for f in house.living() if f.readable and f.record.spec.provider == "aws"]
    return (ours[0].record.cloud_name, ours[0].record.spec) if len(ours) == 1 else ("", None)


def _named(spec: FleetSpec | None) -> tuple[str, ...]:
    """Regions that the fleet's needs name; () where one leaves it open."""
    found = tuple(dict.fromkeys(n.region for n in spec.any_of)) if spec else ()
    return found if all(found) else ()
