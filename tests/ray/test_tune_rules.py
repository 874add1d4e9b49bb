"""Rules of elastic trials that need no Ray: sizes, growth, the keys of a search space."""

from __future__ import annotations

import pickle
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType
from typing import Any

import pytest

import spotfleet.ray.tune
from spotfleet.errors import UsageError
from spotfleet.membership.pace import Pace
from spotfleet.protocol.messages import dump
from spotfleet.protocol.ray_cluster import PlacedTrials, RayNode, RayTrial
from spotfleet.ray.cluster.trials import TrialReader
from spotfleet.ray.tune.grow import coming_trials, growth
from spotfleet.ray.tune.mailbox import Mailbox, TrialReport
from spotfleet.ray.tune.sizes import EXPIRES_S, PLACED_S, Sizes, SizesOverview, TrialClaim, TrialSize
from spotfleet.ray.tune.space import TrialSpace
from spotfleet.ray.tune.trainables import elastic
from spotfleet.ray.tune.trial import trial_call
from spotfleet.version import install


def begun(atoms: int, *claims: TrialClaim) -> Sizes:
    sizes = Sizes(atoms)
    for claim in claims:
        sizes.claim(claim, 0.0)
    return sizes


def test_trials_begin_with_their_least_and_grow_as_wished():
    sizes = begun(4, TrialClaim("a", 1, 4), TrialClaim("b", 1, 2))
    assert sizes.sizes() == {"a": 1, "b": 1}
    assert sizes.wish("a", 2) == 2 and sizes.wish("b", 9) == 2
    assert sizes.free == 0


def test_a_wish_that_exceeds_the_atoms_is_granted_once_they_are_free():
    sizes = begun(4, TrialClaim("a", 1, 4), TrialClaim("b", 1, 4))
    assert sizes.wish("b", 2) == 2 and sizes.wish("a", 4) == 2
    sizes.leave(TrialClaim("b", 1, 4))
    assert sizes.sizes() == {"a": 4}


def test_atoms_that_one_trial_gives_up_go_to_another_in_the_same_call():
    sizes = begun(4, TrialClaim("a", 1, 4), TrialClaim("b", 1, 4))
    sizes.wish("a", 3)
    assert sizes.wish_all({"b": 3, "a": 1}) == {"b": 3, "a": 1}


def test_a_trial_that_begins_takes_its_first_atoms_from_the_largest():
    sizes = begun(4, TrialClaim("a", 1, 4), TrialClaim("b", 1, 4))
    sizes.wish("a", 3)
    assert sizes.claim(TrialClaim("c", 1, 4), 0.0) == 1 and sizes.sizes() == {"a": 2, "b": 1, "c": 1}
    sizes.leave(TrialClaim("c", 1, 4))
    assert sizes.sizes() == {"a": 3, "b": 1}, "the wish counts still"


def test_trials_without_room_wait_in_their_order():
    sizes = begun(4, TrialClaim("a", 2, 4), TrialClaim("b", 2, 4), TrialClaim("c", 3, 4), TrialClaim("d", 1, 1))
    assert sizes.sizes() == {"a": 2, "b": 2, "c": 0, "d": 0}
    sizes.leave(TrialClaim("a", 2, 4))
    assert sizes.sizes() == {"b": 2, "c": 0, "d": 0}, "d would fit, and c has waited for longer"
    sizes.leave(TrialClaim("b", 1, 4))
    assert sizes.sizes() == {"c": 3, "d": 1}


def test_while_trials_are_held_none_begins_beside_others_and_one_begins_alone():
    sizes = begun(4, TrialClaim("a", 1, 4))
    sizes.hold(True)
    assert sizes.claim(TrialClaim("b", 1, 4), 0.0) == 0
    assert sizes.wish("a", 4) == 4, "it gets all atoms, and b takes none back"
    sizes.leave(TrialClaim("a", 1, 4))
    assert sizes.sizes() == {"b": 1}, "atoms would lie idle"
    sizes.claim(TrialClaim("c", 1, 4), 0.0)
    sizes.hold(False)
    assert sizes.sizes() == {"b": 1, "c": 1}


