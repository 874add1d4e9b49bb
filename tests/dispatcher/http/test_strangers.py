"""Connections without a valid token are few, cost little, and keep no member out."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from spotfleet.dispatcher.http.admission import KNOWN_S, Crowd, KnownNetworks, Places, network_of
from spotfleet.dispatcher.http.listener import TLS_BUFFER
from spotfleet.protocol.messages import AgentReport, dump
from spotfleet.storage.daemon_logs import KindFilter, LogFormatter
from spotfleet.transport import certs
from tests.support.dispatcher.fake_fleet import ADMIN, Stage, spec

LIMIT_S = 20.0


@dataclass(eq=False)
class Caller:
    network: str
    since: float = 0.0


def callers(*networks: str) -> list[Caller]:
    return [Caller(network) for network in networks]


# ---- the decisions


def test_the_oldest_of_the_network_with_most_connections_is_the_first_to_go():
    crowd, found = Crowd[Caller](), callers("a", "b", "b", "c", "b", "c")
    for caller in found:
        crowd.add(caller)
    gone = []
    while (oldest := crowd.oldest_of_busiest()) is not None:
        gone.append(found.index(oldest))
        assert crowd.remove(oldest) and not crowd.remove(oldest)
    assert gone == [1, 2, 3, 0, 4, 5] and len(crowd) == 0 and not list(crowd)


def test_a_new_connection_waits_where_nobody_has_more_places_than_it_would_have():
    places, (a, b, c, d) = Places[Caller](most_waiting=3, most_open=2), callers("a", "b", "c", "a")
    assert [places.arrive(caller) for caller in (a, b, c)] == [None] * 3
    assert [places.enter(a), places.enter(b), places.enter(c)] == [(True, None), (True, None), (False, None)]
    assert [places.arrive(d), places.enter(d)] == [None, (False, None)] and places.next_ready() is None
    assert places.leave(b) and places.next_ready() is c and places.enter(c) == (True, None)


def test_the_longest_silent_connection_gives_way_to_a_new_one():
    places, found = Places[Caller](most_waiting=2, most_open=2), callers("many", "few", "many", "new")
    assert [places.arrive(caller) for caller in found] == [None, None, found[0], found[1]]


def test_a_network_with_many_open_connections_gives_way_to_one_with_none():
    places, many = Places[Caller](most_waiting=9, most_open=3), callers("many", "many", "many")
    (member,) = callers("member")
    for caller in (*many, member):
        places.arrive(caller)
    assert [places.enter(c)[0] for c in many] == [True] * 3
    assert places.enter(member) == (True, many[0])


def test_a_connection_that_waits_for_us_is_not_overdue():
    places, (silent, ready, opened) = Places[Caller](9, 1), callers("a", "b", "c")
    for caller in (silent, ready, opened):
        places.arrive(caller)
    assert places.enter(opened)[0] and not places.enter(ready)[0]
    assert places.overdue(30.0, 30.0) == [] and places.overdue(31.0, 30.0) == [silent, opened]


def test_a_network_is_known_for_an_hour_after_a_valid_token():
    known = KnownNetworks()
    known.note("10.0.0.1", 0.0)
    assert known.has("10.0.0.1", KNOWN_S - 1) and not known.has("10.0.0.1", KNOWN_S + 1)
    assert not known.has("10.0.0.2", 0.0)


def test_all_addresses_of_one_ipv6_network_count_as_one():
    assert network_of("2001:db8:1:2::7") == network_of("2001:db8:1:2:aaaa::9") != network_of("2001:db8:1:3::7")
    assert network_of("::ffff:10.0.0.7") == network_of("10.0.0.7") == "10.0.0.7"


# ---- the real server


@contextlib.contextmanager
def silent(port: int, count: int, source: str = "127.0.0.9") -> Iterator[list[socket.socket]]:
    """Connections that send nothing."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT_S, (source, 0)))
               for _ in range(count)]


async def until(condition) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_silent_connections_are_few_the_oldest_is_closed_first_and_members_stay(play, monkeypatch):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        agent = stage.daemon.dispatcher.core.connections[host]
        listener = stage.daemon.listener
        with silent(stage.port, 40) as found:
            await until(lambda: listener.count == 20)
            for sock in found[:20]:
                assert await asyncio.to_thread(sock.recv, 1) == b""
            for sock in found[20:]:
                sock.setblocking(False)
                with pytest.raises(BlockingIOError):
                    sock.recv(1)
            with silent(stage.port, 5, "127.0.0.1") as own:  # a network with a valid token: it has other places
                await until(lambda: listener.count == 25)
                with silent(stage.port, 30, "127.0.0.10"):
                    await stage.call("GET", "/v1/status")
                    for sock in own:
                        sock.setblocking(False)
                        with pytest.raises(BlockingIOError):
                            sock.recv(1)
            assert agent.connected and stage.daemon.dispatcher.core.connections[host] is agent
        await until(lambda: listener.count == 0)

    monkeypatch.setattr("spotfleet.dispatcher.http.listener.MOST_WAITING", 20)
    play(scene, spec(1))


