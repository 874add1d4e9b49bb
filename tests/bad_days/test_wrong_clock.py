"""Wrong clocks: a laptop's is days off, a dispatcher's is set by hours. Nothing ends, and words name the clock."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from spotfleet.api.home import write_whole
from spotfleet.dispatcher.lifecycle.clock import MonotonicClock
from spotfleet.model import Autostop
from spotfleet.transport import certs
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script

LONG = 1_000_000
DAY_S, HOUR_S = 86400.0, 3600.0
REAL = time.time
LONGER = pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="the long form only (SPOTFLEET_LONG=1)")


@pytest.mark.parametrize("days", [-2, 2, pytest.param(-300, marks=LONGER), pytest.param(300, marks=LONGER)])
def test_a_fleet_made_by_a_laptop_whose_clock_is_days_off_works(user, monkeypatch, days):
    make = certs.make
    monkeypatch.setattr(certs, "make", lambda fleet, now: make(fleet, now + days * DAY_S))
    user.ok("up fleet.yaml -y")
    assert json.loads(user.ok("status -o json").out)["state"] == "up"
    user.ok("down -y")


@pytest.mark.parametrize(("years", "side"), [(3, "before"), (-12, "after")])
def test_a_clock_that_is_years_off_is_named_with_the_way_to_set_it(up, years, side):
    made = certs.make("digits", REAL() + years * 365 * DAY_S)
    up.dispatcher.stop()
    up.dispatcher.boot |= {"cert": made.cert, "key": made.key}
    up.dispatcher.start()
    write_whole(up.home / "fleets" / "digits" / "ca.pem", made.ca)
    days = [f"{datetime.now(UTC):%Y-%m-%d}"]
    said = up.fails("status", code=3)
    days.append(f"{datetime.now(UTC):%Y-%m-%d}")  # it may be midnight
    assert said.err.startswith(tuple(f"error: this machine's clock says {day} " for day in days))
    assert f" days {side} the time of the fleet's certificate\n" in said.err
    assert said.err.endswith("hint: set the clock, for instance with `sudo timedatectl set-ntp true`, and try again; "
                             "the fleet goes on\n")


def test_the_bill_of_a_living_fleet_does_not_believe_a_laptop_that_is_hours_ahead(up, monkeypatch):
    from spotfleet.api import reports
    from spotfleet.transport.client import DispatcherClient

    honest, an_hour = (json.loads(up.ok(f"{read} -o json").out)[what] for read, what in (
        ("cost", "micros"), ("status", "burn_micros_h")))
    learn = DispatcherClient._learn

    def ahead(self: DispatcherClient, reply: object) -> None:
        learn(self, reply)
        self.ahead_s += 5 * HOUR_S

    monkeypatch.setattr(DispatcherClient, "_learn", ahead)
    monkeypatch.setattr(reports, "time", type("Time", (), {"time": staticmethod(lambda: REAL() + 5 * HOUR_S)}))
    later = json.loads(up.ok("cost -o json").out)["micros"]
    assert honest <= later < honest + an_hour


def test_a_stopwatch_counts_what_passed_before_it_and_then_only_what_passes():
    watch = MonotonicClock(unix=1000.0, mono=50.0, created_at=400.0, ended_at=700.0)
    assert (watch.age_s(60.0), watch.idle_s(60.0, working=False)) == (610.0, 310.0)
    assert watch.idle_s(70.0, working=True) == 0.0
    assert watch.idle_s(95.0, working=False) == 25.0
    young = MonotonicClock(unix=1000.0, mono=50.0, created_at=5000.0, ended_at=0.0)  # made by a clock that was ahead
    assert (young.age_s(60.0), young.idle_s(60.0, working=False)) == (10.0, 10.0)


@pytest.mark.parametrize("by_s", [3 * HOUR_S, -3 * HOUR_S], ids=["forward", "back"])
def test_a_dispatcher_whose_clock_is_set_ends_no_host_no_job_and_no_fleet(play, monkeypatch, by_s):
    now = [0.0]
    fleet = replace(spec(2), autostop=Autostop(idle_s=900.0), max_lifetime_s=7200.0)

    async def scene(stage: Stage) -> None:
        hosts = sorted(await stage.up(2))
        job = await stage.submit(Script(steps=LONG), (1, 2))
        await stage.at_version(job, 3)
        silent = stage.agents[hosts[0]]
        silent.shut = True  # away for a moment, as a host on a busy network

        async def away() -> bool:
            return [e["request_id"] for e in await stage.events("HostSilent")] == [hosts[0]]

        await stage.until("its silence to be known", away)
        monkeypatch.setattr(time, "time", lambda: REAL() + now[0])
        now[0] = by_s

        async def noticed() -> bool:
            why = (await stage.call("GET", "/v1/status"))[1]["why"]
            return f"the dispatcher's clock is 3.0 h {'ahead of' if by_s > 0 else 'behind'} the cloud's time" in why

        await stage.until("the new time to be noticed", noticed)
        version = (await stage.job(job)).version
        silent.shut = False
        stage.agents.pop(hosts[0]).task.cancel()  # another agent process takes its place
        assert sorted(await stage.up(2)) == hosts
        await stage.at_version(job, version + 50)
        assert sorted(stage.cloud.machines) == hosts
        status = (await stage.call("GET", "/v1/status"))[1]
        assert status["state"] == "up"
        ages = [status["age_s"], *(h["since_s"] for h in status["hosts"]), *(j["age_s"] for j in status["jobs"])]
        assert min(ages) >= 0
        assert stage.daemon.dispatcher.shutdown.why == ""
        assert await stage.events("ClockSetBack") == []
        assert all(abs(e["at"] - REAL()) < HOUR_S for e in await stage.events())

    play(scene, fleet)
