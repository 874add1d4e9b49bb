"""Authentication of callers: the admin by the admin token, a host by its own token.

A host's token is `HOST.MAC`, where MAC is HMAC-SHA256(fleet secret, HOST) in hex. It names its host, so one computation
verifies it, for any number of hosts. A genuine token can be revoked in the ledger: see `revocation.rejection`.
The metrics token opens `/metrics` alone; `protocol/tokens.py` makes it on the laptop, too.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

LONGEST_TOKEN = 512


@dataclass(frozen=True)
class Caller:
    """Authenticated caller; `host` is empty for the admin."""

    host: str = ""

    @property
    def is_admin(self) -> bool:
        return not self.host


def host_token(fleet_secret: str, host: str) -> str:
    """Return the token of this host of this fleet."""
    return f"{host}.{hmac.new(fleet_secret.encode(), host.encode(), hashlib.sha256).hexdigest()}"


def bearer(header: str) -> str:
    """Return the token in an Authorization header; empty when there is none."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def identify(token: str, admin_token: str, fleet_secret: str) -> Caller | None:
    """Return the owner of a genuine token, else None. Runs in constant time: it reveals nothing about a near guess."""
    if not token or len(token) > LONGEST_TOKEN or not token.isascii():
        return None
    given = token.encode()
    host = token.rpartition(".")[0]
    is_admin = hmac.compare_digest(given, admin_token.encode()) and bool(admin_token)
    is_host = hmac.compare_digest(given, host_token(fleet_secret, host).encode())
    return Caller() if is_admin else Caller(host) if is_host and host else None
