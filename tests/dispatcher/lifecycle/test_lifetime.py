"""When a fleet ends by itself."""

from __future__ import annotations

from dataclasses import replace

from spotfleet.cli import render
from spotfleet.dispatcher.lifecycle.lifetime import HOST_GRACE_S, Idleness, reason_to_stop, told_to_host
from spotfleet.dispatcher.status import StatusInput, fleet_status
from spotfleet.fleet.domain.events import FleetCreated
from spotfleet.fleet.domain.history import MarketHistory
from spotfleet.fleet.domain.state import FleetState
from spotfleet.model import Autostop, BillingRules, CheckpointSpec, FleetSpec, Nodes
from spotfleet.protocol.messages import BootMeasure

SPEC = FleetSpec("f", autostop=Autostop(idle_s=60.0), max_lifetime_s=1000.0)


def test_a_fleet_without_autostop_and_limit_lives_on():
    assert reason_to_stop(FleetSpec("f"), Idleness(up_since=0.0, running=0), now=1e9) == ""


def test_idle_time_counts_from_the_end_of_the_last_job():
    idle = Idleness(up_since=0.0, running=0, last_ended_at=100.0)
    assert reason_to_stop(SPEC, idle, now=159.0) == ""
    assert reason_to_stop(SPEC, idle, now=160.0) == "idle for 60 s (autostop)"


def test_idle_time_counts_from_the_start_before_any_job():
    assert reason_to_stop(SPEC, Idleness(up_since=100.0, running=0), now=159.0) == ""
    assert reason_to_stop(SPEC, Idleness(up_since=100.0, running=0), now=160.0)


def test_a_running_job_is_no_idleness_but_the_lifetime_ends_it():
    busy = Idleness(up_since=0.0, running=1, down_asked="digits")
    assert reason_to_stop(SPEC, busy, now=999.0) == ""
    assert reason_to_stop(SPEC, busy, now=1000.0) == "max_lifetime of 1000 s is over"


def test_train_down_ends_the_fleet_as_soon_as_no_job_runs():
    asked = Idleness(up_since=0.0, running=0, last_ended_at=10.0, down_asked="digits")
    assert "digits" in reason_to_stop(SPEC, asked, now=10.0)


def test_autostop_that_must_not_take_the_fleet_down_does_nothing():
    spec = replace(SPEC, autostop=Autostop(idle_s=60.0, down=False))
    assert reason_to_stop(spec, Idleness(up_since=0.0, running=0), now=500.0) == ""


def test_a_host_is_told_what_is_left_of_the_lifetime_and_a_little_more_so_that_we_come_first():
    spec = replace(SPEC, orphan_after_s=60.0, checkpoint=CheckpointSpec(target="/mnt/kept"))
    told = {"orphan_after_s": 60.0, "target": "/mnt/kept"}
    assert told_to_host(spec, up_since=100.0, now=400.0) == {**told, "lifetime_s": 700.0 + HOST_GRACE_S}
    assert told_to_host(spec, up_since=100.0, now=9000.0) == {**told, "lifetime_s": HOST_GRACE_S}
    assert told_to_host(replace(spec, max_lifetime_s=0.0), up_since=100.0, now=400.0) == {**told, "lifetime_s": 0.0}


def test_the_status_has_the_measured_boots():
    state = FleetState(history=MarketHistory(boots=(90.0, 110.0), boots_of={"fake/a/g5/spot": (90.0,)}))
    scene = StatusInput("f", state, Nodes(0, 0, 0), None, (), {}, {}, (), "", "")
    assert fleet_status(scene, 0.0).boots == (BootMeasure("", 100.0, 2), BootMeasure("fake/a/g5/spot", 90.0, 1))


def test_the_status_tells_how_long_the_fleet_may_still_live():
    born = FleetState(created=FleetCreated(100.0, "f", "local", Nodes(), BillingRules()))
    scene = StatusInput("f", born, Nodes(0, 0, 0), None, (), {}, {}, (), "", "", max_lifetime_s=1000.0)
    assert [fleet_status(scene, now).ends_in_s for now in (100.0, 400.0, 2000.0)] == [1000.0, 700.0, 0.0]
    assert fleet_status(replace(scene, max_lifetime_s=0.0), 400.0).ends_in_s is None
    early = fleet_status(scene, 40.0)  # the clock was set back since
    assert (early.age_s, early.ends_in_s) == (0.0, 1000.0)
    said = render.fleet_status(fleet_status(scene, 400.0))
    assert "5m00s old, max_lifetime ends it in 11m40s;" in said
