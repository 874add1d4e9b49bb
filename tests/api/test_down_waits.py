"""`down` waits while results arrive, stops with their names when they do not, and says what was not collected."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.api.lifecycle import down
from spotfleet.errors import SpotfleetError
from spotfleet.protocol.messages import NOT_COLLECTED, UnsentStatus
from spotfleet.transport.client import Ending

FULL = "one-1: its output waits: the dispatcher's disk is full"
HELD = UnsentStatus("f-1", "one-1", "output", 22_000_000, 130.0, 3470.0, FULL)
DRAINS = Ending(False, "asked", {"f-1": "draining"}, (HELD,))
DOWN = Ending(True, "asked", {})


class Clock:
    """Time that passes only while `down` sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(down, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def wait(*endings: Ending, each: int = 1, discard: bool = False) -> list[str]:
    """Wait with a dispatcher that gives each of `endings` so many times, the last one for ever; its lines."""
    answers, lines = [e for e in endings for _ in range(each)], []
    client = SimpleNamespace(ending=lambda: answers.pop(0) if len(answers) > 1 else answers[0])
    down._wait_for_workers(client, "f", lines.append, discard)  # type: ignore[arg-type]
    return lines


def test_down_stops_when_nothing_arrives_and_names_job_host_and_bytes(clock: Clock):
    with pytest.raises(SpotfleetError) as caught:
        wait(DRAINS)
    assert str(caught.value) == ("not all results are here: f-1 still holds 22.0 MB of the output of one-1, and "
                                 f"nothing has arrived for 2 min 10 s ({FULL})")
    assert caught.value.hint == ("`spotfleet down f` again once the cause is gone, or --discard to give them up; the "
                                 "machines stay (and cost) for 57 min more, then these results are lost")
    assert caught.value.exit_code == 1 and down.LEAST_S <= clock.now - 1000.0 < down.LEAST_S + 1


def test_down_waits_while_bytes_arrive_however_long_that_takes(clock: Clock):
    moving = [replace(DRAINS, unsent=(replace(HELD, bytes=n * 1_000_000, quiet_s=1.0),)) for n in range(4000, 0, -1)]
    lines = wait(*moving, DOWN, each=4)
    assert clock.now - 1000.0 > 4 * down.WORKERS_GONE_S
    assert lines[0] == "going down: f-1 (draining, still holds 4.0 GB of the output of one-1)"
    assert 10 < len(lines) < (clock.now - 1000.0) / down.LINE_S + 2


def test_down_with_discard_ends_its_wait_also_for_a_dispatcher_that_always_reports_something_new(clock: Clock):
    moving = [replace(DRAINS, unsent=(replace(HELD, bytes=n, quiet_s=1.0),)) for n in range(4000)]
    with pytest.raises(SpotfleetError, match="after 600 s there are still f-1"):
        wait(*moving, each=4, discard=True)
    assert clock.now - 1000.0 < down.WORKERS_GONE_S + 1


@pytest.mark.parametrize("other", [
    replace(DRAINS, left={"f-1": "draining", "f-2": "draining"}),  # one without results is to end first
    replace(DRAINS, unsent=(HELD, replace(HELD, kind="log", quiet_s=3.0))),
    replace(DRAINS, unsent=(replace(HELD, stays_s=100.0),)),  # its agent is silent: the dispatcher ends it soon
    replace(DRAINS, unsent=(replace(HELD, stays_s=None),)),  # it still has workers
], ids=["another host", "something arrives", "ends soon", "not draining"])
def test_down_does_not_stop_while_there_is_something_else_to_wait_for(clock: Clock, other: Ending):
    wait(other, DOWN, each=100)


def test_discard_waits_for_the_dispatcher_to_end_the_hosts(clock: Clock):
    wait(DRAINS, DOWN, each=1000, discard=True)
    with pytest.raises(SpotfleetError, match="after 600 s there are still f-1"):
        wait(DRAINS, discard=True)


def test_an_older_dispatcher_reports_no_results(clock: Clock):
    with pytest.raises(SpotfleetError, match="after 600 s there are still f-1"):
        wait(replace(DRAINS, unsent=()))


def test_what_the_archive_lacks_is_named(tmp_path: Path):
    folder = SimpleNamespace(archive=tmp_path)
    assert down._not_collected(folder) == ((), ())  # type: ignore[arg-type]
    lost = {"at": 5.0, "job": "one-1", "host": "f-1", "what": "output", "bytes": 22_000_000, "why": FULL, "kept_at": ""}
    (tmp_path / NOT_COLLECTED).write_text(json.dumps({
        "lost": [lost, {**lost, "bytes": 0, "kept_at": "/target"}],
        "partial_files": [{"job": "one-1", "worker": "f-1/0/1", "file": "f2615.bin"}]}))
    assert down._not_collected(folder) == (  # type: ignore[arg-type]
        ("22.0 MB of the output of one-1 (lost with f-1)", "a part of the output of one-1 (a copy is in /target)"),
        ("the end of 'f2615.bin' of f-1/0/1 in one-1",))
    (tmp_path / NOT_COLLECTED).write_text(json.dumps({
        "lost": [], "partial_files": [{"job": "one-1", "worker": "f-1/0/1", "file": "nnn", "at": "n~1.partial"}],
        "more_partial_files": True,
        "refused": [{"name": "jobs/a", "at": "", "why": "no"},
                    {"name": "jobs/b", "at": "set-aside/1", "why": "long"}]}))
    assert down._not_collected(folder) == (  # type: ignore[arg-type]
        ("'jobs/a' (no)",), ("the end of 'nnn' of f-1/0/1 in one-1, now 'n~1.partial'", "the ends of more files",
                             "'jobs/b' under its name (long): it is set-aside/1"))


@pytest.mark.parametrize("text", ["no JSON", "[" * 200_000, "[]", '{"lost": 1}', '{"lost": [{}], "partial_files": []}'],
                         ids=["text", "deep", "list", "number", "empty"])
def test_a_list_of_missing_results_that_cannot_be_read_is_a_loss_and_no_crash(tmp_path: Path, text: str):
    folder = SimpleNamespace(archive=tmp_path, record=SimpleNamespace(reached=False))
    (tmp_path / NOT_COLLECTED).write_text(text)
    assert down._not_collected(folder)[0] or down._incomplete(folder)  # type: ignore[arg-type]
    down._change_not_collected(tmp_path, {"given_up": "the link is down"})
    assert json.loads((tmp_path / NOT_COLLECTED).read_text())["given_up"] == "the link is down"
