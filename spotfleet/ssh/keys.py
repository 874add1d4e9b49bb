"""Keys of the fleet's own: one pair that opens its machines, and host keys for machines that a cloud makes."""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass, field

from spotfleet.errors import UsageError

TYPE = "ssh-ed25519"


@dataclass(frozen=True)
class KeyPair:
    """ed25519, in OpenSSH's formats."""

    private: str = field(repr=False)
    public: str  # "ssh-ed25519 BASE64 COMMENT", without a newline


def make(fleet: str) -> KeyPair:
    """The pair that opens the machines of `fleet`; by its comment, `spotfleet:FLEET`, `down` knows it on a machine."""
    return _pair(f"spotfleet:{fleet}")


def make_host_key(host: str) -> KeyPair:
    """What a machine is known by, handed to it at its birth: so its first visitor knows it already."""
    return _pair(f"spotfleet-host:{host}")


def derived_host_key(secret: str, host: str) -> KeyPair:
    """As `make_host_key`, for whoever knows the fleet's secret: the same key for the same host, wherever it is asked
    for. Its seed is HMAC-SHA256(secret, "spotfleet host key HOST")."""
    seed = hmac.new(secret.encode(), f"spotfleet host key {host}".encode(), hashlib.sha256).digest()
    return _pair(f"spotfleet-host:{host}", seed)


def pinned(public: str) -> str:
    """"TYPE BASE64" of a public key with or without a comment, as `SshDoor.host_keys` holds it. Raises UsageError."""
    words = public.split()
    try:
        data = base64.b64decode(words[1], validate=True)
    except (IndexError, ValueError):
        data = b""
    length = int.from_bytes(data[:4], "big")
    if not data or data[4:4 + length] != words[0].encode():  # the type stands in the key as well
        raise UsageError(f"{public.strip()[:60]!r} is no public key",
                         hint="expected what `ssh-keyscan` or the machine's /etc/ssh/ssh_host_ed25519_key.pub shows: "
                              "TYPE BASE64")
    return f"{words[0]} {words[1]}"


def fingerprint(public: str) -> str:
    """SHA256:..., as `ssh-keygen -l` shows it."""
    digest = hashlib.sha256(base64.b64decode(pinned(public).split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def _pair(comment: str, seed: bytes | None = None) -> KeyPair:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(seed) if seed else Ed25519PrivateKey.generate()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH,
                                serialization.NoEncryption())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return KeyPair(private.decode(), f"{public.decode()} {comment}")
