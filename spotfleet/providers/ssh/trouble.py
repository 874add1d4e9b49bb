"""What keeps us out of a machine, or from working on it, in words that say what to do. Pure.

Errors of the SSH library are known by the names of their classes, so that nothing of it is imported here.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from spotfleet.errors import SpotfleetError

ADDRESS_WORDS = {
    errno.EHOSTUNREACH: ("there is no route to it", "is it switched on, and on a network that this machine reaches?"),
    errno.ENETUNREACH: ("its network cannot be reached", "is this machine online, and the address right?"),
    errno.ECONNREFUSED: ("it runs no sshd at port {port}", "start sshd there, or correct `port` in the fleet file"),
    errno.ETIMEDOUT: ("it does not answer", "is it switched on, and does a firewall let us through to port {port}?"),
}
LATE = ADDRESS_WORDS[errno.ETIMEDOUT]


@dataclass(frozen=True)
class Trouble:
    what: str  # goes on after the machine's name
    fix: str = ""
    away: bool = False  # the machine said nothing, or the line to it broke: nobody knows what it does

    def __str__(self) -> str:
        return f"{self.what} ({self.fix})" if self.fix else self.what


class Troubled(SpotfleetError):
    """What we wanted of one machine failed. Callers turn it into what their caller reacts to."""

    def __init__(self, machine: str, trouble: Trouble) -> None:
        super().__init__(f"{machine}: {trouble}")
        self.machine, self.trouble = machine, trouble


def of_error(error: BaseException, host: str, user: str, port: int, identity: str = "") -> Trouble:
    """Why a machine could not be entered, or why the line to it broke."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "UnknownHostKey" in names:
        return unknown_key(host, port, str(error))
    if "BadHostKeyException" in names:
        return changed_key(host, port, _key(error, "key"), _key(error, "expected_key"))
    if "PasswordRequiredException" in names:
        return Trouble(f"the key {identity or 'for it'} is locked by a passphrase", "`ssh-add` it first")
    if "AuthenticationException" in names:
        return refused(user, identity)
    if "NoValidConnectionsError" in names:
        inner = list(getattr(error, "errors", {}).values())
        return of_error(inner[0], host, user, port) if inner else Trouble(*LATE, away=True)
    if "gaierror" in names:
        return Trouble(f"the name {host} is not known here", "correct it in the fleet file, or write its address",
                       away=True)
    if isinstance(error, FileNotFoundError | PermissionError) and error.filename:
        return Trouble(f"the key {error.filename} cannot be read: {error.strerror}",
                       "correct `identity_file` in the fleet file")
    if re.search(r"private key file|[Uu]npack|Invalid key", str(error)):
        return Trouble(f"the key {identity or 'for it'} cannot be read: {error}",
                       "name a private key in OpenSSH's format as `identity_file` in the fleet file")
    if "TimeoutError" in names:
        return _address(LATE, port)
    if isinstance(error, OSError) and error.errno in ADDRESS_WORDS:
        return _address(ADDRESS_WORDS[error.errno], port)
    return _of_words(str(error) or type(error).__name__, port)


def _address(words: tuple[str, str], port: int) -> Trouble:
    return Trouble(words[0].format(port=port), words[1].format(port=port), away=True)


def _of_words(said: str, port: int) -> Trouble:
    """Of errors that have no class of their own."""
    if re.search(r"banner|No existing session|Negotiation", said):
        return Trouble(f"something accepts connections at port {port} and does not speak SSH",
                       "is its sshd hanging, or overloaded? `ssh -v` shows how far it comes", away=True)
    if re.search(r"[Aa]uthentication timeout", said):
        return Trouble("its sshd does not answer whether our key is good", "is a directory service hanging there?",
                       away=True)
    if "key exchange" in said.lower() or "no acceptable" in said.lower() or "Incompatible" in said:
        return Trouble(f"its sshd and we have no algorithm in common: {said}", "is it very old? update its sshd")
    return Trouble(f"the connection broke: {said}", "it is tried again", away=True)


def _key(error: BaseException, name: str) -> str:
    """"TYPE FINGERPRINT" of a key that the library's error holds."""
    key = getattr(error, name)
    return f"{key.get_name()} {key.fingerprint}"


