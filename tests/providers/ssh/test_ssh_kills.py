"""A process that is killed at any point of its work on machines: the next one finds each host once or not at all.

`test_each_point` with --long tries all; otherwise each flow is killed at some, in each run at others. `scripts/test
--long tests/providers/ssh/test_ssh_kills.py` prints how many there are.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from spotfleet.errors import NoCapacity
from spotfleet.model import CloudState, Role
from spotfleet.providers.ssh import SshProvider, poller
from tests.support.ssh_provider.box_machines import USERS_KEY, Boxes, Point, boxes
from tests.support.ssh_provider.sshd_machines import idle_hosts

pytestmark = pytest.mark.processes
MOST = 0 if os.environ.get("SPOTFLEET_LONG") else 2  # points of each flow; 0: all
KEY = "ssh-ed25519 AAAAfleets"
Act = Callable[[Boxes, SshProvider], object]


class Flow(NamedTuple):
    before: Callable[[Boxes], object]
    act: Act
    hosts: int  # wanted afterwards
    again: bool = True  # the next process does the same once more


def launched(b: Boxes) -> None:
    b.process().launch(b.request(1))


def with_key(b: Boxes) -> None:
    b.process().install_key(b.fleet, KEY)


def whole(b: Boxes) -> None:
    with_key(b)
    b.process().launch(b.request(0, Role.DISPATCHER))
    launched(b)


FLOWS = {
    "launch": Flow(lambda b: None, lambda b, p: p.launch(b.request(1)), 1),
    "launch of a dispatcher": Flow(lambda b: None, lambda b, p: p.launch(b.request(0, Role.DISPATCHER)), 0),
    "terminate": Flow(launched, lambda b, p: p.terminate(f"{b.fleet}-1"), 0),
    "tag": Flow(launched, lambda b, p: p.tag(f"{b.fleet}-1", {"zone": "a"}), 1),
    "interrupt": Flow(launched, lambda b, p: p.interrupt(f"{b.fleet}-1", None), 1, again=False),
    "install_key": Flow(lambda b: None, lambda b, p: p.install_key(b.fleet, KEY), 0),
    "install_key in place of another": Flow(with_key, lambda b, p: p.install_key(b.fleet, f"{KEY}2"), 0),
    "remove_fleet": Flow(whole, lambda b, p: p.remove_fleet(b.fleet), 0),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    idle_hosts(monkeypatch)
    monkeypatch.setattr(poller, "FRESH_S", 0.0)
    monkeypatch.setattr(poller, "POLL_S", 60.0)
    yield


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[[], Boxes]]:
    """Make new machines; those before are given up."""
    number, held = 0, []

    def make() -> Boxes:
        nonlocal number
        number += 1
        if held:
            held.pop().__exit__(None, None, None)
        held.append(boxes(tmp_path / str(number), f"k{os.getpid()}x{number}"))
        return held[-1].__enter__()

    yield make
    if held:
        held.pop().__exit__(None, None, None)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FLOWS)
def test_each_point(name: str, machines: Callable[[], Boxes]):
    flow, b = FLOWS[name], machines()
    flow.before(b)
    points = b.killed(lambda provider: flow.act(b, provider), None).points
    tried = random.sample(points, min(MOST, len(points))) if MOST else points
    print(f"{name}: {len(points)} points, {len(tried)} tried")
    for point in tried:
        killed_and_repeated(flow, machines(), point)


def killed_and_repeated(flow: Flow, b: Boxes, point: Point) -> None:
    flow.before(b)
    b.killed(lambda provider: flow.act(b, provider), point)
    running = b.running()
    assert len(set(running)) == len(running), f"{point}: {running}"
    for box in (b.head, b.worker):
        assert USERS_KEY in (box.home / ".ssh" / "authorized_keys").read_text(), f"{point}: the user is locked out"
    b.settle()
    b.age()
    provider = b.process()
    if flow.again:
        with suppress(NoCapacity):  # its launch was cut off before the start: another host is launched below
            flow.act(b, provider)
    b.settle()
    converge(b, flow.hosts, str(point))
    assert b.process().remove_fleet(b.fleet) == {}, point
    b.settle()
    assert b.running() == [], point
    assert [box.holds() for box in (b.head, b.worker)] == [[".ssh", ".ssh/authorized_keys"]] * 2, point
    assert (b.worker.home / ".ssh" / "authorized_keys").read_text() == USERS_KEY, point


def converge(b: Boxes, hosts: int, point: str) -> None:
    """As a dispatcher: end what has ended or failed, and launch until there are as many hosts as it wants."""
    for number in range(2, 6):
        provider = b.process()
        workers = [h for h in provider.hosts(b.fleet) if h.role is Role.WORKER]
        up = [h.request_id for h in workers if h.state is CloudState.RUNNING]
        for host in workers:
            if host.request_id not in up:
                provider.terminate(host.request_id)
        if len(up) == hosts:
            assert [h for h in b.running() if h in up] == up, f"{point}: listed {up}, running {b.running()}"
            return
        b.process().launch(b.request(number))  # one that has seen a failure waits before it tries the machine again
        b.settle()
    raise AssertionError(f"{point}: never {hosts} hosts: {b.worker.holds()}")
