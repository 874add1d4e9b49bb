"""A setup that fails: the host is replaced and the job goes on; everywhere, and the job fails with the reason."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from spotfleet.dispatcher.hosts import Departure
from spotfleet.dispatcher.jobs.context import JobContext
from spotfleet.dispatcher.jobs.failures import classify_exits
from spotfleet.dispatcher.jobs.restart import Cause, End, History
from spotfleet.dispatcher.jobs.workers import JobWorkers
from spotfleet.fleet.domain.events import SetupFailed
from spotfleet.protocol.messages import AgentReport, Exit, WorkerReport, WorkerState
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import SETUP, FakeWorker, Script

LONG = 1_000_000
LINE = SETUP.splitlines()[0]


class Tries:
    """Setups that fail on some hosts, each time."""

    def __init__(self, *hosts: str) -> None:
        self.hosts, self.count = hosts, Counter[str]()

    def __call__(self, worker: FakeWorker) -> int:
        host = worker.name.split("/")[0]
        if self.hosts and host not in self.hosts:
            return 0
        self.count[host] += 1
        return self.count[host]


def test_a_host_on_which_setup_fails_twice_is_replaced_and_the_job_trains_on(play):
    async def scene(stage: Stage) -> None:
        bad, good = sorted(await stage.up(2))
        job = await stage.submit(Script(steps=LONG, setup=Tries(bad)), (1, 2))

        async def replaced() -> list[str]:
            trains = {w.host for w in (await stage.job(job)).workers if w.rank >= 0}
            return sorted(trains) if len(trains) == 2 and bad not in trains else []

        assert good in await stage.until("another host in its place", replaced)
        drains = {e["request_id"]: e["why"] for e in await stage.events("HostDraining")}
        assert drains == {bad: f"2 workers failed there: {LINE}"}
        told = [(e["job"], e["host"], e["tries"], e["why"]) for e in await stage.events("SetupFailed")]
        assert told == [(job, bad, 1, SETUP), (job, bad, 2, SETUP)]
        assert (await stage.job(job)).state == "running"

    play(scene, spec(2))


def test_a_setup_that_fails_wherever_it_runs_fails_the_job_with_its_line_after_the_third_host(play):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(Script(steps=LONG, setup=Tries()), (1, 1))
        status = await stage.stands(job, "failed")
        assert (status.why, status.error) == (f"on 3 hosts in a row: {LINE}", SETUP)
        hosts = [(e["host"], e["tries"]) for e in await stage.events("SetupFailed")]
        assert [tries for _, tries in hosts] == [1, 2, 1, 2, 1] and len({host for host, _ in hosts}) == 3

    play(scene, spec(1))


@pytest.mark.parametrize(("leaving", "held"), [(Departure(20.0, "notice"), False), (Departure(120.0, "drain"), True),
                                               (None, True)])
def test_what_fails_on_a_host_that_the_cloud_takes_is_held_against_nobody(leaving: Departure | None, held: bool):
    workers = JobWorkers("job-1")
    name = "h-1/0/1"
    workers.add(name, 0)
    report = WorkerReport(name, "job-1", error=SETUP, setup_tries=1)
    workers.receive(AgentReport("h-1", "i", "127.0.0.1", 1, (WorkerState(report, 0, exit=Exit(1)),)))
    context = JobContext(1.0, 1e9, ("h-1",), (("h-1", 0),), {"h-1": SimpleNamespace(leaving=leaving)})
    verdict = classify_exits("job-1", workers, History(), lambda: frozenset({name}), context)
    assert verdict.events == ((SetupFailed(1e9, "job-1", "h-1", 1, SETUP),) if held else ())
    assert bool(verdict.history.setups) is held and verdict.failed is None


def test_workers_that_have_begun_clear_the_setup_of_what_failed_elsewhere():
    workers = JobWorkers("job-1")
    workers.add("h-1/0/1", 0)
    failed = History(setups=(End("h-2/0/1", ("h-2", 0), Cause.SETUP, 0.0, error=SETUP, tries=1),))
    context = JobContext(1.0, 1e9, ("h-1",), (("h-1", 0),), {})

    def told(pid: int) -> History:
        states = (WorkerState(WorkerReport("h-1/0/1", "job-1"), 0, pid),)
        workers.receive(AgentReport("h-1", "i", "127.0.0.1", 1, states))
        return classify_exits("job-1", workers, failed, frozenset, context).history

    assert told(0) == failed  # still at its own setup
    assert told(77) == History()
    assert told(77) == failed  # only at its beginning: what fails after it counts