def unknown_key(host: str, port: int, shown: str) -> Trouble:
    """`shown`: the key it shows, "TYPE BASE64 FINGERPRINT"."""
    kind, blob, fingerprint = shown.split()
    return Trouble(
        f"its host key is not pinned, and none is trusted at first sight; it shows {kind} {fingerprint}",
        f"compare that with `ssh-keygen -lf /etc/ssh/ssh_host_{_file(kind)}_key.pub` on the machine itself; if they "
        f"are the same, write `host_key: {kind} {blob}` for it in the fleet file")


def changed_key(host: str, port: int, shown: str, expected: str) -> Trouble:
    name = host if port == 22 else f"[{host}]:{port}"
    return Trouble(
        f"its host key has changed: it shows {shown}, and {expected} is pinned: it was installed anew, or somebody "
        "sits between", f"if you know that it was installed anew, `ssh-keygen -R '{name}'`, then pin its new key")


def _file(kind: str) -> str:
    return {"ssh-ed25519": "ed25519", "ssh-rsa": "rsa"}.get(kind, "ecdsa")


def refused(user: str, identity: str) -> Trouble:
    with_what = f"the key {identity}" if identity else "any of our keys"
    return Trouble(f"its sshd refuses user '{user}' with {with_what}",
                   f"correct `user` or `identity_file` in the fleet file: `ssh {user}@...` must need no password")


def not_admitted(user: str) -> Trouble:
    return Trouble(f"its sshd refuses user '{user}' with the fleet's key",
                   "`spotfleet up` admits the key again; if it does not help, its sshd reads another "
                   "AuthorizedKeysFile than ~/.ssh/authorized_keys")


def no_shell(said: str) -> Trouble:
    """It let us in and then ran something else than our command, which said so much."""
    words = " ".join(said.split())[-200:]
    return Trouble("it lets us in but does not run our commands" + (f"; it says: {words}" if words else ""),
                   "is there a forced command (`command=` in authorized_keys, ForceCommand), or no shell for the user?")


def silent(limit_s: float) -> Trouble:
    return Trouble(f"it let us in and then said nothing for {limit_s:g} s", "is it overloaded, or its disk hanging?",
                   away=True)


# Of what commands on the machine print, the first that fits.
WORDS = (
    (r"No space left on device|Disk quota exceeded", "its disk is full", "free some space below {root}, or set "
                                                                         "`folder` to a larger disk"),
    (r"Read-only file system", "its disk is read-only", "set `folder` to one that is not"),
    (r"Permission denied|Operation not permitted", "its user must not write to {root}",
     "set `folder` in the fleet file to a folder that is the user's own"),
    (r"Not a directory|File exists", "{root} is no folder there", "remove it, or set `folder` in the fleet file"),
    (r"Cannot fork|fork: retry|Resource temporarily unavailable", "it starts no more processes",
     "too many run there already"),
    (r"bash: (command )?not found|bash: No such file", "it has no bash", "install bash there"),
)


def of_output(status: int, said: str, root: str) -> Trouble:
    """Why a command on the machine failed."""
    for pattern, what, fix in WORDS:
        if found := re.search(pattern, said):
            line = next(one for one in said.splitlines() if found[0] in one).strip()
            return Trouble(f"{what.format(root=root)}: {line[-200:]}", fix.format(root=root))
    lines = [one.strip() for one in said.splitlines() if one.strip()]
    return Trouble(f"a command of ours failed there with status {status}" + (f": {lines[-1][-200:]}" if lines else ""))


def no_python(wanted: str, found: str) -> Trouble:
    """`found`: its version, or "" where there is none."""
    if not found:
        return Trouble(f"it has no {wanted}", "install Python 3.11 or newer there, or name the interpreter: "
                                              "`environment: {python: /path/to/python3.11}`")
    return Trouble(f"its {wanted} is Python {found}, and 3.11 or newer is needed",
                   "name another interpreter: `environment: {python: /path/to/python3.11}`")


def no_sftp(said: str, printed: bool) -> Trouble:
    """`printed`: something came before the protocol began."""
    if printed or "Garbage packet" in said:
        return Trouble("its login shell prints something before we can bring files",
                       "let ~/.bashrc there print in interactive shells only: `[[ $- == *i* ]] || return` at its top")
    return Trouble(f"it takes no files over SFTP: {said}", "its sshd_config needs `Subsystem sftp internal-sftp`")
