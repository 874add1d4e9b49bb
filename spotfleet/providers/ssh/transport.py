"""One persistent SSH connection per machine and process, by fabric; runs scripts and transfers files.

    closed --open--> open --failure, or a script without answer in time--> closed
       ^               '--next call: opened anew
       '-- refused or no answer: MachineError, within CONNECT_S + BANNER_S + AUTH_S; concurrent callers get the same

Only pinned host keys are accepted, also on the jump host; the user's ssh config is never read.
"""

from __future__ import annotations

import logging
import os
import posixpath
import secrets
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from spotfleet.bootstrap import MARK
from spotfleet.providers.ssh import channels, diagnosis
from spotfleet.providers.ssh.diagnosis import MachineError
from spotfleet.providers.ssh.machines import ResolvedMachine
from spotfleet.ssh.known_hosts import entry

if TYPE_CHECKING:
    from fabric import Connection
    from paramiko import SFTPClient, Transport

CONNECT_S = 4.0  # TCP connection and key exchange
BANNER_S = 3.5  # for an sshd that accepts and sends nothing
AUTH_S = 5.0
KEEPALIVE_S = 5
SCRIPT_S = 15.0
HELLO = "spotfleet-answer"  # first line of every script's answer: earlier output is the login shell's


@dataclass(frozen=True)
class CommandResult:
    """Result of a script."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Keyring:
    """Keys for logins. `private` is the fleet's own key; the others are the user's, on the laptop only."""

    private: str = ""
    identity: str = ""
    users: bool = False  # also try the user's agent and default keys


class Transport(Protocol):
    """Access to one machine. Each method raises MachineError.

    Time limits begin after the login, which has limits of its own.
    """

    def run(self, script: str, limit_s: float = SCRIPT_S) -> CommandResult:
        """Run the POSIX shell script and return its output; the caller checks its status."""

    def put(self, folder: str, files: Mapping[str, bytes], limit_s: float) -> None:
        """Write each file as a whole, mode 0600; `folder` exists."""

    def get(self, paths: list[str], limit_s: float = SCRIPT_S) -> list[bytes]: ...

    def close(self) -> None: ...


class SshTransport:
    """Access over SSH, directly or through a jump host."""

    def __init__(self, machine: ResolvedMachine, keys: Keyring, through: SshTransport | None = None) -> None:
        self.machine, self.through, self._keys = machine, through, keys
        self._lock = Lock()
        self._connection: Connection | None = None
        self._failed: MachineError | None = None
        self._failed_at = 0.0  # monotonic

    # ---- the connection

    def transport(self) -> Transport:
        """Return the transport of the persistent connection, opened if necessary."""
        asked = time.monotonic()
        with self._lock:
            if self._connection is not None and self._connection.is_connected:
                return self._connection.transport
            if self._failed is not None and self._failed_at > asked:
                raise self._failed  # another caller tried the same while we waited
            try:
                self._connection = self._open()
            except MachineError as error:
                self._failed, self._failed_at = error, time.monotonic()
                raise
            return self._connection.transport

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                _shut(self._connection)
            self._connection = None

    def _open(self) -> Connection:
        """Connect through the jump host if there is one, and directly if it cannot reach the machine."""
        if self.through is not None:
            try:
                return self._connect(self.through)
            except MachineError as error:
                if error.machine == self.machine.name and not _no_way_through(error):
                    raise  # the machine was reached, and refuses or hangs
        return self._connect(None)

    def _connect(self, through: SshTransport | None) -> Connection:
        quiet()
        gateway: Any = False
        if through is not None:
            through.transport()
            gateway = through._connection
        connection = self._made(gateway)
        try:
            connection.open()
            connection.transport.set_keepalive(KEEPALIVE_S)
        except (channels.ssh_error(), OSError, EOFError, ValueError) as error:
            _shut(connection)
            raise MachineError(self.machine.name, self._trouble(error)) from error
        return connection

    def _made(self, gateway: Any) -> Connection:
        from fabric import Config, Connection
        from paramiko import SSHConfig
        from paramiko.hostkeys import HostKeyEntry, InvalidHostKey

        machine, keys = self.machine, self._keys
        how: dict[str, Any] = {"allow_agent": keys.users, "look_for_keys": keys.users and not keys.identity,
                               "banner_timeout": BANNER_S, "auth_timeout": AUTH_S, "channel_timeout": CONNECT_S}
        if keys.private:
            how["pkey"] = _private_key(keys.private)
        if keys.identity:
            how["key_filename"] = [keys.identity]
        connection = Connection(machine.host, user=machine.user, port=machine.port, gateway=gateway,
                                config=Config(ssh_config=SSHConfig()), connect_timeout=CONNECT_S, connect_kwargs=how)
        connection.client.set_missing_host_key_policy(_refusal())
        for key in machine.host_keys:
            try:
                pinned = HostKeyEntry.from_line(f"{entry(machine.host, machine.port)} {key}")
            except InvalidHostKey:  # a damaged line of known_hosts pins nothing: the machine's key is then unknown
                continue
            if pinned is not None:
                connection.client.get_host_keys().add(pinned.hostnames[0], pinned.key.get_name(), pinned.key)
        return connection

    def _trouble(self, error: Exception) -> diagnosis.Diagnosis:
        machine, keys = self.machine, self._keys
        found = diagnosis.of_error(error, machine.host, machine.user, machine.port, keys.identity)
        if keys.private and not keys.users and found == diagnosis.refused(machine.user, "", machine.host):
            return diagnosis.not_admitted(machine.user)
        return found

    # ---- scripts and files

    def run(self, script: str, limit_s: float = SCRIPT_S) -> CommandResult:
        channel, end = self._session(limit_s)
        watchdog = channels.deadline_timer(channel, end)
        try:
            channel.exec_command("exec sh -s")  # for any login shell
            channels.send_stdin(channel, f"echo {HELLO}\n{script}\n".encode())
            out, err = channels.read(channel, channel.recv, end), channels.read(channel, channel.recv_stderr, end)
            channel.settimeout(channels.seconds_left(end))
            if not channel.status_event.wait(channels.seconds_left(end)):
                raise TimeoutError
            status = channel.recv_exit_status()
        except TimeoutError:
            self.close()  # the machine's state is unknown; the next call logs in anew
            raise MachineError(self.machine.name, diagnosis.silent(limit_s)) from None
        except (OSError, EOFError, channels.ssh_error()) as error:
            self.close()
            raise MachineError(self.machine.name, self._broken(error, end, limit_s)) from error
        finally:
            watchdog.cancel()
            channels.close_quietly(channel)
        return self._after_hello(status, out, err)

    def _broken(self, error: Exception, end: float, limit_s: float) -> diagnosis.Diagnosis:
        return diagnosis.silent(limit_s) if time.monotonic() >= end else self._trouble(error)

    def _after_hello(self, status: int, out: str, err: str) -> CommandResult:
        before, hello, after = out.partition(f"{HELLO}\n")
        if not hello:
            raise MachineError(self.machine.name, diagnosis.no_shell(f"{before} {err}"))
        return CommandResult(status, after, err)

    def _session(self, limit_s: float) -> tuple[Any, float]:
        """Return a channel and its deadline.

        The persistent connection may have died meanwhile, so the second try uses a new one.
        """
        for last in (False, True):
            transport = self.transport()
            end = time.monotonic() + limit_s  # a machine with a slow login has as much time as another
            try:
                channel = transport.open_session(timeout=min(CONNECT_S, channels.seconds_left(end)))
                channel.settimeout(channels.seconds_left(end))
                return channel, end
            except (OSError, EOFError, channels.ssh_error()) as error:
                self.close()
                if last:
                    raise MachineError(self.machine.name, self._trouble(error)) from error
        raise AssertionError

    def put(self, folder: str, files: Mapping[str, bytes], limit_s: float) -> None:
        def work(sftp: SFTPClient, end: float) -> None:
            for name, data in files.items():
                sftp.get_channel().settimeout(channels.seconds_left(end))
                _put(sftp, posixpath.join(folder, name), data)

        self._with_files(work, folder, limit_s)

    def get(self, paths: list[str], limit_s: float = SCRIPT_S) -> list[bytes]:
        found: list[bytes] = []

        def work(sftp: SFTPClient, _end: float) -> None:
            for path in paths:
                with sftp.open(path, "rb") as file:
                    found.append(file.read())

        self._with_files(work, paths[0] if paths else "", limit_s)
        return found

    def _with_files(self, work: Any, where: str, limit_s: float) -> None:
        from paramiko import SFTPClient, SFTPError

        channel, end = self._session(limit_s)
        watchdog = channels.deadline_timer(channel, end)
        try:
            try:
                channel.invoke_subsystem("sftp")
                sftp = SFTPClient(channel)
            except (OSError, EOFError, SFTPError, channels.ssh_error()) as error:
                if time.monotonic() >= end:
                    raise TimeoutError from error
                found = diagnosis.no_sftp(str(error) or type(error).__name__, printed=channels.has_output(channel))
                raise MachineError(self.machine.name, found) from error
            work(sftp, end)
        except TimeoutError:
            self.close()
            raise MachineError(self.machine.name, diagnosis.silent(round(limit_s, 1))) from None
        except (OSError, EOFError, SFTPError, channels.ssh_error()) as error:
            if isinstance(error, OSError) and time.monotonic() < end:
                # the server's message, such as a bare "Failure" for a full disk
                raise MachineError(self.machine.name, self._of_files(str(error), where)) from error
            self.close()
            raise MachineError(self.machine.name, self._broken(error, end, round(limit_s, 1))) from error
        finally:
            watchdog.cancel()
            channels.close_quietly(channel)

    def _of_files(self, message: str, where: str) -> diagnosis.Diagnosis:
        """Find the reason with a script, since SFTP reports most errors as "Failure"."""
        probe = self.run(f"d={shlex.quote(where)}; [ -d \"$d\" ] || d=${{d%/*}}\n"
                         "printf '%0262144d' 0 >\"$d/.room.$$\"; s=$?; rm -f \"$d/.room.$$\"; exit $s")
        return diagnosis.of_output(probe.status or 1, f"{message}\n{probe.err}", where)


class LocalTransport:
    """The machine of this process: no login is needed."""

    def __init__(self, machine: ResolvedMachine) -> None:
        self.machine = machine

    def run(self, script: str, limit_s: float = SCRIPT_S) -> CommandResult:
        try:
            done = subprocess.run(["/bin/sh", "-s"], input=script.encode(), capture_output=True, timeout=limit_s,
                                  start_new_session=True, env=_unmarked())
        except subprocess.TimeoutExpired:
            raise MachineError(self.machine.name, diagnosis.silent(limit_s)) from None
        except OSError as error:
            raise MachineError(self.machine.name, diagnosis.of_output(126, str(error), self.machine.root)) from error
        return CommandResult(done.returncode, done.stdout.decode("utf-8", "replace"),
                             done.stderr.decode("utf-8", "replace"))

    def run_detached(self, script: str) -> None:
        """Run a script detached from this process, which it may end."""
        with tempfile.NamedTemporaryFile("w", prefix="spotfleet-", suffix=".sh", delete=False) as file:
            file.write(f"rm -f {shlex.quote(file.name)}\n{script}")
        self.run(f"setsid sh {shlex.quote(file.name)} </dev/null >/dev/null 2>&1 &")

    def put(self, folder: str, files: Mapping[str, bytes], limit_s: float) -> None:
        raise MachineError(self.machine.name, diagnosis.Diagnosis("a dispatcher launches nothing on its own machine"))

    def get(self, paths: list[str], limit_s: float = SCRIPT_S) -> list[bytes]:
        try:
            found = []
            for path in paths:
                with open(path, "rb") as file:
                    found.append(file.read())
            return found
        except OSError as error:
            raise MachineError(self.machine.name, diagnosis.of_output(1, str(error), self.machine.root)) from error

    def close(self) -> None:
        """Do nothing: no connection is open."""


def _unmarked() -> dict[str, str]:
    """Return our environment without our host's mark: a script with it would count as part of the host."""
    home = {"HOME": os.path.expanduser("~")}  # a systemd unit has none
    return home | {name: value for name, value in os.environ.items() if name != MARK}


