"""The coordinator of an elastic run with toy workers, which count and need neither torch nor Ray."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from spotfleet.addresses import split
from spotfleet.errors import UsageError
from spotfleet.membership import Ordered
from spotfleet.membership.pace import Pace
from spotfleet.protocol.messages import JOB_KEY, Checkpoint, Stage, WorkerOrders, WorkerReport
from spotfleet.ray import logger
from spotfleet.ray.run import line
from spotfleet.ray.run.checkpoints import CheckpointTarget, RunCheckpoints
from spotfleet.ray.run.coordinator import Coordinator, Leaving
from spotfleet.ray.run.line import ControlServer
from spotfleet.worker.control import TCP, AgentLine, connect
from spotfleet.worker.handshake import MAC, NONCE

KEY = "key"


class Toy:
    """A worker that holds each generation as soon as it is ordered, and counts."""

    def __init__(self, path: str, name: str, key: str = KEY) -> None:
        self.name, self.count = name, 0
        self.restores: Checkpoint | None = None  # the last one that its orders named
        self.line = AgentLine(path, WorkerReport(name, "ray", Stage.INIT, store="127.0.0.1:1"), key)
        self.line.on_orders = self._obey
        self.line.start()

    def _obey(self, orders: WorkerOrders) -> None:
        place = orders.assignment
        generation = place.generation if place is not None and place.rank >= 0 else 0
        self.restores = orders.restore or self.restores
        if generation != self.line.report.generation or self.line.report.stage is Stage.INIT:
            self.line.update(stage=Stage.READY, generation=generation)

    def step(self) -> None:
        self.count += 1
        self.line.update(version=self.count)


class Toys:
    """A coordinator with its loop, and its toys."""

    def __init__(self, least: int, most: int, checkpoints: RunCheckpoints | None = None,
                 pace: Pace | None = None) -> None:
        self.logs: list[Any] = []
        self.coordinator = Coordinator("127.0.0.1", KEY, least, most, lambda: None,
                                       lambda worker, info: self.logs.append((worker, info)), pace)
        self.coordinator.use(checkpoints or RunCheckpoints())
        self.changes: list[Any] = []
        self.toys: dict[str, Toy] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def add(self, host: str, key: str = KEY) -> Toy:
        name = f"{host}/0/{len(self.toys) + 1}"
        self.coordinator.add(name, host, 0)
        self.toys[name] = Toy(self.coordinator.path, name, key)
        return self.toys[name]

    def hosts(self) -> list[str]:
        return [m.partition("/")[0] for m in self.coordinator.standing().members]

    def runs(self, *hosts: str) -> bool:
        return self.hosts() == list(hosts) and self.coordinator.standing().phase == "running"

    def _loop(self) -> None:
        while not self._over.wait(0.01):
            self.changes += self.coordinator.step(0)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.coordinator.close()
        for toy in self.toys.values():
            toy.line.close()


@pytest.fixture
def toys() -> Iterator[Callable[..., Toys]]:
    made: list[Toys] = []

    def make(least: int, most: int, checkpoints: RunCheckpoints | None = None, pace: Pace | None = None) -> Toys:
        made.append(Toys(least, most, checkpoints, pace))
        return made[-1]

    yield make
    for one in made:
        one.close()


def eventually(holds: Callable[[], Any], limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, f"not within {limit_s:g} s"
        time.sleep(0.005)


def test_workers_form_a_generation_over_tcp_and_a_later_one_joins(toys):
    fleet = toys(2, 3)
    fleet.add("a")
    fleet.add("b")
    eventually(lambda: fleet.runs("a", "b"))
    fleet.add("c")
    eventually(lambda: fleet.runs("a", "b", "c"))


def test_the_confirmed_end_of_a_worker_makes_a_generation_of_the_others(toys):
    fleet = toys(1, 2)
    first, second = fleet.add("a"), fleet.add("b")
    eventually(lambda: fleet.runs("a", "b"))
    for toy in (first, second):
        toy.step()
    second.line.close()
    fleet.coordinator.ended(second.name)
    eventually(lambda: fleet.runs("a"))
    assert fleet.coordinator.standing().version == 1


def test_a_lost_connection_alone_is_no_death_until_a_peer_fails(toys):
    fleet = toys(1, 2)
    first, second = fleet.add("a"), fleet.add("b")
    eventually(lambda: fleet.runs("a", "b"))
    second.line.close()
    eventually(lambda: fleet.coordinator._workers[second.name].silent)
    assert fleet.coordinator.standing().members == (first.name, second.name)
    first.line.update(failed=1, generation=0)
    eventually(lambda: fleet.runs("a"))


def test_a_worker_that_connects_again_keeps_its_place(toys):
    fleet = toys(1, 2)
    first, second = fleet.add("a"), fleet.add("b")
    eventually(lambda: fleet.runs("a", "b"))
    fleet.coordinator._server._peers[second.name].shutdown(socket.SHUT_RDWR)
    second.step()
    eventually(lambda: fleet.coordinator.report(second.name).version == 1)
    assert fleet.coordinator.standing().members == (first.name, second.name)
    assert fleet.coordinator.standing().generation == 1


def test_workers_of_a_node_that_drains_leave_as_planned(toys):
    fleet = toys(1, 2)
    fleet.add("a")
    second = fleet.add("b")
    eventually(lambda: fleet.runs("a", "b"))
    fleet.coordinator.leaving = {"b": Leaving(time.monotonic() + 4.0, "notice")}
    eventually(lambda: fleet.runs("a"))
    eventually(lambda: not fleet.coordinator.wanted(second.name))
    assert not second.line.orders.assignment.urgent


def test_fewer_workers_are_wanted_and_the_rest_goes_on(toys):
    fleet = toys(1, 3)
    for host in ("a", "b", "c"):
        fleet.add(host)
    eventually(lambda: len(fleet.hosts()) == 3)
    fleet.coordinator.resize(1, 2)
    eventually(lambda: fleet.runs("a", "b"))


def test_one_worker_joins_in_each_change_where_the_pace_is_one(toys):
    fleet = toys(1, 3, pace=Pace(max_join=1))
    fleet.add("a")
    eventually(lambda: fleet.runs("a"))
    fleet.coordinator.resize(1, 1)
    fleet.add("b")
    fleet.add("c")
    eventually(lambda: all(toy.line.report.stage is Stage.READY for toy in fleet.toys.values()))
    fleet.coordinator.resize(1, 3)
    eventually(lambda: fleet.runs("a", "b", "c"))
    assert [len(c.members) for c in fleet.changes if isinstance(c, Ordered)] == [1, 2, 3]


def test_a_stranger_without_the_key_is_no_worker(toys):
    fleet = toys(1, 2)
    fleet.add("a")
    eventually(lambda: fleet.runs("a"))
    assert not fleet.add("b", key="another").line.flush(0.3) and fleet.hosts() == ["a"]
    with pytest.raises(ConnectionError):
        connect(fleet.coordinator.path, "another")
    connect(fleet.coordinator.path, KEY).close()
    with socket.create_connection(split(fleet.coordinator.path.removeprefix(TCP)), timeout=30) as sock:
        nonce = sock.recv(NONCE)
        sock.sendall(nonce + bytes(MAC))
        assert sock.recv(MAC) == b"", "an answer to a client with a wrong proof"


def raw(server: ControlServer) -> socket.socket:
    return socket.create_connection(split(server.path.removeprefix(TCP)), timeout=30)


@pytest.fixture
def server(monkeypatch) -> Iterator[ControlServer]:
    monkeypatch.setattr(line, "SWEEP_S", 0.01)
    made = ControlServer("127.0.0.1", KEY, lambda report: None, lambda worker: None, lambda *_: None)
    yield made
    made.close()


def test_a_stranger_that_sends_a_byte_at_a_time_is_closed_in_time(server, monkeypatch):
    monkeypatch.setattr(line, "HELLO_LIMIT_S", 0.05)
    with raw(server) as sock:
        assert len(sock.recv(NONCE)) == NONCE
        sock.settimeout(0.01)
        for _ in range(NONCE + MAC - 1):  # never the whole proof
            with contextlib.suppress(TimeoutError):
                try:
                    sock.sendall(b"x")
                    assert sock.recv(1) == b""
                except (ConnectionResetError, BrokenPipeError):
                    pass
                return
        raise AssertionError("it may stay as long as it sends")


def test_of_too_many_strangers_the_oldest_is_closed_and_a_worker_still_connects(server, monkeypatch):
    monkeypatch.setattr(line, "MOST_STRANGERS", 2)
    monkeypatch.setattr(line, "HELLO_LIMIT_S", 600.0)
    with raw(server) as first, raw(server), raw(server):
        with contextlib.suppress(ConnectionResetError):
            while first.recv(NONCE):
                pass  # its end came before the limit of time
        connect(server.path, KEY).close()


def test_a_server_without_a_free_descriptor_accepts_again_once_there_is_one(server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as early:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            early.connect(split(server.path.removeprefix(TCP)))
            time.sleep(0.02)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        early.settimeout(10)
        assert len(early.recv(NONCE)) == NONCE


def test_a_worker_does_not_talk_to_a_server_that_lacks_the_key():
    seen: list[WorkerReport] = []
    server = ControlServer("127.0.0.1", "another", seen.append, lambda worker: None, lambda *_: None)
    toy = Toy(server.path, "a/0/1")
    try:
        assert not toy.line.flush(0.3) and seen == []
    finally:
        toy.line.close()
        server.close()


def test_a_line_that_is_no_report_ends_its_connection_and_nothing_else(toys):
    fleet = toys(1, 1)
    with connect(fleet.coordinator.path, KEY) as sock:
        sock.sendall(b"[1, 2\n")
        assert sock.recv(1) == b""
    fleet.add("a")
    eventually(lambda: fleet.runs("a"))


def test_values_that_a_worker_logs_arrive_in_order(toys, monkeypatch):
    fleet = toys(1, 1)
    monkeypatch.setenv("SPOTFLEET_SOCKET", fleet.coordinator.path)
    monkeypatch.setenv("SPOTFLEET_WORKER", "a/0/1")
    monkeypatch.setenv(JOB_KEY, KEY)
    monkeypatch.setattr(logger, "_connection", None)
    for epoch in range(3):
        logger.log({"epoch": epoch})
    assert fleet.logs == [("a/0/1", {"epoch": n}) for n in range(3)]
    logger._connection[1].close()


def test_a_value_may_be_answered_and_its_sender_waits_for_that(monkeypatch):
    server = ControlServer("127.0.0.1", KEY, lambda report: None, lambda worker: None,
                           lambda worker, value: {"of": worker, "twice": 2 * value["n"], "long": "x" * 100_000})
    monkeypatch.setenv("SPOTFLEET_SOCKET", server.path)
    monkeypatch.setenv("SPOTFLEET_WORKER", "a/0/1")
    monkeypatch.setenv(JOB_KEY, KEY)
    monkeypatch.setattr(logger, "_connection", None)
    try:
        assert logger.send({"n": 4}, 30.0) == {"of": "a/0/1", "twice": 8, "long": "x" * 100_000}
        logger._connection[1].close()
    finally:
        server.close()


def test_a_value_whose_connection_is_lost_is_sent_again_and_passed_on_once(monkeypatch):
    seen: list[int] = []

    def on_log(worker: str, value: dict[str, int]) -> int:
        seen.append(value["n"])
        if len(seen) == 1:
            logger._connection[1].shutdown(socket.SHUT_RDWR)  # the answer does not arrive
        return 10 * value["n"]

    server = ControlServer("127.0.0.1", KEY, lambda report: None, lambda worker: None, on_log)
    for name, value in {"SPOTFLEET_SOCKET": server.path, "SPOTFLEET_WORKER": "a/0/1", JOB_KEY: KEY}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(logger, "_connection", None)
    monkeypatch.setattr(logger, "AGAIN_S", 0.01)
    try:
        assert [logger.send({"n": n}, 30.0) for n in (1, 2)] == [10, 20] and seen == [1, 2]
        logger._connection[1].close()
    finally:
        server.close()


@pytest.mark.parametrize(("value", "named"), [
    ({"text": "x" * (1 << 20)}, "at most 1048576 can be logged at once"), ({"of": {1, 2}}, "a set cannot be logged"),
    ({"loss": array("d", [1.0, 2.0])}, "a array cannot be logged")])
def test_a_value_that_cannot_be_logged_is_refused_by_name(value, named):
    with pytest.raises(UsageError, match=named):
        logger.send(value, 0.0)


def test_the_server_listens_where_the_workers_are_told(toys):
    path = toys(1, 1).coordinator.path
    assert path.startswith(TCP) and split(path.removeprefix(TCP))[0] == "127.0.0.1"


TARGET = CheckpointTarget("s3://bucket/run", every_s=7.0)


def kept(version: int, generation: int) -> Checkpoint:
    return Checkpoint(version, f"digest of {version}-{generation}", 10, generation,
                      url=f"{TARGET.url}/{version}-{generation}")


def test_when_all_workers_are_lost_new_ones_restore_the_newest_checkpoint(toys):
    fleet = toys(2, 2, RunCheckpoints(TARGET))
    old = [fleet.add("a"), fleet.add("b")]
    eventually(lambda: fleet.runs("a", "b"))
    assert [(t.line.orders.checkpoint_url, t.line.orders.checkpoint_every_s) for t in old] == 2 * [(TARGET.url, 7.0)]
    old[0].line.update(version=40, checkpoint=kept(40, 1))
    eventually(lambda: fleet.coordinator.checkpoints.version == 40)
    assert old[0].restores is old[1].restores is None, "as long as a worker holds the state"
    for toy in old:
        toy.line.close()
        fleet.coordinator.ended(toy.name)
    new = [fleet.add("c"), fleet.add("d")]
    eventually(lambda: fleet.runs("c", "d"))
    assert [t.restores for t in new] == 2 * [kept(40, 1)]


def test_a_run_begins_with_the_checkpoint_of_an_earlier_one_in_a_later_generation(toys):
    fleet = toys(1, 2, RunCheckpoints(TARGET, kept(40, 30)))
    first = fleet.add("a")
    eventually(lambda: fleet.runs("a"))
    assert first.restores == kept(40, 30)
    assert fleet.coordinator.standing().generation > 30
    assert fleet.coordinator.checkpoints.take_remarks() == [
        f"begins with the checkpoint of version 40 at {TARGET.url}/40-30"]


def test_without_a_target_workers_write_no_checkpoints(toys):
    fleet = toys(1, 1)
    first = fleet.add("a")
    eventually(lambda: fleet.runs("a"))
    assert (first.line.orders.checkpoint_url, first.line.orders.checkpoint_every_s) == ("", 0.0)


def test_a_worker_on_a_node_that_drains_leaves_once_its_state_is_kept(toys):
    fleet = toys(1, 1, RunCheckpoints(TARGET))
    only = fleet.add("a")
    eventually(lambda: fleet.runs("a"))
    only.line.update(version=40)
    fleet.coordinator.leaving = {"a": Leaving(time.monotonic() + 4.0, "notice")}
    eventually(lambda: only.line.orders.checkpoint_now and only.line.orders.seconds_left is not None)
    assert fleet.coordinator.wanted(only.name)
    only.line.update(checkpoint=kept(40, 1))
    eventually(lambda: not fleet.coordinator.wanted(only.name))
