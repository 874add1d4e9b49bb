"""Work that the dispatcher has acknowledged, while its process is killed: nothing of it is lost or done twice.

One fleet of two hosts serves all tests; the last one ends it. Only real processes show what a kill leaves.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from spotfleet.api import Job
from spotfleet.model import Nodes
from tests.support.attack.attack_scripts import WAITING
from tests.support.attack.job_stream import JobStream
from tests.support.attack.live import LiveFleet, eventually, live_stage
from tests.support.attack.tally import ONCE, Tally, strokes
from tests.support.e2e.e2e_stage import output

pytestmark = [pytest.mark.processes, pytest.mark.timeout(3600)]
IN_FORCE_S = 60.0  # from the restart until a change must show
SPARE, SPARE_BYTES = 8, 16 << 20  # what a process may hold more than before, whatever it did
JOB_BYTES, JOB_FILES = 100_000, 6  # and for each job


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    with live_stage(tmp_path_factory.mktemp("acknowledged")) as stage:
        (stage.work / "waiting.py").write_text(WAITING)
        yield LiveFleet(stage, stage.fleet("acked", 1, 2, "checkpoint: {interval: 1s}", most=4))


def test_kills_of_the_dispatcher_lose_no_acknowledged_job(live: LiveFleet, attack, seed: int):
    with attack("K1 kill -9 of the dispatcher under a stream of jobs") as tally:
        dice, jobs = random.Random(seed), JobStream(live, seed)
        jobs.start()
        try:
            for _ in range(strokes(5, 40)):
                time.sleep(dice.choice([dice.uniform(0, 0.3), dice.uniform(0.3, 2), dice.uniform(1, 3)]))
                live.kill_dispatcher()
                if dice.random() < 0.7:
                    tally.check("the dispatcher answers again", live.answers())
        finally:
            jobs.stop()
        jobs.check(tally)


class Changes:
    """Each change is acknowledged, then the dispatcher is killed at once."""

    def __init__(self, live: LiveFleet, tally: Tally) -> None:
        self.live, self.tally, self.target = live, tally, 2

    def cancel(self) -> None:
        job = self.live.run("waiting.py", 600)
        eventually("the job's first line", lambda: "begun" in output(job))
        self._killed(lambda: job.cancel())
        self._in_force("a cancelled job is cancelled", lambda: job.status().state == "cancelled")

    def submit(self) -> None:
        jobs: list[Job] = []
        self._killed(lambda: jobs.append(self.live.run("waiting.py", 0.1)))
        self._in_force("a submitted job runs", lambda: jobs[0].status().state == "succeeded")

    def drain(self) -> None:
        host = self._host()
        client = self.live.fleet.client  # ready before, so that the kill follows the answer at once
        self._killed(lambda: client.drain(host))
        self._in_force("a drained host leaves", lambda: host not in self.live.up())

    def revoke(self) -> None:
        host = self._host()
        client = self.live.fleet.client
        self._killed(lambda: client.revoke(host, "attack"))
        self._in_force("a revoked host leaves", lambda: host not in self.live.up())
        events = [e for e in self.live.fleet.events() if e["kind"] == "TokenRevoked"]
        self.tally.check("a revocation stays in the ledger", host in str(events), events)

    def resize(self) -> None:
        self.target = 3 if self.target == 2 else 2
        client = self.live.fleet.client
        self._killed(lambda: client.set_nodes(Nodes(1, self.target, 4)))
        self._in_force("a new size is the fleet's", lambda: self.live.fleet.status().target == self.target)

    def _host(self) -> str:
        return eventually("a host that is up", self.live.up)[-1]

    def _killed(self, change) -> None:
        self.live.answers()
        pid = self.live.dispatcher_pid()
        change()
        self.live.kill_dispatcher(pid)
        self.live.answers()

    def _in_force(self, promise: str, holds) -> None:
        try:
            eventually(promise, holds, IN_FORCE_S)
        except AssertionError as error:
            self.tally.check(promise, False, error)
        else:
            self.tally.check(promise, True)


def test_an_acknowledged_change_is_in_force_after_a_kill(live: LiveFleet, attack, seed: int):
    with attack("K3 an acknowledged change, then kill -9 of the dispatcher at once") as tally:
        dice, changes = random.Random(seed), Changes(live, tally)
        for _ in range(strokes(1, 5)):
            kinds = [changes.cancel, changes.submit, changes.drain, changes.revoke, changes.resize]
            dice.shuffle(kinds)
            for change in kinds:
                change()


@dataclass(frozen=True)
class Usage:
    """What a process and its machine's folder hold."""

    memory_bytes: int
    descriptors: int
    threads: int
    files: int


def usage(live: LiveFleet) -> dict[str, Usage]:
    """Return what dispatcher and agents hold, by machine."""
    found = {}
    for machine in [live.dispatcher(), *live.machines()]:
        process = psutil.Process(machine.processes[0])
        files = sum(len(names) for _, _, names in os.walk(machine.folder))
        found[machine.request_id] = Usage(process.memory_info().rss, process.num_fds(), process.num_threads(), files)
    return found


def test_many_small_jobs_leave_memory_descriptors_and_files_bounded(live: LiveFleet, attack, seed: int):
    with attack("K5 many small jobs, one after the other") as tally:
        eventually("two hosts", lambda: len(live.up()) >= 2)
        few, many = JobStream(live, seed + 1000), JobStream(live, seed + 2000)
        few.run(4, lasts_s=0.0)
        before = usage(live)
        many.run(jobs := strokes(16, 400), lasts_s=0.0)
        after = usage(live)
        many.check(tally)
        for name in before.keys() & after.keys():
            check_growth(tally, name, before[name], after[name], jobs)
        tally.check("the same machines are compared", len(before.keys() & after.keys()) >= 3, [*before, *after])


def check_growth(tally: Tally, name: str, old: Usage, new: Usage, jobs: int) -> None:
    what, grown = f"{name}: {old} -> {new}", new.memory_bytes - old.memory_bytes
    tally.check("memory is bounded", grown < SPARE_BYTES + jobs * JOB_BYTES, what)
    tally.check("descriptors are bounded", new.descriptors <= old.descriptors + SPARE, what)
    tally.check("threads are bounded", new.threads <= old.threads + SPARE, what)
    tally.check("files are bounded", new.files <= old.files + SPARE + JOB_FILES * jobs, what)
    tally.note(f"{name} {grown / 1e6:+.1f} MB, {new.descriptors - old.descriptors:+} descriptors, "
               f"{new.files - old.files:+} files")


@ONCE
def test_the_fleet_ends_though_its_dispatcher_is_killed_as_it_is_asked(live: LiveFleet, attack):
    with attack("K3 an acknowledged `down`, then kill -9 of the dispatcher at once") as tally:
        live.answers()
        client, pid = live.fleet.client, live.dispatcher_pid()
        client.down()
        live.kill_dispatcher(pid)
        live.answers()
        tally.check("an acknowledged `down` is in force", eventually("the end of all hosts", lambda: not live.up()))
        live.check_end(tally)
