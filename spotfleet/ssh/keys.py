"""Keys of a fleet: one pair for access to its machines, and host keys for machines that a cloud makes."""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass, field

from spotfleet.errors import UsageError


@dataclass(frozen=True)
class KeyPair:
    """ed25519 key pair in OpenSSH's formats."""

    private: str = field(repr=False)
    public: str  # "ssh-ed25519 BASE64 COMMENT", without a newline


def make(fleet: str) -> KeyPair:
    """Make the pair for access to the machines of `fleet`; `down` finds it on a machine by its comment,
    `spotfleet:FLEET`."""
    return _pair(f"spotfleet:{fleet}")


def derived_host_key(secret: str, host: str) -> KeyPair:
    """Return the host key that a machine gets when it is made, so that its first visitor knows it already.

    It is the same for the same fleet's secret and host: its seed is HMAC-SHA256(secret, "spotfleet host key HOST").
    """
    seed = hmac.new(secret.encode(), f"spotfleet host key {host}".encode(), hashlib.sha256).digest()
    return _pair(f"spotfleet-host:{host}", seed)


def pinned(public: str) -> str:
    """Return "TYPE BASE64" of a public key with or without a comment, as in `SshAccess.host_keys`. Raises UsageError.
    """
    words = public.split()
    try:
        data = base64.b64decode(words[1], validate=True)
    except (IndexError, ValueError):
        data = b""
    length = int.from_bytes(data[:4], "big")
    if not data or data[4:4 + length] != words[0].encode():  # the type is in the key as well
        raise UsageError(f"{public.strip()[:60]!r} is no public key",
                         hint="expected what `ssh-keyscan` or the machine's /etc/ssh/ssh_host_ed25519_key.pub shows: "
                              "TYPE BASE64")
    return f"{words[0]} {words[1]}"


def _pair(comment: str, seed: bytes | None = None) -> KeyPair:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(seed) if seed else Ed25519PrivateKey.generate()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH,
                                serialization.NoEncryption())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return KeyPair(private.decode(), f"{public.decode()} {comment}")
