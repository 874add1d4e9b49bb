"""What is counted when a generation goes on: by the workers' own word, or by the dispatcher's where none is left."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spotfleet.dispatcher.membership import Formed, Phase
from spotfleet.dispatcher.progress import Progress
from spotfleet.dispatcher.workers import Crew
from spotfleet.fleet.events import JobResumed


@dataclass
class Group:
    """What Progress looks at in a Membership."""

    phase: Phase = Phase.RUNNING
    version: int = 0


@dataclass
class Around:
    now: float
    unix: float = 0.0


def say(crew: Crew, name: str, **report: object) -> None:
    worker = crew.all.get(name) or crew.add(name, 0)
    worker.report = replace(worker.report, **report)


def resumed(progress: Progress, crew: Crew, now: float, phase: Phase = Phase.RUNNING) -> list[JobResumed]:
    events = progress.look(crew, Group(phase, crew.version()), Around(now))  # type: ignore[arg-type]
    return [e for e in events if isinstance(e, JobResumed)]


def trained_to(version: int) -> tuple[Progress, Crew]:
    progress, crew = Progress("j", 0), Crew("j")
    say(crew, "a/0/1", resumed=1, version=version)
    progress.formed(Formed(1, ("a/0/1",), "start", "", 0), restored=0)
    resumed(progress, crew, now=10.0)
    resumed(progress, crew, now=11.0)
    return progress, crew


def test_after_the_loss_of_all_the_steps_since_the_checkpoint_are_repeated_and_the_gap_is_the_pause():
    progress, crew = trained_to(50)
    resumed(progress, crew, now=12.0, phase=Phase.HOLDING)
    crew.all.clear()
    say(crew, "b/0/2", resumed=2, version=41)
    progress.formed(Formed(2, ("b/0/2",), "resume", "", 40), restored=40)
    assert resumed(progress, crew, now=31.0) == [JobResumed(0.0, "j", 2, 41, repeated=10, pause_s=20.0)]
    assert progress.repeated == 10


def test_where_somebody_survives_only_what_the_workers_say_counts():
    progress, crew = trained_to(50)
    say(crew, "a/0/1", resumed=2, version=51, repeated=1, pause_s=0.1)
    say(crew, "b/0/2", resumed=2, version=51)
    progress.formed(Formed(2, ("a/0/1", "b/0/2"), "death", "", 50), restored=40)
    assert resumed(progress, crew, now=31.0) == [JobResumed(0.0, "j", 2, 51, repeated=1, pause_s=0.1)]


def test_a_second_change_before_the_first_step_hides_none_of_the_steps_that_were_lost():
    progress, crew = trained_to(50)
    resumed(progress, crew, now=12.0, phase=Phase.HOLDING)
    crew.all.clear()
    say(crew, "b/0/2", version=40)
    progress.formed(Formed(2, ("b/0/2", "c/0/3"), "resume", "", 40), restored=40)
    progress.formed(Formed(3, ("b/0/2",), "death", "", 40), restored=40)
    say(crew, "b/0/2", resumed=3, version=41)
    assert resumed(progress, crew, now=31.0) == [JobResumed(0.0, "j", 3, 41, repeated=10, pause_s=20.0)]


def test_a_restarted_dispatcher_counts_what_was_lost_while_it_was_away():
    crew = Crew("j")
    progress = Progress("j", 3)
    progress.adopt(crew, ("a/0/1",), 50)
    say(crew, "b/0/2", resumed=12, version=41)
    progress.formed(Formed(12, ("b/0/2",), "resume", "", 40), restored=40)
    assert [e.repeated for e in resumed(progress, crew, now=31.0)] == [10]
    assert progress.repeated == 13
