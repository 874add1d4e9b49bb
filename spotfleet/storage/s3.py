"""What obstore does not find out about S3 by itself: the region of a bucket, and the credentials in a user's profile.

Without AWS_REGION obstore takes us-east-1. It reads the credentials of the environment and of the machine's role. Those
of `aws configure` and `aws sso login`, as on a laptop, boto3 reads, if it is installed.

S3 answers any request for a bucket with the bucket's region, also one that it refuses. Source: Amazon S3 API Reference,
HeadBucket: "regardless of the permissions on the bucket, you will receive a response header with the correct bucket
location".
"""

from __future__ import annotations

import importlib
import os
import time
import urllib.error
import urllib.request
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path
from typing import Any

ANYWHERE = "https://s3.amazonaws.com"  # knows the buckets of all regions but those of China and GovCloud
LOOKUP_S, AGAIN_S = 5.0, 60.0  # for an answer; until S3 is asked again that has not answered
REGION = ("AWS_REGION", "AWS_DEFAULT_REGION")
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")  # obstore reads them
FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
ENDPOINT = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")

_asked_next = 0.0  # monotonic


def settings(url: str) -> dict[str, Any]:
    """Return settings of obstore for a bucket's URL that the environment lacks."""
    found: dict[str, Any] = {}
    if not any(os.environ.get(name) for name in (*REGION, *ENDPOINT)) and (region := region_of(_bucket(url))):
        found["region"] = region
    if provider := _profile():
        found["credential_provider"] = provider
    return found


def other_region(url: str) -> str:
    """Explain that a bucket is not where these settings look for it."""
    bucket, here = _bucket(url), next((v for name in REGION if (v := os.environ.get(name))), "")
    region = region_of(bucket)
    return (f"bucket {bucket!r} is in {f'region {region}' if region else 'another region'}"
            f"{f', not in {here}' if here else ''}: set AWS_REGION to the bucket's region under `envs`")


def region_of(bucket: str) -> str:
    """Return the region of a bucket; "" if S3 does not answer, or does not know the bucket."""
    global _asked_next
    if time.monotonic() < _asked_next:
        return ""
    try:
        return _asked(ANYWHERE, bucket)
    except (OSError, HTTPException):  # a subnet with nothing but a gateway endpoint has no way to it
        _asked_next = time.monotonic() + AGAIN_S
        return ""


@lru_cache(maxsize=64)
def _asked(address: str, bucket: str) -> str:
    request = urllib.request.Request(f"{address}/{bucket}", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=LOOKUP_S) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as refused:
        refused.close()
        headers = refused.headers
    return str(headers.get("x-amz-bucket-region") or "")


def _profile() -> Any:
    """Return obstore's provider of the credentials in the user's profile; None without a profile, or without boto3.
    OSError for a profile that boto3 refuses."""
    files = (Path(os.environ.get(name) or usual).expanduser() for name, usual in FILES.items())
    if any(os.environ.get(name) for name in KEYS) or not (
            os.environ.get("AWS_PROFILE") or any(file.is_file() for file in files)):
        return None
    try:
        provider = importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider
        refused = importlib.import_module("botocore.exceptions").BotoCoreError
    except ImportError:
        return None
    try:
        return provider()
    except ValueError:  # that profile has none
        return None
    except refused as error:
        raise OSError(f"the credentials cannot be read: {error}") from error


def _bucket(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]
