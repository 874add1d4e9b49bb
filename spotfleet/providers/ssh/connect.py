"""One kept SSH connection per machine and process, by fabric, and what is done over it: scripts and files.

    closed --open--> kept --broke, or a script got no answer in time--> closed
       ^               '--asked again: opened anew
       '-- refused or no answer: Troubled, within CONNECT_S + BANNER_S + AUTH_S; who waited for the same gets the same

Only pinned host keys are accepted, on the machine that we pass through too; nothing of the user's ssh config is read.
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
from spotfleet.providers.ssh import channels, trouble
from spotfleet.providers.ssh.machines import Machine
from spotfleet.providers.ssh.trouble import Troubled
from spotfleet.ssh.known_hosts import entry

if TYPE_CHECKING:
    from fabric import Connection
    from paramiko import SFTPClient, Transport

CONNECT_S = 4.0  # TCP, and the exchange of keys after it
BANNER_S = 3.5  # an sshd that accepts and says nothing
AUTH_S = 5.0
KEEPALIVE_S = 5
SCRIPT_S = 15.0
HELLO = "spotfleet-hears"  # the first line of every script's answer: what came before is the login shell's


@dataclass(frozen=True)
class Said:
    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Keyring:
    """What opens machines. `private` is the fleet's own key; the rest is the user's, on the laptop alone."""

    private: str = ""
    identity: str = ""
    users: bool = False  # may the user's agent and default keys be tried?


class Door(Protocol):
    """The way into one machine. Each method raises Troubled. Limits of time begin once the machine has let us in, for
    which there are others."""

    def run(self, script: str, limit_s: float = SCRIPT_S) -> Said:
        """What the POSIX shell script says; its status is the caller's affair."""

    def put(self, folder: str, files: Mapping[str, bytes], limit_s: float) -> None:
        """Each file whole, mode 0600; `folder` exists."""

    def get(self, paths: list[str], limit_s: float = SCRIPT_S) -> list[bytes]: ...

    def close(self) -> None: ...


class SshDoor:
    def __init__(self, machine: Machine, keys: Keyring, through: SshDoor | None = None) -> None:
        self.machine, self.through, self._keys = machine, through, keys
        self._lock = Lock()
        self._connection: Connection | None = None
        self._failed: Troubled | None = None
        self._failed_at = 0.0  # monotonic

    # ---- the connection

    def transport(self) -> Transport:
        """Of the kept connection, opened if need be."""
        asked = time.monotonic()
        with self._lock:
            if self._connection is not None and self._connection.is_connected:
                return self._connection.transport
            if self._failed is not None and self._failed_at > asked:
                raise self._failed  # while we waited for it, the same was tried
            try:
                self._connection = self._open()
            except Troubled as error:
                self._failed, self._failed_at = error, time.monotonic()
                raise
            return self._connection.transport

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                _shut(self._connection)
            self._connection = None

    def _open(self) -> Connection:
        """Through the machine between if there is one, and past it where it does not lead on."""
        if self.through is not None:
            try:
                return self._connect(self.through)
            except Troubled as error:
                if error.machine == self.machine.name and not _no_way_through(error):
                    raise  # it has been reached, and refuses or hangs
        return self._connect(None)

    def _connect(self, through: SshDoor | None) -> Connection:
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
            raise Troubled(self.machine.name, self._trouble(error)) from error
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
            except InvalidHostKey:  # a damaged line of known_hosts pins nothing: the machine's own key is unknown then
                continue
            if pinned is not None:
                connection.client.get_host_keys().add(pinned.hostnames[0], pinned.key.get_name(), pinned.key)
        return connection

    def _trouble(self, error: Exception) -> trouble.Trouble:
        machine, keys = self.machine, self._keys
        found = trouble.of_error(error, machine.host, machine.user, machine.port, keys.identity)
        if keys.private and not keys.users and found == trouble.refused(machine.user, ""):
            return trouble.not_admitted(machine.user)
        return found

    # ---- what is done over it

    def run(self, script: str, limit_s: float = SCRIPT_S) -> Said:
        channel, end = self._session(limit_s)
        watchdog = channels.ending(channel, end)
        try:
            channel.exec_command("exec sh -s")  # whatever the login shell is
            channels.tell(channel, f"echo {HELLO}\n{script}\n".encode())
            out, err = channels.read(channel, channel.recv, end), channels.read(channel, channel.recv_stderr, end)
            channel.settimeout(channels.left(end))
            if not channel.status_event.wait(channels.left(end)):
                raise TimeoutError
            status = channel.recv_exit_status()
        except TimeoutError:
            self.close()  # nobody knows what the machine still does; the next call enters anew
            raise Troubled(self.machine.name, trouble.silent(limit_s)) from None
        except (OSError, EOFError, channels.ssh_error()) as error:
            self.close()
            raise Troubled(self.machine.name, self._broken(error, end, limit_s)) from error
        finally:
            watchdog.cancel()
            channels.closed(channel)
        return self._heard(status, out, err)

    def _broken(self, error: Exception, end: float, limit_s: float) -> trouble.Trouble:
        return trouble.silent(limit_s) if time.monotonic() >= end else self._trouble(error)

    def _heard(self, status: int, out: str, err: str) -> Said:
        before, hello, after = out.partition(f"{HELLO}\n")
        if not hello:
            raise Troubled(self.machine.name, trouble.no_shell(f"{before} {err}"))
        return Said(status, after, err)

    def _session(self, limit_s: float) -> tuple[Any, float]:
        """A channel, and when its time is over. A kept connection may have died meanwhile, so the second try is on a
        new one."""
        for last in (False, True):
            transport = self.transport()
            end = time.monotonic() + limit_s  # a machine that lets us in slowly has as much time as another
            try:
                channel = transport.open_session(timeout=min(CONNECT_S, channels.left(end)))
                channel.settimeout(channels.left(end))
                return channel, end
            except (OSError, EOFError, channels.ssh_error()) as error:
                self.close()
                if last:
                    raise Troubled(self.machine.name, self._trouble(error)) from error
        raise AssertionError

    def put(self, folder: str, files: Mapping[str, bytes], limit_s: float) -> None:
        def work(sftp: SFTPClient, end: float) -> None:
            for name, data in files.items():
                sftp.get_channel().settimeout(channels.left(end))
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
        watchdog = channels.ending(channel, end)
        try:
            try:
                channel.invoke_subsystem("sftp")
                sftp = SFTPClient(channel)
            except (OSError, EOFError, SFTPError, channels.ssh_error()) as error:
                if time.monotonic() >= end:
                    raise TimeoutError from error
                said = trouble.no_sftp(str(error) or type(error).__name__, printed=channels.printed(channel))
                raise Troubled(self.machine.name, said) from error
            work(sftp, end)
        except TimeoutError:
            self.close()
            raise Troubled(self.machine.name, trouble.silent(round(limit_s, 1))) from None
        except (OSError, EOFError, SFTPError, channels.ssh_error()) as error:
            if isinstance(error, OSError) and time.monotonic() < end:
                # the server's words, such as a bare "Failure" for a full disk
                raise Troubled(self.machine.name, self._of_files(str(error), where)) from error
            self.close()
            raise Troubled(self.machine.name, self._broken(error, end, round(limit_s, 1))) from error
        finally:
            watchdog.cancel()
            channels.closed(channel)

    def _of_files(self, said: str, where: str) -> trouble.Trouble:
        """SFTP calls most things "Failure", so the machine is asked once more, in words."""
        probe = self.run(f"d={shlex.quote(where)}; [ -d \"$d\" ] || d=${{d%/*}}\n"
                         "printf '%0262144d' 0 >\"$d/.room.$$\"; s=$?; rm -f \"$d/.room.$$\"; exit $s")
        return trouble.of_output(probe.status or 1, f"{said}\n{probe.err}", where)


