"""OpenSSH's client: its path, its calls with the fleet's config, and the meaning of its errors.

It is always called with `-F CONFIG`, so nothing in the user's own config has an effect, even if it is broken or
unusual.
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

SHARED = Path("/tmp")  # short: a Unix socket's path has at most 104 bytes, and ssh needs 17 of them for its own suffix
SOCKET_BYTES = 104 - 17
NAME_CHARS = 16
ASK_S = 10.0


@dataclass(frozen=True)
class SshRefusal:
    """Reason why ssh could not log in."""

    why: str
    hint: str = ""
    person: bool = False  # a retry does not help


# The first pattern that matches ssh's output applies; {0} is the machine.
MEANINGS = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED|[Hh]ost key .* has changed|no matching host key type",
     SshRefusal("{0} shows another host key than the one that is pinned: it was installed anew, or someone sits "
                "between",
             "if you know that it was installed anew, put its new key into the fleet file (`host_key`) or into your "
             "known_hosts, and `spotfleet up FILE`", True)),
    (r"No \S+ host key is known", SshRefusal("no host key is pinned for {0}",
                                         "give its `host_key` in the fleet file and `spotfleet up FILE`", True)),
    (r"Host key verification failed",
     SshRefusal("{0} does not show the host key that is pinned",
             "if it was installed anew, give its new `host_key` in the fleet file", True)),
    (r"Permission denied|Too many authentication failures",
     SshRefusal("{0} does not let the fleet's key in",
             "is `user` right? `spotfleet up FILE` admits the key again, by a key of yours that opens it", True)),
    (r"administratively prohibited", SshRefusal("sshd of {0} forbids forwarding",
                                            "set `AllowTcpForwarding yes` in its sshd_config and reload sshd", True)),
    (r"Bad configuration option|[Bb]ad owner or permissions|UNPROTECTED PRIVATE KEY|Load key",
     SshRefusal("ssh does not take the fleet's config or key", "`spotfleet up FILE` writes both anew", True)),
    (r"Could not resolve hostname", SshRefusal("the name of {0} is unknown here", "is this machine online?")),
    (r"open failed: connect failed: Connection refused", SshRefusal("{0} is there, its dispatcher does not listen")),
    (r"Connection refused", SshRefusal("{0} runs no sshd at that port")),
    (r"banner exchange", SshRefusal("sshd of {0} does not answer as it should")),
    (r"[Tt]imed out|No route to host|Network is unreachable|not responding", SshRefusal("{0} cannot be reached")),
    (r"kex_exchange_identification", SshRefusal("sshd of {0} does not answer as it should")),  # or the route is blocked
)


def find() -> str:
    """Return the path of `ssh`. Raises NeedsPerson."""
    path = shutil.which("ssh")
    if path is None:
        raise NeedsPerson("there is no `ssh` on this machine", hint="install OpenSSH's client (openssh-client)")
    return path


@functools.cache
def version() -> tuple[int, int]:
    """Return the client's version. Raises NeedsPerson if it is too old."""
    said = subprocess.run([find(), "-V"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_S)
    found = re.search(r"OpenSSH_(?:\w+_)?(\d+)\.(\d+)", said.stderr + said.stdout)
    if found is None or (known := (int(found[1]), int(found[2]))) < OLDEST:
        raise NeedsPerson(f"`{find()}` is {(said.stderr or said.stdout).strip()[:80] or 'unknown'}",
                          hint=f"OpenSSH {OLDEST[0]}.{OLDEST[1]} or newer is needed")
    return known


def command(config: Path, *words: str) -> list[str]:
    """Return the `ssh` command with only the fleet's config."""
    return [find(), "-F", str(config), *words]


def proxy(words: Sequence[str]) -> str:
    """Return a ProxyCommand of these words: %h and %p are kept for ssh, any other % of a path is escaped."""
    return " ".join(
        "'[%h]:%p'" if word == "[%h]:%p" else shlex.quote(word).replace("%", "%%") for word in words)


def meaning(said: str, machine: str) -> SshRefusal:
    """Translate ssh's messages; an unknown message is shown by its last line."""
    for pattern, refusal in MEANINGS:
        if found := re.search(pattern, said):
            line = next(line for line in said.splitlines() if found[0] in line).strip(" @\r")
            return SshRefusal(f"{refusal.why.format(machine)} ({line})", refusal.hint, refusal.person)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return SshRefusal(f"{machine} cannot be entered: {lines[-1] if lines else 'ssh has ended without a word'}")


def private_folder(home: Path) -> Path:
    """Return a folder that only we can access, with a path short enough for sockets. Raises NeedsPerson."""
    tried = []
    for folder in (SHARED / f"spotfleet-{os.getuid()}", home / "run"):
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
    """Make sure that the folder exists and is private: `leave` of another command may have removed it. Raises OSError.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not ours alone")


def leave(home: Path) -> None:
    """Remove the private folder, unless it is in use."""
    with suppress(OSError):
        private_folder(home).rmdir()


def control_path(home: Path, purpose: str) -> Path:
    """Return the socket's path for `purpose`, the same each time."""
    return private_folder(home) / hashlib.sha256(purpose.encode()).hexdigest()[:NAME_CHARS]
