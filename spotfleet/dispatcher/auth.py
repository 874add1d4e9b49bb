"""Who is calling: the person with the admin token, or a host with a token of its own."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Caller:
    """`host` is empty for the admin."""

    host: str = ""

    @property
    def is_admin(self) -> bool:
        return not self.host


def host_token(fleet_secret: str, host: str) -> str:
    """The token that only this host of this fleet holds, in hex."""
    return hmac.new(fleet_secret.encode(), host.encode(), hashlib.sha256).hexdigest()


def bearer(header: str) -> str:
    """The token in an Authorization header; empty when there is none."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def identify(token: str, admin_token: str, fleet_secret: str, hosts: Iterable[str]) -> Caller | None:
    """Whose token this is, among the admin and `hosts`; None when nobody's. Every wrong token takes the same time."""
    if not token:
        return None
    given, found = token.encode(), None
    if admin_token and hmac.compare_digest(given, admin_token.encode()):
        found = Caller()
    for host in hosts:
        if hmac.compare_digest(given, host_token(fleet_secret, host).encode()):
            found = Caller(host)
    return found
