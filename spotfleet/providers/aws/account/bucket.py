"""What `check` finds about the bucket for checkpoints: whether it answers, its region, key and lifecycle rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spotfleet.errors import SpotfleetError
from spotfleet.providers import Finding
from spotfleet.providers.aws.account import identity
from spotfleet.providers.aws.mapping import errors
from spotfleet.providers.aws.session import Account


def findings(account: Account) -> Iterator[Finding]:
    """Yield what is found about the bucket of the checkpoint target, if that is on S3."""
    target = account.settings.target
    if not target.startswith("s3://"):
        return
    bucket = target.removeprefix("s3://").partition("/")[0]
    try:
        answer = account.client("s3").head_bucket(Bucket=bucket)
    except SpotfleetError as error:
        match errors.code(error):
            case "404" | "NoSuchBucket":
                yield Finding(f"there is no bucket {bucket}", "blocker",
                              f"aws s3 mb s3://{bucket} --region {account.home_region}; or correct `checkpoint.target`")
            case "403":
                yield Finding(f"you may not read bucket {bucket}; the first checkpoint shows whether hosts may "
                              "write there", "warning", "if it is another account's, its owner must allow the "
                              "fleet's hosts what `spotfleet check aws --policy host FILE` prints")
            case _:
                raise
        return
    region = answer.get("BucketRegion") or answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", "")
    if region and region not in account.regions:
        yield Finding(f"bucket {bucket} is in {region}, the fleet in {', '.join(account.regions)}: each checkpoint is "
                      "paid for as traffic between regions", "warning", "use a bucket in the fleet's region")
    else:
        yield Finding(f"bucket {bucket} answers; the first checkpoint shows whether hosts may write there")
    yield from _key(account, bucket)
    yield from _rules(account, bucket, target.partition(bucket)[2].strip("/"))


def _rules(account: Account, bucket: str, prefix: str) -> Iterator[Finding]:
    """Warn of a bucket that keeps what the fleet removes, or the parts of uploads that a killed worker began."""
    s3, rules = account.client("s3"), []
    try:
        versioned = s3.get_bucket_versioning(Bucket=bucket).get("Status", "") == "Enabled"
        rules = s3.get_bucket_lifecycle_configuration(Bucket=bucket).get("Rules") or []
    except SpotfleetError as error:
        if errors.code(error) != "NoSuchLifecycleConfiguration":
            yield Finding(f"the lifecycle rules of bucket {bucket} cannot be read: {error}", "warning",
                          "allow s3:GetBucketVersioning and s3:GetLifecycleConfiguration; or see that a rule ends "
                          "incomplete uploads, and one removes old versions if it is versioned")
            return
    rules = [rule for rule in rules if rule.get("Status") == "Enabled" and _covers(rule, prefix)]
    if versioned and not any("NoncurrentVersionExpiration" in rule for rule in rules):
        yield Finding(f"bucket {bucket} keeps each version: checkpoints that the fleet removes stay there, and cost as "
                      "before", "warning", "a lifecycle rule with NoncurrentVersionExpiration for "
                      f"{prefix or 'the bucket'} (terraform/aws/checkpoints.tf has one)")
    if not any("AbortIncompleteMultipartUpload" in rule for rule in rules):
        yield Finding(f"no lifecycle rule of bucket {bucket} ends incomplete uploads: what a killed worker has sent "
                      "stays there, invisible, and costs", "warning",
                      f"a rule with AbortIncompleteMultipartUpload for {prefix or 'the bucket'} "
                      "(terraform/aws/checkpoints.tf has one)")


def _covers(rule: Mapping[str, Any], prefix: str) -> bool:
    """Return whether a lifecycle rule is for all objects under this prefix."""
    where = rule.get("Filter") or {}
    where = where.get("And") or where
    named = where.get("Prefix", rule.get("Prefix", ""))
    return f"{prefix}/".startswith(named) and not where.keys() - {"Prefix"}


def _key(account: Account, bucket: str) -> Iterator[Finding]:
    """Name the customer's key of a bucket: without rights to it, a host's first checkpoint is denied."""
    try:
        key = identity.target_key(account)
    except SpotfleetError as error:
        yield Finding(f"the encryption of bucket {bucket} cannot be read: {error}", "warning",
                      "if a KMS key encrypts it, allow s3:GetEncryptionConfiguration before `up`, which then gives "
                      "hosts the rights to the key")
        return
    if key and (profile := account.settings.spec.host_profile):
        yield Finding(f"{key} encrypts bucket {bucket}", "warning",
                      f"the role of `aws.host_profile` {profile} must allow kms:GenerateDataKey and kms:Decrypt for it")
    elif key:
        yield Finding(f"{key} encrypts bucket {bucket}; `up` gives hosts the rights to it, and the key's policy must "
                      "leave that to the account's roles")
