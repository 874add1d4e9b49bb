"""The loop that every caller of Membership runs: views from reports, orders out."""

from __future__ import annotations

from dataclasses import replace

from spotfleet.membership import Formed, Membership, Ordered
from spotfleet.membership.desk import Condition, WorkerRecord, observe, release, view_of, worker_orders
from spotfleet.protocol.messages import Stage, WorkerReport


class Loop:
    """A caller with hosts of one slot: each worker's host is the first part of its name."""

    def __init__(self, min_workers: int, max_workers: int) -> None:
        self.membership = Membership("job", min_workers, max_workers)
        self.workers: dict[str, WorkerRecord] = {}
        self.leaving: dict[str, float] = {}
        self.now = 0.0

    def put(self, name: str, **fields) -> None:
        known = self.workers.setdefault(name, WorkerRecord(name, name.split("/")[0], 0, 0, WorkerReport(name, "job")))
        known.report = replace(known.report, store=f"{name}:1", **fields)

    def look(self, after: float = 0.0, coming: int = 0) -> list:
        self.now += after
        views = [view_of(w, Condition(leaving_s=self.leaving.get(w.name), leaving_why="notice"), self.now)
                 for w in self.workers.values()]
        return observe(self.membership, self.workers, views, coming, self.now)

    def train(self, version: int) -> None:
        for name in self.membership.members:
            self.put(name, stage=Stage.READY, generation=self.membership.generation, version=version)
        assert [type(change) for change in self.look()] == [Formed]

    def released(self, kept: int = 0) -> list[str]:
        release(self.membership, self.workers.values(), self.leaving, kept)
        return [w.name for w in self.workers.values() if not w.wanted]


def test_the_first_generation_waits_for_workers_that_start():
    loop = Loop(1, 3)
    loop.put("a/0/1", stage=Stage.INIT)
    loop.put("b/0/2")
    assert loop.look() == [] and loop.membership.why.endswith("waits for 1 more")
    loop.workers["b/0/2"].wanted = False
    assert [type(change) for change in loop.look()] == [Ordered]


def test_workers_that_the_caller_is_about_to_start_are_awaited_too():
    loop = Loop(1, 3)
    loop.put("a/0/1", stage=Stage.INIT)
    assert loop.look(coming=2) == [] and loop.membership.why.endswith("waits for 2 more")


def test_an_evicted_worker_is_wanted_no_more():
    loop = Loop(1, 2)
    loop.put("a/0/1", stage=Stage.INIT)
    loop.put("b/0/2", stage=Stage.INIT)
    loop.look()
    loop.put("a/0/1", stage=Stage.INIT, generation=1)  # and the other one never forms it
    for _ in range(10):
        loop.look(after=4.0)
    assert [(w.wanted, w.evicted) for w in loop.workers.values()] == [(True, False), (False, True)]


def test_a_leaving_worker_is_released_once_another_one_has_its_state():
    loop = Loop(1, 2)
    for name in ("a/0/1", "b/0/2"):
        loop.put(name, stage=Stage.INIT)
    loop.look()
    loop.train(version=5)
    loop.leaving["a/0/1"] = 4.0
    assert loop.released() == []  # it trains
    loop.look(after=1.0)
    assert loop.membership.members == ("b/0/2",) and loop.released() == []
    loop.put("a/0/1", generation=0, version=6)  # the newest report of the other one is still to come
    assert loop.released() == []
    loop.train(version=6)
    assert loop.released() == ["a/0/1"]


def test_a_leaving_worker_is_released_when_a_checkpoint_holds_its_state():
    loop = Loop(1, 1)
    loop.put("a/0/1", stage=Stage.READY, version=6)
    loop.leaving["a/0/1"] = 60.0
    assert loop.released(kept=5) == [] and loop.released(kept=6) == ["a/0/1"]


def test_a_workers_orders_hold_its_place_and_no_checkpoint_by_timer():
    loop = Loop(1, 1)
    loop.put("a/0/1", stage=Stage.INIT)
    loop.look()
    orders = worker_orders(loop.membership.orders("a/0/1"), 0.0)
    assert (orders.assignment.generation, orders.assignment.rank, orders.assignment.members) == (1, 0, ("a/0/1",))
    assert (orders.checkpoint_every_s, orders.checkpoint_now, orders.restore) == (0.0, False, None)
