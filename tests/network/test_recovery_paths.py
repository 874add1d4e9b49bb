"""Machines and workers lost in every way, on a network of their own: only there is there neither FIN nor RST.

One fleet serves all tests: two workers train, a third waits as a spare. Each test begins and ends with it whole.

What is lost, how, and which test shows what follows (a module without a folder is in `tests/train/`):
- a worker, SIGKILL at any point of an iteration, while a generation forms, as source of a transfer, two at once, rank
  0, all but one: test_kill_points, test_counting, forming_sweep; with a spare ready: a_spare_fills here
- a worker, SIGSTOP and SIGCONT: a_stopped_worker here; every rule: tests/membership/test_membership_stuck.py
- a worker that hangs in its own code: a_worker_that_hangs here; every rule: the same
- a host, agent and workers at once: a_host_that_loses_power here; tests/e2e/test_training.py (rank 0)
- a host, silently cut off, and back: survivors_of_a_silent_cut here
- a notice to one: tests/e2e/test_training.py; several, all: tests/e2e/test_total_loss.py; orders:
  tests/membership/test_membership_leaving.py; withdrawn: a_notice_that_is_withdrawn here, orders there
- a join while a generation forms: orders in tests/membership/test_membership_rules.py; processes: forming_sweep
- the dispatcher, killed in any of these and restarted: a_dispatcher_killed_with_a_host here;
  tests/attack/test_acknowledged.py; in every order: tests/membership/test_random_histories.py
- all of it at random: test_chaos_workers, tests/attack/test_training_faults.py
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.support.network.namespaces import why_not
from tests.support.network.network_fleet import NetworkFleet, host_of, tuned
from tests.support.network.network_scripts import TRACING, Trace, now

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not())]
long = pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="SPOTFLEET_LONG=1 runs it")
HANG_S = 2.0


class Scene:
    """A fleet with one job, and the truth about its steps."""

    def __init__(self, fleet: NetworkFleet, trace: Trace, job: str) -> None:
        self.fleet, self.trace, self.job = fleet, trace, job

    def wait_whole(self, without: str = "") -> tuple[list[str], str]:
        """Members by rank, and the spare, once they train and it is warm; none of them is `without`."""
        seen: list[tuple[list[str], list[str]]] = []

        def whole() -> bool:
            status = self.fleet.job(self.job)
            ranked = sorted(status.workers, key=lambda w: w.rank)
            members = [w.worker for w in ranked if w.rank >= 0]
            spares = [w.worker for w in ranked if w.rank < 0 and w.stage == "ready"]
            made = [self.trace.steps(m) for m in members]
            trains = all(steps and steps[-1].generation == status.generation for steps in made)
            seen.append((members, spares))
            return len(members) == 2 and len(spares) == 1 and trains and without not in spares

        self.fleet.wait("two that train and a spare", whole)
        members, (spare,) = seen[-1]
        return members, spare

    def pause_s(self, what: str, begun: float, workers: list[str], generation: int) -> float:
        """From `begun` to the first step that all of `workers` completed in a generation after `generation`."""

        def first(worker: str) -> float | None:
            return next((s.at for s in self.trace.steps(worker) if s.generation > generation), None)

        self.fleet.wait(f"steps of {workers} after {what}", lambda: all(first(w) for w in workers))
        pause_s = max(first(w) or 0.0 for w in workers) - begun
        print(f"{what}: next step after {pause_s:.2f} s")
        return pause_s

    def formed(self, after: int) -> list[tuple[str, tuple[str, ...]]]:
        """Cause and members of the generations formed after `after`, once that is written down: members may have made
        steps before all have told that it stands."""
        found: list[tuple[str, tuple[str, ...]]] = []

        def told() -> bool:
            found[:] = [(e["cause"], tuple(e["members"])) for e in self.fleet.events("GenerationFormed")
                        if e["generation"] > after]
            return bool(found)

        self.fleet.wait("the generation's event", told)
        return found

    def generation(self) -> int:
        return self.fleet.job(self.job).generation


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("network")
    trace = Trace(folder / "trace")
    with NetworkFleet(folder, 3, patch=tuned(hang_s=HANG_S, hang_first_s=HANG_S),
                      agent_patch=f"import spotfleet.agent.workers.worker as w; w.HANGS_S = {HANG_S}") as fleet:
        job = fleet.submit({"train.py": TRACING}, np=(2, 2), spares=1,
                           envs={"TRACE": str(trace.folder), "STEPS": "10000000"})
        yield Scene(fleet, trace, job)
        trace.enough()
        fleet.wait("the end", lambda: fleet.job(job).state == "succeeded")
        survivors = [w for w, steps in trace.all().items() if steps]
        numbers = sorted({s.number for w in survivors for s in trace.steps(w)})
        assert numbers == list(range(1, numbers[-1] + 1)), "a step is missing"
        for worker in survivors:
            made = [s.number for s in trace.steps(worker)]
            assert made == sorted(set(made)), f"{worker} made a step twice"


def test_a_spare_fills_a_killed_workers_place_in_the_same_generation_and_is_replaced(scene: Scene):
    (first, second), spare = scene.wait_whole()
    before, begun = scene.generation(), now()
    os.kill(scene.trace.pid(second), signal.SIGKILL)
    scene.pause_s("a kill", begun, [first, spare], before)
    again, _ = scene.wait_whole(without=second)
    assert again == [first, spare]
    assert scene.formed(before) == [("death", (first, spare))]


def test_a_stopped_worker_is_replaced_and_returns_as_a_spare_when_it_is_continued(scene: Scene):
    (first, second), spare = scene.wait_whole()
    pid, before, begun = scene.trace.pid(second), scene.generation(), now()
    os.kill(pid, signal.SIGSTOP)
    scene.pause_s("SIGSTOP", begun, [first, spare], before)
    assert psutil.Process(pid).status() == psutil.STATUS_STOPPED  # not ended
    assert scene.formed(before) == [("death", (first, spare))]
    made = len(scene.trace.steps(second))
    os.kill(pid, signal.SIGCONT)
    assert scene.wait_whole() == ([first, spare], second)
    assert len(scene.trace.steps(second)) <= made + 1  # the one in which it was stopped


@long
def test_a_worker_that_hangs_leaves_its_stacks_in_its_log_and_is_replaced(scene: Scene):
    (first, second), spare = scene.wait_whole()
    before, begun = scene.generation(), now()
    scene.trace.hang(second)
    pause_s = scene.pause_s("a hang", begun, [first, spare], before)
    assert pause_s >= HANG_S
    again, _ = scene.wait_whole(without=second)
    assert again == [first, spare]
    log = scene.fleet.log(scene.job, second)
    assert "spotfleet: no step for" not in scene.fleet.log(scene.job, first)
    assert "in hangs" in log, log


def test_survivors_of_a_silent_cut_go_on_within_seconds_and_the_host_returns_with_its_link(scene: Scene,
                                                                                            record_property):
    (first, second), spare = scene.wait_whole()
    before, begun = scene.generation(), now()
    scene.fleet.cut(host_of(first))  # rank 0, which also serves the bootstrap store
    cut_at = now()
    pause_s = scene.pause_s("a silent cut", begun, [second, spare], before)
    record_property("silent_cut_s", round(pause_s, 3))
    alone = [step for step in scene.trace.steps(first) if step.at > cut_at]
    # Fenced: it cannot make a step alone. One was all but made, and of one more it may have had what it needs.
    assert len(alone) <= 2 and scene.trace.steps(first)[-1].generation == before
    scene.fleet.restore(host_of(first))
    again, back = scene.wait_whole()
    assert (sorted(again), back) == (sorted([second, spare]), first)
    assert pause_s < 30.0  # about 3 s on a quiet machine; what is promised is measured in bench/


@long
def test_a_host_that_loses_power_is_replaced(scene: Scene):
    (first, second), spare = scene.wait_whole()
    before, begun = scene.generation(), now()
    scene.fleet.kill(host_of(second))
    scene.pause_s("a host killed", begun, [first, spare], before)
    again, fresh = scene.wait_whole(without=second)
    assert again == [first, spare] and host_of(fresh) != host_of(second)


@long
def test_a_notice_that_is_withdrawn_in_time_changes_nothing(scene: Scene):
    (first, second), spare = scene.wait_whole()
    before, host = scene.generation(), host_of(spare)
    scene.fleet.notice(host, 100.0)
    scene.fleet.wait("the notice", lambda: any(h.seconds_left for h in scene.fleet.status().hosts if h.host == host))
    scene.fleet.withdraw(host)
    scene.fleet.wait("its end", lambda: not any(h.seconds_left for h in scene.fleet.status().hosts))
    assert scene.wait_whole()[0] == [first, second] and scene.generation() == before


@long
def test_a_dispatcher_killed_with_a_host_at_once_forms_anew_when_it_is_back(scene: Scene):
    (first, second), spare = scene.wait_whole()
    before, begun = scene.generation(), now()
    scene.fleet.kill_dispatcher()
    scene.fleet.kill(host_of(second))
    scene.fleet.start_dispatcher()
    scene.pause_s("dispatcher and host killed", begun, [first, spare], before)
    assert scene.wait_whole(without=second)[0] == [first, spare]
