"""A dispatcher with every limit, whose clock is set while it runs and while it is down, ends no fleet and shows no
false bill."""

from __future__ import annotations

import time
from dataclasses import replace
from email.utils import parsedate_to_datetime

import pytest

from spotfleet.dispatcher import policy as policy_module
from spotfleet.dispatcher.cloud import machines
from spotfleet.dispatcher.disk import jobfile
from spotfleet.dispatcher.lifecycle import fleet_clock
from spotfleet.dispatcher.lifecycle.fleet_clock import BootMoment
from spotfleet.errors import SpotfleetError
from spotfleet.fleet.cost.meter import Meter
from spotfleet.model import Autostop, PolicySpec
from spotfleet.transport import certs
from tests.support.dispatcher.fake_fleet import ADMIN, Cloud, Stage, spec
from tests.support.dispatcher.fake_workers import Script

REAL = time.time
HOUR_S = 3600.0
LIMITS = replace(spec(2, policy=PolicySpec(max_micros=1_000_000)), autostop=Autostop(idle_s=1800.0),
                 max_lifetime_s=7200.0)


async def status(stage: Stage) -> dict:
    return (await stage.call("GET", "/v1/status"))[1]


async def counted_again(stage: Stage) -> None:
    """Wait until the cost has been counted after now."""
    counted = stage.daemon.dispatcher.policy._counted

    async def look() -> bool:
        now = stage.daemon.dispatcher.policy._counted
        return now is not None and now is not counted

    await stage.until("the cost to be counted", look)


async def stays(stage: Stage, hosts: list[str]) -> None:
    """The limits have been looked at with the present clock, and the fleet and its bill are what they were."""
    await stage.until("the wrong clock to be noticed", lambda: noticed(stage))
    await counted_again(stage)
    await counted_again(stage)
    shown = await status(stage)
    assert shown["state"] == "up" and "going down" not in shown["why"] and sorted(stage.cloud.machines) == hosts
    assert stage.daemon.dispatcher.shutdown.decision is None
    assert shown["age_s"] < HOUR_S and shown["spent_micros"] < 50_000
    assert [e for e in await stage.events() if abs(e["at"] - REAL()) > HOUR_S] == []


async def noticed(stage: Stage) -> bool:
    return "and is not used" in (await status(stage))["why"]


@pytest.mark.parametrize("by_s", [20 * HOUR_S, -20 * HOUR_S], ids=["forward", "back"])
def test_no_limit_ends_a_fleet_whose_dispatchers_clock_is_set_while_it_runs_or_is_down(play, monkeypatch, by_s):
    monkeypatch.setattr(policy_module, "COUNT_S", 0.05)
    monkeypatch.setattr(policy_module, "REST", 0.0)
    monkeypatch.setattr(machines, "TICK_S", 0.05)

    async def scene(stage: Stage) -> None:
        hosts = sorted(await stage.up(2))
        await counted_again(stage)
        monkeypatch.setattr(time, "time", lambda: REAL() + by_s)
        await stays(stage, hosts)

        await stage.stop_dispatcher()
        await stage.start_dispatcher()
        assert sorted(await stage.up(2)) == hosts
        await stays(stage, hosts)

        await stage.stop_dispatcher()
        monkeypatch.setattr(fleet_clock, "boot_moment", lambda: BootMoment("another boot", time.monotonic()))
        await stage.start_dispatcher()
        assert sorted(await stage.up(2)) == hosts
        await stays(stage, hosts)

        headers = {"Authorization": f"Bearer {ADMIN}"}
        async with stage.http.get(stage.url + "/v1/status", headers=headers,
                                  ssl=certs.client_context(stage.ca)) as answer:
            assert abs(parsedate_to_datetime(answer.headers["Date"]).timestamp() - REAL()) < HOUR_S

        await stage.call("POST", "/v1/down", {})
        await stage.until("the end", lambda: not [h for h in stage.cloud.living() if h in hosts])

        async def listed() -> bool:
            return bool(await stage.events("FleetDown"))

        await stage.until("the end to be written", listed)
        events = [event for _, event in stage.daemon.dispatcher.core.journal.after(0)]
        invoice = stage.cloud.market.invoice(REAL(), "f")
        assert Meter(events, REAL() + by_s).micros() == sum(invoice.hosts[host] for host in hosts)

    play(scene, LIMITS)


