"""The ledger as the dispatcher's loop sees it."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
from dataclasses import fields
from pathlib import Path

import pytest

from spotfleet.dispatcher.journal import Journal
from spotfleet.errors import SpotfleetError
from spotfleet.fleet.domain.events import (
    KINDS,
    CheckpointKept,
    HostNoticed,
    JobProgress,
    event_from_json,
    event_to_json,
)
from spotfleet.fleet.ledger import Ledger


def test_no_event_has_a_field_that_hides_its_kind():
    assert [name for name, kind in KINDS.items() if "kind" in (f.name for f in fields(kind))] == []
    notice = HostNoticed(1.0, "f-0", 30.0, "terminate", "rebalance")
    assert event_from_json(event_to_json(notice)) == notice


def test_events_are_written_in_their_order_and_seen_by_all_readers(tmp_path: Path):
    async def scene() -> None:
        journal = Journal(Ledger(tmp_path / "ledger.db"))
        waiter = asyncio.create_task(journal.signal.wait(10.0))
        await asyncio.sleep(0)
        events = [JobProgress(float(n), "j", n, 0.1) for n in range(50)]
        for event in events:
            journal.note(event)
        assert await waiter
        await journal.flush()
        assert [e for _, e in journal.after(0)] == events
        assert [e for _, e in journal.after(journal.after(0)[47][0])] == events[48:]
        journal.ledger.append(CheckpointKept(60.0, "j", 1, 1, "d", 1))  # by the reconciler, say
        await journal.catch_up()
        assert journal.after(0)[-1][1] == CheckpointKept(60.0, "j", 1, 1, "d", 1)
        await journal.close()

    asyncio.run(scene())


def test_the_history_of_a_long_life_lies_on_disk_and_not_in_memory(tmp_path: Path):
    async def scene() -> None:
        journal = Journal(Ledger(tmp_path / "ledger.db"))
        journal.note(*(JobProgress(float(n), "of-long-life", n, 0.1) for n in range(3000)))
        await journal.flush()
        assert not [o for o in gc.get_objects() if type(o) is JobProgress and o.job == "of-long-life"]
        found = [e.version for _, e in await journal.page(1000, 5)]
        assert found == [1000, 1001, 1002, 1003, 1004]
        assert await journal.page(3000, 5) == []
        await journal.close()

    asyncio.run(scene())


def test_a_ledger_that_cannot_be_written_stops_the_dispatcher(tmp_path: Path):
    async def scene() -> None:
        ledger = Ledger(tmp_path / "ledger.db")
        journal = Journal(ledger)
        with sqlite3.connect(tmp_path / "ledger.db") as db:
            db.execute("DROP TABLE events")
        journal.note(JobProgress(1.0, "j", 1, 0.1))
        with pytest.raises(SpotfleetError):
            await journal.flush()
        with pytest.raises(SpotfleetError):
            journal.check()

    asyncio.run(scene())
