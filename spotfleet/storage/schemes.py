"""Table of the object stores that a checkpoint's target and `file_mounts` may name, by the scheme of their URLs.

An object store is no provider: a fleet of any provider may use any store. A new store is a row here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scheme:
    """An object store as obstore knows it."""

    bucket: str  # the store's word for a bucket, as in a URL's pattern
    credentials: str  # environment variables with credentials, as text for users
    place: str  # environment variables by which a bucket is looked up
    prefix: str  # common beginning of all its environment variables


SCHEMES = {
    "s3": Scheme("BUCKET", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "AWS_REGION, AWS_ENDPOINT_URL", "AWS"),
    "gs": Scheme("BUCKET", "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE"),
    "az": Scheme("CONTAINER", "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
                 "AZURE_STORAGE_ACCOUNT_NAME", "AZURE"),
}
STORES = {"s3": "s3", "gcs": "gs", "azure": "az"}  # SkyPilot's names -> schemes
EXAMPLES = [f"{scheme}://{one.bucket}/PREFIX" for scheme, one in SCHEMES.items()]
ANY_URL = f"{', '.join(EXAMPLES[:-1])} or {EXAMPLES[-1]}"  # for messages
ANY_SCHEME = " or ".join([", ".join(f"{scheme}://" for scheme in [*SCHEMES][:-1]), f"{[*SCHEMES][-1]}://"])
