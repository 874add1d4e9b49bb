"""Keys of disks: the account's default one, and whether EC2 may use a customer's key for a launch.

EC2 accepts a launch whose caller may not use the key, and ends the instance at once. A key that KMS does not know is
not judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.fakes.aws.catalog import ACCOUNT
from tests.support.fakes.aws.operations import Context, operation

if TYPE_CHECKING:
    from tests.support.fakes.aws.cloud import AwsCloud
    from tests.support.fakes.aws.state import Order

MANAGED = "alias/aws/ebs"
USES = ("kms:CreateGrant", "kms:Decrypt", "kms:GenerateDataKeyWithoutPlaintext", "kms:ReEncryptFrom", "kms:ReEncryptTo")
REFUSED = ("Client.InternalError", "Client.InternalError: Client error on launch")


@operation("ec2:GetEbsDefaultKmsKeyId")
def get_ebs_default_kms_key_id(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    return {"KmsKeyId": default(ctx.cloud, ctx.region.name)}


def default(cloud: AwsCloud, region: str) -> str:
    """ARN of the key that encrypts where a launch names none; AWS's own, unless the account has set another."""
    if set_ := cloud.regions[region].default_key:
        return set_
    backend = _backend(region)
    if backend.get_key_id_from_alias(MANAGED) is None:
        backend._generate_default_keys(MANAGED)
    key = backend.describe_key(MANAGED)
    key.key_manager = "AWS"
    return str(key.arn)


def may_use(cloud: AwsCloud, region: str, order: Order) -> bool:
    """May the caller of this launch have its disks encrypted? For spot, EC2's linked role needs a grant as well."""
    for volume in order.volumes:
        key = _customers(region, volume.get("KmsKeyId") or default(cloud, region)) if volume.get("Encrypted") else None
        if key is None:
            continue
        about = {
            "resource": [key.arn],
            "kms:ViaService": f"ec2.{region}.amazonaws.com",
            "kms:GrantIsForAWSResource": "true",
            **aliases(key),
        }
        if not all(cloud.rights.may(order.principal, action, about) for action in USES):
            return False
        granted = [g for g in key.grants.values() if g.grantee_principal.endswith("/AWSServiceRoleForEC2Spot")]
        if order.market == "spot" and not any("CreateGrant" in g.operations for g in granted):
            return False
    return True


def of_bucket(arn: str) -> Any | None:
    """The customer's key that encrypts a bucket's objects by default; its region is that of the key's ARN."""
    from moto.s3.models import s3_backends

    bucket = s3_backends[ACCOUNT]["aws"].buckets.get(arn.removeprefix("arn:aws:s3:::").partition("/")[0])
    rule = ((bucket.encryption if bucket else None) or {}).get("Rule") or {}
    name = (rule.get("ApplyServerSideEncryptionByDefault") or {}).get("KMSMasterKeyID", "")
    return _customers(name.split(":")[3] if name.startswith("arn:") else "us-east-1", name) if name else None


def aliases(key: Any) -> dict[str, list[str]]:
    return {"kms:ResourceAliases": [a.name for a in key.aliases.values()]}


def _customers(region: str, name: str) -> Any | None:
    backend = _backend(region)
    if name.endswith(MANAGED):
        return None
    alias = name[name.index("alias/") :] if "alias/" in name else ""
    id = backend.get_key_id_from_alias(alias) if alias else name.rpartition("/")[2]
    key = backend.keys.get(backend.get_key_id(id)) if id else None
    return key if key is not None and key.key_manager == "CUSTOMER" else None


def _backend(region: str) -> Any:
    from moto.kms.models import kms_backends

    return kms_backends[ACCOUNT][region]
