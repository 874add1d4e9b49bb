"""OpenSSH's client: where it is, how it is called with the fleet's config, and what its errors mean.

It is always called with `-F CONFIG`, so that nothing of the user's own config counts, be it broken or strange.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spotfleet.errors import NeedsPerson
from spotfleet.ssh.config import OLDEST

SHARED = Path("/tmp")  # short: a Unix socket's path has at most 104 bytes, of which ssh takes 17 for its own ending
SOCKET_BYTES = 104 - 17
NAME_CHARS = 16
ASK_S = 10.0


@dataclass(frozen=True)
class Refusal:
    """What kept ssh out."""

    why: str
    hint: str = ""
    person: bool = False  # trying again does not help


# Of ssh's words, the first that fits; {0} is the machine.
MEANINGS = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED|[Hh]ost key .* has changed|no matching host key type",
     Refusal("{0} shows another host key than the one that is pinned: it was installed anew, or someone sits between",
             "if you know that it was installed anew, put its new key into the fleet file (`host_key`) or into your "
             "known_hosts, and `spotfleet up FILE`", True)),
    (r"No \S+ host key is known", Refusal("no host key is pinned for {0}",
                                         "give its `host_key` in the fleet file and `spotfleet up FILE`", True)),
    (r"Host key verification failed",
     Refusal("{0} does not show the host key that is pinned",
             "if it was installed anew, give its new `host_key` in the fleet file", True)),
    (r"Permission denied|Too many authentication failures",
     Refusal("{0} does not let the fleet's key in",
             "is `user` right? `spotfleet up FILE` admits the key again, by a key of yours that opens it", True)),
    (r"administratively prohibited", Refusal("sshd of {0} forbids forwarding",
                                            "set `AllowTcpForwarding yes` in its sshd_config and reload sshd", True)),
    (r"Bad configuration option|[Bb]ad owner or permissions|UNPROTECTED PRIVATE KEY|Load key",
     Refusal("ssh does not take the fleet's config or key", "`spotfleet up FILE` writes both anew", True)),
    (r"Could not resolve hostname", Refusal("the name of {0} is unknown here", "is this machine online?")),
    (r"open failed: connect failed: Connection refused", Refusal("{0} is there, its dispatcher does not listen")),
    (r"Connection refused", Refusal("{0} runs no sshd at that port")),
    (r"banner exchange", Refusal("sshd of {0} does not answer as it should")),
    (r"[Tt]imed out|No route to host|Network is unreachable|not responding", Refusal("{0} cannot be reached")),
    (r"kex_exchange_identification", Refusal("sshd of {0} does not answer as it should")),  # or the way to it is barred
)


def find() -> str:
    """The path of `ssh`. Raises NeedsPerson."""
    path = shutil.which("ssh")
    if path is None:
        raise NeedsPerson("there is no `ssh` on this machine", hint="install OpenSSH's client (openssh-client)")
    return path


@functools.cache
def version() -> tuple[int, int]:
    """Of the client here. Raises NeedsPerson for one that is too old."""
    said = subprocess.run([find(), "-V"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_S)
    found = re.search(r"OpenSSH_(?:\w+_)?(\d+)\.(\d+)", said.stderr + said.stdout)
    if found is None or (known := (int(found[1]), int(found[2]))) < OLDEST:
        raise NeedsPerson(f"`{find()}` is {(said.stderr or said.stdout).strip()[:80] or 'unknown'}",
                          hint=f"OpenSSH {OLDEST[0]}.{OLDEST[1]} or newer is needed")
    return known


def command(config: Path, *words: str) -> list[str]:
    """`ssh` with the fleet's config alone."""
    return [find(), "-F", str(config), *words]


def proxy(words: Sequence[str]) -> str:
    """A ProxyCommand of these words: %h and %p stand for themselves, any other % of a path is kept."""
    return " ".join(
        "'[%h]:%p'" if word == "[%h]:%p" else shlex.quote(word).replace("%", "%%") for word in words)


def meaning(said: str, machine: str) -> Refusal:
    """What ssh's words mean; its last line where they are unknown."""
    for pattern, refusal in MEANINGS:
        if found := re.search(pattern, said):
            line = next(line for line in said.splitlines() if found[0] in line).strip(" @\r")
            return Refusal(f"{refusal.why.format(machine)} ({line})", refusal.hint, refusal.person)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return Refusal(f"{machine} cannot be entered: {lines[-1] if lines else 'ssh has ended without a word'}")


def private_folder(house: Path) -> Path:
    """A folder that only we can enter, with a path short enough for sockets. Raises NeedsPerson."""
    tried = []
    for folder in (SHARED / f"spotfleet-{os.getuid()}", house / "run"):
        if len(os.fsencode(folder)) + 1 + NAME_CHARS > SOCKET_BYTES:
            tried.append(f"{folder} is too long a path")
            continue
        try:
            make_private(folder)
            return folder
        except OSError as error:
            tried.append(str(error))
    raise NeedsPerson(f"there is no private folder for ssh's sockets: {'; '.join(tried)}",
                      hint=f"make {SHARED}/spotfleet-{os.getuid()} yours alone, or give SPOTFLEET_HOME a short path")


def make_private(folder: Path) -> None:
    """Let it be there and be ours alone: `leave` of another command may have removed it. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not ours alone")


def leave(house: Path) -> None:
    """Remove the private folder, unless somebody uses it."""
    with suppress(OSError):
        private_folder(house).rmdir()


def control_path(house: Path, purpose: str) -> Path:
    """A socket for `purpose`, the same each time."""
    return private_folder(house) / hashlib.sha256(purpose.encode()).hexdigest()[:NAME_CHARS]
