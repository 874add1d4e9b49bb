"""Text of a fleet's ssh_config and known_hosts. Pure.

OpenSSH takes the first value that it finds for an option. The fleet's file is included at the top of the user's. So it
sets every relevant option, even to OpenSSH's default, and a `Host *` below cannot change it. Options that accumulate
instead (IdentityFile, LocalForward, SendEnv) come after ours. Options that older clients lack are written only for
newer clients: one unknown word would break `ssh` to any host.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from spotfleet.errors import UsageError
from spotfleet.model import SshAccess

OLDEST = (7, 3)  # the oldest version with Include and ProxyJump
CONNECT_S = 10  # limit for one connection's TCP handshake and greeting
ALIVE_S, ALIVES = 15, 3  # a shell survives a short gap; a dead link ends it
FIXED = f"""\
ProxyUseFdpass no
IdentitiesOnly yes
IdentityAgent SSH_AUTH_SOCK
AddKeysToAgent no
PreferredAuthentications publickey
PubkeyAuthentication yes
PubkeyAcceptedKeyTypes ssh-ed25519
GlobalKnownHostsFile /dev/null
StrictHostKeyChecking yes
CheckHostIP no
VerifyHostKeyDNS no
UpdateHostKeys no
NoHostAuthenticationForLocalhost no
CanonicalizeHostname no
AddressFamily any
ConnectTimeout {CONNECT_S}
ConnectionAttempts 1
TCPKeepAlive yes
ServerAliveInterval {ALIVE_S}
ServerAliveCountMax {ALIVES}
ControlMaster no
ControlPath none
ForwardAgent no
ForwardX11 no
PermitLocalCommand no
Tunnel no
RequestTTY auto
ExitOnForwardFailure no""".splitlines()
SINCE = (((7, 6), "RemoteCommand none"), ((8, 2), "PKCS11Provider none"), ((8, 5), "KnownHostsCommand none"),
         ((8, 7), "SessionType default"), ((8, 7), "StdinNull no"), ((8, 7), "ForkAfterAuthentication no"))
RSA = ("ssh-rsa", "rsa-sha2-512,rsa-sha2-256,ssh-rsa")  # one key, signed in three ways
WORD = re.compile(r"[^\s\"'\\\x00-\x20\x7f#=]+")

KEY = re.compile(r"([a-zA-Z0-9@.-]+) ([A-Za-z0-9+/]+=*)(?: [^\x00-\x1f]*)?")


@dataclass(frozen=True)
class Entry:
    """Machine of the fleet."""

    aliases: tuple[str, ...]  # names for users; the first one is shown
    host: str  # request_id; known_hosts lists the machine under this name
    door: SshAccess


@dataclass(frozen=True)
class SshFiles:
    """Absolute paths that the config names."""

    key: str
    known_hosts: str


def config_text(fleet: str, entries: Sequence[Entry], files: SshFiles, version: tuple[int, int] = (9, 0)) -> str:
    """Return the ssh_config for a client of that version. Raises UsageError for values that ssh_config cannot express.
    """
    blocks = [_block(fleet, entry, entries, files, version) for entry in entries]
    return "\n".join([f"# fleet {fleet}; written by spotfleet, which writes it anew\n", *blocks])


def known_hosts_text(entries: Sequence[Entry]) -> str:
    """Return the pinned keys, each under the host's own name, whatever its address."""
    return "".join(f"{_word(e.host, 'host')} {' '.join(_key(key))}\n" for e in entries for key in e.door.host_keys)


def _block(fleet: str, entry: Entry, entries: Sequence[Entry], files: SshFiles, version: tuple[int, int]) -> str:
    door = entry.door
    jump = door.jump and fleet not in entry.aliases and any(fleet in e.aliases for e in entries)
    lines = [
        f"HostName {_word(door.address, 'address').replace('%', '%%')}", f"Port {door.port}",
        f"User {_word(door.user, 'user')}", f"ProxyJump {fleet}" if jump else "ProxyCommand none",
        f"HostKeyAlias {_word(entry.host, 'host')}", *_algorithms(door.host_keys),
        f"IdentityFile {_path(files.key)}", f"UserKnownHostsFile {_path(files.known_hosts)}",
        *FIXED, *(line for since, line in SINCE if version >= since),
    ]
    return f"Host {' '.join(_word(a, 'alias') for a in entry.aliases)}\n" + "".join(f"    {x}\n" for x in lines)


def _algorithms(host_keys: Sequence[str]) -> list[str]:
    """Return options that request the known keys: a machine has several, and a `Host *` may have excluded ours."""
    types = dict.fromkeys(RSA[1] if t == RSA[0] else t for t, _ in map(_key, host_keys))
    return [f"HostKeyAlgorithms {','.join(types)}"] if types else []


def _word(text: str, what: str) -> str:
    if not WORD.fullmatch(text) or text.startswith("-") or (what != "address" and "%" in text):
        raise UsageError(f"{what} {text!r} of a machine cannot stand in an ssh config",
                         hint="letters, digits and . : _ - @ + are safe")
    return text


def _key(text: str) -> tuple[str, str]:
    """Return (type, body) of a pinned key."""
    found = KEY.fullmatch(text)
    if found is None:
        raise UsageError(f"host key {text[:60]!r} of a machine cannot stand in an ssh config",
                         hint="expected TYPE BASE64, as in ssh_host_ed25519_key.pub")
    return found[1], found[2]


def _path(path: str) -> str:
    if re.search(r'["\\\x00-\x1f\x7f]|\$\{', path):
        raise UsageError(f"{path!r} cannot stand in an ssh config",
                         hint="set SPOTFLEET_HOME to a folder without quotes, backslashes and ${ in its name")
    return '"' + path.replace("%", "%%") + '"'
