"""What is counted when a generation goes on: by the workers' own word, or by the dispatcher's where none is left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from spotfleet.dispatcher.checkpoints.store import CheckpointStore
from spotfleet.dispatcher.hosts import HostView
from spotfleet.dispatcher.jobs.orders import worker_orders
from spotfleet.dispatcher.jobs.progress import ProgressTracker
from spotfleet.dispatcher.jobs.workers import JobWorkers
from spotfleet.fleet.domain.events import JobProgress, JobResumed, StepExplained
from spotfleet.fleet.domain.host import Host
from spotfleet.fleet.domain.step_cost import ENOUGH
from spotfleet.membership import Formed, Orders, Phase
from spotfleet.model import HostState, Market, Offer, Role
from spotfleet.protocol.messages import Assignment, StepCost


@dataclass
class Group:
    """What Progress looks at in a Membership."""

    phase: Phase = Phase.RUNNING
    version: int = 0
    generation: int = 0
    members: tuple[str, ...] = ()


@dataclass
class Context:
    now: float
    unix: float = 0.0
    hosts: dict[str, HostView] = field(default_factory=dict)


def say(workers: JobWorkers, name: str, **report: object) -> None:
    worker = workers.all.get(name) or workers.add(name, 0)
    worker.report = replace(worker.report, **report)


def resumed(progress: ProgressTracker, workers: JobWorkers, now: float,
            phase: Phase = Phase.RUNNING) -> list[JobResumed]:
    events = progress.update(workers, Group(phase, workers.version()), Context(now))  # type: ignore[arg-type]
    return [e for e in events if isinstance(e, JobResumed)]


def trained_to(version: int) -> tuple[ProgressTracker, JobWorkers]:
    progress, workers = ProgressTracker("j", 0), JobWorkers("j")
    say(workers, "a/0/1", resumed=1, version=version)
    progress.formed(Formed(1, ("a/0/1",), "start", "", 0), restored=0)
    resumed(progress, workers, now=10.0)
    resumed(progress, workers, now=11.0)
    return progress, workers


def test_after_the_loss_of_all_the_steps_since_the_checkpoint_are_repeated_and_the_gap_is_the_pause():
    progress, workers = trained_to(50)
    resumed(progress, workers, now=12.0, phase=Phase.HOLDING)
    workers.all.clear()
    say(workers, "b/0/2", resumed=2, version=41)
    progress.formed(Formed(2, ("b/0/2",), "resume", "", 40), restored=40)
    assert resumed(progress, workers, now=31.0) == [JobResumed(0.0, "j", 2, 41, repeated=10, pause_s=20.0, lost=10)]
    assert progress.repeated == 10


def test_a_generation_whose_workers_have_all_ended_without_a_step_has_not_trained():
    progress, workers = trained_to(50)
    workers.all.clear()
    say(workers, "b/0/2", version=40)
    progress.formed(Formed(2, ("b/0/2",), "resume", "", 40), restored=40)
    workers.all.clear()
    assert resumed(progress, workers, now=20.0, phase=Phase.HOLDING) == []
    say(workers, "c/0/3", resumed=3, version=41)
    progress.formed(Formed(3, ("c/0/3",), "resume", "", 40), restored=40)
    assert resumed(progress, workers, now=31.0) == [JobResumed(0.0, "j", 3, 41, repeated=10, pause_s=20.0, lost=10)]


def test_where_somebody_survives_only_what_the_workers_say_counts():
    progress, workers = trained_to(50)
    say(workers, "a/0/1", resumed=2, version=51, repeated=3, pause_s=0.1)
    say(workers, "b/0/2", resumed=2, version=51)
    progress.formed(Formed(2, ("a/0/1", "b/0/2"), "death", "", 50), restored=40)
    assert resumed(progress, workers, now=31.0) == [JobResumed(0.0, "j", 2, 51, repeated=3, pause_s=0.1, lost=0)]


def test_a_gradient_that_is_computed_again_is_no_step_that_is_repeated():
    """A step of four gradients, added up over four reductions: two kills in it throw away one gradient each."""
    progress, workers = trained_to(50)
    for generation, recomputed in ((2, 1), (3, 2)):
        say(workers, "a/0/1", resumed=generation, version=51, recomputed=recomputed, pause_s=0.1)
        progress.formed(Formed(generation, ("a/0/1",), "death", "", 50), restored=40)
        (event,) = resumed(progress, workers, now=30.0 + generation)
        assert (event.repeated, event.recomputed, event.after_pause) == (0, 1, 0)
    assert (progress.repeated, progress.recomputed) == (0, 2)


def test_the_first_steps_of_hosts_that_have_booted_are_named_with_the_time_since_their_launch():
    offer = Offer("fake", "r", "zone-a", "g5", Market.SPOT, 2, 1, 3)
    new = Host("b", Role.WORKER, offer, HostState.UP, 90.0, 40.0, 40.0, first_step_from=40.0)
    hosts = {h.request_id: HostView(h, True, 2) for h in (new, replace(new, request_id="a", first_step_from=None))}
    progress, workers = trained_to(50)
    for name in ("a/0/1", "b/0/2", "b/1/3", "gone/0/4"):
        say(workers, name, resumed=2, version=51)
    progress.formed(Formed(2, ("a/0/1", "b/0/2", "b/1/3", "gone/0/4"), "join", "", 50), restored=40)
    context = Context(31.0, 100.25, hosts)
    (event,) = [e for e in progress.update(workers, Group(version=51), context)  # type: ignore[arg-type]
                if isinstance(e, JobResumed)]
    assert event.first_steps == {"b": 60.25}


def test_a_second_change_before_the_first_step_hides_none_of_the_steps_that_were_lost():
    progress, workers = trained_to(50)
    resumed(progress, workers, now=12.0, phase=Phase.HOLDING)
    workers.all.clear()
    say(workers, "b/0/2", version=40)
    progress.formed(Formed(2, ("b/0/2", "c/0/3"), "resume", "", 40), restored=40)
    progress.formed(Formed(3, ("b/0/2",), "death", "", 40), restored=40)
    say(workers, "b/0/2", resumed=3, version=41)
    assert resumed(progress, workers, now=31.0) == [JobResumed(0.0, "j", 3, 41, repeated=10, pause_s=20.0, lost=10)]


def test_a_restarted_dispatcher_counts_what_was_lost_while_it_was_away():
    workers = JobWorkers("j")
    progress = ProgressTracker("j", 3)
    progress.adopt(workers, ("a/0/1",), 50)
    say(workers, "b/0/2", resumed=12, version=41)
    progress.formed(Formed(12, ("b/0/2",), "resume", "", 40), restored=40)
    assert [e.repeated for e in resumed(progress, workers, now=31.0)] == [10]
    assert progress.repeated == 13


def test_why_a_step_takes_its_time_is_told_once_all_members_of_the_generation_have_measured_it():
    progress, workers, names = ProgressTracker("j", 0), JobWorkers("j"), ("a/0/1", "b/0/2")
    cost = StepCost(ENOUGH, 0.06, 1, 4000, "gloo", 0.02, "10.0.0.2", 0.02)

    def told(now: float, generation: int = 3, phase: Phase = Phase.RUNNING) -> list[StepExplained]:
        group = Group(phase, 9, generation, names)
        events = progress.update(workers, group, Context(now, 1000.0 + now))  # type: ignore[arg-type]
        return [e for e in events if isinstance(e, StepExplained)]

    say(workers, names[0], resumed=3, step_s=0.1, cost=cost, store="10.0.0.1:7")
    say(workers, names[1], resumed=2, step_s=0.1, cost=cost, store="10.0.0.2:7")
    assert told(10.0) == []  # what b has measured is of another generation
    say(workers, names[1], resumed=3)
    assert told(10.5) == []  # it is looked at each second
    assert told(11.5, phase=Phase.FORMING) == []
    why = ("a step takes 0.100 s: 0.040 s computing, 0.060 s in reductions; 20 ms from a to b and back; "
           "1 reduction of 2 round trips in a row, about 0.040 s each")
    (found,) = told(12.0)
    assert replace(found, compute_s=0.04) == StepExplained(
        1012.0, "j", 3, 0.1, 0.04, 0.0, 0.06, 0.02, ("a", "b"), "", why)
    assert progress.step_why == why
    assert told(14.0) == []


@dataclass
class Told:
    """What `worker_orders` asks of a Membership."""

    places: dict[str, Assignment | None]
    leaves_s: float | None = None

    def orders_of(self, workers: Iterable[str]) -> dict[str, Orders]:
        return {w: Orders(self.places[w], founded=True) for w in workers}


def test_rank_0_is_told_for_its_log(tmp_path: Path):
    members = ("a/0/1", "b/0/2")
    places = {"a/0/1": Assignment(3, 0, members, "s:1"), "b/0/2": Assignment(3, 1, members, "s:1"),
              "c/0/3": Assignment(3, -1, members, "s:1"), "d/0/4": None}
    told = worker_orders(Told(places), CheckpointStore(tmp_path, 2), 60.0, places, False, "why")  # type: ignore[arg-type]
    assert {w: o.remark for w, o in told.items()} == {"a/0/1": "why", "b/0/2": "", "c/0/3": "", "d/0/4": ""}


def test_progress_tells_how_many_bytes_a_step_reduces_also_once_nobody_measures_them_any_more():
    progress, workers = ProgressTracker("j", 0), JobWorkers("j")
    for name, moved in (("a/0/1", 4000), ("b/0/2", 4000), ("c/0/3", 0)):  # c has not measured it yet
        say(workers, name, version=9, step_s=0.1, cost=StepCost(bytes=moved))
    events = progress.update(workers, Group(version=9), Context(10.0))  # type: ignore[arg-type]
    assert events == [JobProgress(0.0, "j", 9, 0.1, step_bytes=4000)]
    workers.all.clear()
    assert progress.last(12, Context(11.0)) == [  # type: ignore[arg-type]
        JobProgress(0.0, "j", 12, 0.1, step_bytes=4000)]
