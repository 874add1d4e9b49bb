"""Streams to the dispatcher's port through a real sshd: cheap after the first, made anew when the way breaks."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest

from spotfleet.api.access import ssh
from spotfleet.errors import DispatcherUnreachable, NeedsPerson
from spotfleet.model import Role
from spotfleet.ssh import keys, openssh
from spotfleet.ssh.tunnel import NotConnected, Tunnel
from spotfleet.transport.certs import server_context
from spotfleet.transport.client import DispatcherClient, Endpoint
from tests.support.shell.loopback_sshd import Machine, free_port, lives, until
from tests.support.shell.shell_fleet import Laptop, Rack, certificates, listed

pytestmark = pytest.mark.processes


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what comes."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        def serve() -> None:
            while True:
                try:
                    stream, _ = door.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(stream,), daemon=True).start()

        def answer(stream: socket.socket) -> None:
            with stream:
                while data := stream.recv(65536):
                    stream.sendall(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield door.getsockname()[1]
        door.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def head(rack: Rack) -> Machine:
    """The dispatcher's machine."""
    return rack.dispatcher


def tunnel(laptop: Laptop, head: Machine, port: int) -> Tunnel:
    ways = laptop.enters(listed("digits-d-0", Role.DISPATCHER, head.door, port=port))
    return ssh.tunnel(laptop.folder, ways.ways[0])


def works(way: Tunnel) -> bool:
    with way.dial(10.0) as stream:
        stream.settimeout(10.0)
        stream.sendall(b"hello")
        return stream.recv(16) == b"hello"