def test_connections_with_tls_and_without_a_token_are_few_and_a_member_gets_a_place(play, monkeypatch):
    async def scene(stage: Stage) -> None:
        listener, tls = stage.daemon.listener, certs.client_context(stage.ca)
        members = listener.count
        streams = [asyncio.create_task(asyncio.open_connection(
            "127.0.0.1", stage.port, ssl=tls, local_addr=("127.0.0.9", 0), ssl_handshake_timeout=LIMIT_S))
            for _ in range(12)]
        await until(lambda: sum(t.done() for t in streams) >= 4 and listener.count - members >= 12)
        assert len(listener._strangers.open) == 4
        status, _ = await stage.call("GET", "/v1/status")  # from 127.0.0.1, one of whose connections is closed at most
        assert status == 200
        for task in streams:
            task.cancel()
        for done in await asyncio.gather(*streams, return_exceptions=True):
            if isinstance(done, tuple):
                done[1].close()
        await until(lambda: listener.count == members)

    monkeypatch.setattr("spotfleet.dispatcher.http.listener.MOST_OPEN", 4)
    play(scene, spec(0))


def test_a_connection_without_a_token_is_closed_in_time_and_one_with_a_token_is_not(play, monkeypatch):
    async def scene(stage: Stage) -> None:
        tls = certs.client_context(stage.ca)
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port, ssl=tls)
        writer.write(f"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ADMIN}\r\n\r\n".encode())
        assert b" 200 " in await asyncio.wait_for(reader.readline(), LIMIT_S)
        with silent(stage.port, 1) as (sock,):
            assert await asyncio.to_thread(sock.recv, 1) == b""
        stranger, other = await asyncio.open_connection("127.0.0.1", stage.port, ssl=tls)
        assert await asyncio.wait_for(stranger.read(), LIMIT_S) == b""
        other.close()
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"ok" in await asyncio.wait_for(reader.readuntil(b"ok"), LIMIT_S)
        writer.close()

    monkeypatch.setattr("spotfleet.dispatcher.http.listener.STRANGER_S", 0.3)
    play(scene, spec(0))


def test_an_agent_that_the_provider_does_not_list_yet_is_a_member_too(play):
    async def scene(stage: Stage) -> None:
        headers = {"Authorization": f"Bearer {stage.token('f-99')}"}
        async with stage.http.ws_connect(f"{stage.url}/v1/agent", ssl=certs.client_context(stage.ca),
                                         headers=headers) as link:
            await link.send_str(dump(AgentReport("f-99", "incarnation", "127.0.0.1", 1)))
            await until(lambda: stage.daemon.dispatcher.core.is_connected("f-99"))
            await until(lambda: stage.daemon.listener.count == 0)

    play(scene, spec(0))


def test_a_refused_caller_is_disconnected(play):
    async def scene(stage: Stage) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port, ssl=certs.client_context(stage.ca))
        writer.write(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 401 " in await asyncio.wait_for(reader.read(), LIMIT_S)  # `read` ends with the connection
        writer.close()

    play(scene, spec(0))


def test_a_connection_costs_little_memory_with_tls_and_without(play):
    async def scene(stage: Stage) -> None:
        await stage.call("GET", "/v1/status")
        tls = certs.client_context(stage.ca)
        gc.collect()
        tracemalloc.start()
        try:
            with silent(stage.port, 30):
                await until(lambda: stage.daemon.listener.count >= 30)
                assert tracemalloc.get_traced_memory()[0] < 30 * 10_000
            before = tracemalloc.get_traced_memory()[0]
            streams = [await asyncio.open_connection("127.0.0.1", stage.port, ssl=tls) for _ in range(20)]
            both = (tracemalloc.get_traced_memory()[0] - before) / 20  # both sides, ours and the client's
            for _, writer in streams:
                writer.close()
        finally:
            tracemalloc.stop()
        assert both < 4 * TLS_BUFFER

    play(scene, spec(0))


def test_malformed_requests_do_not_fill_the_log(play):
    async def scene(stage: Stage) -> None:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(handler.format(record))
        handler.setFormatter(LogFormatter("%(message)s"))
        handler.addFilter(KindFilter())
        logging.getLogger().addHandler(handler)
        try:
            for _ in range(10):
                reader, writer = await asyncio.open_connection("127.0.0.1", stage.port,
                                                               ssl=certs.client_context(stage.ca))
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                await asyncio.wait_for(reader.readuntil(b"}"), LIMIT_S)
                writer.write(b"BREW /" + b"x" * 8000 + b" HTTP/1.1\r\n\r\n")
                assert b" 400 " in await asyncio.wait_for(reader.read(), LIMIT_S)
                writer.close()
        finally:
            logging.getLogger().removeHandler(handler)
        assert sum(map(len, lines)) < 2000 and sum("x" * 50 in line for line in lines) <= 1

    play(scene, spec(0))
