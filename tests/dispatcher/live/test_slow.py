"""Slow workers: named after 50 steps, by their own work and not by the step that all share."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from spotfleet.dispatcher.hosts import Departure
from spotfleet.dispatcher.live.history import HistoryKeeper
from spotfleet.dispatcher.live.slow import SlowHost, SlowWorkers, host_to_replace
from spotfleet.model import Nodes, PolicySpec
from spotfleet.protocol.messages import SlowWorker, StepCost, WorkerReport

STEP_S = 0.2  # every rank's: the fast ones wait


def reports(compute_s: list[float], steps: int) -> list[tuple[int, WorkerReport]]:
    return [(rank, WorkerReport(f"h{rank}/0/1", "j", step_s=STEP_S, cost=StepCost(steps, wait_s=STEP_S - own)))
            for rank, own in enumerate(compute_s)]


def test_a_worker_is_named_once_it_was_slow_for_50_steps():
    slow = SlowWorkers()
    assert slow.update(reports([0.1, 0.1, 0.1, 0.2], 20)) == ()
    assert slow.update(reports([0.1, 0.1, 0.1, 0.2], 69)) == ()
    (found,) = slow.update(reports([0.1, 0.1, 0.1, 0.2], 70))
    assert (found.worker, found.rank, found.steps) == ("h3/0/1", 3, 50)
    assert replace(found, compute_s=round(found.compute_s, 6), median_s=round(found.median_s, 6)) == SlowWorker(
        "h3/0/1", 3, 0.2, 0.1, 50)


def test_one_that_was_fast_in_between_begins_anew():
    slow = SlowWorkers()
    for steps, own in ((20, 0.2), (60, 0.1), (100, 0.2), (140, 0.2)):
        assert slow.update(reports([0.1, 0.1, own], steps)) == ()
    assert [w.rank for w in slow.update(reports([0.1, 0.1, 0.2], 150))] == [2]


def test_30_percent_is_the_line_and_a_difference_below_the_clocks_noise_none():
    slow = SlowWorkers()
    for steps in (20, 200):
        found = slow.update(reports([0.1, 0.1, 0.129], steps))
        assert found == () and SlowWorkers().update(reports([0.001, 0.001, 0.0028], steps)) == ()


def test_of_two_workers_the_faster_is_the_measure_and_one_alone_is_never_slow():
    slow = SlowWorkers()
    slow.update(reports([0.1, 0.2], 20))
    assert [w.rank for w in slow.update(reports([0.1, 0.2], 90))] == [1]
    assert slow.update(reports([0.2], 500)) == ()


def test_a_new_generation_counts_its_steps_from_its_beginning():
    slow = SlowWorkers()
    slow.update(reports([0.1, 0.1, 0.2], 1000))
    assert slow.update(reports([0.1, 0.1, 0.2], 20)) == ()
    assert slow.update(reports([0.1, 0.1, 0.2], 69)) == ()
    assert [w.steps for w in slow.update(reports([0.1, 0.1, 0.2], 70))] == [50]


MEMBERS = ("h0/0/1", "h0/1/2", "h1/0/3", "h2/0/4")
SLOW, SLOWER = SlowWorker("h1/0/3", 2, 0.15, 0.1, 60), SlowWorker("h0/1/2", 1, 0.2, 0.1, 55)


def test_the_host_of_the_slowest_worker_is_replaced_with_the_figures_as_the_reason():
    found = host_to_replace("j-1", [SLOW, SLOWER], MEMBERS, 1, ())
    assert found == SlowHost("h0", frozenset({0, 1}), "replace_slow: rank 1 of j-1 computes 200.0 ms in a step, "
                                                      "the median 100.0 ms, for 55 steps")


def test_a_host_whose_loss_leaves_too_few_workers_stays_and_so_does_one_that_replaced_a_slow_one():
    assert host_to_replace("j-1", [SLOW, SLOWER], MEMBERS, 3, ()).host == "h1"
    assert host_to_replace("j-1", [SLOW, SLOWER], MEMBERS, 4, ()) is None
    assert host_to_replace("j-1", [SLOW, SLOWER], MEMBERS, 1, {0}).host == "h1"
    assert host_to_replace("j-1", [SLOW, SLOWER], MEMBERS, 1, {0, 2}) is None
    gone = [replace(SLOW, worker="h7/0/9")]
    assert host_to_replace("j-1", gone, MEMBERS, 1, ()) is None


def keeper(*views: SimpleNamespace, asked: bool = True) -> HistoryKeeper:
    """The history of a fleet with a target of three hosts, whose job has a slow worker on `h1`."""
    job = SimpleNamespace(id="j-1", membership=SimpleNamespace(members=MEMBERS), spec=SimpleNamespace(min_workers=1))
    core = SimpleNamespace(jobs={"j-1": job}, views=lambda: views, ranges={"": Nodes(1, 3, 3)},
                           journal=SimpleNamespace(last=0), policy=PolicySpec(replace_slow=asked))
    made = HistoryKeeper(core)  # type: ignore[arg-type]
    made._slow["j-1"] = SlowWorkers()
    made._slow["j-1"].found = (SLOW,)
    return made


def view(usable: bool = True, leaving: Departure | None = None) -> SimpleNamespace:
    return SimpleNamespace(host=SimpleNamespace(counts=leaving is None), usable=usable, leaving=leaving)


def test_one_host_at_a_time_is_replaced_while_all_are_up_and_only_if_the_file_asks_for_it():
    up, drained = view(), view(False, Departure(120.0, "drain"))
    history = keeper(up, up, up)
    assert history.replacement().host == "h1"
    assert history.replacement() is None, "its rank has had its replacement"
    assert keeper(up, up, up, asked=False).replacement() is None
    for views in ((up, up), (up, up, view(False)), (up, up, up, drained)):
        assert keeper(*views).replacement() is None


def test_a_fleet_whose_hosts_follow_demand_is_whole_with_those_that_it_has():
    history = keeper(view(), view())
    assert history.replacement() is None
    history = keeper(view(), view())
    history._core.ranges = {"": Nodes(0, 3, 3)}  # type: ignore[misc]
    assert history.replacement().host == "h1"
