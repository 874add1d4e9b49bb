"""Text from hosts, scripts and clouds is shown by every command, and can neither command the terminal nor forge a line.

Raw are only `logs` and an attached `train`, which pass on what a script prints, and `-o json`, which escapes it.
"""

from __future__ import annotations

import json
import sys

import pytest

from spotfleet.cli import app, console, event_text, render, tables
from spotfleet.cli.commands import check, cost, read, shell
from spotfleet.fleet.domain.events import HostDraining, JobChanged, SetupFailed, event_to_json
from spotfleet.model import JobState
from spotfleet.protocol.messages import FleetStatus, HostStatus, JobStatus, PolicyStatus
from spotfleet.providers import Finding
from spotfleet.report.html import text as html_text
from spotfleet.words import UNSEEN, harmless, harmless_lines

EVIL = "\x1b]0;pwned\x07\x1b[2J\r\nFAKE LINE\x9b31m\u202e\u2028FAKE\udcff\x0bFAKE"
SHOWN = r"\x1b]0;pwned\x07\x1b[2J FAKE LINE\x9b31m\u202e FAKE\udcff FAKE"


def clean(text: str) -> None:
    """Nothing in `text` is a command to the terminal, and no line of it begins with the forged text."""
    assert not UNSEEN.search(text) and "\r" not in text and "\u2028" not in text
    assert [line for line in text.splitlines() if line.startswith("FAKE")] == []
    text.encode()


def status() -> FleetStatus:
    host = HostStatus(f"w-0{EVIL}", "worker", "up", f"local/a{EVIL}", 1, 2, 3, EVIL, (EVIL,), why=EVIL)
    job = JobStatus(f"j-1{EVIL}", EVIL, "running", EVIL, step_why=EVIL)
    return FleetStatus("f", "up", EVIL, 1, 1, 1, hosts=(host,), jobs=(job,), policy=PolicyStatus(1, 0, EVIL, "spot"))


def test_a_text_becomes_one_line_that_a_terminal_can_only_show():
    assert harmless(EVIL) == SHOWN and harmless("plain, naïve: 東京 \t x") == "plain, naïve: 東京   x"
    assert harmless_lines("a\tb\r\nc\x1b") == "a\tb\nc\\x1b"
    assert "\x1b" not in html_text(EVIL)


@pytest.mark.parametrize("width", [0, 60, 200])
def test_status_hosts_jobs_and_fleets_show_a_hosts_words_harmless(width: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables, "columns", lambda stream=None: width)
    monkeypatch.setattr(render, "columns", lambda stream=None: width)
    found = status()
    for text in (render.fleet_status(found), render.hosts(found.hosts), render.jobs(found.jobs),
                 render.fleets([found])):
        assert "pwned" in text
        clean(text)
    assert sum("FAKE LINE" in line for line in render.hosts(found.hosts).splitlines()) <= 3 or width == 60


def test_json_has_the_exact_text(capsys: pytest.CaptureFixture[str]):
    read.emit(status())
    out = capsys.readouterr().out
    assert json.loads(out)["why"] == EVIL
    clean(out)


@pytest.mark.parametrize("event", [
    HostDraining(0.0, "w-0", EVIL), JobChanged(0.0, "j-1", JobState.FAILED, EVIL),
    SetupFailed(0.0, "j-1", EVIL, 1, EVIL),
], ids=lambda event: type(event).__name__)
def test_an_event_is_one_line(event):
    line = event_text.line(event_to_json(event))
    assert "pwned" in line and len(line.splitlines()) == 1
    clean(line)


def test_messages_and_questions_are_harmless(capsys: pytest.CaptureFixture[str]):
    console.print_message(EVIL)
    console.print_step(EVIL)
    console.print_message(f"\nafter ^C {EVIL}")
    console.next_command(f"spotfleet logs {EVIL}")
    err = capsys.readouterr().err
    assert err == f"{SHOWN}\n  {SHOWN}\n\nafter ^C {SHOWN}\nnext: spotfleet logs {SHOWN}\n"


def test_an_error_with_a_hosts_words_has_no_line_that_looks_like_ours(capsys: pytest.CaptureFixture[str]):
    app._print_error(f"job j-1 failed: Traceback\n  File x\n{EVIL}", EVIL)
    err = capsys.readouterr().err
    clean(err.partition("hint:")[0])
    assert not UNSEEN.search(err) and err.startswith("error: job j-1 failed: Traceback\n    File x\n")


def test_findings_lines_of_machines_and_csv_are_harmless(capsys: pytest.CaptureFixture[str],
                                                         monkeypatch: pytest.MonkeyPatch):
    check._print_finding(Finding(EVIL, "warning", EVIL, "w-0"), as_json=False)
    clean(capsys.readouterr().out)
    place = type("Place", (), {"alias": "f-w0"})()
    printer = shell._line_printer(named=True)
    printer(place, "stdout", "\x1b[31mred\x1b[0m")
    assert capsys.readouterr().out == "f-w0: \x1b[31mred\x1b[0m\n"  # into a pipe: exactly what the command printed
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _self: True, raising=False)
    printer(place, "stdout", "\rf-w1: forged")
    cost._write(cost.CostQuery(output="csv"), f"job,{EVIL}\n")
    out = capsys.readouterr().out
    assert out.startswith("f-w0:  f-w1: forged\n") and not UNSEEN.search(out)
