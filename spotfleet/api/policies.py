"""IAM policy documents that `check --policy` prints, for the user, a dispatcher or hosts. Sends no request."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from spotfleet import config
from spotfleet.api.home import Home
from spotfleet.errors import UsageError
from spotfleet.model import AwsSpec, FleetSpec
from spotfleet.providers.aws.mapping import names, policies

ROLES = ("laptop", "dispatcher", "host")  # roles that have a policy
LONGEST = 6144  # characters of a managed policy, white space not counted
A_FILE = "spotfleet check --policy {role} FILE"


def document(home: Home, role: str, file: Path | None) -> dict[str, Any]:
    """Return the policy of `role` for any fleet; exactly for the fleet of `file`, or for the only one there is.

    Raises UsageError where the role's policy depends on a fleet and there is none.
    """
    name, spec = _fleet(home, file)
    aws = (spec.aws if spec else None) or AwsSpec()
    target = spec.checkpoint.url if spec else ""
    regions = aws.regions or _named(spec)
    region = regions[0] if regions else policies.ANY
    partition = names.partition(regions[0] if regions else os.environ.get("AWS_REGION", ""))
    if role == "host":
        if not target.startswith("s3://"):
            raise UsageError("hosts have no permissions but those of a checkpoint bucket, and none is named",
                             hint=f"{A_FILE.format(role=role)}, in it `checkpoint: {{target: s3://BUCKET/PREFIX}}`")
        return policies.host(target, partition)
    own = aws.image if aws.image.startswith("/") and not aws.image.startswith("/aws/service/") else ""
    if role == "laptop":  # for all regions: each named region would make it half as long again
        return _fitting(policies.laptop(policies.Scope(
            partition=partition, kms_key=aws.kms_key, image=own, target=target, queue=aws.event_queue,
            dispatcher_profile=aws.dispatcher_profile, host_profile=aws.host_profile,
            boundary=aws.permissions_boundary)))
    if not name:
        raise UsageError("a dispatcher's permissions are limited to its fleet, and none is named",
                         hint=A_FILE.format(role=role))
    own_role = f"{names.IAM_PATH}{names.role(name, 'host', region)}"
    host_role = f"arn:{partition}:iam::{policies.ANY}:role{'/*' if aws.host_profile else own_role}"  # named: any role
    return policies.dispatcher(policies.Scope(
        name, regions, partition=partition,
        host_role=host_role if target.startswith("s3://") or aws.host_profile else "",
        kms_key=aws.kms_key, image=own, target=target, queue=aws.event_queue))


def _fitting(document: dict[str, Any]) -> dict[str, Any]:
    """Shorten the document if IAM would not take it."""
    if len(json.dumps(document, separators=(",", ":"))) <= LONGEST:
        return document
    return policies.shortened(document)


def _fleet(home: Home, file: Path | None) -> tuple[str, FleetSpec | None]:
    """Return the fleet's name in the cloud, or a pattern of all names it may get there, and its spec."""
    if file is not None:
        spec = config.load(file).spec
        if spec.provider != "aws":
            raise UsageError(f"{file} is of provider {spec.provider}, which has no policies",
                             hint="name a fleet file with `provider: aws`")
        return names.any_life(spec.name), spec
    found = [f for f in home.living() if f.readable and f.record.spec.provider == "aws"]
    return (found[0].record.cloud_name, found[0].record.spec) if len(found) == 1 else ("", None)


def _named(spec: FleetSpec | None) -> tuple[str, ...]:
    """Return the regions that the fleet's needs name; () if one of them names none."""
    found = tuple(dict.fromkeys(n.region for n in spec.any_of)) if spec else ()
    return found if all(found) else ()
