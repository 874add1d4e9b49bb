"""A machine that lets us in and then does not even answer a request: no wait for it is without a limit."""

from __future__ import annotations

import contextlib
import getpass
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator

import paramiko
import pytest

from spotfleet.model import Role
from spotfleet.providers.ssh.diagnosis import MachineError
from spotfleet.providers.ssh.machines import ResolvedMachine
from spotfleet.providers.ssh.transport import Keyring, SshTransport
from tests.support.ssh_provider.sshd_machines import key_pair

pytestmark = pytest.mark.processes

LIMIT_S, BOUND_S = 0.5, 30.0  # nobody answers, so that a busy machine changes nothing


class Deaf(paramiko.ServerInterface):
    """As an sshd that is stopped, or whose disk hangs, just when something is asked of it."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.login_s = 0.0

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.over.wait(self.login_s)
        return paramiko.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        self.over.wait()
        return False

    def check_channel_subsystem_request(self, channel: paramiko.Channel, name: str) -> bool:
        self.over.wait()
        return False


@pytest.fixture
def deaf() -> Deaf:
    return Deaf()


@pytest.fixture
def door(deaf: Deaf) -> Iterator[SshTransport]:
    host_private, host_public = key_pair()
    private, _ = key_pair()
    served: list[paramiko.Transport] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    transport = paramiko.Transport(listening.accept()[0])
                    served.append(transport)
                    transport.add_server_key(paramiko.Ed25519Key.from_private_key(io.StringIO(host_private)))
                    transport.start_server(event=threading.Event(), server=deaf)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        machine = ResolvedMachine("deaf", "127.0.0.1", listening.getsockname()[1], getpass.getuser(),
                                  "~/.spotfleet-host",
                          Role.WORKER, host_keys=(host_public,))
        door = SshTransport(machine, Keyring(private))
        yield door
        door.close()
        deaf.over.set()
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(BOUND_S)
    for transport in served:
        transport.close()


@pytest.mark.parametrize("ask", [
    lambda door: door.run("echo there", LIMIT_S),
    lambda door: door.put("/tmp", {"file": b"text"}, LIMIT_S),
    lambda door: door.get(["/tmp/file"], LIMIT_S),
], ids=["a command", "files there", "files back"])
@pytest.mark.parametrize("login_s", [0.0, 1.5 * LIMIT_S], ids=["", "after a login that takes longer than that"])
def test_a_request_that_is_never_answered_ends_with_its_limit(ask: Callable[[SshTransport], object], login_s: float,
                                                              deaf: Deaf, door: SshTransport):
    deaf.login_s = login_s
    began, raised = time.monotonic(), []

    def asked() -> None:
        try:
            ask(door)
        except MachineError as error:
            raised.append(error.trouble)

    thread = threading.Thread(target=asked, daemon=True)
    thread.start()
    thread.join(BOUND_S)
    assert not thread.is_alive(), f"still waiting after {time.monotonic() - began:.1f} s"
    assert [(one.away, "sent nothing for" in one.what) for one in raised] == [(True, True)]
