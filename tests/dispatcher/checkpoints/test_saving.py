"""Everybody who holds a job's state goes: it is said whether what had been reached was kept before."""

from __future__ import annotations

import hashlib

import pytest

from spotfleet.dispatcher.checkpoints.last_copy import HINT_S, JOIN_S, LastCopyTracker, StateSnapshot
from spotfleet.fleet.domain.events import CheckpointInTime
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script


class Job:
    """Looks at it each second."""

    def __init__(self, told: int = 0) -> None:
        self.last_copy, self.now, self.events = LastCopyTracker(told), 0.0, []

    def look(self, reached: int, kept: int, leaves_s: float | None = None, *, trains: bool = True, held: bool = True,
             joining: bool = False, hinted: tuple[str, ...] = ()) -> None:
        self.now += 1.0
        self.events += self.last_copy.update("j", 5.0,
                                        StateSnapshot(self.now, leaves_s, reached, kept, trains, held, joining,
                                                        frozenset(hinted)))

    def gone(self, kept: int, *, joining: bool = False) -> None:
        self.look(0, kept, trains=False, held=False, joining=joining)


def test_what_was_kept_while_its_hosts_still_live_was_in_time():
    job = Job()
    job.look(800, 700)
    job.look(812, 700, 8.0)
    job.look(812, 812, 7.0)  # it trains on: that is not all yet
    job.look(815, 812, 6.0)
    job.look(815, 812, 5.0, trains=False)
    assert job.last_copy.why == "all hosts that hold its state go in 5 s: version 815 was reached, 812 is kept so far"
    assert job.events == []
    for leaves_s in (3.2, 2.2):
        job.look(815, 815, leaves_s, trains=False)
    job.gone(815)
    assert job.events == [CheckpointInTime(5.0, "j", 815, 815, 3.2,
                                           "version 815 was kept 3.2 s before the hosts that held it go")]
    job.look(815, 815, trains=False)  # restored
    assert job.last_copy.why == job.events[0].why
    job.look(816, 815)
    assert job.last_copy.why == ""


def test_a_hint_asks_for_one_checkpoint_of_what_was_reached_and_another_hosts_for_another():
    job = Job()
    job.look(800, 700)
    assert not job.last_copy.wanted
    job.look(812, 700, hinted=("f-0",))
    assert job.last_copy.wanted and job.last_copy.why == "" and job.events == []
    job.look(815, 811, hinted=("f-0",))
    assert job.last_copy.wanted
    job.look(816, 812, hinted=("f-0",))
    assert not job.last_copy.wanted
    job.look(900, 812, hinted=("f-0",))
    assert not job.last_copy.wanted  # the same hint
    job.look(901, 812, hinted=("f-0", "f-1"))
    assert job.last_copy.wanted
    assert not job.last_copy.waits(812, True, job.now)  # nobody's end waits for it


def test_a_hint_asks_for_nothing_that_is_kept_already_and_not_for_ever():
    job = Job()
    job.look(800, 800, hinted=("f-0",))
    assert not job.last_copy.wanted
    job.look(800, 700, hinted=("f-1",))
    job.now += HINT_S
    job.look(801, 700, hinted=("f-1",))
    assert not job.last_copy.wanted


@pytest.mark.parametrize(("kept", "why"), [
    (790, "version 812 was reached, 790 is kept: 22 steps will be repeated"),
    (811, "version 812 was reached, 811 is kept: 1 step will be repeated"),
    (0, "version 812 was reached, none is kept: 812 steps will be repeated"),
])
def test_what_was_not_is_told_once_when_the_last_is_gone(kept, why):
    job = Job()
    job.look(812, kept, 1.0)
    for _ in range(3):
        job.gone(kept)
    assert job.events == [CheckpointInTime(5.0, "j", 812, kept, 0.0, why)]
    assert job.last_copy.why == why


def test_one_that_was_on_its_way_when_they_went_may_have_arrived():
    job = Job()
    job.look(812, 790, 1.0)
    job.gone(812)
    assert [(e.version, e.kept_version, e.seconds_left) for e in job.events] == [(812, 812, 0.0)]


def test_parts_that_are_still_to_be_joined_are_waited_for_but_not_for_ever():
    joined, stuck = Job(), Job()
    for job in (joined, stuck):
        job.look(812, 790, 1.0)
        job.gone(790, joining=True)
        assert job.events == []
    joined.gone(812)
    stuck.now += JOIN_S
    stuck.gone(790, joining=True)
    assert [job.events[0].kept_version for job in (joined, stuck)] == [812, 790]


