"""Order of recovery.py's events, and its rows while it runs and after Ctrl-C. With systems that do nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCH = str(Path(__file__).parents[2] / "bench")
sys.path.insert(0, BENCH)
try:
    import recovery
    import results
    from diary import Diary, Outcome
    from recovery import Part, Results, Row, in_turns, mixed
finally:
    sys.path.remove(BENCH)

ABOUT = {"at": "2026-11-20T10:00:00+00:00", "commit": "abc", "cores": 2, "torch": "2.13", "load_before": 0.1}


def part(name: str, count: int, *, alone: bool = False) -> Part:
    return Part(lambda folder: name, mixed({"worker": count}), alone=alone)


def order(parts: list[Part], turns: int) -> list[tuple[str, list[int]]]:
    return [(p.make(Path()), [i for _, i in events]) for p, events in in_turns(parts, turns)]


def test_systems_take_turns_and_each_turn_begins_with_another():
    ours, peer = part("ours", 4), part("peer", 2)
    assert order([ours, peer], 2) == [("ours", [0, 1]), ("peer", [0]), ("peer", [1]), ("ours", [2, 3])]


def test_every_event_is_played_once_in_whatever_number_of_turns():
    for turns in range(1, 9):
        for count in range(8):
            played = order([part("a", count), part("b", 3)], turns)
            assert [i for name, events in played if name == "a" for i in events] == list(range(count))
            assert all(events for _, events in played)


def test_a_system_with_few_events_is_not_played_in_one_turn_alone():
    assert [name for name, _ in order([part("a", 4), part("b", 2)], 4)].count("b") == 2


def test_an_event_that_needs_its_own_world_shares_none():
    assert order([part("a", 3, alone=True)], 1) == [("a", [0]), ("a", [1]), ("a", [2])]


def test_kinds_of_events_take_turns_too():
    assert mixed({"worker": 2, "host": 3}) == (("worker", 0), ("host", 0), ("worker", 1), ("host", 1), ("host", 2))


def test_a_row_is_in_the_file_before_the_next_event_and_a_torn_line_is_left_out(tmp_path):
    file = tmp_path / "rows.jsonl"
    kept = Results(ABOUT, file)
    kept.keep(Row("spotfleet", "worker", 1.0, Outcome(0.3, 0.3, 0.2, 0, 3, 2, 1.3)))
    assert [json.loads(line) for line in file.read_text().splitlines()][1]["row"]["outcome"]["latency_s"] == 0.3
    file.write_text(file.read_text() + '{"row": {"sys')
    (run,) = results.load(file)
    assert [r["system"] for r in run["rows"]] == ["spotfleet"] and run["commit"] == "abc"
    assert "interrupted." in "\n".join(results.section(run, ""))


def test_several_runs_in_one_file_of_rows_stay_apart(tmp_path):
    file = tmp_path / "rows.jsonl"
    for count in (1, 2):
        kept = Results(ABOUT, file)
        for _ in range(count):
            kept.keep(Row("spotfleet", "worker", 1.0, None, "not within 60 s"))
        kept.finish({"load_after": 2.0, "skipped": {}})
    assert [len(run["rows"]) for run in results.load(file)] == [1, 2]


def test_ctrl_c_prints_what_has_been_measured(tmp_path, monkeypatch, capsys):
    def interrupted(part: Part, events: list[tuple[str, int]], kept: Results) -> None:
        kept.keep(Row("spotfleet", "worker", 1.0, Outcome(0.3, 0.3, 0.2, 0, 3, 2, 1.3)))
        raise KeyboardInterrupt

    monkeypatch.setattr(recovery, "play_all", interrupted)
    monkeypatch.setattr(recovery.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["recovery.py", "--only", "worker", "--peer-rounds", "0"])
    monkeypatch.setenv("SPOTFLEET_LOCAL_OWNER_PID", "")
    with pytest.raises(SystemExit) as left:
        recovery.main()
    said = capsys.readouterr().out
    assert left.value.code == 130
    assert "kill worker -> all survivors' next step, median: spotfleet 0.30 s" in said and "INTERRUPTED" in said


def test_a_system_that_never_begins_to_train_is_a_failed_row_and_not_tried_for_ever(monkeypatch):
    class Idle:
        name = "idle"

        def __init__(self, folder: Path) -> None:
            self.diary = Diary(folder)

        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(recovery, "LIMIT_S", 0.0)
    kept = Results(ABOUT)
    recovery.play_all(Part(Idle, ()), [("worker", 0), ("worker", 1)], kept)
    assert [(r.system, r.outcome) for r in kept.rows] == [("idle", None)] * 2
