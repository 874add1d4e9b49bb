"""Explanations of errors on the way to a machine or on it, with the fix. Pure.

Errors of the SSH library are recognised by class name, so that the library is not imported here.
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
class Diagnosis:
    """An explained error, with its fix."""

    what: str  # follows the machine's name in messages
    fix: str = ""
    away: bool = False  # no answer, or a broken connection: the machine's state is unknown
    broken: bool = False  # the machine answered, then the connection ended: another one may work at once

    def __str__(self) -> str:
        return f"{self.what} ({self.fix})" if self.fix else self.what


class MachineError(SpotfleetError):
    """Failure of an operation on one machine. Callers convert it to an error of their contract."""

    def __init__(self, machine: str, trouble: Diagnosis) -> None:
        super().__init__(f"{machine}: {trouble}")
        self.machine, self.trouble = machine, trouble


def of_error(error: BaseException, host: str, user: str, port: int, identity: str = "") -> Diagnosis:
    """Explain why a login failed, or why the connection broke."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "UnknownHostKey" in names:
        return unknown_key(str(error))
    if "BadHostKeyException" in names:
        return changed_key(host, port, _key(error, "key"), _key(error, "expected_key"))
    if "PasswordRequiredException" in names:
        return Diagnosis(f"the key {identity or 'for it'} is locked by a passphrase", "`ssh-add` it first")
    if "AuthenticationException" in names:
        return refused(user, identity, host)
    if "NoValidConnectionsError" in names:
        inner = list(getattr(error, "errors", {}).values())
        return of_error(inner[0], host, user, port) if inner else Diagnosis(*LATE, away=True)
    if "gaierror" in names:
        return Diagnosis(f"the name {host} is not known here", "correct it in the fleet file, or write its address",
                       away=True)
    if isinstance(error, FileNotFoundError | PermissionError) and error.filename:
        return Diagnosis(f"the key {error.filename} cannot be read: {error.strerror}",
                       "correct `identity_file` in the fleet file")
    if re.search(r"private key file|[Uu]npack|Invalid key", str(error)):
        return Diagnosis(f"the key {identity or 'for it'} cannot be read: {error}",
                       "name a private key in OpenSSH's format as `identity_file` in the fleet file")
    if "TimeoutError" in names:
        return _address(LATE, port)
    if isinstance(error, OSError) and error.errno in ADDRESS_WORDS:
        return _address(ADDRESS_WORDS[error.errno], port)
    return _of_words(str(error) or type(error).__name__, port)


def _address(words: tuple[str, str], port: int) -> Diagnosis:
    return Diagnosis(words[0].format(port=port), words[1].format(port=port), away=True)


def _of_words(message: str, port: int) -> Diagnosis:
    """Explain an error without a class of its own."""
    if re.search(r"banner|No existing session|Negotiation", message):
        return Diagnosis(f"something accepts connections at port {port} and does not speak SSH",
                       "is its sshd hanging, or overloaded? `ssh -v` shows how far it comes", away=True)
    if re.search(r"[Aa]uthentication timeout", message):
        return Diagnosis("its sshd does not answer whether our key is good", "is a directory service hanging there?",
                       away=True)
    if "key exchange" in message.lower() or "no acceptable" in message.lower() or "Incompatible" in message:
        return Diagnosis(f"its sshd and we have no algorithm in common: {message}", "is it very old? update its sshd")
    return Diagnosis(f"the connection broke: {message}", "it is tried again", away=True, broken=True)


def _key(error: BaseException, name: str) -> str:
    """Return "TYPE FINGERPRINT" of a key in the library's error."""
    key = getattr(error, name)
    return f"{key.get_name()} {key.fingerprint}"


def unknown_key(shown: str) -> Diagnosis:
    """`shown`: the key it shows, "TYPE BASE64 FINGERPRINT"."""
    kind, blob, fingerprint = shown.split()
    return Diagnosis(
        f"its host key is not pinned, and none is trusted on first use; it shows {kind} {fingerprint}",
        f"compare that with `ssh-keygen -lf /etc/ssh/ssh_host_{_file(kind)}_key.pub` on the machine itself; if they "
        f"are the same, write `host_key: {kind} {blob}` for it in the fleet file")


def changed_key(host: str, port: int, shown: str, expected: str) -> Diagnosis:
    name = host if port == 22 else f"[{host}]:{port}"
    return Diagnosis(
        f"its host key has changed: it shows {shown}, and {expected} is pinned: it was installed anew, or somebody "
        "intercepts the connection",
        f"if you know that it was installed anew, `ssh-keygen -R '{name}'`, then pin its new key")


def _file(kind: str) -> str:
    return {"ssh-ed25519": "ed25519", "ssh-rsa": "rsa"}.get(kind, "ecdsa")


def refused(user: str, identity: str, host: str) -> Diagnosis:
    with_what = f"the key {identity}" if identity else "any of our keys"
    return Diagnosis(f"its sshd refuses user '{user}' with {with_what}",
                   f"correct `user` or `identity_file` in the fleet file: `ssh {user}@{host}` must need no password")


def not_admitted(user: str) -> Diagnosis:
    return Diagnosis(f"its sshd refuses user '{user}' with the fleet's key",
                   "`spotfleet up` admits the key again; if it does not help, its sshd reads another "
                   "AuthorizedKeysFile than ~/.ssh/authorized_keys")


def no_shell(output: str) -> Diagnosis:
    """Explain a login that ran another program than our command; `output` is its output."""
    words = " ".join(output.split())[-200:]
    return Diagnosis("it lets us in but does not run our commands" + (f"; it prints: {words}" if words else ""),
                   "is there a forced command (`command=` in authorized_keys, ForceCommand), or no shell for the user?")


def silent(limit_s: float) -> Diagnosis:
    return Diagnosis(f"it let us in and then sent nothing for {limit_s:g} s", "is it overloaded, or its disk hanging?",
                   away=True)


# Output of failed commands on the machine; the first match counts.
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


def of_output(status: int, output: str, root: str) -> Diagnosis:
    """Explain why a command on the machine failed."""
    for pattern, what, fix in WORDS:
        if found := re.search(pattern, output):
            line = next(one for one in output.splitlines() if found[0] in one).strip()
            return Diagnosis(f"{what.format(root=root)}: {line[-200:]}", fix.format(root=root))
    lines = [one.strip() for one in output.splitlines() if one.strip()]
    end = f": {lines[-1][-200:]}" if lines else ""
    return Diagnosis(f"a command of ours failed there with status {status}{end}")


def no_python(wanted: str, found: str) -> Diagnosis:
    """Explain an unsuitable Python; `found`: its version, or "" for none."""
    if not found:
        return Diagnosis(f"it has no {wanted}", "install Python 3.11 or newer there, or name the interpreter: "
                                              "`environment: {python: /path/to/python3.11}`")
    return Diagnosis(f"its {wanted} is Python {found}, and 3.11 or newer is needed",
                   "name another interpreter: `environment: {python: /path/to/python3.11}`")


def no_sftp(output: str, printed: bool) -> Diagnosis:
    """Explain missing file transfer; `printed`: output came before the protocol began."""
    if printed or "Garbage packet" in output:
        return Diagnosis("its login shell prints something before we can bring files",
                       "let ~/.bashrc there print in interactive shells only: `[[ $- == *i* ]] || return` at its top")
    return Diagnosis(f"it takes no files over SFTP: {output}", "its sshd_config needs `Subsystem sftp internal-sftp`")
