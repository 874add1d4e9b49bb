"""Whom a dispatcher on an empty disk believes that has written to the checkpoint target."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet.codec import to_text
from spotfleet.dispatcher.checkpoints.ledger_restore import (
    SealedJob,
    ledger_digest,
    ledger_name,
    lock,
    restore,
    sealed_name,
)
from spotfleet.dispatcher.disk.jobfile import JobRecord, load, save
from spotfleet.fleet.domain.events import FleetCreated, JobSubmitted
from spotfleet.fleet.ledger import Ledger
from spotfleet.model import BillingRules, CheckpointSpec, JobSpec, Nodes
from spotfleet.storage.folder import fleet_store, read_range
from spotfleet.transport.boot import DispatcherBoot
from tests.support.dispatcher.fake_fleet import spec

SEALED = SealedJob(JobRecord("j-1", JobSpec("j", ("train.py",)), 1.0), {"KEY": "value"})


@pytest.fixture
def boot(tmp_path: Path) -> DispatcherBoot:
    (tmp_path / "target").mkdir()
    fleet = spec(1, checkpoint=CheckpointSpec(target=str(tmp_path / "target")))
    return DispatcherBoot("f", "f-d-1", fleet, "the fleet's secret", "admin", "ca", "cert", "key")


def put_job(boot: DispatcherBoot, name: str = "j-1", secret: str = "") -> None:
    there = fleet_store(boot.spec.checkpoint.target, boot.fleet, boot.ca)
    there.put(sealed_name(name), [lock(secret or boot.fleet_secret).encrypt(to_text(SEALED).encode())])


def put_ledger(boot: DispatcherBoot, folder: Path, secret: str = "") -> None:
    ledger = Ledger(folder / "forged.db")
    ledger.append(FleetCreated(1.0, "f", "local", Nodes(1, 1, 1), BillingRules()))
    ledger.copy_to(folder / "copy.db")
    ledger.close()
    there = fleet_store(boot.spec.checkpoint.target, boot.fleet, boot.ca)
    name = ledger_name(0, 7, ledger_digest(folder / "copy.db", secret or boot.fleet_secret))
    there.put(name, read_range(folder / "copy.db"))


def test_what_a_dispatcher_of_the_fleet_left_comes_back(boot, tmp_path: Path):
    put_job(boot)
    put_ledger(boot, tmp_path)
    found = asyncio.run(restore(boot, tmp_path / "home"))
    assert (found.ledger, found.jobs, found.troubles) == (True, ("j-1",), ())
    assert load(tmp_path / "home" / "jobs" / "j-1") == (SEALED.record, SEALED.secrets)


def test_a_job_that_has_left_memory_does_not_come_back(boot, tmp_path: Path):
    put_job(boot)
    save(tmp_path / "home" / "past" / "j-1", SEALED.record)
    asyncio.run(restore(boot, tmp_path / "home"))
    assert not (tmp_path / "home" / "jobs" / "j-1").exists() and not (tmp_path / "home" / ".restored").exists()


def put_history(boot: DispatcherBoot, folder: Path, machine: int, *ats: float) -> str:
    """Put the copy of a ledger with jobs submitted at these times there; return its name."""
    ledger, copy = Ledger(folder / f"{machine}.db"), folder / "copy.db"
    ledger.append(FleetCreated(ats[0], "f", "local", Nodes(1, 1, 1), BillingRules()),
                  *(JobSubmitted(at, "j-1", "j", "", 1, 1) for at in ats[1:]))
    ledger.copy_to(copy)
    ledger.close()
    name = ledger_name(machine, len(ats), ledger_digest(copy, boot.fleet_secret))
    fleet_store(boot.spec.checkpoint.target, boot.fleet, boot.ca).put(name, read_range(copy))
    return name


def test_a_small_ledger_of_a_later_dispatcher_does_not_hide_the_history_before_it(boot, tmp_path: Path):
    older = put_history(boot, tmp_path, 0, 1.0, 2.0, 3.0, 4.0)
    put_history(boot, tmp_path, 1, 100.0, 101.0)  # took over while the target was away
    found = asyncio.run(restore(boot, tmp_path / "home"))
    trouble, = found.troubles
    assert found.ledger and trouble.startswith("the 4 events of the fleet's dispatcher 0 are not part of these records")
    assert trouble.endswith(older) and Path(trouble.rpartition(" ")[2]).is_file()
    ledger = Ledger(tmp_path / "home" / "ledger.db")
    assert [event.at for _, event in ledger.events()] == [100.0, 101.0]
    ledger.close()


def test_a_ledger_that_goes_on_with_the_one_before_hides_nothing(boot, tmp_path: Path):
    put_history(boot, tmp_path, 0, 1.0, 2.0, 3.0)
    put_history(boot, tmp_path, 1, 1.0, 2.0, 3.0, 4.0)
    assert asyncio.run(restore(boot, tmp_path / "home")).troubles == ()


@pytest.mark.parametrize("forged", [{"secret": "another secret"}, {"name": "j-2"}], ids=["made", "moved"])
def test_a_job_that_a_host_made_or_moved_there_is_refused(boot, tmp_path: Path, forged: dict[str, str]):
    put_job(boot, **forged)
    found = asyncio.run(restore(boot, tmp_path / "home"))
    assert found.jobs == () and "is refused" in found.troubles[0]
    assert not list((tmp_path / "home").rglob("secrets.json"))


def test_a_ledger_that_a_host_made_is_refused(boot, tmp_path: Path):
    put_ledger(boot, tmp_path, secret="another secret")
    found = asyncio.run(restore(boot, tmp_path / "home"))
    assert not found.ledger and found.troubles[0].endswith("is refused: its digest is wrong")


def test_a_target_that_is_not_mounted_is_said(boot, tmp_path: Path):
    away = replace(boot, spec=spec(1, checkpoint=CheckpointSpec(target=str(tmp_path / "away"))))
    assert asyncio.run(restore(away, tmp_path / "home")).troubles == (
        f"{tmp_path / 'away'} is no folder here: is it mounted?",)
