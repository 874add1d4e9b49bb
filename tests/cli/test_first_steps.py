"""A newcomer's first commands: what is missing, misspelt, slow or interrupted is named at once."""

from __future__ import annotations

import io
import json
import sys
import time

import pytest

from spotfleet.cli import console
from spotfleet.cli.options import Interrupted


def test_without_a_command_the_help_is_printed_and_no_error(user):
    said = user.types("")
    assert said.code == 2 and "Usage:" in said.err and "--help" in said.err
    assert "error:" not in said.err and "hint:" not in said.err


@pytest.mark.parametrize("line", ["up fleet.yaml", "up fleet.yaml --dryrun"])
def test_a_misspelt_word_of_resources_is_named_with_file_and_line_instead_of_a_plan(user, line):
    user.write("fleet.yaml", "name: digits\nresources:\n  use_spot: true\n  instance_type: cpu.smal\n")
    said = user.fails(line, code=2)
    assert said.out == "" and said.err.startswith("error: fleet.yaml:4: resources: instance_type 'cpu.smal' is unknown")
    assert "did you mean 'cpu.small'?" in said.err and "`provider: ssh`" in said.err


def test_a_fleet_file_with_another_ending_is_suggested(user):
    assert "there is no file fleet.yml; did you mean 'fleet.yaml'?" in user.fails("up fleet.yml", code=2).err


def test_interrupting_the_question_says_that_nothing_was_changed(monkeypatch, capsys):
    class Keyboard(io.StringIO):
        def isatty(self) -> bool:
            return True

        def readline(self, *_: int) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Keyboard())
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _self: True, raising=False)
    with pytest.raises(Interrupted):
        console.confirm("Go on?", False)
    assert "nothing was changed" in capsys.readouterr().err


def test_what_takes_long_says_what_it_waits_for_and_what_is_quick_does_not(monkeypatch, capsys):
    with console.told_if_slow("waiting for A"):
        pass
    monkeypatch.setattr(console, "SLOW_S", 0.01)
    shown, end = "", time.monotonic() + 60
    with console.told_if_slow("waiting for B"):
        while not shown and time.monotonic() < end:
            time.sleep(0.01)
            shown = capsys.readouterr().err
    assert shown == "waiting for B\n"


def test_lists_without_content_say_so_on_stderr(up):
    said = up.ok("jobs")
    assert (said.out, said.err) == ("", "fleet digits has had no job\n")
    assert json.loads(up.ok("jobs -o json").out) == []
    up.ok("down -y")
    said = up.ok("hosts")
    assert (said.out, said.err) == ("", "fleet digits is down: no host is up\n")


def test_after_the_end_status_says_where_the_results_are(up):
    up.ok("train hello.py")
    up.ok("down -y")
    said = up.ok("status")
    assert f"results are in {up.home / 'fleets/digits/archive'}; `spotfleet down` has nothing left to do" in said.err


def test_outputs_of_a_job_that_wrote_none_make_no_folder(up):
    up.ok("train hello.py")
    up.ok("down -y")
    assert "hello-1 has written no file" in up.ok("outputs hello-1").out
    assert not (up.work / "outputs").exists()
    (up.work / "mine").mkdir()
    up.ok("outputs hello-1 mine")
    assert (up.work / "mine").is_dir()


def test_a_job_with_one_worker_has_rank_0(up):
    up.ok("train hello.py --np 1")
    assert "hint: it has one worker, rank 0" in up.fails("logs --rank 7").err