def masters(way: Tunnel) -> list[psutil.Process]:
    """The background ssh processes of this tunnel."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(way.control) in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_the_first_stream_costs_a_handshake_and_a_further_one_none(laptop, head, echo):
    way, before = tunnel(laptop, head, echo), entries(head)
    for _ in range(20):
        assert works(way)
    assert (len(masters(way)), entries(head)) == (1, before + 1)


def entries(head: Machine) -> int:
    """How often somebody has entered."""
    return (head.folder / "log").read_text().count("Accepted publickey for")


def test_other_commands_share_the_connection_and_down_ends_it(laptop, head, echo):
    assert works(tunnel(laptop, head, echo))
    way = tunnel(laptop, head, echo)  # another command's
    with way.dial(10.0) as stream:
        assert works(way) and len(masters(way)) == 1
        ssh.remove(laptop.folder)
        assert masters(way) == []
        assert stream.recv(1) == b""
    assert list(way.control.parent.glob(f"{way.control.name}*")) == []


def test_a_connection_is_made_also_where_the_folder_of_its_socket_has_been_tidied_away(laptop, head, echo):
    way = tunnel(laptop, head, echo)
    openssh.leave(laptop.house.path)  # by another command
    assert works(way)


def test_threads_at_once_make_one_connection(laptop, head, echo):
    way = tunnel(laptop, head, echo)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: works(way), range(24)))
    assert len(masters(way)) == 1


def test_large_data_goes_both_ways_unharmed(laptop, head, echo):
    data = os.urandom(3 << 20)
    with tunnel(laptop, head, echo).dial(10.0) as stream:
        sender = threading.Thread(target=stream.sendall, args=(data,))
        sender.start()
        got = b""
        while len(got) < len(data):
            got += stream.recv(1 << 16)
        sender.join()
    assert got == data


def test_streams_that_have_ended_leave_no_descriptor(laptop, head, echo):
    way = tunnel(laptop, head, echo)
    assert works(way)
    own = psutil.Process()
    children = own.children()

    def settled() -> bool:
        assert works(way)
        return own.num_fds() <= before + 4

    before = own.num_fds()
    for _ in range(50):
        assert works(way)
    until(settled, "descriptors pile up")
    assert own.children() == children


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_connection_whose_process_is_killed_or_hangs_is_made_anew(laptop, head, echo, number, monkeypatch):
    monkeypatch.setattr("spotfleet.ssh.tunnel.LOCAL_S", 1.5)
    way = tunnel(laptop, head, echo)
    assert works(way)
    (old,) = masters(way)
    old.send_signal(number)
    assert works(way)
    (new,) = masters(way)
    assert new.pid != old.pid


def test_after_the_sshd_has_restarted_the_next_stream_goes_through(laptop, head, echo):
    way = tunnel(laptop, head, echo)
    assert works(way)
    head.stop()
    with pytest.raises(NotConnected, match=r"digits.*Connection refused|runs no sshd"):
        until(lambda: not works(way), "goes through no sshd")
    head.start()
    assert works(way)


def test_a_cut_link_is_noticed_in_the_streams_own_time_and_the_next_one_takes_a_new_connection(
        laptop, head, echo, monkeypatch):
    way = tunnel(laptop, head, echo)
    assert works(way)
    monkeypatch.setattr("spotfleet.ssh.tunnel.HANDSHAKE_S", 1.0)
    (old,) = masters(way)
    head.freeze()
    begun = time.monotonic()
    with pytest.raises(NotConnected, match="does not answer over SSH"):
        way.dial(0.5)
    assert time.monotonic() - begun < 20.0
    with pytest.raises(NotConnected):
        way.dial(0.5)  # a new connection, which hangs as well
    head.thaw()
    monkeypatch.setattr("spotfleet.ssh.tunnel.HANDSHAKE_S", 30.0)
    assert works(way)
    assert [p for p in masters(way) if p != old]  # also while the old one lives
    until(lambda: old.pid not in [p.pid for p in masters(way)] and not lives(old), "what was set aside stays")


def test_a_connection_that_nobody_uses_ends_by_itself(laptop, head, echo, monkeypatch):
    monkeypatch.setattr("spotfleet.ssh.tunnel.IDLE_S", 1)
    way = tunnel(laptop, head, echo)
    assert works(way)
    (process,) = masters(way)
    until(lambda: not lives(process), "it stays for ever")
    assert works(way)


@pytest.mark.parametrize("ended", [ConnectionResetError, BrokenPipeError, FileNotFoundError])
def test_a_connection_that_ends_as_it_is_used_is_made_anew(laptop, head, echo, monkeypatch, ended):
    ways, stream = [ended("it has just ended")], Tunnel._stream

    def once(way, timeout_s):
        if ways:
            raise ways.pop()
        return stream(way, timeout_s)

    monkeypatch.setattr(Tunnel, "_stream", once)
    assert works(tunnel(laptop, head, echo))


def test_a_port_where_nobody_listens_is_a_refusal_that_can_be_tried_again(laptop, head):
    way = tunnel(laptop, head, free_port("127.0.0.1"))
    with pytest.raises(NotConnected, match="its dispatcher does not listen"):
        way.dial(10.0)
    with pytest.raises(ConnectionRefusedError):  # whatever was to be sent has not arrived
        way.dial(10.0)
    with way._beside(".log").open("r+") as log:  # what was wrong earlier is no news
        said = log.read()
        log.seek(0)
        log.write("channel 9: open failed: administratively prohibited: open failed\n" + said)
    with pytest.raises(NotConnected, match="its dispatcher does not listen"):
        way.dial(10.0)


def test_another_host_key_is_refused_with_the_fix(laptop, head, echo):
    way = tunnel(laptop, head, echo)
    head.stop()
    head.host_key = keys.derived_host_key("another secret", "impostor")
    head.start()
    with pytest.raises(NeedsPerson, match="another host key than the one that is pinned") as caught:
        way.dial(10.0)
    assert "host_key" in caught.value.hint and masters(way) == []


def test_a_machine_without_a_pinned_key_is_not_entered(laptop, head, echo):
    door = head.door.__class__(head.door.address, head.door.user, head.door.port)
    ways = laptop.enters(listed("digits-d-0", Role.DISPATCHER, door, port=echo))
    with pytest.raises(NeedsPerson, match="no host key is pinned for"):
        ssh.tunnel(laptop.folder, ways.ways[0]).dial(10.0)


def test_a_machine_that_does_not_know_the_fleets_key_says_so(laptop, head, echo):
    (head.folder / "authorized_keys").write_text("")
    with pytest.raises(NeedsPerson, match="does not let the fleet's key in") as caught:
        tunnel(laptop, head, echo).dial(10.0)
    assert "spotfleet up FILE" in caught.value.hint


def test_an_sshd_that_forbids_forwarding_is_named(laptop, head, echo):
    head.stop()
    head.options.append("AllowTcpForwarding no")
    head.start()
    with pytest.raises(NeedsPerson, match="forbids forwarding"):
        tunnel(laptop, head, echo).dial(10.0)


def test_an_sshd_that_accepts_and_hangs_is_given_up_in_bounded_time(laptop, head, echo, short_waits):
    way = tunnel(laptop, head, echo)
    head.freeze()
    begun = time.monotonic()
    with pytest.raises(NotConnected, match="does not answer"):
        way.dial(0.5)
    assert time.monotonic() - begun < 20.0 and masters(way) == []


def test_a_new_dispatchers_machine_gets_a_connection_of_its_own(laptop, head, echo, rack):
    old = tunnel(laptop, head, echo)
    assert works(old)
    new = tunnel(laptop, rack.workers[0], echo)
    assert masters(old) == []
    assert works(new) and new.control != old.control


# --- the API


@pytest.fixture
def dispatcher(tmp_path) -> Iterator[int]:
    """The port of a server with the fleet's certificate that is healthy."""
    made = certificates()
    (tmp_path / "cert").write_text(made.cert)
    (tmp_path / "key").write_text(made.key)
    context = server_context(tmp_path / "cert", tmp_path / "key")
    with socket.create_server(("127.0.0.1", 0)) as door:
        def serve() -> None:
            while True:
                try:
                    raw, _ = door.accept()
                except OSError:
                    return
                with raw, suppress(OSError), context.wrap_socket(raw, server_side=True) as stream:
                    stream.recv(65536)
                    stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield door.getsockname()[1]
        door.shutdown(socket.SHUT_RDWR)
        thread.join()


