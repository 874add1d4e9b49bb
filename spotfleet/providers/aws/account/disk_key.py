"""Key of the disks. A customer's key requires rights of the caller of each launch, and for spot hosts a grant as well.

Where the fleet file names no key, EC2 takes the account's default of the region, which many accounts have set to a key
of their own. Without the rights EC2 accepts a launch and ends the machine at once, with Client.InternalError.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.providers import Finding
from spotfleet.providers.aws.mapping import errors, listing, names
from spotfleet.providers.aws.session import Account

AWS_OWN = "alias/aws/ebs"
KEY_S = 600.0  # the account's default may change
SPOT_ROLE = "AWSServiceRoleForEC2Spot"
IN_A_ROW, RECENT_S, ENDED_S = 3, 600.0, 30.0  # machines that ended for the key; for how long; how often it is read
GRANT = ("once per key, by a person who administers it: aws kms create-grant --region {region} --key-id {key} "
         "--grantee-principal arn:{partition}:iam::{account}:role/aws-service-role/spot.amazonaws.com/" + SPOT_ROLE +
         " --operations Decrypt Encrypt GenerateDataKey GenerateDataKeyWithoutPlaintext CreateGrant DescribeKey "
         "ReEncryptFrom ReEncryptTo")


def default(account: Account, region: str) -> str:
    """Return the ARN of the customer's key that encrypts the account's disks by default; "" if that is AWS's own."""
    def ask() -> str:
        key = account.client("ec2", region).get_ebs_default_kms_key_id()["KmsKeyId"]
        if key.endswith(AWS_OWN):
            return ""
        found = account.client("kms", region).describe_key(KeyId=key)["KeyMetadata"]
        return found["Arn"] if found.get("KeyManager") == "CUSTOMER" else ""

    return account.cached(("default disk key", region), KEY_S, ask)


def defaults(account: Account) -> tuple[str, ...]:
    """Return the customers' keys that encrypt disks in the fleet's regions where the fleet file names none."""
    if account.settings.spec.kms_key:
        return ()
    return tuple(dict.fromkeys(key for region in account.regions if (key := default(account, region))))


def findings(account: Account, region: str) -> Iterator[Finding]:
    named = account.settings.spec.kms_key
    key = named or default(account, region)
    if not key:
        yield Finding(f"{region}: AWS's own key encrypts the disks")
        return
    kms = account.client("kms", region)
    what = f"{region}: {key} encrypts the disks" + ("" if named else ", as the account's default")
    try:
        found = kms.describe_key(KeyId=key)["KeyMetadata"]
    except SpotfleetError as error:
        if errors.code(error) != "NotFoundException":
            raise
        yield Finding(f"{what}, but it is not there", "blocker", "correct `aws.kms_key`, or leave it out")
        return
    if found.get("KeyState") != "Enabled":
        yield Finding(f"{what}, and it is {found.get('KeyState')}", "blocker", f"aws kms enable-key --key-id {key}")
        return
    grants = kms.pages("list_grants", "Grants", KeyId=found["Arn"])  # takes no alias
    if any(g.get("GranteePrincipal", "").endswith(f"/{SPOT_ROLE}") for g in grants):
        yield Finding(f"{what}, and {SPOT_ROLE} has a grant for it")
        return
    number, arn = account.identity()
    yield Finding(f"{what}, and {SPOT_ROLE} has no grant for it: spot hosts end at once, unless the key's policy names "
                  "the role", "warning",
                  GRANT.format(region=region, key=found["Arn"], partition=arn.split(":")[1], account=number))


def refuse_again(account: Account, region: str, fleet: str) -> None:
    """Raise NeedsPerson if EC2 ended the fleet's last machines for the key: the next one would end as well.

    A person's repair is tried once the last of them is RECENT_S old.
    """
    def ended() -> bool:
        found = account.client("ec2", region).pages(
            "describe_instances", "Reservations", Filters=[{"Name": f"tag:{names.FLEET}", "Values": [fleet]}])
        last = sorted((i for r in found for i in r["Instances"]), key=lambda i: i["LaunchTime"])[-IN_A_ROW:]
        return len(last) == IN_A_ROW and time.time() - last[-1]["LaunchTime"].timestamp() < RECENT_S and all(
            (i.get("StateReason") or {}).get("Code") == listing.KEY_TROUBLE for i in last)

    if account.cached(("ended for the key", region, fleet), ENDED_S, ended):
        key = account.settings.spec.kms_key or "the account's default key for disks"
        raise NeedsPerson(f"aws {region}: EC2 ended the last {IN_A_ROW} machines with {listing.KEY_TROUBLE}: it may "
                          f"not use {key} for them", hint="`spotfleet check aws FILE` on the laptop shows what the key "
                          "needs (docs/clouds/aws.md, \"KMS\"); launches begin again within ten minutes of it")
