"""Values of sections `ssh` and `environment`. Each function returns the checked value or raises ValueError.

Names and folders become words of commands on other machines, so only harmless characters are allowed.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from typing import Any
from urllib.parse import urlsplit

from spotfleet.config import values

HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})")
USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")
FOLDER = re.compile(r"(~/|/)[A-Za-z0-9._+@-]+(/[A-Za-z0-9._+@-]+)*/?")
PYTHON = re.compile(r"[A-Za-z0-9._+@/~-]+")
MOST_SLOTS = 256  # a larger number is a port mistaken for slots
KEY_TYPES = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa",
             "sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com")


def _wrong(expected: str, value: Any, more: str = "") -> ValueError:
    return ValueError(f"expected {expected}, got {value!r}{more}")


def name(value: Any) -> Any:
    """Check a host name, or an IPv4 or IPv6 address without brackets."""
    expected = "the name or the address of a machine"
    if not isinstance(value, str) or not value:
        raise _wrong(expected, value)
    if "@" in value:
        before, _, after = value.rpartition("@")
        raise _wrong(expected, value, f"; write {{host: {after}, user: {before}}}")
    if value.startswith("[") and value.endswith("]"):
        value = value[1:-1]
    if ":" in value:
        if "%" in value:
            raise _wrong(expected, value, "; an address with an interface means another machine elsewhere: use a name, "
                                          "or an address that is routed")
        try:
            return str(ipaddress.IPv6Address(value))
        except ValueError:
            raise _wrong(expected, value, "; an IPv6 address, or in lists HOST:SLOTS") from None
    if not HOST.fullmatch(value):
        raise _wrong(expected, value)
    return value


def address(value: Any) -> Any:
    """Check an IPv4 or IPv6 address. Names are rejected: each peer could resolve a name differently."""
    expected = "an IP address of one of the machine's own interfaces, such as 10.1.0.7 or fd00::7"
    if not isinstance(value, str) or "%" in value:
        raise _wrong(expected, value)
    try:
        return str(ipaddress.ip_address(value.removeprefix("[").removesuffix("]")))
    except ValueError:
        raise _wrong(expected, value) from None


def line(text: str, usual: int = 1) -> tuple[str, int]:
    """Return (host, slots) for "host", "host:slots", "fd00::1" or "[fd00::1]:slots"; without slots it has the `usual`
    ones. Raises ValueError.

    Such lines stand in the list of hosts and in the output of a host-discovery script.
    """
    expected = "HOST or HOST:SLOTS, such as node2:8 or [fd00::1]:8"
    word = text.strip()
    if bracketed := re.fullmatch(r"(\[[^\]]*\])(?::(.*))?", word):
        host, count = bracketed[1], bracketed[2]
    elif word.count(":") == 1:
        host, _, count = word.partition(":")
    else:
        host, count = word, None
    if count is not None and not re.fullmatch(r"\d{1,6}", count):
        raise _wrong(expected, text)
    return name(host), usual if count is None else slots(int(count))


def slots(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong("slots, a whole number of at least 1: room for so many workers, one for each GPU", value)
    if value > MOST_SLOTS:
        raise _wrong(f"at most {MOST_SLOTS} slots", value, "; a port is written {host: NAME, port: NUMBER}")
    return value


def machine(value: Any) -> Any:
    """Return {host, slots} for a short form; a mapping is returned unchanged."""
    if isinstance(value, str):
        host, count = line(value)
        return {"host": host, "slots": count}
    if not isinstance(value, dict):
        raise _wrong("HOST, HOST:SLOTS, or {host: HOST, slots: 8, port: 22, user: ...}", value)
    if "host" not in value:
        raise ValueError("host is missing: the name or the address of the machine")
    return value


def machine_list(value: Any) -> Any:
    if not isinstance(value, list):
        raise _wrong("a list of machines such as [node1, node2:8]", value)
    return value


def dispatcher(value: Any) -> Any:
    given = machine(value)
    if "slots" in given and (not isinstance(value, str) or given["slots"] != 1):
        raise ValueError("the dispatcher's machine runs no workers, so it has no slots; remove them")
    return given


def user(value: Any) -> Any:
    if not isinstance(value, str) or not USER.fullmatch(value):
        raise _wrong("the name of a user on the machine", value)
    return value


def port(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
        raise _wrong("a port, 1 to 65535", value)
    return value


def folder(value: Any) -> Any:
    """Check a folder of a machine that we may create and remove."""
    if not isinstance(value, str) or not FOLDER.fullmatch(value) or ".." in value.split("/"):
        raise _wrong("a folder of our own on the machine, such as ~/.spotfleet-host or /scratch/spotfleet", value,
                     "; without spaces" if isinstance(value, str) and " " in value else "")
    return value.rstrip("/")


def accelerator(value: Any) -> Any:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z][\w-]*", value):
        raise _wrong("the name of an accelerator such as A100; `slots` gives their number", value)
    return value


def host_key(value: Any) -> Any:
    """Return "TYPE BASE64" from a line of a .pub file or of known_hosts."""
    expected = 'a public host key such as "ssh-ed25519 AAAA...", as in /etc/ssh/ssh_host_ed25519_key.pub'
    words = value.split() if isinstance(value, str) else []
    if isinstance(value, str) and value.startswith("SHA256:"):
        raise _wrong(expected, value, "; a fingerprint is not enough")
    if len(words) >= 3 and words[0] not in KEY_TYPES and words[1] in KEY_TYPES:
        words = words[1:]  # a line of known_hosts, or of ssh-keyscan
    if len(words) < 2 or words[0] not in KEY_TYPES:
        raise _wrong(expected, value)
    try:
        blob = base64.b64decode(words[1], validate=True)
    except binascii.Error:
        raise _wrong(expected, value, "; its second word is not base64: is it cut off?") from None
    if blob[4:4 + len(words[0])] != words[0].encode() or int.from_bytes(blob[:4], "big") != len(words[0]):
        raise _wrong(expected, value, f"; its second word holds no {words[0]} key")
    return f"{words[0]} {words[1]}"


def timeout(value: Any) -> Any:
    seconds = values.duration(value)
    if not 0 < seconds <= 600:
        raise _wrong("a duration above 0s and up to 10m", value)
    return seconds


def python(value: Any) -> Any:
    if not isinstance(value, str) or not PYTHON.fullmatch(value) or value.startswith("-"):
        raise _wrong("the interpreter on the machines, such as python3.11 or /usr/bin/python3.11", value)
    return value


def packages(value: Any) -> Any:
    expected = "a list of requirements such as [torch==2.13.0]"
    if not isinstance(value, list):
        raise _wrong(expected, value)
    for one in value:
        if not isinstance(one, str) or not re.match(r"[A-Za-z0-9]", one) or "\n" in one:
            raise _wrong(expected, one, "; options of pip have no place here" if str(one).startswith("-") else "")
    return tuple(value)


def index_url(value: Any) -> Any:
    expected = "the URL of a package index, such as https://pypi.example.com/simple"
    if not isinstance(value, str) or not re.fullmatch(r"(https?|file)://\S+", value):
        raise _wrong(expected, value)
    if "@" in urlsplit(value).netloc:
        raise ValueError(f"expected {expected}, without a user and a password: they would be written down; keep them "
                         "in the machine's netrc or pip.conf")
    return value