class OwnDoor:
    """The machine on which this process runs: no way in is needed."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def run(self, script: str, limit_s: float = SCRIPT_S) -> Said:
        try:
            done = subprocess.run(["/bin/sh", "-s"], input=script.encode(), capture_output=True, timeout=limit_s,
                                  start_new_session=True, env=_unmarked())
        except subprocess.TimeoutExpired:
            raise Troubled(self.machine.name, trouble.silent(limit_s)) from None
        except OSError as error:
            raise Troubled(self.machine.name, trouble.of_output(126, str(error), self.machine.root)) from error
        return Said(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))

    def leave(self, script: str) -> None:
        """Run it as nobody's child, though it ends this very process."""
        with tempfile.NamedTemporaryFile("w", prefix="spotfleet-", suffix=".sh", delete=False) as file:
            file.write(f"rm -f {shlex.quote(file.name)}\n{script}")
        self.run(f"setsid sh {shlex.quote(file.name)} </dev/null >/dev/null 2>&1 &")

    def put(self, folder: str, files: Mapping[str, bytes], limit_s: float) -> None:
        raise Troubled(self.machine.name, trouble.Trouble("a dispatcher launches nothing on its own machine"))

    def get(self, paths: list[str], limit_s: float = SCRIPT_S) -> list[bytes]:
        try:
            found = []
            for path in paths:
                with open(path, "rb") as file:
                    found.append(file.read())
            return found
        except OSError as error:
            raise Troubled(self.machine.name, trouble.of_output(1, str(error), self.machine.root)) from error

    def close(self) -> None:
        """There is nothing open."""


def _unmarked() -> dict[str, str]:
    """Our environment without the mark of our host: what looks at a host is no part of it."""
    home = {"HOME": os.path.expanduser("~")}  # a unit of systemd has none
    return home | {name: value for name, value in os.environ.items() if name != MARK}


def quiet() -> None:
    """paramiko writes tracebacks of what it raises as well to the log, and so to the user's screen."""
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)


def _refusal() -> Any:
    """fabric's own policy is to accept whoever answers; this one tells what was shown besides refusing it."""
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


def _no_way_through(error: Troubled) -> bool:
    """Did the machine between not reach the one behind it?"""
    cause = error.__cause__
    return type(cause).__name__ == "ChannelException" or "opening channel" in str(cause)


def _shut(connection: Connection) -> None:
    """Also where it was never quite open, when `close` would leave its thread and socket."""
    channels.closed(connection.client)


def _put(sftp: SFTPClient, path: str, data: bytes) -> None:
    part = f"{path}.{secrets.token_hex(4)}.part"
    with sftp.open(part, "wb") as file:
        file.chmod(0o600)
        file.set_pipelined(True)
        file.write(data)
    if sftp.stat(part).st_size != len(data):  # writes in a pipeline fail without a word
        raise OSError("the file came out short")
    sftp.posix_rename(part, path)
