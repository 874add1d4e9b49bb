"""Places of workers that join: the predicted one, and what binds a worker to it. Random histories read places, too."""

from __future__ import annotations

from dataclasses import replace

from spotfleet.membership import Evicted, Pace
from spotfleet.protocol.messages import RankInfo, Stage
from tests.support.membership.membership_desk import Desk, training


def predicted(desk: Desk, worker: str) -> tuple[int, int] | None:
    found = desk.core.orders(worker).provisional
    return found and (found.rank, found.size)


def ready(desk: Desk, worker: str, reads: bool = True) -> None:
    """Its script has come to elastic.run, and has read its numbers on the way."""
    rank, size = predicted(desk, worker) if reads else (-1, 0)
    desk.put(worker, stage=Stage.READY, read_rank=rank, read_size=size)


def evicted(changes: list) -> list[str]:
    return [w for change in changes if isinstance(change, Evicted) for w in change.workers]


def test_a_place_is_predicted_for_a_worker_in_init_only_and_does_not_change():
    desk = training("a", "b", "c")
    desk.put("d", stage=Stage.STARTING)
    desk.see()
    assert predicted(desk, "d") is None
    desk.put("d", stage=Stage.INIT)
    desk.see()
    assert predicted(desk, "d") == (3, 4)
    desk.put("c", exited=True)
    desk.see()
    assert predicted(desk, "d") == (3, 4)


def test_a_joiner_below_the_minimum_is_given_the_lost_ones_rank_and_the_size_of_the_generation_to_come():
    desk = training("a", "b", "c", min_workers=3, max_workers=3)
    desk.put("b", leaving_s=1.0, leaving_why="notice")
    desk.put("d")
    desk.see()
    assert predicted(desk, "d") == (1, 3)


def test_joiners_of_a_job_that_waits_take_the_places_that_they_have_read_in_whatever_order_they_come():
    desk = training("a", "b", "c", min_workers=3, max_workers=3)
    desk.put("a", "c", exited=True)
    desk.see()
    for name in "de":
        desk.put(name)
        desk.see()
    assert (predicted(desk, "d"), predicted(desk, "e")) == ((0, 3), (2, 3))
    ready(desk, "e")
    assert desk.ordered(after=20.0) is None
    ready(desk, "d")
    assert desk.ordered() == ("resume", ("d", "b", "e"))


def test_workers_that_start_on_one_host_are_predicted_together_and_join_together():
    desk = training("a/0")
    for slot in range(3):
        desk.put(f"b/{slot}", stage=Stage.STARTING, local_rank=slot, store="")
    desk.put("b/1", stage=Stage.INIT, store="b/1:1")
    desk.see()
    assert desk.core.orders("b/1").provisional == RankInfo(2, 4, 1, 3, 0, 1)
    desk.put("b/0", "b/2", stage=Stage.INIT, store="b:1")
    desk.see()
    assert [predicted(desk, f"b/{slot}") for slot in range(3)] == [(1, 4), (2, 4), (3, 4)]
    for slot in (1, 2):
        ready(desk, f"b/{slot}")
    assert desk.ordered(after=10.0) is None
    ready(desk, "b/0")
    desk.see()
    assert desk.ordered(after=0.3) == ("join", ("a/0", "b/0", "b/1", "b/2"))


def test_a_worker_does_not_wait_for_a_companion_that_does_not_come_and_its_successor_counts_on_nobody():
    desk = training("a/0")
    for slot in range(2):
        desk.put(f"b/{slot}", local_rank=slot)
    desk.see()
    ready(desk, "b/0")
    assert desk.ordered(after=0.0) is None and evicted(desk.see(after=29.0)) == []
    assert evicted(desk.see(after=1.0)) == ["b/0"]
    del desk.views["b/0"]
    desk.put("b/0/2", host="b")
    desk.see()
    assert predicted(desk, "b/0/2") == (1, 2)
    ready(desk, "b/0/2")
    desk.see()
    assert desk.ordered(after=0.3) == ("join", ("a/0", "b/0/2"))


def test_a_spare_that_has_read_another_rank_than_the_lost_ones_starts_anew_and_its_successor_takes_it():
    desk = training("a", "b", "c", min_workers=3, max_workers=3)
    desk.put("d")
    desk.see()
    assert predicted(desk, "d") == (2, 3)
    ready(desk, "d")
    assert evicted(desk.see(after=50.0)) == []  # it is of use yet
    desk.put("b", exited=True)
    desk.see()
    assert evicted(desk.see(after=0.3)) == ["d"]
    del desk.views["d"]
    desk.put("e")
    desk.see()
    ready(desk, "e")
    assert desk.ordered() == ("resume", ("a", "e", "c"))


def test_a_spare_that_has_read_nothing_takes_any_place():
    desk = training("a", "b", "c", min_workers=3, max_workers=3)
    desk.put("d")
    desk.see()
    ready(desk, "d", reads=False)
    desk.put("b", exited=True)
    assert desk.ordered() == ("death", ("a", "d", "c"))


def test_a_spare_that_has_read_only_the_size_takes_any_rank_of_a_world_of_that_size():
    desk = training("a", "b", "c", min_workers=2, max_workers=3)
    desk.put("d", stage=Stage.READY, read_size=3)
    desk.put("b", exited=True)
    assert desk.ordered() == ("death", ("a", "d", "c"))


def test_survivors_train_on_while_a_worker_that_has_read_other_numbers_starts_anew():
    desk = training("a", "b")
    desk.put("c", "d")
    desk.see()
    assert (predicted(desk, "c"), predicted(desk, "d")) == ((2, 3), (3, 4))
    desk.put("c", exited=True)
    ready(desk, "d")
    assert desk.ordered() is None
    assert evicted(desk.see(after=0.3)) == ["d"]
    assert desk.core.members == ("a", "b")


def test_a_prediction_knows_how_many_may_join_in_one_change():
    desk = training("a")
    desk.core.pacer.pace = Pace(max_join=1)
    desk.put("b/0", "b/1")
    desk.views["b/1"] = replace(desk.views["b/1"], local_rank=1)
    desk.see()
    assert (predicted(desk, "b/0"), predicted(desk, "b/1")) == ((1, 2), (2, 3))


def test_a_founder_whose_first_generation_broke_keeps_its_rank():
    desk = Desk(min_workers=2)
    desk.put("a", "b", "c")
    desk.see()
    desk.put("a", exited=True)
    desk.put("b", failed=1)
    desk.see()
    assert predicted(desk, "b") == (0, 2)
    ready(desk, "b")
    ready(desk, "c")
    assert desk.ordered() == ("resume", ("b", "c"))


# ---- what else a joiner is told


def test_all_generations_keep_the_backend_of_the_first():
    desk = training("a", "b")
    assert desk.core.orders("a").backend == ""
    desk.put("a", backend="nccl")
    desk.put("c", stage=Stage.READY)
    desk.see()
    desk.put("a", "b", backend="gloo")  # cannot be; the first word counts
    desk.see()
    assert {desk.core.orders(name).backend for name in "abc"} == {"nccl"}
