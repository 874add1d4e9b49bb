"""Who is calling: the person with the admin token, or a host with a token of its own.

A host's token is `HOST.MAC`, where MAC is HMAC-SHA256(fleet secret, HOST) in hex. It says whose it claims to be, so one
computation tells whether it is genuine, however many hosts there are. Whether a genuine token still counts is the
ledger's business: see `Dispatcher.refusal`.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

LONGEST_TOKEN = 512


@dataclass(frozen=True)
class Caller:
    """`host` is empty for the admin."""

    host: str = ""

    @property
    def is_admin(self) -> bool:
        return not self.host


def host_token(fleet_secret: str, host: str) -> str:
    """The token that only this host of this fleet holds."""
    return f"{host}.{hmac.new(fleet_secret.encode(), host.encode(), hashlib.sha256).hexdigest()}"


def bearer(header: str) -> str:
    """The token in an Authorization header; empty when there is none."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def identify(token: str, admin_token: str, fleet_secret: str) -> Caller | None:
    """Whose genuine token this is; None when nobody's. How near a guess comes does not show in the time this takes."""
    if not token or len(token) > LONGEST_TOKEN or not token.isascii():
        return None
    given = token.encode()
    host = token.rpartition(".")[0]
    is_admin = hmac.compare_digest(given, admin_token.encode()) and bool(admin_token)
    is_host = hmac.compare_digest(given, host_token(fleet_secret, host).encode())
    return Caller() if is_admin else Caller(host) if is_host and host else None