def test_where_somebody_stays_in_the_end_there_is_nothing_to_tell():
    job = Job()
    job.look(812, 700, 8.0)
    assert job.last_copy.why
    job.look(813, 700)
    assert (job.events, job.last_copy.why) == ([], "")


def test_hosts_that_just_die_are_nothing_that_anybody_could_be_in_time_for():
    job = Job()
    job.look(812, 700)
    job.gone(700)
    assert job.events == []


def test_each_time_is_told_by_itself_and_a_restarted_dispatcher_does_not_tell_it_again():
    job = Job()
    job.look(812, 812, 4.0, trains=False)
    again = Job(job.last_copy.reported)
    again.look(812, 812, 3.0, trains=False)
    again.gone(812)
    again.look(900, 812)
    again.look(900, 900, 4.0, trains=False)
    assert [e.version for e in (*job.events, *again.events)] == [812, 900]


# ---- with the whole dispatcher


async def trained(stage: Stage) -> tuple[str, str]:
    """A job on a host that no other can replace; both."""
    (host,) = await stage.up(1)
    job = await stage.submit(Script(steps=10_000), (1, 1))
    await stage.at_version(job, 3)
    with stage.cloud.lock:
        for pool in list(stage.cloud.market.capacity):
            stage.cloud.market.set_capacity(pool, 0, stage.cloud.clock())
    return job, host


async def keep(stage: Stage, job: str, host: str, version: int) -> None:
    data = b"state %d" % version
    path = f"/v1/jobs/{job}/checkpoints/{version}?generation=1&digest={hashlib.sha256(data).hexdigest()}"
    await stage.call("PUT", path, token=stage.token(host), data=data)


async def told(stage: Stage) -> list[dict]:
    return await stage.events("CheckpointInTime")


def only(stage: Stage):
    return next(iter(stage.world.workers.values()))


def test_workers_hear_how_long_they_have_and_the_ledger_hears_that_it_was_enough(play):
    async def scene(stage: Stage) -> None:
        job, host = await trained(stage)
        stage.cloud.interrupt(host, 5.0)
        await stage.until("the order", lambda: only(stage).order.orders.checkpoint_now)
        assert 0 <= only(stage).order.orders.seconds_left <= 5
        assert "hosts that hold its state go in" in (await stage.job(job)).why
        await stage.until("standing by", lambda: only(stage).generation == 0)
        version = only(stage).version
        await keep(stage, job, host, version)
        (event,) = await stage.until("its word", lambda: told(stage))
        assert (event["version"], event["kept_version"]) == (version, version)
        assert 0 < event["seconds_left"] < 5
        assert event["why"] in (await stage.job(job)).why

    play(scene, spec(1))


def test_the_ledger_hears_what_is_lost_where_it_was_not(play):
    async def scene(stage: Stage) -> None:
        job, host = await trained(stage)
        await keep(stage, job, host, 2)
        stage.cloud.interrupt(host, 0.5)
        (event,) = await stage.until("its word", lambda: told(stage))
        lost = event["version"] - 2
        assert event["kept_version"] == 2 and event["seconds_left"] == 0 and lost > 0
        assert event["why"] == f"version {event['version']} was reached, 2 is kept: {lost} steps will be repeated"
        assert event["why"] in (await stage.job(job)).why

    play(scene, spec(1))


def test_a_host_that_the_cloud_may_take_soon_is_shown_and_what_was_reached_is_kept_while_training_goes_on(play):
    async def scene(stage: Stage) -> None:
        first, _ = await stage.up(2)
        job = await stage.submit(Script(steps=100_000), (2, 2))
        await stage.at_version(job, 20)
        with stage.cloud.lock:
            stage.cloud.market.rebalance(first, stage.cloud.clock())

        def ordered() -> bool:
            orders = [a.orders for a in stage.agents.values() if a.orders]
            return [o.orders.checkpoint_now for told in orders for o in told.workers] == [True, True]

        await stage.until("a checkpoint is ordered", ordered)
        version = (await stage.job(job)).version
        await stage.at_version(job, version + 20)
        status = (await stage.call("GET", "/v1/status"))[1]
        assert [h["why"] for h in status["hosts"] if h["host"] == first] == ["leave this host"]
        assert not [e for e in await stage.events() if e["kind"] in ("HostDraining", "TerminateIntended")]

    play(scene, spec(2))
