"""The bootstrap store: whoever knows the job's key meets the others there, and a stranger can do nothing."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest

from spotfleet.worker import store
from spotfleet.worker.store import Server, StoreClient, open_store

KEY = "the job's key"
ADDRESS = "127.0.0.1"
SET = struct.pack("!cII", b"S", 7, 5) + b"a/1/keyevil!"


def client(server: Server, key: str = KEY) -> StoreClient:
    return StoreClient(ADDRESS, server.port, "a/1", 10.0, key)


def stranger(server: Server) -> socket.socket:
    return socket.create_connection((ADDRESS, server.port), timeout=10)


def is_cut_off(sock: socket.socket) -> bool:
    """Does the server end this connection? What it sent before that is skipped."""
    try:
        while sock.recv(100):
            pass
    except ConnectionError:
        return True
    return True


def await_condition(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_client_with_another_key_is_cut_off():
    server = Server(ADDRESS, KEY)
    with pytest.raises(ConnectionError, match="refuses this job's key"):
        client(server, "another key")


@pytest.mark.parametrize("said", [SET, bytes(48) + SET, b"GET / HTTP/1.1\r\n" * 4])
def test_who_does_not_know_the_key_writes_nothing(said):
    server = Server(ADDRESS, KEY)
    with stranger(server) as sock:
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        assert is_cut_off(sock)
    member = client(server)
    member.set("key", b"good")
    assert member.get("key") == b"good"
    assert server._values == {b"a/1/key": b"good"}
    member.close()


def test_an_answer_overheard_is_of_no_use_on_another_connection():
    server = Server(ADDRESS, KEY)
    with socket.create_server((ADDRESS, 0)) as ear:
        heard: list[bytes] = []

        def relay() -> None:
            victim, _ = ear.accept()
            with victim, stranger(server) as real:
                victim.sendall(real.recv(16, socket.MSG_WAITALL))
                heard.append(victim.recv(48, socket.MSG_WAITALL))  # never passed on

        thread = threading.Thread(target=relay)
        thread.start()
        with pytest.raises(OSError):
            StoreClient(ADDRESS, ear.getsockname()[1], "a/1", 10.0, KEY)
        thread.join(10)
    with stranger(server) as sock:
        sock.sendall(heard[0] + SET)
        assert is_cut_off(sock)
    assert server._values == {}


def test_a_store_that_does_not_know_the_key_is_not_believed():
    with socket.create_server((ADDRESS, 0)) as impostor:
        def serve() -> None:
            sock, _ = impostor.accept()
            with sock:
                sock.sendall(bytes(16))
                sock.recv(48, socket.MSG_WAITALL)
                sock.sendall(bytes(32))

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConnectionError, match="does not know this job's key"):
            StoreClient(ADDRESS, impostor.getsockname()[1], "a/1", 10.0, KEY)
        thread.join(10)


def test_a_stranger_that_says_nothing_is_cut_off_in_time(monkeypatch):
    monkeypatch.setattr(store, "HELLO_LIMIT_S", 0.2)
    server = Server(ADDRESS, KEY)
    with stranger(server) as silent:
        assert is_cut_off(silent)


def test_however_many_strangers_come_members_meet_at_once(monkeypatch):
    monkeypatch.setattr(store, "MOST_STRANGERS", 8)
    server = Server(ADDRESS, KEY)
    crowd = [socket.create_connection((ADDRESS, server.port), timeout=10, source_address=("127.0.0.5", 0))
             for _ in range(50)]
    began = time.monotonic()
    writer, reader = client(server), client(server)
    writer.set("key", b"value")
    assert reader.get("key") == b"value"
    assert time.monotonic() - began < store.HELLO_LIMIT_S  # it did not wait for them to be given up
    assert len(server._strangers) <= 8
    for sock in (*crowd, writer, reader):
        sock.close()


def test_a_first_word_that_is_lost_is_said_again_for_who_can_wait():
    """A listener whose queue is full drops what comes, as a network that loses packets does."""
    with socket.create_server((ADDRESS, 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        address = listener.getsockname()
        with contextlib.suppress(TimeoutError):
            while True:
                stack.enter_context(socket.create_connection(address, timeout=0.2))

        def empty() -> None:
            listener.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                while True:
                    listener.accept()[0].close()

        timers = [threading.Timer(store.CONNECT_LIMIT_S + s, empty) for s in (0.2, 0.8)]
        for timer in timers:
            timer.start()
        with pytest.raises(ConnectionError):  # it was let in, and sent away
            StoreClient(ADDRESS, address[1], "a/1", 10.0, KEY, connect_s=10.0)
        for timer in timers:
            timer.join()


def test_a_store_that_is_closed_lets_go_of_all_and_nobody_gets_in_any_more():
    server = Server(ADDRESS, KEY)
    member, unknown = client(server), stranger(server)
    await_condition(lambda: len(server._selector.get_map()) == 3)  # else closing the listener alone ends both
    held = [key.fileobj for key in server._selector.get_map().values()]  # else the last reference closes them
    server.close()
    assert is_cut_off(unknown)
    await_condition(lambda: all(sock.fileno() == -1 for sock in held))
    with pytest.raises(OSError):
        member.get("key")
    with pytest.raises(ConnectionRefusedError):
        stranger(server)
    for sock in (member, unknown):
        sock.close()


def test_a_store_whose_members_leave_while_it_is_closed_closes_without_an_error():
    before = set(threading.enumerate())
    server = Server(ADDRESS, KEY)
    (thread,) = set(threading.enumerate()) - before
    member, listener = client(server), server._listener

    class Late:
        """The listener, shut by a thread that the scheduler holds up for half a second."""

        accept = listener.accept

        def shutdown(self, how: int) -> None:
            member.close()  # wakes the server's thread
            thread.join(0.5)
            listener.shutdown(how)

    server._listener = Late()
    server.close()
    thread.join(10)
    assert listener.fileno() == -1


def test_a_process_that_closes_all_its_stores_serves_on_none_of_their_ports():
    made = [open_store(ADDRESS, KEY)[0] for _ in range(2)]
    ports = {server.port for server in made}
    assert ports <= store.served_ports()
    store.close_all()
    assert not store.served_ports()
    for port in ports:
        with pytest.raises(OSError):
            StoreClient(ADDRESS, port, "a/1", 10.0, KEY)