def test_lost_nodes_shrink_the_largest_trials_and_end_none():
    sizes = begun(6, TrialClaim("a", 1, 4), TrialClaim("b", 2, 2))
    sizes.wish("a", 4)
    sizes.atoms = 4
    sizes.claim(TrialClaim("b", 2, 2), 1.0)
    assert sizes.sizes() == {"a": 2, "b": 2}
    sizes.atoms = 1
    sizes.claim(TrialClaim("b", 2, 2), 2.0)
    assert sizes.sizes() == {"a": 1, "b": 2}


def test_a_new_holder_of_the_sizes_takes_them_from_the_claims():
    assert begun(4, TrialClaim("a", 1, 4, holds=3), TrialClaim("b", 1, 4, holds=1)).sizes() == {"a": 3, "b": 1}


def test_a_trial_without_a_claim_for_long_has_ended():
    sizes = begun(2, TrialClaim("a", 1, 2), TrialClaim("b", 1, 2))
    sizes.claim(TrialClaim("a", 1, 2), EXPIRES_S)
    sizes.expire(EXPIRES_S + 1)
    assert sizes.sizes() == {"a": 1}


def test_worker_seconds_add_up_over_the_runs_of_a_trial():
    """A paused trial and one whose coordinator was lost with its node go on in another run."""
    sizes = begun(2, TrialClaim("a", 1, 2, run="1", worker_s=5.0))
    sizes.claim(TrialClaim("a", 1, 2, run="2"), 1.0)
    assert sizes.spent_s("a") == 5.0
    sizes.leave(TrialClaim("a", 1, 2, run="1", worker_s=6.0))
    assert sizes.sizes() == {"a": 1}, "the lost coordinator's end arrives late"
    sizes.leave(TrialClaim("a", 1, 2, run="2", worker_s=2.0))
    assert sizes.spent_s("a") == 7.0 and sizes.sizes() == {}


def test_small_arguments_of_a_trial_come_with_the_call_and_large_ones_from_the_store():
    """A copy in the store of a lost node delays the trial's next worker by 10 s."""
    store: list[Any] = []

    def put(value: Any) -> str:
        store.append(value)
        return "reference"

    small, large = (b"function", {"lr": 0.1}), (b"function", {"data": bytes(1 << 20)})
    assert trial_call(small, pickle.dumps, put).args == small and not store
    assert trial_call(large, pickle.dumps, put).args == "reference" and store == [large]


NODES = (RayNode("n0", "", {"CPU": 0.0}), RayNode("n1", "f-1", {"CPU": 4.0}),
         RayNode("n2", "f-2", {"CPU": 32.0, "GPU": 4.0}))


def published(*claims: TrialClaim, beat: int = 1) -> bytes:
    return dump(PlacedTrials(beat, begun(99, *claims).placed(0.0))).encode()


def test_a_trial_takes_the_part_of_a_host_that_its_workers_take_of_the_scarcest_resource():
    text = published(TrialClaim("a", 1, 4, name="train_a", nodes={"n1": 2, "n2": 1}),
                     TrialClaim("b", 1, 4, cpus=1.0, gpus=1.0, nodes={"n2": 3}), TrialClaim("c", 1, 1))
    assert TrialReader().trials(text, NODES, 0.0) == (
        RayTrial("a", "train_a", 3, {"f-1": 500_000, "f-2": 31_250}), RayTrial("b", "", 3, {"f-2": 750_000}))


def test_trials_on_nodes_that_are_no_hosts_of_the_fleet_are_left_out():
    assert TrialReader().trials(published(TrialClaim("a", 1, 4, nodes={"n0": 1, "n9": 1})), NODES, 0.0) == ()


def test_a_trial_whose_process_is_lost_is_not_in_the_bill_while_it_may_come_back():
    sizes = begun(2, TrialClaim("a", 1, 1, nodes={"n1": 1}))
    assert sizes.placed(PLACED_S) and not sizes.placed(PLACED_S + 1)
    assert sizes.sizes() == {"a": 1}


