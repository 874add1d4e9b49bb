"""Region of a bucket on S3, which obstore does not find out by itself: without AWS_REGION it takes us-east-1.

S3 answers any request for a bucket with the bucket's region, also one that it refuses. Source: Amazon S3 API Reference,
HeadBucket: "regardless of the permissions on the bucket, you will receive a response header with the correct bucket
location".
"""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from functools import lru_cache
from http.client import HTTPException
from typing import Any

ANYWHERE = "https://s3.amazonaws.com"  # knows the buckets of all regions but those of China and GovCloud
LOOKUP_S, AGAIN_S = 5.0, 60.0  # for an answer; until S3 is asked again that has not answered
REGION = ("AWS_REGION", "AWS_DEFAULT_REGION")
ENDPOINT = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")

_asked_next = 0.0  # monotonic


def settings(url: str) -> dict[str, Any]:
    """Return settings of obstore for a bucket's URL that the environment lacks."""
    found: dict[str, Any] = {}
    if not any(os.environ.get(name) for name in (*REGION, *ENDPOINT)) and (region := region_of(_bucket(url))):
        found["region"] = region
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


def _bucket(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]
