"""Boots that a plan and a simulation use: those of the running fleet, or of the earlier one of the same name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet.api.home import FleetDir, FleetRecord
from spotfleet.api.lifecycle import boots
from spotfleet.api.lifecycle.boots import measured_boots
from spotfleet.errors import DispatcherUnreachable
from spotfleet.fleet.domain.events import FleetCreated, HostJoined, JobProgress, LaunchIntended
from spotfleet.fleet.domain.history import MarketHistory
from spotfleet.fleet.ledger import Ledger
from spotfleet.fleet.policy.lifetimes import BootTime, boot_time
from spotfleet.model import BillingRules, EnvironmentSpec, FleetSpec, Market, Nodes, Offer, Role
from spotfleet.protocol.messages import BootMeasure, FleetStatus

OFFER = Offer("local", "r", "zone-a", "cpu.small", Market.SPOT, 1, 1_000_000, 3_000_000)
SPEC = FleetSpec("f", "local", environment=EnvironmentSpec(packages=("torch",)))


def fleet(folder: Path, down_at: float, url: str = "https://127.0.0.1:1") -> FleetDir:
    found = FleetDir(folder / "f")
    found.path.mkdir()
    found.save(FleetRecord(SPEC, "f", 1.0, url=url, reached=True, down_at=down_at))
    return found


@pytest.fixture
def ended(tmp_path: Path) -> FleetDir:
    found = fleet(tmp_path, down_at=9.0)
    found.archive.mkdir()
    ledger = Ledger(found.archive / "ledger.db")
    ledger.append(FleetCreated(0.0, "f", "local", Nodes(), BillingRules()),
                  LaunchIntended(10.0, "f-0", Role.WORKER, OFFER, ""), JobProgress(11.0, "j", 1, 1.0),
                  HostJoined(250.0, "f-0", "1"))
    ledger.close()
    return found


class Dispatcher:
    """A dispatcher that answers with these boots, or not at all."""

    found: tuple[BootMeasure, ...] | None = ()

    def __init__(self, _folder: FleetDir) -> None:
        pass

    def client(self, _url: str, patience_s: float) -> Dispatcher:
        assert patience_s <= 2
        return self

    def status(self) -> FleetStatus:
        if self.found is None:
            raise DispatcherUnreachable("no answer")
        return FleetStatus("f", "up", "", 1, 1, 1, boots=self.found)


@pytest.fixture
def running(tmp_path: Path, monkeypatch) -> FleetDir:
    monkeypatch.setattr(boots, "DispatcherMachine", Dispatcher)
    return fleet(tmp_path, down_at=0.0)


def test_the_boots_of_the_earlier_fleet_of_the_same_name_count(ended):
    assert boot_time(measured_boots(ended, replace(SPEC, nodes=Nodes(3, 3, 3))), OFFER) == BootTime(240.0, 1)


def test_boots_of_another_environment_or_another_image_are_no_measure(ended):
    for other in (replace(SPEC, environment=EnvironmentSpec()), replace(SPEC, provider="ssh"),
                  replace(SPEC, section={"image": "ami-1"})):
        assert measured_boots(ended, other) == MarketHistory()


def test_without_records_nothing_is_measured(ended, tmp_path):
    (ended.archive / "ledger.db").write_bytes(b"no database at all")
    assert measured_boots(ended, SPEC) == MarketHistory()
    (ended.archive / "ledger.db").unlink()
    assert measured_boots(ended, SPEC) == MarketHistory()
    assert measured_boots(FleetDir(tmp_path / "none"), SPEC) == MarketHistory()


def test_a_running_fleets_dispatcher_has_them(running, monkeypatch):
    monkeypatch.setattr(Dispatcher, "found", (BootMeasure("", 200.0, 7), BootMeasure(OFFER.pool, 150.0, 3),
                                              BootMeasure("odd", -1.0, 3)))
    found = measured_boots(running, SPEC)
    assert (boot_time(found), boot_time(found, OFFER)) == (BootTime(200.0, 7), BootTime(150.0, 3))
    assert measured_boots(running, SPEC, living=False) == MarketHistory()


def test_a_dispatcher_that_does_not_answer_delays_no_plan(running, monkeypatch):
    monkeypatch.setattr(Dispatcher, "found", None)
    assert measured_boots(running, SPEC) == MarketHistory()
