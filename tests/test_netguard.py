"""The guard that keeps tests on this machine bites, in this process and in its children."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import netguard
import pytest

ELSEWHERE = "192.0.2.1"  # TEST-NET-1: nobody answers there


@pytest.fixture
def refusals(stays_on_this_machine: Path):
    """The lines refused in this test so far. They are expected here: taken out of the log afterwards."""
    before = stays_on_this_machine.read_text() if stays_on_this_machine.exists() else ""
    yield lambda: stays_on_this_machine.read_text()[len(before):].splitlines()
    stays_on_this_machine.write_text(before)


def test_a_connection_off_this_machine_is_refused(refusals):
    with socket.socket() as sock, pytest.raises(netguard.OffThisMachine, match=ELSEWHERE):
        sock.connect((ELSEWHERE, 80))
    assert len(refusals()) == 1


def test_a_datagram_off_this_machine_is_refused(refusals):
    with socket.socket(type=socket.SOCK_DGRAM) as sock, pytest.raises(netguard.OffThisMachine):
        sock.sendto(b"x", (ELSEWHERE, 53))
    assert len(refusals()) == 1


def test_a_name_of_elsewhere_is_not_looked_up(refusals):
    with pytest.raises(netguard.OffThisMachine):
        socket.getaddrinfo("example.com", 80)
    assert len(refusals()) == 1


def test_a_child_process_is_guarded_too_and_its_swallowed_refusal_is_seen(refusals):
    code = f"import socket\ntry: socket.create_connection(('{ELSEWHERE}', 80), 1)\nexcept Exception: pass"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert len(refusals()) == 1


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.8.7"])
def test_loopback_is_free(address):
    with socket.socket() as server, socket.socket() as client:
        server.bind((address, 0))
        server.listen()
        client.connect(server.getsockname())


def test_a_unix_socket_is_free(tmp_path):
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(tmp_path / "s"))
        server.listen()
        client.connect(str(tmp_path / "s"))


def test_another_network_namespace_is_free(monkeypatch, refusals):
    monkeypatch.setenv(netguard.NAMESPACE, "net:[1]")  # as if the tests had started in that one, and made ours
    netguard.watch("socket.connect", (socket.socket(), (ELSEWHERE, 80)))
    monkeypatch.undo()
    with pytest.raises(netguard.OffThisMachine):
        netguard.watch("socket.connect", (socket.socket(), (ELSEWHERE, 80)))
    assert len(refusals()) == 1