def test_trials_that_nobody_writes_any_more_do_not_count():
    reader, claim = TrialReader(), TrialClaim("a", 1, 4, nodes={"n1": 1})
    assert reader.trials(published(claim), NODES, 100.0) and reader.trials(published(claim), NODES, 110.0)
    assert not reader.trials(published(claim), NODES, 116.0)
    assert reader.trials(published(claim, beat=2), NODES, 117.0)


@pytest.mark.parametrize("text", [None, b"", b"no json", b'{"beat": 1, "trials": [{"trial": 3}]}', b"[]"])
def test_what_is_no_list_of_trials_is_none(text):
    assert TrialReader().trials(text, NODES, 0.0) == ()


def test_in_any_history_the_sum_stays_within_the_atoms_and_each_size_within_its_limits():
    draw = random.Random(7)
    for _ in range(300):
        sizes = Sizes(draw.randint(1, 8))
        claims: dict[str, TrialClaim] = {}
        for now in range(40):
            name = draw.choice("abcdef")
            match draw.randint(0, 3):
                case 0 | 1:
                    least = draw.randint(1, 3)
                    claims.setdefault(name, TrialClaim(name, least, least + draw.randint(0, 4)))
                    sizes.claim(claims[name], float(now))
                case 2:
                    sizes.wish(name, draw.randint(1, 8))
                case 3:
                    if claim := claims.pop(name, None):
                        sizes.leave(claim)
            found = sizes.sizes()
            assert sum(found.values()) <= sizes.atoms
            assert all(size == 0 or claims[n].least <= size <= claims[n].most for n, size in found.items())
            first = next((n for n, size in found.items() if size == 0), None)
            kept = sum(claims[n].least for n, size in found.items() if size)
            assert first is None or kept + claims[first].least > sizes.atoms, "room is never kept from one that waits"


BEST = {"a": 0.5, "b": 0.9, "c": 0.7}


def overview(atoms: int, **sizes: tuple[int, int]) -> SizesOverview:
    """Sizes by trial: (size, most)."""
    return SizesOverview(atoms, {t: TrialSize(size, 1, most, goal=size) for t, (size, most) in sizes.items()})


def test_free_atoms_go_to_the_best_trials_each_up_to_its_most():
    assert growth(overview(8, a=(1, 4), b=(1, 4), c=(1, 4)), BEST, coming=0) == {"b": 4, "c": 3}


def test_atoms_are_kept_for_trials_that_will_begin():
    assert growth(overview(8, a=(1, 4), b=(1, 4), c=(1, 4)), BEST, coming=3) == {"b": 3}
    assert growth(overview(4, a=(1, 4), b=(1, 4), c=(1, 4)), BEST, coming=2) == {}


def test_a_trial_that_waits_or_has_no_value_yet_does_not_grow():
    assert growth(overview(8, a=(1, 2), b=(0, 4), d=(1, 4)), BEST, coming=0) == {"a": 2}


def test_an_older_wish_for_atoms_that_another_trial_has_taken_ends():
    sizes = begun(4, TrialClaim("a", 1, 4), TrialClaim("b", 1, 4))
    sizes.wish("a", 3)
    sizes.claim(TrialClaim("c", 1, 4), 0.0)
    assert growth(sizes.overview(), BEST, coming=0) == {"a": 2}, "a is not the best any more"


def test_trials_that_will_begin_are_counted_within_tunes_limit():
    states = {"a": "RUNNING", "b": "PENDING", "c": "TERMINATED", "d": "PAUSED"}
    assert coming_trials(states, {"a"}, total=10, at_once=None) == 8
    assert coming_trials(states, {"a"}, total=10, at_once=2) == 1
    assert coming_trials({"a": "RUNNING"}, {"a"}, total=1, at_once=2) == 0
    assert coming_trials({"a": "RUNNING", "b": "RUNNING"}, {"a"}, total=2, at_once=2) == 1, "b's process starts"


def test_the_space_of_a_trial_overrides_the_arguments():
    space = TrialSpace(1, 8)
    assert space.of({"lr": 0.1}) == space
    given = {"max_workers": 4, "growth": {0: 1, 30: 4}, "max_join": 2, "max_leave": 1, "every_s": 5}
    assert space.of({"elastic": given}) == TrialSpace(1, 4, {0: 1, 30: 4}, Pace(2, 1, 5.0))


