"""Policies from the fleet file to real machines: on demand while spot is not to be had, and an end before the limit.

What the cheaper tests cannot show: that the dispatcher, given nothing but the file, carries its policy out, and that
training goes on meanwhile.
"""

from __future__ import annotations

import json

import pytest

from spotfleet.api import Fleet
from spotfleet.fleet.policy.budget import ENDING_S
from tests.support.e2e.e2e_stage import Stage, hosts, output, trains, wait_for

pytestmark = pytest.mark.processes
ZONES = ("local-a", "local-b", "local-c")


def markets(fleet: Fleet) -> list[str]:
    return sorted(h.pool.rpartition("/")[2] for h in hosts(fleet))


def decided(fleet: Fleet) -> list[tuple[int, int]]:
    return [(e["spot"], e["on_demand"]) for e in fleet.events() if e["kind"] == "PolicyDecided"]


def sell_spot(stage: Stage, room: int) -> None:
    for zone in ZONES:
        stage.cloud.set_capacity(f"local/{zone}/cpu.small/spot", room)


def test_a_fleet_goes_on_demand_while_spot_is_not_to_be_had_and_back(stage: Stage):
    fleet = stage.fleet("mixed", 2, 2, "spot_policy: auto")
    assert markets(fleet) == ["spot", "spot"]
    job = stage.counting(fleet, 200, (2, 2))
    wait_for("training", lambda: trains(job, 2))
    sell_spot(stage, 0)
    for host in hosts(fleet):
        fleet.interrupt(host.host, 1.0)
    wait_for("the decision", lambda: (2, 2) in decided(fleet))
    sell_spot(stage, 3)  # before pools are asked again, which are asked less and less often
    wait_for("two on-demand hosts", lambda: markets(fleet) == ["on-demand", "on-demand"])
    assert "policy auto: 2 spot and 2 on-demand hosts" in stage.cli("status", "mixed").stdout
    refused = stage.cli("train", "counting.py", "--deadline", "1h", "--work", "2h", ok=False)
    assert "the deadline is impossible: " in refused.stderr
    wait_for("two spot hosts", lambda: markets(fleet) == ["spot", "spot"])
    stage.hurry()
    job.wait()
    assert "counted -200.0 of -200" in output(job)
    assert decided(fleet)[0] == decided(fleet)[-1] == (2, 0) and len(decided(fleet)) < 8, "it flaps"


def test_a_fleet_that_is_told_a_max_cost_ends_by_itself_in_time_with_its_results(stage: Stage):
    """The limit comes with another `up` once it trains: how long a busy machine takes until then does not matter."""
    fleet = stage.fleet("thrifty", least=2, target=2)
    job = stage.counting(fleet, 400, (2, 2))
    wait_for("some steps, and a first count", lambda: trains(job, 2, step=5) and fleet.status().spent_micros)
    status = fleet.status()
    limit = status.spent_micros + status.burn_micros_h * (ENDING_S + 10.0) / 3600
    path = stage.fleet_file("thrifty", 2, 2, 2, f"max_cost: {limit / 1e6:.6f}")
    stage.cli("up", str(path), "-y", ok=False)  # it may see the end already
    wait_for("the end of all machines", lambda: stage.cloud.truth() == [])
    assert stage.cloud.invoice("thrifty").micros <= limit
    kept = stage.home / "fleets" / "thrifty" / "archive" / "jobs" / job.id / "checkpoints"
    events = json.loads(stage.cli("events", "thrifty", "-o", "json").stdout)
    assert [e["percent"] for e in events if e["kind"] == "BudgetReached"][-1] == 100
    assert [p for p in kept.rglob("*") if p.is_file()], "no checkpoint came home"
