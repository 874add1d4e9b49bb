"""A ledger that cannot be read is set aside, with every word about it; the fleet goes on from what the cloud lists."""

from __future__ import annotations

import json
import os
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from spotfleet.fleet.domain.events import HistoryLost, NodesChanged
from spotfleet.fleet.ledger import Ledger, LedgerDamaged, OtherSchema, open_sound, problem
from spotfleet.model import Nodes
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script

LONG = 1_000_000
LONGER = pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="the long form only (SPOTFLEET_LONG=1)")


def garbage(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(20_000))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


def flipped_pages(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for n in range(1, len(data) // 4096):
        data[n * 4096:n * 4096 + 64] = bytes(b ^ 0x5A for b in data[n * 4096:n * 4096 + 64])
    path.write_bytes(data)


def flipped_text(path: Path) -> None:
    """Inside a row, where sqlite itself sees nothing wrong."""
    path.write_bytes(path.read_bytes().replace(b'{"kind"', b'{"k\x01nd\\', 1))


def of_another_program(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA application_id=7")


DAMAGE = pytest.mark.parametrize("damage", [garbage, cut_short, flipped_pages, flipped_text, of_another_program],
                                 ids=lambda f: f.__name__)


def settled(path: Path) -> Path:
    """`path` as one file, as after an orderly end."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.append(*(NodesChanged(float(n), Nodes(1, n, 999), "x" * 100) for n in range(200)))
    ledger.close()
    return settled(tmp_path / "ledger.db")


@DAMAGE
def test_each_damage_is_told_with_the_file_and_what_to_do(path: Path, damage: Callable[[Path], None]):
    assert problem(path) is None
    damage(path)
    found = problem(path)
    assert isinstance(found, LedgerDamaged) and str(path) in str(found) and found.hint.startswith("move it away")


@DAMAGE
def test_a_damaged_ledger_is_kept_and_a_new_one_says_so(path: Path, damage: Callable[[Path], None]):
    damage(path)
    before = path.read_bytes()
    ledger, trouble = open_sound(path)
    (lost,) = [event for _, event in ledger.events()]
    assert isinstance(lost, HistoryLost) and lost.kept_as.startswith("ledger.db.corrupt-20")
    aside = path.with_name(lost.kept_as)
    assert aside.read_bytes()[100:] == before[100:]  # its header may count that it was opened
    assert trouble.startswith(str(path)) and trouble.endswith(f"it is kept as {aside.name}, and a new one is begun")
    ledger.close()
    assert problem(path) is None


def test_a_ledger_of_a_newer_release_is_not_touched(path: Path):
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=7")
    before = path.read_bytes()
    with pytest.raises(OtherSchema, match="schema 7; this spotfleet reads 1") as caught:
        open_sound(path)
    assert caught.value.hint.startswith("use the spotfleet release that wrote it, or a newer one; or move it away")
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", [garbage, pytest.param(flipped_text, marks=LONGER)])
def test_the_laptop_warns_takes_up_its_dispatcher_again_and_bills_it_in_full(up, damage):
    ledger = settled(up.home / "fleets" / "digits" / "ledger.db")
    damage(ledger)
    said = up.ok("cost")
    assert "records were lost at 20" in said.out and "may be missing here" in said.out
    assert "  records     begun anew, the old one is kept as ledger.db.corrupt-20" in up.ok("events").out
    damage(settled(ledger))
    said = up.ok("up fleet.yaml -y")
    assert "  warning: " in said.err and "it is kept as ledger.db.corrupt-" in said.err
    assert len([name for name in up.cloud.living() if "-d-" in name]) == 1
    damage(settled(ledger))
    said = up.ok("down -y")
    assert "  warning: " in said.err and up.cloud.living() == []
    cost = json.loads(up.ok("cost -o json").out)
    assert cost["micros"] == up.cloud.market.invoice(up.cloud.clock(), "digits").micros
    assert cost["missing_before"] is not None


def test_the_books_of_an_ended_fleet_stay_closed(up):
    up.ok("down -y")
    end = json.loads(up.ok("cost -o json").out)["at"]
    garbage(up.home / "fleets" / "digits" / "ledger.db")
    cost = json.loads(up.ok("cost -o json").out)
    assert (cost["at"], cost["micros"]) == (
        pytest.approx(end, abs=1), up.cloud.market.invoice(up.cloud.clock(), "digits").micros)


def test_a_damaged_archive_is_told_by_its_name(up):
    up.ok("down -y")
    archived = up.home / "fleets" / "digits" / "archive" / "ledger.db"
    garbage(archived)
    assert up.fails("cost").err.startswith(f"error: {archived} is damaged: file is not a database\nhint: move it away")


@pytest.mark.parametrize("damage", [garbage, *(pytest.param(d, marks=LONGER) for d in (flipped_pages, "newer"))])
def test_a_dispatcher_begins_anew_adopts_its_hosts_and_its_job_trains_on(play, damage):
    async def scene(stage: Stage) -> None:
        hosts = await stage.up(2)
        job = await stage.submit(Script(steps=LONG), (2, 2))
        before = (await stage.at_version(job, 3)).workers
        await stage.stop_dispatcher()
        ledger = settled(stage.home / "ledger.db")
        if damage == "newer":
            with sqlite3.connect(ledger) as db:
                db.execute("PRAGMA user_version=7")
        else:
            damage(ledger)
        await stage.start_dispatcher()
        assert sorted(await stage.up(2)) == sorted(hosts)
        await stage.at_version(job, 30)

        async def listed() -> bool:  # an agent that is slow to come back has none for a moment
            return [w.worker for w in (await stage.job(job)).workers] == [w.worker for w in before]

        await stage.until("the same workers", listed)
        (lost,) = await stage.events("HistoryLost")  # once for each damage
        assert (stage.home / lost["kept_as"]).exists()
        assert lost["kept_as"].startswith("ledger.db.corrupt-") and "ledger.db" in lost["why"]
        assert sorted(stage.cloud.machines) == sorted(hosts)  # none was launched in place of another
        assert len(await stage.events("FleetCreated")) == len(await stage.events("TakenOver")) == 1
        status = (await stage.call("GET", "/v1/status"))[1]
        assert f"kept as {lost['kept_as']}" in status["why"]

    play(scene, spec(2))
