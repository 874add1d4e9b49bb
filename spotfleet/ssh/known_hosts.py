"""Keys of a machine in the text of a known_hosts file. Pure."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import hmac

KEY_TYPES = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa",
             "sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com")


def entry(host: str, port: int) -> str:
    """Return a machine's name in known_hosts."""
    return host if port == 22 else f"[{host}]:{port}"


def known_keys(text: str, host: str, port: int) -> list[str]:
    """Return every key, "TYPE BASE64", that known_hosts `text` holds for a machine, without revoked ones."""
    found: list[str] = []
    revoked: set[str] = set()
    for line in text.splitlines():
        words = line.split()
        mark = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#") or words[1] not in KEY_TYPES:
            continue
        key = f"{words[1]} {words[2]}"
        if mark == "@revoked":
            revoked |= {key} if _names(words[0], entry(host, port)) else set()
        elif not mark and key not in found and _names(words[0], entry(host, port)):
            found.append(key)  # a certificate authority's key (@cert-authority) is no machine's
    return [key for key in found if key not in revoked]


def _names(patterns: str, name: str) -> bool:
    """Return whether the first word of a line means the machine `name`, hashed or not, as sshd(8) defines it."""
    name = name.casefold()
    if patterns.startswith("|1|"):
        return _hashed(patterns, name)
    matched = False
    for pattern in patterns.casefold().split(","):
        negated = pattern.startswith("!")
        if fnmatch.fnmatchcase(name, pattern.removeprefix("!").replace("[", "[[]")):  # brackets mean themselves
            if negated:
                return False
            matched = True
    return matched


def _hashed(word: str, name: str) -> bool:
    try:
        _, _, salt, digest = word.split("|")[:4] if word.count("|") == 3 else ("", "", "", "")
        made = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
        return hmac.compare_digest(made, base64.b64decode(digest))
    except ValueError:
        return False