@pytest.mark.parametrize(("given", "names"), [
    ({"max_joins": 1}, r"elastic\.max_joins is not a key"),
    ({"max_join": -1}, r"elastic\.max_join is -1"),
    ({"max_leave": 1.5}, r"elastic\.max_leave is 1\.5"),
    ({"every_s": "5s"}, r"elastic\.every_s is '5s'"),
    ({"growth": [1, 4]}, r"elastic\.growth is \[1, 4\]"),
    ({"growth": {3: 0}}, r"elastic\.growth is 0"),
    ({"max_workers": 0}, "max_workers is 0"),
    ({"min_workers": 9}, "max_workers is 8 and min_workers is 9"),
    ("fast", "elastic is 'fast'"),
])
def test_wrong_keys_of_a_space_are_named(given, names):
    with pytest.raises(UsageError, match=names) as refused:
        TrialSpace(1, 8).of({"elastic": given})
    assert refused.value.hint


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    threading.Thread(target=lambda: future.set_result(call()), daemon=True).start()
    return future


def report(step: int, **more: Any) -> dict[str, Any]:
    return {"tune": "report", "metrics": {"step": step}, **more}


def test_training_goes_on_once_tune_has_decided_on_the_result():
    box = Mailbox(0, lambda: "", lambda: "w", hold_s=60)
    first = in_thread(lambda: box.receive("w", report(1)))
    assert box.next(lambda: False) == TrialReport({"step": 1})
    with pytest.raises(TimeoutError):  # Tune decides
        first.result(0.05)
    second = in_thread(lambda: box.next(lambda: False))
    assert first.result(30) == {"save": None}
    box.close()
    for worker in ("v", "w"):
        box.receive(worker, {"logged by": worker})
    assert second.result(30) == TrialReport({"logged by": "w"}), "with ray_logger, by rank 0"


def test_a_worker_waits_for_tune_for_a_limited_time_only():
    box = Mailbox(0, lambda: "", lambda: "w", hold_s=0.01)
    assert [box.receive("w", report(n)) for n in (1, 2)] == 2 * [{"save": None}]
    assert [box.next(lambda: True) for _ in range(3)] == [TrialReport({"step": 1}), TrialReport({"step": 2}), None]


def test_a_checkpoint_is_written_with_the_result_after_which_tune_asks_for_it():
    box = Mailbox(7, lambda: "", lambda: "w", hold_s=60)
    reported = in_thread(lambda: box.receive("w", report(1, saves=True)))
    box.next(lambda: False)
    saved = in_thread(lambda: box.save(lambda: False, 60))
    assert reported.result(30) == {"save": 7} and box.saves
    assert box.receive("w", {"tune": "saved", "checkpoint": "/runs/checkpoint_000007"}) is None
    assert saved.result(30) == "/runs/checkpoint_000007"
    assert box.receive("w", {"tune": "index"}) == 8, "numbers of checkpoints are never used again"


def test_a_function_that_ends_without_writing_the_checkpoint_keeps_nobody_waiting():
    box = Mailbox(0, lambda: "text", lambda: "w", hold_s=60)
    assert box.save(lambda: True, 60) == ""
    assert box.save(lambda: False, 0.01) == ""
    assert box.receive("w", {"tune": "restore"}) == "text"


def test_without_pandas_elastic_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    with pytest.raises(UsageError, match="Ray Tune cannot be imported") as refused:
        elastic(print)
    assert refused.value.hint == install("tune") and "[tune]" in install("tune")


def test_outside_of_a_trial_report_names_where_it_belongs():
    with pytest.raises(UsageError, match="no worker of a trial"):
        spotfleet.ray.tune.report({"loss": 1.0})
    with pytest.raises(AttributeError, match="no attribute 'grow_best'"):
        _ = spotfleet.ray.tune.grow_best
    assert {"elastic", "resize", "report", "GrowBest", "DistributedTrainableCreator"} <= set(dir(spotfleet.ray.tune))
