"""The append-only file behind a fleet."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spotfleet.errors import SpotfleetError
from spotfleet.fleet.domain.events import HostJoined, LaunchIntended, NodesChanged
from spotfleet.fleet.domain.state import fold
from spotfleet.fleet.ledger import Ledger, read_events
from spotfleet.model import Market, Nodes, Offer, Role

OFFER = Offer("fake", "r", "zone-a", "g5", Market.SPOT, 1, 1_000_000, 3_000_000)


def event(n: int) -> NodesChanged:
    return NodesChanged(float(n), Nodes(1, n, 9), f"number {n}")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "fleet" / "ledger.db"


def test_what_is_appended_is_read_in_order_by_any_later_opener(path):
    ledger = Ledger(path)
    assert ledger.append(event(1), event(2)) == 2
    assert ledger.append(event(3)) == 3
    ledger.close()
    assert Ledger(path).events() == [(1, event(1)), (2, event(2)), (3, event(3))]
    assert read_events(path) == [event(1), event(2), event(3)]


def test_the_file_its_copies_and_sqlites_files_beside_it_are_the_owners_alone(path):
    before = os.umask(0)
    try:
        ledger = Ledger(path)
        ledger.append(event(1))
        ledger.copy_to(path.with_name("copy.db"))
        files = sorted(path.parent.iterdir())
        assert [file.name for file in files] == ["copy.db", "ledger.db", "ledger.db-shm", "ledger.db-wal"]
        assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    finally:
        os.umask(before)
    assert read_events(path.with_name("copy.db")) == [event(1)]


def test_a_write_waits_for_the_disk(path):
    ledger = Ledger(path)
    settings = [ledger._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
    assert settings == ["wal", 2]


def test_a_reader_goes_on_from_where_it_stopped(path):
    ledger = Ledger(path)
    ledger.append(*map(event, range(5)))
    assert ledger.events(after=3) == [(4, event(3)), (5, event(4))]
    assert ledger.events(after=1, limit=2) == [(2, event(1)), (3, event(2))]
    assert ledger.events(after=5) == []


def test_the_state_is_that_of_all_events_also_of_another_writers(path):
    own, other = Ledger(path), Ledger(path)
    own.append(LaunchIntended(1.0, "f-0", Role.WORKER, OFFER, "missing"))
    before = own.state()
    other.append(HostJoined(2.0, "f-0", "x"), event(7))
    assert own.state() == other.state() == fold(e for _, e in own.events())
    assert own.state().hosts[0].incarnation == "x"
    assert before.hosts[0].incarnation == ""


def test_a_batch_with_an_event_that_cannot_be_written_is_not_written_at_all(path):
    ledger = Ledger(path)
    with pytest.raises(TypeError):
        ledger.append(event(1), HostJoined(2.0, "f-0", object()))
    assert ledger.append() == 0
    ledger.append(event(2))
    assert ledger.events() == [(1, event(2))]


def test_a_write_that_the_disk_refuses_is_told_and_blocks_no_later_one(path):
    ledger = Ledger(path)
    db = sqlite3.connect(path)
    db.execute("CREATE TRIGGER full BEFORE INSERT ON events WHEN NEW.at = 2 BEGIN SELECT RAISE(FAIL, 'no room'); END")
    db.close()
    with pytest.raises(SpotfleetError, match="no room"):
        ledger.append(event(1), event(2))
    ledger.append(event(3))
    assert [e for _, e in ledger.events()] == [event(3)] == read_events(path)


def test_many_threads_write_and_read_one_ledger(path):
    ledger, seen = Ledger(path), []

    def work(k: int) -> None:
        for n in range(20):
            ledger.append(event(100 * k + n), event(100 * k + n + 50))
            seen.append(ledger.state().nodes)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    rows = ledger.events()
    assert [seq for seq, _ in rows] == list(range(1, 161))
    pairs = [int(e.at) for _, e in rows]
    assert all(b == a + 50 for a, b in zip(pairs[::2], pairs[1::2], strict=True)), "a batch was torn apart"
    assert len(seen) == 80
    assert ledger.state() == fold(e for _, e in rows)


def test_several_that_make_one_ledger_at_once_all_get_it(tmp_path):
    for number in range(30):
        path, begin = tmp_path / f"{number}.db", threading.Barrier(4)

        def make(path: Path = path, begin: threading.Barrier = begin) -> str:
            begin.wait()
            try:
                Ledger(path).close()
            except SpotfleetError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(4) as pool:
            assert [f.result() for f in [pool.submit(make) for _ in range(4)]] == [""] * 4


WRITER = """
import sys
from spotfleet.fleet.ledger import Ledger
from spotfleet.fleet.domain.events import NodesChanged
from spotfleet.model import Nodes
ledger = Ledger(sys.argv[1])
for n in range(int(sys.argv[2])):
    ledger.append(NodesChanged(1.0, Nodes(), "a"), NodesChanged(2.0, Nodes(), "b"), NodesChanged(3.0, Nodes(), "c"))
    print(n, flush=True)