def quiet() -> None:
    """Silence paramiko's log: it prints tracebacks of raised errors to the user's screen."""
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)


def _refusal() -> Any:
    """Return a policy that rejects unknown host keys and names the key shown; fabric's own policy accepts any."""
    from paramiko import RejectPolicy, SSHException

    class UnknownHostKey(SSHException):
        pass

    class Refuse(RejectPolicy):
        def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
            raise UnknownHostKey(f"{key.get_name()} {key.get_base64()} {key.fingerprint}")

    return Refuse()


def _private_key(text: str) -> Any:
    from paramiko import Ed25519Key

    return Ed25519Key.from_private_key(StringIO(text))


def _no_way_through(error: MachineError) -> bool:
    """Return whether the jump host failed to reach the machine."""
    cause = error.__cause__
    return type(cause).__name__ == "ChannelException" or "opening channel" in str(cause)


def _shut(connection: Connection) -> None:
    """Close a half-open connection too, whose `close` would leave its thread and socket."""
    channels.close_quietly(connection.client)


def _put(sftp: SFTPClient, path: str, data: bytes) -> None:
    part = f"{path}.{secrets.token_hex(4)}.part"
    with sftp.open(part, "wb") as file:
        file.chmod(0o600)
        file.set_pipelined(True)
        file.write(data)
    if sftp.stat(part).st_size != len(data):  # pipelined writes fail silently
        raise OSError("the file came out short")
    sftp.posix_rename(part, path)
