"""The benchmarks' own arithmetic: what diaries say of an event, and which aims a run's figures hold."""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path

import pytest

BENCH = str(Path(__file__).parents[2] / "bench")
sys.path.insert(0, BENCH)
try:
    import aims
    import results
    from diary import Diary, Note, Outcome, changed, interval, is_whole, outcome, percentile, step_s, survivors_back
finally:
    sys.path.remove(BENCH)

KILL = 1.05


def steps(label: str, pids: list[int], first_step: int, ends: list[float], late_s: float = 0.0) -> list[Note]:
    """Each of `pids` is a rank; rank r notes each step r * late_s later than rank 0."""
    return [Note(pid, rank, len(pids), first_step + i, at + rank * late_s, label)
            for i, at in enumerate(ends) for rank, pid in enumerate(pids)]


def test_latency_runs_until_the_slowest_survivor_and_pause_is_the_longest_gap_of_one():
    notes = [*steps("1", [10, 11, 12], 0, [0.8, 1.0]), *steps("2", [10, 11], 2, [1.5, 1.7, 1.9], late_s=0.01)]
    assert outcome(notes, KILL) == Outcome(
        latency_s=pytest.approx(0.46), pause_s=pytest.approx(0.51), step_s=pytest.approx(0.2), repeated=0,
        world_before=3, world_after=2, next_at=pytest.approx(1.51))


def test_a_survivor_that_is_left_out_of_the_next_membership_is_waited_for():
    """Two of three outlive the kill; the next membership is one of them with a new process, the other follows."""
    notes = [*steps("1", [10, 11, 12], 0, [0.8, 1.0]), *steps("2", [10, 22], 2, [1.5, 1.7, 1.9])]
    assert not survivors_back(notes, KILL, 2)
    notes += steps("3", [10, 22, 11], 5, [4.0, 4.2, 4.4])
    assert survivors_back(notes, KILL, 2)
    found = outcome(notes, KILL)
    assert (found.latency_s, found.pause_s, found.world_after) == (pytest.approx(2.95), pytest.approx(3.0), 2)


def test_a_new_process_is_no_survivor_and_its_first_step_is_not_waited_for():
    notes = [*steps("1", [10, 11, 12], 0, [0.8, 1.0]), *steps("2", [10, 11], 2, [1.5, 1.7, 1.9]),
             *steps("3", [10, 11, 22], 5, [2.5, 2.7, 2.9])]
    assert outcome(notes, KILL).latency_s == pytest.approx(0.45)
    assert outcome(notes, KILL, "3").latency_s == pytest.approx(1.45)  # a join is over when the new one has trained


def test_a_membership_of_new_processes_alone_has_no_survivor_to_wait_for():
    notes = [*steps("1", [10, 11, 12], 0, [0.8, 1.0]), *steps("2", [20, 21, 22], 2, [7.0, 7.2, 7.4])]
    assert survivors_back(notes, KILL, 2) and not survivors_back(notes[:6], KILL, 2)


def test_a_step_that_the_old_membership_still_finishes_is_not_the_next_step():
    through = Note(10, 0, 3, 2, KILL + 0.01, "1")  # its reduction had ended before the kill
    notes = [*steps("1", [10, 11, 12], 0, [0.8, 1.0]), through, *steps("2", [10, 11], 3, [1.5, 1.7, 1.9])]
    assert outcome(notes, KILL).latency_s == pytest.approx(0.45)


def test_where_every_process_was_restarted_the_pause_runs_from_the_last_old_step():
    notes = [*steps("1", [10, 11, 12], 0, [0.8, 1.0]), *steps("2", [20, 21, 22], 2, [7.0, 7.2, 7.4], late_s=0.1)]
    found = outcome(notes, KILL)
    assert (found.latency_s, found.pause_s) == (pytest.approx(6.15), pytest.approx(6.2))


def test_steps_of_both_memberships_count_as_repeated():
    notes = [*steps("1", [10, 11, 12], 0, [0.2, 0.4, 0.6, 0.8, 1.0]), *steps("2", [20, 21, 22], 2, [7.0, 7.2, 7.4])]
    assert outcome(notes, KILL).repeated == 3


def test_the_pause_beyond_one_step_leaves_out_one_step_of_the_new_membership():
    notes = [*steps("1", [10, 11, 12], 0, [0.8, 1.0]), *steps("2", [10, 11], 2, [1.3, 1.5, 1.7])]
    assert outcome(notes, KILL).beyond_s == pytest.approx(0.1)


