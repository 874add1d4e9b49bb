"""What the commands print on terminals of 60, 80 and 120 columns: no line is longer, and no word is broken."""

from __future__ import annotations

import os
import pty
import re
import struct
import sys
import termios
from fcntl import ioctl

import pytest

from spotfleet.cli import render, tables
from spotfleet.protocol.messages import HostStatus, JobStatus
from tests.support.cli.cli_user import User

WIDTHS = [60, 80, 120]
HIDDEN = re.compile(r"\(not\s+shown\s+at\s+this\s+width:\s+[^)]*\)")
COMMANDS = ["up fleet.yaml --dryrun", "status", "jobs", "hosts", "events", "cost", "cost --by host",
            "cost --by pool", "leaks", "offers --gpus A100:8", "offers --instance-type g5.xlarge --all", "catalog"]
LONG_WHY = ("needs 3 workers, 2 free: 1 of 3 held by training-of-the-large-model-17; pool local/local-b/cpu.small/spot "
            "refused, asked again at 12:00:30 UTC")


def fits(narrow: str, wide: str, width: int) -> None:
    """Nothing of `narrow` is wider than the terminal; each of its words is one of `wide`, so none was broken."""
    assert [line for line in narrow.splitlines() if len(line) > width] == []
    words = {word.strip(":") for word in steady(wide).split()}
    assert [word for word in steady(HIDDEN.sub("", narrow)).split() if word.strip(":") not in words] == []


@pytest.fixture
def terminal(monkeypatch):
    """Makes the captured stdout and stderr a terminal of so many columns; 0: none."""
    def make(width: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(type(stream), "isatty", lambda _self: width > 0, raising=False)
        monkeypatch.setenv("COLUMNS", str(width))

    return make


def steady(text: str) -> str:
    """Without what differs between two calls: times, spans and amounts."""
    return re.sub(r"\d[\d.:]*", "0", text)


def test_a_path_that_is_too_long_for_any_line_stays_whole_and_keeps_its_lines_indentation():
    path = "/" + "x" * 90
    assert tables.flow(f"error:\n    File {path}, line 1", 80).splitlines() == [
        "error:", "    File", f"      {path},", "      line 1"]


def test_an_interruption_notice_is_shown_once_with_the_seconds_left():
    host = HostStatus("f-0", "worker", "draining", "local/a/t/spot", 1, 1, 1, seconds_left=90.0,
                      why="GPU 0: fell off; interruption notice: it ends at 12:00:30 UTC")
    shown = render.hosts([host])
    assert "interruption notice: ends in 90 s; GPU 0: fell off" in shown and shown.count("notice") == 1


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_output_of_a_command_fits_the_terminal(up: User, terminal, command, width):
    up.ok("train hello.py")  # to its end: from now on nothing but times and amounts change
    wide = up.types(command)
    terminal(width)
    narrow = up.types(command)
    terminal(0)
    later = up.types(command)  # with a word for what began to cost something meanwhile
    assert narrow.code == wide.code
    fits(narrow.out, wide.out + later.out, width)


def hosts() -> list[HostStatus]:
    return [HostStatus("training-of-vision-17", "worker", "launching", "aws/us-east-1a/p4d.24xlarge/spot", 8, 9_832_000,
                       32_772_600, "10.11.12.13:40123", ("pretraining-3",), since_s=3723.0, why=LONG_WHY),
            HostStatus("training-of-vision-d-0", "dispatcher", "up", "aws/us-east-1b/t3.small/on-demand", 0, 20_800,
                       20_800, "10.11.12.14:40123", since_s=3723.0)]


def jobs() -> list[JobStatus]:
    return [JobStatus("pretraining-3", "pretraining", "queued", LONG_WHY, 3, version=123456, repeated=12,
                      min_workers=3, max_workers=4, age_s=86400.0)]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("shown", "given"), [(render.hosts, hosts), (render.jobs, jobs)])
def test_long_names_addresses_and_reasons_fit_the_terminal(terminal, shown, given, width):
    wide = shown(given())
    terminal(width)
    narrow = shown(given())
    fits(narrow, wide, width)
    assert " ".join(LONG_WHY.split()) in " ".join(narrow.split()) or width == 120  # wrapped, not cut


def test_into_a_pipe_a_table_is_as_wide_as_it_needs(terminal):
    terminal(0)
    assert max(map(len, render.hosts(hosts()).splitlines())) > 200


# ---- the order of what is given up


HEAD = ["name", "place", "$/h", "why"]
ROW = ["f-1", "zone-a/m5", "0.10", "because of a long reason that wraps somewhere"]


@pytest.mark.parametrize(("width", "shown"), [
    (80, ["name  place       $/h  why",
          "f-1   zone-a/m5  0.10  because of a long reason that wraps somewhere"]),
    (60, ["name  place       $/h  why",
          "f-1   zone-a/m5  0.10  because of a long reason that wraps",
          "                       somewhere"]),
    (40, ["name  place       $/h",
          "f-1   zone-a/m5  0.10",
          "    because of a long reason that wraps",
          "    somewhere"]),
    (19, ["name   $/h",
          "f-1   0.10",
          "    because of a",
          "    long reason",
          "    that wraps",
          "    somewhere",
          "(not shown at this",
          "  width: place)"]),
    (9, ["name: f-1", "place:", "zone-a/m5", "  $/h:", "    0.10", "why:", "because", "of a long", "reason", "that",
         "wraps", "somewhere"]),
])
def test_words_wrap_then_go_below_then_columns_are_left_out_then_rows_become_lists(width, shown):
    assert tables.table(HEAD, [ROW], ["$/h"], drop=["place"], words="why", width=width).splitlines() == shown


def test_a_column_without_content_goes_first():
    shown = tables.table(["name", "jobs", "place"], [["f-1", "-", "zone-a"]], drop=["place"], width=14)
    assert shown.splitlines() == ["name  place", "f-1   zone-a"]


def test_a_line_of_prose_keeps_its_indentation_and_short_lines_stay():
    assert tables.flow("  one two three\nshort", 9) == "  one two\n    three\nshort"


def test_the_width_is_that_of_the_terminal_unless_COLUMNS_says_otherwise(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    far, near = pty.openpty()
    try:
        ioctl(near, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 71, 0, 0))
        with open(near, "w", closefd=False) as stream, open(os.devnull, "w") as file:
            assert (tables.columns(stream), tables.columns(file)) == (71, 0)
            monkeypatch.setenv("COLUMNS", "90")
            assert (tables.columns(stream), tables.columns(file)) == (90, 0)
    finally:
        os.close(far), os.close(near)
