"""A base on Google Cloud: its contract is an object in its bucket, which has the base's label."""

from __future__ import annotations

import json
from urllib.parse import quote, urlencode

from spotfleet.errors import NeedsPerson
from spotfleet.providers.gcp.session import GcpAccount
from spotfleet.providers.kit.mapping import names

OBJECT = "spotfleet-base.json"


def found(account: GcpAccount, name: str) -> str:
    """Return the contract of base `name` in the project, as JSON. Raises NeedsPerson for none."""
    token = ""
    while True:
        asked = urlencode({"project": account.project, "fields": "items(name,labels),nextPageToken",
                           **({"pageToken": token} if token else {})})
        page, _ = account.rest("storage", f"/storage/v1/b?{asked}")
        for bucket in page.get("items") or ():
            if (bucket.get("labels") or {}).get(names.BASE) == name:
                content, _ = account.rest("storage", f"/storage/v1/b/{quote(bucket['name'])}/o/{OBJECT}?alt=media")
                return json.dumps(content)
        if not (token := page.get("nextPageToken", "")):
            raise NeedsPerson(f"gcp: no base {name} is in project {account.project}",
                              hint="name its project under `gcp.project` of the fleet file, or read the output of "
                                   "Terraform: --from-terraform DIR")
