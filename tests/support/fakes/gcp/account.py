"""Requests on the project itself: its policy, its APIs, its service accounts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tests.support.fakes.gcp import catalog
from tests.support.fakes.gcp.errors import GcpError, invalid
from tests.support.fakes.gcp.requests import Request, handles
from tests.support.fakes.gcp.state import fingerprint

if TYPE_CHECKING:
    from tests.support.fakes.gcp.cloud import GcpCloud

ACCOUNT_ID = re.compile(r"[a-z]([-a-z0-9]{4,28}[a-z0-9])")
PERMISSIONS_MOST = 100


def furnish(cloud: GcpCloud) -> None:
    cloud.accounts[cloud.default_account] = (_account(cloud, cloud.default_account, "Compute Engine default service "
                                                      "account"), 0.0)


def _account(cloud: GcpCloud, email: str, text: str) -> dict[str, Any]:
    return {"name": f"projects/{cloud.project}/serviceAccounts/{email}", "projectId": cloud.project, "email": email,
            "uniqueId": cloud.number(), "displayName": text, "etag": "MDEwMjE5MjA=", "oauth2ClientId": cloud.number()}


def _known(request: Request, name: str) -> None:
    if name not in (request.cloud.project, catalog.NUMBER):
        raise GcpError("forbidden", "The caller does not have permission", 403)


# ---- the project


@handles("cloudresourcemanager.projects.get")
def project(request: Request) -> dict[str, Any]:
    _known(request, request.named["projectId"])
    request.need("resourcemanager.projects.get", f"projects/{request.cloud.project}")
    return {"projectId": request.cloud.project, "projectNumber": catalog.NUMBER, "name": "training",
            "lifecycleState": "ACTIVE", "createTime": "2026-01-01T00:00:00.000Z"}


@handles("cloudresourcemanager.projects.testIamPermissions")
def test_permissions(request: Request) -> dict[str, Any]:
    _known(request, request.named["resource"])
    wanted = request.body.get("permissions", [])
    if len(wanted) > PERMISSIONS_MOST or any("*" in p for p in wanted):
        raise GcpError("badRequest", f"At most {PERMISSIONS_MOST} permissions without wildcards are allowed.", 400)
    held = [p for p in wanted if request.may(p)]
    return {"permissions": held} if held else {}


@handles("cloudresourcemanager.projects.getIamPolicy")
def get_policy(request: Request) -> dict[str, Any]:
    _known(request, request.named["resource"])
    request.need("resourcemanager.projects.getIamPolicy", f"projects/{request.cloud.project}")
    return request.cloud.policy


@handles("cloudresourcemanager.projects.setIamPolicy")
def set_policy(request: Request) -> dict[str, Any]:
    """With the etag of what was read: else somebody else's change would be lost."""
    cloud = request.cloud
    _known(request, request.named["resource"])
    request.need("resourcemanager.projects.setIamPolicy", f"projects/{cloud.project}")
    given = request.body.get("policy", {})
    if given.get("etag") != cloud.policy["etag"]:
        raise GcpError("alreadyExists", "There were concurrent policy changes. Please retry the whole "
                       "read-modify-write with exponential backoff.", 409)
    for binding in given.get("bindings", ()):
        for member in binding.get("members", ()):
            kind, _, email = member.partition(":")
            if kind == "serviceAccount" and email.endswith(f"@{cloud.project}.iam.gserviceaccount.com") and (
                    not cloud.account_known(email)):
                raise GcpError("invalid", f"Service account {email} does not exist.", 400)
    cloud.policy = {"version": 1, "bindings": given.get("bindings", []), "etag": fingerprint(given)}
    return cloud.policy


# ---- APIs


def _service(request: Request, name: str) -> dict[str, Any]:
    on = name in request.cloud.services
    return {"name": f"projects/{catalog.NUMBER}/services/{name}", "parent": f"projects/{catalog.NUMBER}",
            "config": {"name": name}, "state": "ENABLED" if on else "DISABLED"}


@handles("serviceusage.services.get")
def service_get(request: Request) -> dict[str, Any]:
    request.need("serviceusage.services.get", request.named["name"])
    return _service(request, request.named["name"].rpartition("/")[2])


@handles("serviceusage.services.batchGet")
def services_get(request: Request) -> dict[str, Any]:
    request.need("serviceusage.services.get", request.named["parent"])
    return {"services": [_service(request, n.rpartition("/")[2]) for n in request.several("names")]}


@handles("serviceusage.services.list")
def services(request: Request) -> dict[str, Any]:
    request.need("serviceusage.services.list", request.named["parent"])
    known = sorted({*catalog.SERVICES, *request.cloud.services})
    wanted = request.query.get("filter", "")
    if wanted not in ("", "state:ENABLED", "state:DISABLED"):
        raise invalid("filter", wanted, "The allowed filter strings are state:ENABLED and state:DISABLED.")
    found = [_service(request, n) for n in known]
    return {"services": [s for s in found if wanted in ("", f"state:{s['state']}")]}


@handles("serviceusage.services.enable", "serviceusage.services.batchEnable")
def enable(request: Request) -> dict[str, Any]:
    where = request.named.get("name") or request.named["parent"]
    request.need("serviceusage.services.enable", where)
    names = [where.rpartition("/")[2]] if "name" in request.named else request.body.get("serviceIds", [])
    request.cloud.services |= set(names)
    return {"name": "operations/acat.p2-123", "done": True, "response": {}}


# ---- service accounts


@handles("iam.projects.serviceAccounts.create")
def create_account(request: Request) -> dict[str, Any]:
    cloud = request.cloud
    request.need("iam.serviceAccounts.create", request.named["name"])
    id = request.body.get("accountId", "")
    if not ACCOUNT_ID.fullmatch(id):
        raise invalid("accountId", id, "Must be 6 to 30 lowercase letters, digits and hyphens.")
    email = f"{id}@{cloud.project}.iam.gserviceaccount.com"
    if email in cloud.accounts:
        raise GcpError("alreadyExists", f"Service account {id} already exists within project "
                       f"projects/{cloud.project}.", 409)
    given = request.body.get("serviceAccount", {})
    made = _account(cloud, email, given.get("displayName", "")) | {
        k: v for k, v in given.items() if k == "description"}
    cloud.accounts[email] = (made, request.now)
    return made


def _email(request: Request) -> str:
    email = (request.named.get("name") or request.named["resource"]).rpartition("/")[2]
    if not request.cloud.account_known(email) or email not in request.cloud.accounts:
        raise GcpError("notFound", f"Unknown service account: {email}", 404)
    return email


@handles("iam.projects.serviceAccounts.get")
def get_account(request: Request) -> dict[str, Any]:
    request.need("iam.serviceAccounts.get", request.named["name"])
    return request.cloud.accounts[_email(request)][0]


@handles("iam.projects.serviceAccounts.list")
def accounts(request: Request) -> dict[str, Any]:
    request.need("iam.serviceAccounts.list", request.named["name"])
    return {"accounts": [a for a, _ in request.cloud.accounts.values()]}


@handles("iam.projects.serviceAccounts.delete")
def delete_account(request: Request) -> dict[str, Any]:
    request.need("iam.serviceAccounts.delete", request.named["name"])
    del request.cloud.accounts[_email(request)]
    return {}


@handles("iam.projects.serviceAccounts.testIamPermissions")
def test_on_account(request: Request) -> dict[str, Any]:
    held = [p for p in request.body.get("permissions", []) if request.may(p)]
    return {"permissions": held} if held else {}