def client(laptop: Laptop, port: int) -> DispatcherClient:
    dial = ssh.dialer(laptop.folder, "127.0.0.1", port, lambda: ())
    return DispatcherClient(Endpoint(f"https://127.0.0.1:{port}", "admin", certificates().ca, dial), patience_s=0.0)


def test_the_client_speaks_tls_inside_ssh_and_says_why_where_it_cannot(laptop, head, dispatcher):
    tunnel(laptop, head, dispatcher)
    assert client(laptop, dispatcher).why_unreachable() == ""
    assert client(laptop, dispatcher).status is not None
    head.stop()
    ssh.tunnel(laptop.folder, ssh.read_targets(laptop.folder).ways[0]).close()
    assert "runs no sshd at that port" in client(laptop, dispatcher).why_unreachable()
    with pytest.raises(DispatcherUnreachable, match="runs no sshd at that port"):
        client(laptop, dispatcher).down()


def test_a_dispatcher_whose_machine_the_provider_does_not_list_is_never_reached_around_ssh(laptop, head, dispatcher):
    assert "lists no machine" in client(laptop, dispatcher).why_unreachable()


def test_an_unknown_machine_is_looked_up_in_the_listing_once(laptop, head, dispatcher):
    asked = []

    def look():
        asked.append(1)
        return [listed("digits-d-0", Role.DISPATCHER, head.door, port=dispatcher)]

    dial = ssh.dialer(laptop.folder, "127.0.0.1", dispatcher, look)
    for _ in range(3):
        dial(10.0).close()
    assert asked == [1]
