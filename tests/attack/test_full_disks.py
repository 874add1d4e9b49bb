"""Full disks under a live fleet: the dispatcher's, the checkpoint target's, a host's.

Each is a small file system in memory, so the tests need root. One job trains through all of them; the last test ends it
and the fleet. Real processes show what the cheaper test (tests/bad_days/test_disk_full.py) cannot: a daemon that is
killed on its full disk.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from spotfleet.api import Job
from spotfleet.errors import DiskFull
from tests.support.attack.attack_scripts import WAITING
from tests.support.attack.live import LiveFleet, eventually, live_stage
from tests.support.attack.tally import ONCE, Tally, strokes
from tests.support.e2e.e2e_stage import COUNTING, output
from tests.support.local.small_disk import SmallDisk, small_disk

pytestmark = [pytest.mark.processes, pytest.mark.timeout(3600)]
STEPS = strokes(2000, 10_000)
DISPATCHER_MIB, OTHER_MIB = 96, 48


@dataclass
class Full:
    live: LiveFleet
    job: Job
    dispatcher: SmallDisk
    host: SmallDisk
    target: SmallDisk

    def pids(self) -> list[int]:
        return sorted(process.pid for process in self.live.workers())

    def check_steps(self, tally: Tally, when: str) -> None:
        before = self.job.status().version
        tally.check(f"training goes on {when}", eventually("steps", lambda: self.job.status().version >= before + 5))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Full]:
    with live_stage(folder := tmp_path_factory.mktemp("full")) as stage, ExitStack() as disks:
        hosts = stage.home / "local" / "hosts"
        hosts.mkdir(parents=True, mode=0o700)
        small = {name: disks.enter_context(small_disk(hosts / name, mib))
                 for name, mib in (("full-d-0", DISPATCHER_MIB), ("full-0", OTHER_MIB))}
        target = disks.enter_context(small_disk(folder / "target", OTHER_MIB))
        (stage.work / "counting.py").write_text(COUNTING)
        (stage.work / "waiting.py").write_text(WAITING)
        more = f"checkpoint: {{interval: 1s, keep: 2, target: '{target.path}'}}"
        live = LiveFleet(stage, stage.fleet("full", 1, 1, more, most=2))
        job = stage.counting(live.fleet, STEPS, (1, 1))
        eventually("a checkpoint in the target", lambda: list(target.path.rglob("*/checkpoints/*/.metadata")))
        yield Full(live, job, small["full-d-0"], small["full-0"], target)
        stage.cloud.shutdown()  # before the disks go


def test_a_full_disk_of_the_dispatcher_stops_no_training(full: Full, attack, seed: int):
    with attack("K7 the dispatcher's disk is full") as tally:
        dice = random.Random(seed)
        for leave in dice.sample([0, dice.randrange(1 << 16), 8 << 20], 3) * strokes(1, 3):
            before, pids = full.job.status(), full.pids()
            full.dispatcher.fill(leave)
            eventually("a reason in status", lambda: "the dispatcher's disk is full" in full.live.fleet.status().why)
            full.check_steps(tally, "while the dispatcher's disk is full")
            check_refusal(tally, full)
            full.live.kill_dispatcher()
            full.live.dispatcher_pid()
            time.sleep(dice.uniform(0, 3))
            tally.check("a dispatcher killed on its full disk costs no worker", full.pids() == pids)
            full.dispatcher.free()
            tally.check("it answers once there is room", full.live.answers())
            full.check_steps(tally, "after that")
            now = full.job.status()
            tally.check("the generation stays", now.generation == before.generation,
                        f"{before.generation} -> {now.generation}")
            tally.check("no step is repeated", now.repeated == before.repeated, f"{before.repeated} -> {now.repeated}")


def check_refusal(tally: Tally, full: Full) -> None:
    try:
        refused = full.live.run("waiting.py", 0).id
    except DiskFull as error:
        refused = ""
        tally.check("the refusal of a job names the disk", "the dispatcher's disk is full" in str(error), error)
    tally.check("no job is accepted on a full disk", not refused, refused)


def copies(full: Full) -> set[str]:
    return {path.parent.name for path in full.target.path.rglob("*/checkpoints/*/.metadata")}


@ONCE
def test_a_full_checkpoint_target_stops_no_training(full: Full, attack):
    with attack("K10 the checkpoint target is full") as tally:
        newest = max(copies(full))
        full.target.fill()
        eventually("a reason in status",
                   lambda: "No space left" in full.live.fleet.status().why + full.job.status().why)
        full.check_steps(tally, "while the target is full")
        tally.none("nothing half written stays", [str(p) for p in full.target.path.rglob("*.part")])
        full.target.free()
        tally.check("checkpoints are copied again", eventually(
            "a newer checkpoint", lambda: copies(full) - {newest}))
        full.check_steps(tally, "after that")


@ONCE
def test_a_full_disk_of_a_host_is_named_and_a_death_there_ends_no_training(full: Full, attack):
    with attack("K10 a host's disk is full") as tally:
        full.host.fill()
        eventually("a reason", lambda: any("disk is full" in h.why for h in full.live.fleet.hosts()))
        full.check_steps(tally, "while the host's disk is full")
        dead = full.live.workers()
        for process in dead:
            process.kill()
        tally.check("another worker trains", eventually(
            "another worker", lambda: full.live.workers() and full.job.status().workers[0].rank == 0))
        full.check_steps(tally, "after a worker's death there")


@ONCE
def test_the_job_that_trained_through_it_counted_right(full: Full, attack):
    with attack("K10 the end of a job that met full disks") as tally:
        full.live.stage.hurry()
        eventually("the job's end", lambda: full.job.state.ended, 300)
        said = output(full.job)
        tally.check("each step counts once", f"counted -{STEPS}.0 of -{STEPS}" in said, said[-300:])
        full.live.check_end(tally)