@pytest.mark.parametrize("by_s", [20 * HOUR_S, -20 * HOUR_S], ids=["ahead", "behind"])
def test_events_written_with_a_wrong_clock_grow_no_older_when_the_time_is_known(play, monkeypatch, by_s):
    monkeypatch.setattr(fleet_clock, "ASK_S", 0.1)
    monkeypatch.setattr(policy_module, "COUNT_S", 0.05)
    monkeypatch.setattr(policy_module, "REST", 0.0)
    monkeypatch.setattr(machines, "TICK_S", 0.05)
    monkeypatch.setattr(time, "time", lambda: REAL() + by_s)
    answers: list[bool] = []

    def cloud_time(cloud: Cloud) -> float:
        if not answers:
            raise SpotfleetError("no answer")
        return REAL()

    monkeypatch.setattr(Cloud, "cloud_time", cloud_time)

    async def scene(stage: Stage) -> None:
        hosts = sorted(await stage.up(2))
        assert not await noticed(stage)
        job = await stage.submit(Script(steps=20))
        await stage.stands(job, "succeeded")
        answers.append(True)
        await stage.until("the wrong clock to be noticed", lambda: noticed(stage))
        await stage.until("the shift to be written", lambda: shifted(stage))
        assert [round(e["by_s"] / HOUR_S) for e in await stage.events("ClockSetBack")] == [round(by_s / HOUR_S)]
        await counted_again(stage)
        await counted_again(stage)
        shown = await status(stage)
        assert shown["state"] == "up" and sorted(stage.cloud.machines) == hosts
        assert all(0 <= h["since_s"] < HOUR_S for h in shown["hosts"])
        assert shown["spent_micros"] < 50_000 and 0 <= shown["age_s"] < HOUR_S
        await stage.stop_dispatcher()
        record = jobfile.load_record(stage.home / "jobs" / job)
        assert [abs(at - REAL()) < HOUR_S for at in (record.submitted_at, record.ended_at)] == [True, True]
        await stage.start_dispatcher()
        assert sorted(await stage.up(2)) == hosts
        core = stage.daemon.dispatcher.core
        assert core.clock.age_s(core.fleet_clock.passed()) < HOUR_S
        assert stage.daemon.dispatcher.shutdown.decision is None

    async def shifted(stage: Stage) -> bool:
        return bool(await stage.events("ClockSetBack"))

    play(scene, LIMITS if by_s < 0 else replace(LIMITS, policy=PolicySpec()))


def test_a_fleet_that_goes_down_waits_for_its_machines_though_its_clock_is_set_forward(play, monkeypatch):
    monkeypatch.setattr(policy_module, "COUNT_S", 0.05)
    monkeypatch.setattr(policy_module, "REST", 0.0)
    monkeypatch.setattr(machines, "TICK_S", 0.05)

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        stage.cloud.answers = False
        await stage.call("POST", "/v1/down", {})
        monkeypatch.setattr(time, "time", lambda: REAL() + 20 * HOUR_S)
        await stage.until("the wrong clock to be noticed", lambda: noticed(stage))
        await counted_again(stage)
        await counted_again(stage)
        ends = [task.exception() for task in stage.daemon._tasks if task.done()]
        assert not any(ends)  # it has not powered its machine off
        stage.cloud.answers = True
        await stage.until("the end", lambda: not [h for h in stage.cloud.living() if h != stage.boot.host])

    play(scene, spec(1))


def test_hosts_confirm_the_time_where_the_cloud_cannot(play, monkeypatch):
    monkeypatch.setattr(fleet_clock, "CLOUD_S", 0.0)
    monkeypatch.setattr(machines, "TICK_S", 0.05)

    async def scene(stage: Stage) -> None:
        hosts = sorted(await stage.up(2))
        job = await stage.submit(Script(steps=1_000_000), (1, 2))
        await stage.at_version(job, 3)
        stage.cloud.faults.lose("cloud_time", "before", 1_000_000)
        monkeypatch.setattr(time, "time", lambda: REAL() + 20 * HOUR_S)
        await stage.until("two hosts to contradict", lambda: says(stage, "its hosts' time, and is not used"))
        for agent in stage.agents.values():
            agent.clock = time.time
        await stage.until("two hosts to agree", lambda: used(stage))
        assert stage.daemon.dispatcher.core.fleet_clock.asks is False
        await stage.at_version(job, (await stage.job(job)).version + 3)
        assert sorted(stage.cloud.machines) == hosts

    async def says(stage: Stage, words: str) -> bool:
        return words in (await status(stage))["why"]

    async def used(stage: Stage) -> bool:
        return "is not used" not in (await status(stage))["why"]

    play(scene)
