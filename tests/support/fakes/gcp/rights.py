"""Who asks, and what each may do. Without a rule everybody may do everything."""

from __future__ import annotations

import base64
import fnmatch
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.support.fakes.gcp.errors import GcpError

if TYPE_CHECKING:
    from tests.support.fakes.gcp.cloud import GcpCloud

PREFIX = "ya29.of:"
PLATFORM = "https://www.googleapis.com/auth/cloud-platform"
COMPUTE = ("https://www.googleapis.com/auth/compute", PLATFORM)
READ_ONLY = (*COMPUTE, "https://www.googleapis.com/auth/compute.readonly",
             "https://www.googleapis.com/auth/cloud-platform.read-only")


class Rights:
    """Permissions by name, as "compute.instances.create"; patterns are allowed."""

    def __init__(self, cloud: GcpCloud) -> None:
        self._cloud = cloud
        self.allowed: dict[str, set[str]] = {}
        self.denied: dict[str, set[str]] = {}
        self.expired: set[str] = set()

    def may(self, principal: str, permission: str) -> bool:
        allowed = self.allowed.get(principal)
        if _any(permission, self.denied.get(principal, ())):
            return False
        return allowed is None or _any(permission, allowed)

    def token(self, principal: str, scopes: Iterable[str] = (PLATFORM,)) -> str:
        """An access token, which says whose it is: the fake knows it after a reset, too."""
        text = json.dumps([principal, sorted(scopes)])
        return PREFIX + base64.urlsafe_b64encode(text.encode()).decode()

    def caller(self, authorization: str) -> tuple[str, tuple[str, ...]]:
        """The principal and the scopes of a request's token. GcpError for a stranger."""
        if not authorization:
            if self._cloud.anonymous:
                return self._cloud.anonymous, (PLATFORM,)
            raise GcpError("authError", "Request is missing required authentication credential. Expected OAuth 2 "
                           "access token, login cookie or other valid authentication credential.", 401)
        token = authorization.removeprefix("Bearer ")
        try:
            if token.startswith(PREFIX):
                principal, scopes = json.loads(base64.urlsafe_b64decode(token.removeprefix(PREFIX)))
            else:  # a JWT that a service account's key has signed itself
                claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
                principal, scopes = claims["iss"], [PLATFORM]
        except (ValueError, IndexError, KeyError):
            raise GcpError("authError", "Invalid Credentials", 401) from None
        if principal in self.expired:
            raise GcpError("authError", "Invalid Credentials", 401)
        return principal, tuple(scopes)


def permission_of(method: str) -> str:
    """The permission that a method needs of itself; "" where its handler judges that."""
    service, resource, verb = [*method.split("."), "", ""][:3]
    if service != "compute" or resource == "instances" or verb == "bulkInsert":
        return ""
    name = {"insert": "create", "aggregatedList": "list", "patch": "update", "wait": "get"}.get(verb, verb)
    if resource == "advice":
        return "compute.advice.calendarMode" if verb == "calendarMode" else f"compute.advice.{verb}"
    return f"compute.{resource}.{name}"


def scopes_suffice(verb: str, path: str, scopes: tuple[str, ...]) -> bool:
    needed = READ_ONLY if verb == "GET" else COMPUTE
    return bool({*scopes} & {*(needed if path.startswith("/compute/") else (PLATFORM, *READ_ONLY[:1]))})


def _any(permission: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(permission, p) for p in patterns)
