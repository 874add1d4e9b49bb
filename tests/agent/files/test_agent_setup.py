"""A job's setup on a host: once, its output kept apart, its failure named by the line, an interruption no failure."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.agent.files import setup
from spotfleet.agent.processes.child import ChildSpec
from spotfleet.agent.processes.zygote_client import ForkedProcess
from spotfleet.protocol.messages import Exit
from tests.support.agent.agent_stage import HOST, Stage, eventually

FIRST, SECOND, LOG = f"{HOST}/0/1", f"{HOST}/1/1", f"{HOST}#setup"
processes = pytest.mark.processes


def why(tmp_path: Path, script: str) -> tuple[str, bool]:
    """What is said of a setup with this text, run as an agent runs it, and whether a signal from without ended it."""
    run = setup._Run(tmp_path / "log", tmp_path / "it's a trace")
    done = subprocess.run(["bash", "-c", setup.traps(run.trace, script) + script], stdin=subprocess.DEVNULL,
                          capture_output=True, cwd=tmp_path)
    code = done.returncode
    return setup.explain(code if code >= 0 else 128 - code, run.failed_lines(), run.last_line())


@pytest.mark.parametrize(("script", "expected"), [
    ("true\ntrue\n", ""),
    ("false || true", ""),
    ("if ! false; then true; fi", ""),
    ("echo a\nexit 7", "line 2 (`exit 7`) exited with code 7"),
    ("# a comment\n\ntrue\n(exit 3)", "line 4 (`( exit 3 )`) exited with code 3"),
    ("set -e\ntrue\nfalse\ntrue", "line 3 (`false`) exited with code 1"),
    ("set -eu\necho $MISSING", "it exited with code 1"),
    ("make() {\n  return 4\n}\nmake", "line 4 (`return 4`) exited with code 4"),
    ("set -o pipefail\ntrue | (exit 9) | true", "line 2 (`true`) exited with code 9"),
    ("(exit 5)\ntrue\n(exit 6)", "line 3 (`( exit 6 )`) exited with code 6; before that line 1 (`( exit 5 )`) failed "
                                "with code 5"),
    ("(exit 5)\ntrue", ""),  # the last command's status is the setup's, unless it says `set -e`
    ("set -x\ntrue\nfalse", "line 3 (`false`) exited with code 1"),
    ("trap 'true' EXIT ERR DEBUG\nexit 8", "it exited with code 8"),  # the user's own traps are not taken away
    ("true\nif then", "it exited with code 2"),  # the shell's own words are in the output
])
def test_a_failure_is_told_with_its_line(tmp_path: Path, script: str, expected: str):
    assert why(tmp_path, script) == (expected, False)


@pytest.mark.parametrize("name", ["KILL", "TERM"])
def test_a_shell_that_a_signal_ends_has_not_failed_by_itself_but_a_command_that_one_ends_has(tmp_path: Path, name: str):
    assert why(tmp_path, f"kill -{name} $$; sleep 10") == (f"it was ended by SIG{name}", True)
    code = 128 + getattr(signal, f"SIG{name}")
    assert why(tmp_path, f"true\nbash -c 'kill -{name} $$'") == (
        f"line 2 (`bash -c 'kill -{name} $$'`) exited with code {code}", False)


def test_a_script_that_prints_its_commands_prints_none_of_ours(tmp_path: Path):
    script = "set -x\ntrue\nfalse"
    done = subprocess.run(["bash", "-c", setup.traps(tmp_path / "trace", script) + script], capture_output=True)
    assert done.stderr.decode().splitlines()[:2] == ["+ true", "+ false"]


@processes
def test_a_failed_setup_is_told_with_its_line_and_the_end_of_its_output_and_counted(stage: Stage):
    stage.boot()
    script = "for n in $(seq 30); do echo line $n; done\n# a comment\nexit 7"
    ended = stage.run("print('never')", setup=script)
    last = "".join(f"\n  line {n}" for n in range(16, 31))
    assert (ended.exit, ended.report.setup_tries, ended.report.setup_sure) == (Exit(1), 1, False)
    assert ended.report.error == f"setup failed: line 3 (`exit 7`) exited with code 7\nits last output:{last}"
    assert stage.log() == f"spotfleet: {ended.report.error}\n"
    stage.order(f"{HOST}/0/2")
    assert stage.dispatcher.wait_worker(f"{HOST}/0/2", lambda w: w.exit).report.setup_tries == 2


class KilledLate:
    """A starter of processes that reports the end of a killed one only after the next has started, by its id."""

    def __init__(self) -> None:
        self.running: dict[str, ForkedProcess] = {}
        self.killed: list[str] = []

    async def spawn(self, spec: ChildSpec) -> ForkedProcess:
        self.running[spec.id] = process = ForkedProcess(0, asyncio.get_running_loop().create_future())
        for id_ in self.killed:
            self.running[id_].ended.set_result(-signal.SIGKILL)
        return process

    def kill(self, id_: str, _signum: int) -> None:
        self.killed.append(id_)


def test_the_end_of_a_killed_setup_that_is_reported_late_is_not_that_of_the_next_one(tmp_path: Path):
    async def run() -> None:
        started = KilledLate()
        setups, log = setup.Setups(SimpleNamespace()), setup._Run(tmp_path / "log", tmp_path / "trace")
        log.begin(1)
        context = setup.SetupContext("h", "j", tmp_path, tmp_path, {}, started)
        first = asyncio.create_task(setups._run(context, log, "true", 0))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(setups._run(context, log, "true", 0))
        await asyncio.sleep(0)
        [process] = [p for p in started.running.values() if not p.ended.done()]
        process.ended.set_result(0)
        assert await second == ("", False)

    asyncio.run(run())


@processes
def test_the_output_of_a_setup_is_kept_apart_with_its_time_and_how_long_it_took(stage: Stage):
    stage.boot()
    assert stage.run("print('hello')", setup="echo preparing; echo more >&2").exit == Exit(0, done=True)
    assert stage.log() == "hello\n"
    eventually(lambda: "succeeded" in stage.log(LOG))
    stamp = r"spotfleet: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC: "
    assert re.fullmatch(f"{stamp}setup begins, try 1 on this host\npreparing\nmore\n"
                        fr"{stamp}setup has succeeded after \d+\.\d s\n", stage.log(LOG))


@processes
def test_setup_runs_once_for_all_workers_of_a_job_and_once_for_each_job(stage: Stage):
    stage.boot()
    script = "print(open('made').read())"
    stage.job(script, setup="echo made >> made")
    stage.job(script, job="other", setup="echo made >> made")
    stage.order(FIRST, SECOND)
    for name in (FIRST, SECOND):
        assert stage.dispatcher.wait_worker(name, lambda w: w.exit).exit == Exit(0, done=True)
    stage.order(f"{HOST}/0/2", job="other")
    stage.dispatcher.wait_worker(f"{HOST}/0/2", lambda w: w.exit)
    stage.order(f"{HOST}/0/3")
    stage.dispatcher.wait_worker(f"{HOST}/0/3", lambda w: w.exit)
    assert [stage.log(n) for n in (FIRST, SECOND, f"{HOST}/0/2", f"{HOST}/0/3")] == ["made\n\n"] * 4


@processes
def test_workers_that_wait_for_one_try_share_its_failure(stage: Stage):
    stage.boot()
    stage.job("print('never')", setup="echo x >> tries; sleep 0.5; false")
    stage.order(FIRST, SECOND)
    ends = [stage.dispatcher.wait_worker(n, lambda w: w.exit).report.setup_tries for n in (FIRST, SECOND)]
    assert ends == [1, 1] and (stage.home / "jobs/job/source/tries").read_text() == "x\n"


@processes
def test_a_worker_that_is_taken_away_during_setup_has_not_failed_and_the_next_runs_it_from_its_beginning(stage: Stage):
    stage.boot()
    stage.job("print('hello')", setup="echo x >> tries; test -e go || sleep 1000")
    stage.order(FIRST)
    tries = stage.home / "jobs/job/source/tries"
    eventually(lambda: tries.exists() and tries.read_text() == "x\n")
    stage.dispatcher.wait(lambda report: "running setup" in report.why)
    stage.order()
    stage.dispatcher.wait(lambda report: not report.workers)
    ends = [w for _, r in stage.dispatcher.seen for w in r.workers if w.exit]
    assert {(w.exit, w.report.error, w.report.setup_tries) for w in ends} == {(Exit(-signal.SIGTERM), "", 0)}
    (tries.parent / "go").touch()
    stage.order(SECOND)
    assert stage.dispatcher.wait_worker(SECOND, lambda w: w.exit).exit == Exit(0, done=True)
    assert tries.read_text() == "x\nx\n" and stage.log(SECOND) == "hello\n"


@processes
def test_a_setup_whose_process_is_killed_runs_again_and_fails_only_when_that_comes_back(stage: Stage):
    stage.patch = "from spotfleet.agent.files import setup\nsetup.PAUSE_S = 0.05"
    stage.boot()
    stage.job("print('hello')", setup="echo $$ >> pids; test -e go || sleep 1000")
    stage.order(FIRST)
    pids = stage.home / "jobs/job/source/pids"
    eventually(lambda: pids.exists() and pids.read_text().endswith("\n"))
    (pids.parent / "go").touch()
    os.kill(int(pids.read_text()), signal.SIGKILL)
    assert stage.dispatcher.wait_worker(FIRST, lambda w: w.exit).exit == Exit(0, done=True)
    stage.job("print('never')", job="other", setup="echo x >> tries; kill -9 $$")
    stage.order(f"{HOST}/0/2", job="other")
    ended = stage.dispatcher.wait_worker(f"{HOST}/0/2", lambda w: w.exit).report
    assert (ended.error, ended.setup_tries) == ("setup failed: it was ended by SIGKILL", 1)
    assert (stage.home / "jobs/other/source/tries").read_text() == "x\n" * 3


@processes
def test_a_setup_that_hangs_is_ended_at_its_limit_and_says_where_it_was(stage: Stage):
    stage.boot()
    ended = stage.run("print('never')", setup="echo at it\nsleep 1000\necho never", setup_timeout_s=3.0)
    assert ended.report.error == ("setup failed: it did not end within 3 s; it was at line 2 (`sleep 1000`)\n"
                                  "its last output:\n  at it")
    eventually(lambda: not any("sleep" in p.name() for p in stage.processes()))
