"""Whom a worker finds no way to, while a generation takes long to form."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from spotfleet.addresses import joined
from spotfleet.worker import connectivity
from tests.support.network.namespaces import Namespaces, why_not

pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.fixture(scope="module")
def net() -> Iterator[Namespaces]:
    with Namespaces() as made:
        for name, interface in (("a", "ens5"), ("b", "wan7"), ("c", "bond1")):
            made.add(name, interface, (4, 6))
        for family in (4, 6):  # what goes to c is lost without a word
            bogus = ["lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "ens5"]
            made.ip("a", "neigh", "replace", made.address("c", family), *bogus)
        yield made


@pytest.mark.parametrize("family", [4, 6])
def test_who_does_not_answer_is_named_with_the_address_and_who_refuses_is_reached(
        net: Namespaces, family: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connectivity, "ANSWER_S", 0.5)
    at = {name: net.address(name, family) for name in "bc"}
    nowhere = "10.99.0.1" if family == 4 else "fd99::1"  # no route leads there
    peers = [("h-b/0/1", joined(at["b"], 9)), ("h-c/0/2", joined(at["c"], 9)), ("h-d/0/3", joined(nowhere, 9))]
    began = time.monotonic()
    assert net.call("a", lambda: connectivity.unreached(peers)) == (f"h-c/0/2 at {at['c']}", f"h-d/0/3 at {nowhere}")
    assert 0.5 <= time.monotonic() - began < 10


def test_only_who_refuses_counts_as_ended_and_only_at_the_second_look(net: Namespaces,
                                                                      monkeypatch: pytest.MonkeyPatch):
    """A machine that does not answer may be slow or cut off."""
    monkeypatch.setattr(connectivity, "ANSWER_S", 0.5)
    at = {name: net.address(name) for name in "bc"}
    peers = [("h-b/0/1", joined(at["b"], 9)), ("h-c/0/2", joined(at["c"], 9)), ("h-d/0/3", joined("10.99.0.1", 9))]
    found = []

    def look() -> None:
        watch = connectivity.RefusalWatch(lambda: peers)
        for _ in range(2):
            watch._look()
            found.append(watch.gone())

    monkeypatch.setattr(connectivity.RefusalWatch, "gone", lambda self: self._gone)
    net.call("a", look)
    assert found == [(), (f"h-b/0/1 at {at['b']}",)]


def test_who_listens_is_reached(net: Namespaces):
    with net.call("b", lambda: socket.create_server((net.address("b"), 0))) as listener:
        place = joined(net.address("b"), listener.getsockname()[1])
        assert net.call("a", lambda: connectivity.unreached([("h-b/0/1", place)])) == ()


def test_it_is_told_while_a_generation_forms_and_taken_back_when_the_way_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connectivity, "AFTER_S", 0.01)
    monkeypatch.setattr(connectivity, "AGAIN_S", 0.01)
    answers, told, over = [("b at 1",), ("b at 1",), ()], [], threading.Event()

    def unreached(_peers: object) -> tuple[str, ...]:
        if not answers:
            over.set()
            return ()
        return answers.pop(0)

    monkeypatch.setattr(connectivity, "unreached", unreached)
    connectivity.watch(lambda: [], lambda: not over.is_set(), told.append)
    assert over.wait(30)
    assert told == [("b at 1",), ()]