def test_a_later_membership_is_measured_against_the_one_before_it():
    notes = [*steps("1", [10, 11, 12], 0, [0.8, 1.0]), *steps("2", [10, 11], 2, [1.4, 1.6, 1.8]),
             *steps("3", [10, 11, 22], 5, [2.5, 2.7, 2.9])]
    found = outcome(notes, KILL, "3")
    assert (found.pause_s, found.world_before, found.world_after) == (pytest.approx(0.7), 2, 3)


def test_a_membership_counts_once_each_of_its_ranks_has_done_a_step():
    notes = [*steps("1", [10, 11, 12], 0, [1.0]), Note(10, 0, 2, 1, 1.5, "2")]
    assert changed(notes, KILL) is None
    assert changed([*notes, Note(11, 1, 2, 1, 1.6, "2")], KILL) == "2"


def test_a_membership_that_began_before_the_event_is_not_its_result():
    notes = [*steps("1", [10, 11, 12], 0, [0.2]), *steps("2", [10, 11], 1, [1.0, 1.5])]
    assert changed(notes, KILL) is None
    with pytest.raises(ValueError, match="after the event"):
        outcome(notes, KILL)


def test_a_world_is_whole_when_every_rank_of_the_newest_membership_has_done_its_steps():
    notes = steps("1", [10, 11, 12], 0, [0.8, 1.0, 1.2])
    assert is_whole(notes, 3, 3)
    assert not is_whole(notes, 3, 4)
    assert not is_whole([*notes, Note(10, 0, 2, 3, 1.4, "2")], 3, 3)
    assert not is_whole([n for n in notes if n.rank != 1], 3, 1)
    assert not is_whole(notes, 2, 1)


def test_how_long_a_step_takes_is_told_from_three_gaps_on():
    assert step_s(steps("1", [10], 0, [1.0, 1.2, 1.4])) is None
    assert step_s(steps("1", [10], 0, [1.0, 1.2, 1.4, 2.0])) == pytest.approx(0.2)


def test_a_diary_leaves_the_line_that_is_being_written_for_later(tmp_path):
    path, line = tmp_path / "10.jsonl", '{"pid": 10, "rank": 0, "world": 3, "step": %d, "at": 1.5, "label": "1"}\n'
    first, second = Note(10, 0, 3, 4, 1.5, "1"), Note(10, 0, 3, 5, 1.5, "1")
    diary = Diary(tmp_path)
    path.write_text((line % 4)[:30])
    assert diary.read() == []
    path.write_text(line % 4 + (line % 5)[:30])
    assert diary.read() == [first]
    path.write_text(line % 4 + line % 5)
    assert diary.read() == diary.read() == [first, second]


def test_a_diary_is_read_by_time_from_any_instant_on(tmp_path):
    line = '{"pid": %d, "rank": 0, "world": 1, "step": 0, "at": %s, "label": "1"}\n'
    (tmp_path / "11.jsonl").write_text(line % (11, 2.0))
    (tmp_path / "10.jsonl").write_text(line % (10, 1.0) + line % (10, 3.0))
    diary = Diary(tmp_path)
    assert [n.at for n in diary.read()] == [1.0, 2.0, 3.0]
    assert [n.at for n in diary.read(2.0)] == [2.0, 3.0]


def test_the_95th_of_20_is_the_last_but_one():
    assert percentile([float(i) for i in range(20, 0, -1)], 0.95) == 19.0
    assert percentile([3.0, 1.0, 2.0], 0.95) == 3.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_the_bootstrap_interval_holds_the_median_19_times_in_20():
    draw, held = random.Random(7), 0
    for seed in range(100):
        low, high = interval([draw.gauss(1.0, 0.1) for _ in range(24)], rounds=100, seed=seed)
        held += low <= 1.0 <= high
    assert 88 <= held <= 99


def test_the_interval_of_equal_values_is_that_value():
    assert interval([1.5] * 20) == (1.5, 1.5)
    assert interval([1.0, 2.0, 4.0], statistic=statistics.mean)[0] >= 1.0


def row(system: str, event: str, latency_s: float, pause_s: float = 0.3, repeated: int = 0) -> dict:
    return {"system": system, "event": event, "at": 0.0, "problem": "",
            "outcome": {"latency_s": latency_s, "pause_s": pause_s, "step_s": 0.2, "repeated": repeated}}


def held(found: dict) -> dict[str, bool | None]:
    return {aim.line: aim.holds for aim in aims.judge({"rows": [], **found})}