"""


@pytest.mark.processes
def test_several_processes_write_one_ledger(path):
    """Real processes: locks of sqlite hold between processes, which threads cannot show."""
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), "15"], stdout=subprocess.DEVNULL)
               for _ in range(3)]
    try:
        assert [w.wait(60) for w in writers] == [0, 0, 0]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert [e.at for e in read_events(path)] == [1.0, 2.0, 3.0] * 45


@pytest.mark.processes
def test_a_killed_writer_leaves_whole_batches_and_everything_that_append_returned_from(path):
    """A real kill -9: nothing less shows what is on the disk."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path), "1000000"], stdout=subprocess.PIPE)
    try:
        confirmed = [int(writer.stdout.readline()) for _ in range(20)][-1] + 1
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    ats = [e.at for e in read_events(path)]
    assert len(ats) >= 3 * confirmed
    assert ats == [1.0, 2.0, 3.0] * (len(ats) // 3)


def test_a_copy_is_one_whole_file_even_while_others_write(path, tmp_path):
    ledger = Ledger(path)
    ledger.append(event(1), event(2))
    home = tmp_path / "home"
    home.mkdir()
    ledger.copy_to(home / "ledger.db")
    ledger.append(event(3))
    assert read_events(home / "ledger.db") == [event(1), event(2)]
    assert [p.name for p in home.iterdir()] == ["ledger.db"]
    ledger.copy_to(home / "ledger.db")
    assert read_events(home / "ledger.db") == [event(1), event(2), event(3)]


def test_a_ledger_that_was_never_written_to_is_empty(path):
    Ledger(path).close()
    assert read_events(path) == []


def refused(open_it, path) -> SpotfleetError:
    with pytest.raises(SpotfleetError) as error:
        open_it(path)
    assert str(path) in str(error.value) and error.value.hint
    return error.value


@pytest.mark.parametrize("open_it", [Ledger, read_events])
def test_a_ledger_of_another_schema_is_refused_with_both_numbers(path, open_it):
    Ledger(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=7")
    db.close()
    assert "schema 7; this spotfleet reads 1" in str(refused(open_it, path))


@pytest.mark.parametrize("open_it", [Ledger, read_events])
def test_a_file_that_is_no_ledger_is_refused_and_left_as_it_is(tmp_path, open_it):
    text, foreign = tmp_path / "text", tmp_path / "foreign.db"
    text.write_bytes(b"not a database, but long enough to have a header that can be read" * 40)
    db = sqlite3.connect(foreign)
    db.execute("CREATE TABLE mine (x)")
    db.commit()
    db.close()
    before = text.read_bytes(), foreign.read_bytes()
    refused(open_it, text)
    assert "another program" in str(refused(open_it, foreign))
    assert (text.read_bytes(), foreign.read_bytes()) == before


def test_a_ledger_that_does_not_exist_is_not_made_by_reading(tmp_path):
    assert "there is no ledger" in str(refused(read_events, tmp_path / "none.db"))
    assert list(tmp_path.iterdir()) == []


def test_an_event_that_a_newer_release_wrote_is_named(path):
    ledger = Ledger(path)
    ledger.append(event(1))
    db = sqlite3.connect(path)
    db.execute("""INSERT INTO events (at, kind, body) VALUES (1, 'Later', '{"kind": "Later", "at": 1}')""")
    db.commit()
    db.close()
    assert "event 2 cannot be read: unknown event kind 'Later'" in str(refused(read_events, path))
    with pytest.raises(SpotfleetError, match="event 2"):
        ledger.state()


def test_a_long_ledger_is_read_in_pages(path, monkeypatch):
    monkeypatch.setattr("spotfleet.fleet.ledger.PAGE", 3)
    ledger = Ledger(path)
    ledger.append(*(event(n) for n in range(1, 11)))
    pages, read = [], ledger.events
    monkeypatch.setattr(ledger, "events", lambda *given: pages.append(read(*given)) or pages[-1])
    assert [seq for seq, _ in ledger.each(2)] == list(range(3, 11))
    assert [len(page) for page in pages] == [3, 3, 2, 0]
    assert ledger.state() == fold(event(n) for n in range(1, 11))
    ledger.close()
