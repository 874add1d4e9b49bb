"""A dispatcher that cannot reach its cloud: it says so, training goes on, and nobody is billed for ever."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from spotfleet.dispatcher.cloud.outage import Outage
from spotfleet.dispatcher.lifecycle import lifetime
from spotfleet.dispatcher.lifecycle.clock import MonotonicClock
from spotfleet.dispatcher.lifecycle.lifetime import LAST_RESORT_S, may_power_off
from spotfleet.dispatcher.lifecycle.shutdown import PowerOff
from spotfleet.model import CloudState, FleetSpec
from tests.support.dispatcher.fake_fleet import LIMIT_S, Stage, spec
from tests.support.dispatcher.fake_workers import Script

LONG = 10_000


async def why(stage: Stage) -> str:
    return (await stage.call("GET", "/v1/status"))[1]["why"]


def test_an_outage_is_told_with_its_length_and_what_it_means():
    outage = Outage("local")
    outage.asked(100.0)
    assert outage.why(109.0) == ""  # clouds are slow at times
    goes_on = ": hosts and training go on, nothing is launched or ended until it does"
    assert outage.why(112.0) == "local has not answered for 12 s" + goes_on
    assert outage.failed("timed out") and not outage.failed("timed out")
    outage.asked(130.0)
    assert outage.why(160.0) == "local has not answered for 60 s (timed out)" + goes_on
    assert outage.answered() and outage.why(170.0) == "" and not outage.answered()


def test_training_goes_on_through_an_outage_and_a_notice_and_the_fleet_is_whole_again_after_it(play):
    async def scene(stage: Stage) -> None:
        first, second = await stage.up(2)
        job = await stage.submit(Script(steps=LONG), (1, 2))
        await stage.at_version(job, 5)
        stage.cloud.answers = False

        async def told() -> bool:
            return "local has not answered for" in await why(stage)

        await stage.until("the outage is told", told)
        assert re.match(r"2 of 2 hosts are up; local has not answered for \d+ s \(no answer within 30 s\): hosts and "
                        "training go on", await why(stage))
        version = (await stage.job(job)).version
        with stage.cloud.lock:
            stage.cloud.market.interrupt(second, 4.0, stage.cloud.clock())
        await stage.until("the other host has left the job",
                          lambda: len(stage.world.history) > 1 and len(stage.world.history[-1][2]) == 1)
        await stage.at_version(job, version + 20)
        queued = await stage.submit(Script(steps=5), (2, 2), "second")

        async def waits() -> bool:
            return "local has not answered for" in (await stage.job(queued)).why

        await stage.until("the queued job names what it waits for", waits)

        stage.cloud.answers = True
        hosts = await stage.up(2)
        assert first in hosts and second not in hosts
        assert "answer" not in await why(stage)
        assert (await stage.job(job)).repeated == 0

    play(scene)


def test_hosts_of_a_fleet_that_goes_down_are_sent_off_by_word_while_the_cloud_is_away(play):
    async def scene(stage: Stage) -> None:
        hosts = await stage.up(2)
        job = await stage.submit(Script(steps=LONG))
        await stage.at_version(job, 3)
        stage.cloud.answers = False
        await stage.call("POST", "/v1/down", {})
        await stage.until("both have powered off", lambda: not any(stage.cloud.look(h)[0] for h in hosts))
        assert (await stage.job(job)).state == "cancelled"
        stage.cloud.answers = True

        async def down() -> bool:
            return (await stage.call("GET", "/v1/status"))[1]["state"] == "down"

        await stage.until("the ledger knows it too", down)

    play(scene)


def test_max_lifetime_stops_the_dispatchers_own_bill_though_the_cloud_never_answers(
        play, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lifetime, "LAST_RESORT_S", 0.5)

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        stage.cloud.answers = False
        now = time.time()
        stage.daemon.dispatcher.core.clock = MonotonicClock(now, time.monotonic(), created_at=now - 3600.0,
                                                            ended_at=0.0)
        with pytest.raises(PowerOff) as ended:
            async with asyncio.timeout(LIMIT_S):
                await stage.daemon.wait()
        assert ended.value.exit_code == 0
        assert (stage.home.parent / "archive" / "ledger.db").exists()
        assert stage.cloud.market.hosts[stage.boot.host].state is CloudState.RUNNING  # its process ends it

    play(scene, spec(1, max_lifetime_s=3600.0))


def test_somebody_stays_with_hosts_that_were_told_never_to_end_themselves():
    late = 100.0 + LAST_RESORT_S
    assert may_power_off(FleetSpec("f"), 100.0, hosts_left=2, now=late)
    assert not may_power_off(FleetSpec("f"), 100.0, hosts_left=2, now=late - 1)
    assert not may_power_off(FleetSpec("f", orphan_after_s=0.0), 100.0, hosts_left=1, now=late)
    assert may_power_off(FleetSpec("f", orphan_after_s=0.0), 100.0, hosts_left=0, now=late)
    assert may_power_off(FleetSpec("f", orphan_after_s=0.0, max_lifetime_s=60.0), 100.0, hosts_left=1, now=late)