def test_a_run_without_figures_judges_nothing():
    assert set(held({}).values()) == {None}


def test_kills_are_judged_by_median_and_p95_beyond_one_step_and_by_half_the_best_tuned_peer():
    ours = [row("spotfleet", "worker", s) for s in (0.3, 0.44, 0.9)]
    peers = [row("torchft tuned", "worker", 1.0), row("torchrun tuned", "worker", 5.0), row("torchft", "worker", 0.1)]
    found = held({"rows": [*ours, *peers]})
    next_step = "kill worker -> all survivors' next step"
    assert [found[f"{next_step}, {what}"] for what in ("median", "p95")] == [True, False]
    assert found["kill worker: half of the best tuned peer"] is True
    assert held({"rows": [*ours, row("torchft tuned", "worker", 0.87)]})[
        "kill worker: half of the best tuned peer"] is False


def test_a_planned_change_holds_only_without_a_repeated_step():
    line = "graceful leave: pause beyond one step, steps repeated"
    assert held({"rows": [row("spotfleet", "leave", 1.0, pause_s=0.29)]})[line] is True
    assert held({"rows": [row("spotfleet", "leave", 1.0, pause_s=0.31)]})[line] is False
    assert held({"rows": [row("spotfleet", "leave", 1.0, pause_s=0.29, repeated=1)]})[line] is False


def test_an_event_after_which_training_did_not_go_on_holds_no_line_of_its_kind():
    hung = {"system": "spotfleet", "event": "worker", "at": 0.0, "problem": "not within 120 s", "outcome": None}
    found = held({"rows": [row("spotfleet", "worker", 0.3), row("spotfleet", "host", 0.3), hung]})
    assert [found[f"kill {what} -> all survivors' next step, median"] for what in ("worker", "host")] == [False, True]


def test_memory_is_what_a_worker_holds_more_than_one_of_plain_ddp():
    def memory(ours: float) -> dict:
        return {name: dict.fromkeys(("rss_mb", "pss_mb", "uss_mb"), mb) for name, mb in (("spotfleet", ours),
                                                                                        ("ddp", 500.0))}
    line = "extra resident memory of a worker"
    assert held({"memory": memory(564.0)})[line] is True
    assert held({"memory": memory(565.0)})[line] is False


def test_a_failed_event_is_shown_and_not_averaged():
    hung = {"system": "torchrun", "event": "worker", "at": 0.0, "problem": "not within 75 s", "outcome": None}
    lines = aims.systems({"rows": [row("spotfleet", "worker", 0.4), hung]})
    assert [line.split()[0] for line in lines[1:]] == ["spotfleet", "torchrun"]
    assert "not within 75 s" in lines[2] and "0.40 (0.40-0.40)" in lines[1]


def test_runs_of_different_parts_become_one_section():
    base = {"at": "2026-11-20T10:00:00+00:00", "commit": "abc", "cores": 2, "torch": "2.13", "load_before": 0.1,
            "load_after": 2.0, "skipped": {}, "rows": []}
    first = base | {"rows": [row("spotfleet", "worker", 0.3)], "skipped": {"silent": "needs root"}}
    second = base | {"at": "2026-11-20T11:00:00+00:00", "load_before": 0.5, "load_after": 3.0,
                     "rows": [row("spotfleet", "worker", 0.5)], "start": {"seconds": [0.4], "median_s": 0.4}}
    lines = results.section(results.joined([first, second]), "")
    assert lines[:2] == ["2026-11-20, commit abc, 2 cores,", "torch 2.13, load average 0.1 before and 3.0 after."]
    assert "| spotfleet | kill worker | 2 | 0.40 (0.30-0.50) | 0.100 | 0-0 | 0 |" in lines
    assert "| new worker process to warm, from the zygote | 0.5 s | 0.400 s of 1 | yes |" in lines
    assert lines[-1] == "\nNot measured, silent: needs root."


def test_the_headline_is_the_median_next_step_of_all_survivors_under_each_system_ours_first():
    rows = [row("torchrun", "worker", 9.0), row("torchft tuned", "worker", 0.6), row("spotfleet", "worker", 0.7),
            row("spotfleet", "worker", 0.9), row("spotfleet", "join", 2.0)]
    assert aims.headline({"rows": rows}) == [
        "kill worker -> all survivors' next step, median: spotfleet 0.80 s, torchft tuned 0.60 s, torchrun 9.00 s"]
