"""Hosts whose disks are full: the job goes on elsewhere, they are replaced, and only many in a row fail the job."""

from __future__ import annotations

from dataclasses import replace

from spotfleet.dispatcher.jobs.restart import (
    HOSTS_LIMIT,
    Cause,
    End,
    History,
    JobFailure,
    cause_of,
    ended,
    progressed,
    unfit,
)
from spotfleet.protocol.messages import Exit, WorkerReport
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script

LONG = 1_000_000
FULL = "this host's disk is full: 0.1 MB of 8.0 GB free"


def failure(host: str, at: float = 0.0, n: int = 1) -> End:
    return End(f"{host}/0/{n}", (host, 0), Cause.HOST, at, error=FULL)


def test_such_an_end_is_the_hosts():
    report = WorkerReport("h/0/1", "j", error=FULL, blame_host=True)
    assert cause_of(Exit(1), report) == (Cause.HOST, FULL)


def test_two_failures_make_a_host_unfit_for_five_minutes_and_one_does_not():
    history, verdict = ended(History(), failure("h-a"), frozenset({"h-a/0/1"}))
    assert (verdict, unfit(history, 1.0)) == (None, {})
    history, verdict = ended(history, failure("h-a", 1.0, 2), frozenset({"h-a/0/2"}))
    assert (verdict, unfit(history, 2.0)) == (None, {"h-a": f"2 workers failed there: {FULL}"})
    assert unfit(history, 400.0) == {}


def test_three_hosts_in_a_row_fail_the_job_and_progress_between_them_forgives():
    history, verdict = History(), None
    for n in range(HOSTS_LIMIT):
        assert verdict is None
        history, verdict = ended(history, failure(f"h-{n}"), frozenset())
    assert verdict == JobFailure("3 hosts in a row had no room on their disks", FULL)
    damaged = [replace(failure(f"h-{n}"), error="checkpoint 20 arrived damaged here 6 times") for n in range(3)]
    history = History()
    for end in damaged:
        history, verdict = ended(history, end, frozenset())
    assert verdict is not None and verdict.why.startswith("3 hosts in a row received a damaged checkpoint")
    forgiven, _ = ended(History(), failure("h-0"), frozenset())
    forgiven, _ = ended(forgiven, failure("h-1"), frozenset())
    assert ended(progressed(forgiven, 1), failure("h-2"), frozenset())[1] is None


def test_a_host_without_room_is_replaced_and_the_job_trains_on(play):
    async def scene(stage: Stage) -> None:
        bad, good = sorted(await stage.up(2))
        script = Script(steps=LONG, fails=lambda w: FULL if w.name.startswith(f"{bad}/") else "")
        job = await stage.submit(script, (1, 2))
        await stage.at_version(job, 20)

        async def replaced() -> list[str]:
            trains = {w.host for w in (await stage.job(job)).workers if w.rank >= 0}
            return sorted(trains) if len(trains) == 2 and bad not in trains else []

        assert good in await stage.until("another host in its place", replaced)
        drains = {e["request_id"]: e["why"] for e in await stage.events("HostDraining")}
        assert drains == {bad: f"2 workers failed there: {FULL}"}
        assert (await stage.job(job)).state == "running"

    play(scene, spec(2))


def test_a_job_that_finds_no_room_anywhere_fails_and_names_the_disk(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(steps=LONG, fails=lambda _w: FULL), (1, 2))
        status = await stage.stands(job, "failed")
        assert status.why == "3 hosts in a row had no room on their disks" and status.error == FULL

    play(scene, spec(2))
