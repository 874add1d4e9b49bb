"""`python -m spotfleet.verify` on scripts with one fault each: the first difference and its usual cause are named.

Real workers: only a kill between real processes shows what a script keeps outside its state.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from spotfleet.errors import UsageError
from spotfleet.verify.__main__ import main
from spotfleet.verify.scenarios import play, step
from spotfleet.verify.verdict import Verdict, judge, verify
from spotfleet.verify.world import Forker, RunSpec
from tests.support.verify import verify_scripts as scripts

pytestmark = pytest.mark.processes
EXAMPLES = Path(__file__).parents[2] / "examples"
LONG = bool(os.environ.get("SPOTFLEET_LONG"))
LIMIT_S = 150.0  # under that of a test, which would end the process


@pytest.fixture(scope="module")
def forker():
    made = Forker()
    yield made
    made.close()


@pytest.fixture
def judged(forker, tmp_path):
    """judged(script, *only): the verdict on a script, given as text or path."""
    with tempfile.TemporaryDirectory(prefix="sf-", dir="/tmp") as folder:
        def run(script: str | Path, *only: str, args: tuple[str, ...] = (), steps: int = 9) -> Verdict:
            if isinstance(script, str):
                path = tmp_path / "script.py"
                path.write_text(script)
                script = path
            return judge(forker, RunSpec(script, args, 2, LIMIT_S), Path(folder), steps, lambda line: None,
                         only or ("kill", "notice", "join", "restore"))

        yield run


def line_of(script: str, text: str) -> int:
    return next(n for n, line in enumerate(script.splitlines(), 1) if text in line)


FAULTS = {
    "a batch drawn ahead": (scripts.DRAWN_AHEAD, "model.weight", "is fetched or drawn ahead", "x = torch.randn(4, 3)"),
    "weights touched where torch does not count": (scripts.WEIGHTS_TOUCHED.replace("weight.mul_", "weight.data.mul_"),
                                                   "model.weight", "outside optimizer.step()", "mul_(0.9)"),
    "a list that grows before the gradient": (scripts.LIST_BEFORE_THE_GRADIENT, "seen", "state.seen is not what it was",
                                              ""),
    "a counter outside the state": (scripts.COUNTER_OUTSIDE, "model.weight", "a variable outside the state",
                                    'seen["n"] += 1'),
    "a buffer of each rank": (scripts.BUFFER_OF_EACH_RANK, "model.center", "differs by rank and is used", "register_"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_script_is_named_with_its_step_its_disturbance_and_the_line(judged, fault):
    script, name, cause, line = FAULTS[fault]
    verdict = judged(script, "kill")
    found = verdict.difference
    assert found is not None and (verdict.result, found.name, found.run) == ("differs", name, "kill"), verdict
    assert found.after is not None and found.version == found.after.version + 1 and found.after.version in (3, 6)
    assert cause in verdict.causes[0].text
    assert not line or line_of(script, line) in verdict.causes[0].lines


def test_a_worker_is_killed_between_its_gradient_and_its_step(forker, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(scripts.MADE_FROM_RANK)
    with tempfile.TemporaryDirectory(prefix="sf-", dir="/tmp") as folder:
        run = play("step", step, forker, RunSpec(path, (), 2, LIMIT_S), Path(folder) / "step", 9, os.environ)
    assert not run.error and run.version == 9
    assert [d.text for d in run.disturbances] == [f"rank {r} was killed in the next step" for r in (0, 1)]
    assert (3, 0) not in run.records and (3, 1) in run.records  # rank 1 alone has made step 3, and the other took it
    assert (6, 1) not in run.records and (6, 0) in run.records


EXACT = {"made from the rank": scripts.MADE_FROM_RANK,
         "weights changed after step": scripts.WEIGHTS_TOUCHED,  # from a copy, which is kept after the first step
         "counted before the gradient": scripts.COUNTED_BEFORE_THE_GRADIENT}


@pytest.mark.parametrize("habit", EXACT)
def test_what_the_runtime_puts_right_is_exact(judged, habit):
    verdict = judged(EXACT[habit], "kill")
    assert (verdict.result, verdict.steps) == ("exact", 9), verdict


def test_a_sound_script_is_exact_through_every_disturbance(judged):
    verdict = judged(scripts.SOUND)
    assert (verdict.result, verdict.steps, verdict.remarks) == ("exact", 9, ()), verdict
    assert list(verdict.runs) == ["undisturbed", "undisturbed again", "kill", "notice", "join", "restore"]


def test_a_script_that_resumes_from_a_checkpoint_of_its_own_finds_none_of_another_worker(judged, tmp_path, monkeypatch):
    here = tmp_path / "here"
    (here / "data").mkdir(parents=True)
    (tmp_path / "beside").mkdir()
    monkeypatch.chdir(here)
    looks = "assert os.path.isdir('data') and os.path.isdir('../beside')\n"
    verdict = judged(scripts.RESUMES.replace("import os\n", f"import os\n{looks}"), "kill", "notice")
    assert verdict.result == "exact", verdict
    assert [p.name for p in here.iterdir()] == ["data"]


def test_statistics_that_no_weight_depends_on_are_a_remark(judged):
    verdict = judged(scripts.STATISTICS, "kill")
    assert verdict.result == "exact" and "state.model.1.running_mean" in verdict.remarks[0]


def test_a_script_that_differs_undisturbed_is_not_blamed_on_recovery(judged):
    verdict = judged(scripts.UNSEEDED)
    assert verdict.result == "not deterministic" and "two undisturbed runs differ at step 1" in verdict.text
    assert "unseeded" in verdict.causes[0].text and "kill" not in verdict.runs


@pytest.mark.parametrize(("script", "text"), [
    (scripts.NOT_ELASTIC, "ended without a call of hvd.elastic.run"), (scripts.RAISES, "ValueError: no data")])
def test_a_script_that_cannot_be_verified_is_told_why(judged, script, text):
    verdict = judged(script)
    assert verdict.result == "failed" and text in verdict.text and list(verdict.runs) == ["undisturbed"]


@pytest.mark.parametrize(("example", "args", "only"), [
    ("digits.py", (), ("kill", "notice", "join", "restore") if LONG else ("notice", "restore")),
    ("gpt.py", ("--short",), ("kill", "notice", "join", "restore") if LONG else ("kill",))])
def test_the_projects_examples_are_exact(judged, example, args, only):
    verdict = judged(EXAMPLES / example, *only, args=args, steps=6)
    assert verdict.result == "exact", verdict


# ---- the command

def test_wrong_arguments_are_refused(tmp_path, capsys):
    with pytest.raises(UsageError, match="is no file"):
        verify(tmp_path / "none.py", (), 2, 12, print)
    with pytest.raises(UsageError, match="1 workers and 12 steps are too few"):
        verify(Path(__file__), (), 1, 12, print)
    assert main(["--only", "kil", "x.py"]) == 2 and "--only kil" in capsys.readouterr().err


def start(path: Path, *options: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "spotfleet.train.verify", *options, str(path)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))  # also under nohup


def test_the_command_prints_json_and_its_status_is_0_only_for_exact(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(scripts.COUNTER_OUTSIDE)
    process = start(path, "-o", "json", "--steps", "6", "--only", "kill")
    out, err = process.communicate(timeout=LIMIT_S)
    found = json.loads(out)
    assert process.returncode == 1, err
    assert found["result"] == "differs"
    assert (found["difference"]["name"], found["difference"]["run"]) == ("model.weight", "kill")
    assert "undisturbed: 6 steps with 2 workers" in err
    path.write_text(scripts.SOUND)
    process = start(path, "--steps", "6", "--only", "kill")
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and out.startswith("exact: 6 steps with 2 workers"), err


def test_train_verify_needs_no_fleet_and_leaves_with_the_verdicts_status(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(scripts.NOT_ELASTIC)
    command = [sys.executable, "-m", "spotfleet.cli", "train", "--verify", str(path)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=LIMIT_S, cwd=tmp_path,
                          env={**os.environ, "SPOTFLEET_HOME": str(tmp_path / "home")})
    assert done.returncode == 1 and "ended without a call of hvd.elastic.run" in done.stdout, done.stderr
    done = subprocess.run([*command[:-1], "none.py"], text=True, capture_output=True, timeout=LIMIT_S, cwd=tmp_path)
    assert done.returncode == 2 and "none.py is no file" in done.stderr


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_closed_terminal_leave_nothing(tmp_path, ended_by):
    path = tmp_path / "script.py"
    pids, folders, deadline = tmp_path / "pids", tmp_path / "folders", time.monotonic() + LIMIT_S
    noted = (f"import os, time\nprint(os.environ['SPOTFLEET_OUTPUT'], file=open({str(folders)!r}, 'a'))\n"
             f"print(os.getpid(), file=open({str(pids)!r}, 'a'))\n")
    path.write_text(noted + scripts.SOUND.replace("state.step += 1", "state.step += 1; time.sleep(0.2)"))
    process = start(path)
    while not (pids.exists() and len(pids.read_text().split()) == 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    written = folders.read_text().split()
    assert all(Path(folder).is_dir() for folder in written)
    process.send_signal(ended_by)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130 and "interrupted" in err
    assert not any(Path(folder).exists() for folder in written)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split())
