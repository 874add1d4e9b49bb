"""Real agents and workers against a fake dispatcher: what runs, how it ends, what is reported."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import psutil
import pytest

from spotfleet.protocol.messages import Exit, WorkerOrders
from tests.support.agent.agent_stage import ADDRESS, HOST, Stage, all_gone, eventually

pytestmark = pytest.mark.processes

FIRST, SECOND = f"{HOST}/0/1", f"{HOST}/1/1"
FOREVER = "import time\nprint('running')\nwhile True: time.sleep(0.05)\n"


def test_a_listed_worker_runs_its_script_in_its_own_environment(stage: Stage):
    stage.boot()
    ended = stage.run("""
import os, sys
for key in ("WORKER", "JOB", "ADDRESS"): print(key, os.environ["SPOTFLEET_" + key])
print(os.environ["SPOTFLEET_LOCAL_RANK"], os.environ["OMP_NUM_THREADS"], os.environ["COLOUR"], os.environ["TOKEN"])
print(sys.argv, __name__, os.path.isfile("train.py"), sys.path[0] == os.getcwd())
""", args=("--lr", "1"), envs={"COLOUR": "red"}, secrets={"TOKEN": "hush-hush"})
    assert ended.exit == Exit(0, done=True) and ended.report.error == ""
    assert stage.log() == (f"WORKER {FIRST}\nJOB job\nADDRESS {ADDRESS}\n0 1 red hush-hush\n"
                           "['train.py', '--lr', '1'] __main__ True True\n")
    assert stage.dispatcher.report.address == ADDRESS


def test_a_script_that_raises_is_reported_with_its_traceback(stage: Stage):
    stage.boot()
    ended = stage.run("def deep():\n    raise KeyError('the reason')\ndeep()\n")
    assert ended.exit == Exit(1) and not ended.report.blame_peer
    assert ended.report.error.startswith("Traceback") and ended.report.error.endswith("KeyError: 'the reason'\n")
    assert 'train.py", line 2, in deep' in ended.report.error and "child.py" not in ended.report.error
    assert stage.log() == ended.report.error


def test_an_error_may_blame_a_peer(stage: Stage):
    stage.boot()
    ended = stage.run("class Broken(RuntimeError):\n    blame_peer = True\nraise Broken('lost')\n")
    assert ended.report.blame_peer and "lost" in ended.report.error


def test_a_long_traceback_is_cut_in_its_middle(stage: Stage):
    stage.boot()
    error = stage.run("raise ValueError('x' * 20000 + 'the end')").report.error
    assert len(error) <= 8192 and error.startswith("Traceback") and error.endswith("the end\n")


@pytest.mark.parametrize(("script", "exit", "error"), [
    ("import sys; sys.exit(3)", Exit(3), "the script left with sys.exit(3)"),
    ("import sys; sys.exit('no data')", Exit(1), "the script left with: no data"),
    ("import sys; sys.exit()", Exit(0, done=True), ""),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", Exit(-9), ""),
    ("import os; os._exit(0)", Exit(0, done=False), ""),
])
def test_an_end_is_classified_by_the_scripts_own_word(stage: Stage, script: str, exit: Exit, error: str):
    stage.boot()
    ended = stage.run(script)
    assert (ended.exit, ended.report.error) == (exit, error)


def test_a_script_ends_when_its_threads_and_atexit_functions_have(stage: Stage):
    stage.boot()
    ended = stage.run("import atexit, threading, time\natexit.register(print, 'bye')\n"
                      "threading.Thread(target=lambda: (time.sleep(0.3), print('thread'))).start()\nprint('main')\n")
    assert ended.exit == Exit(0, done=True) and stage.log() == "main\nthread\nbye\n"


def test_a_missing_script_is_named(stage: Stage):
    stage.boot()
    ended = stage.run(argv=("nowhere.py",))
    assert ended.exit == Exit(2) and "'nowhere.py' is not in the shipped directory" in ended.report.error


@pytest.mark.parametrize(("command", "exit", "error"), [
    ("echo hello; exit 0", Exit(0, done=True), ""),
    ("echo hello; exit 5", Exit(5), "command exited with code 5: echo hello; exit 5"),
])
def test_a_shell_command_runs_in_the_shipped_directory(stage: Stage, command: str, exit: Exit, error: str):
    stage.boot()
    ended = stage.run(run=command)
    assert (ended.exit, ended.report.error, stage.log()) == (exit, error, "hello\n")


def test_a_damaged_bundle_is_an_error_of_the_worker(stage: Stage):
    stage.boot()
    stage.job("print('never')")
    digest = next(iter(stage.dispatcher.bundles))
    stage.dispatcher.bundles[digest] = b"something else"
    stage.order(FIRST)
    ended = stage.dispatcher.wait_worker(FIRST, lambda w: w.exit)
    assert ended.exit == Exit(1) and f"expected {digest[:12]}" in ended.report.error


def test_a_worker_that_is_no_longer_listed_ends_and_is_forgotten(stage: Stage):
    stage.boot()
    stage.job(FOREVER)
    stage.order(FIRST, SECOND)
    pids = [stage.dispatcher.wait_worker(n, lambda w: w.pid).pid for n in (FIRST, SECOND)]
    stage.order(SECOND)
    stage.dispatcher.wait(lambda report: [w.report.worker for w in report.workers] == [SECOND])
    assert not psutil.pid_exists(pids[0]) and psutil.pid_exists(pids[1])


def test_a_worker_that_ignores_sigterm_is_killed(stage: Stage):
    stage.boot()
    stage.job("import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('no'))\n" + FOREVER)
    stage.order(FIRST)
    eventually(lambda: "running" in stage.log())
    stage.order()
    stage.dispatcher.wait(lambda report: not report.workers)
    assert stage.log() == "running\nno\n"


def test_a_new_worker_waits_for_the_last_process_of_its_slot(stage: Stage):
    stage.boot()
    stage.job("import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: None)\nprint(time.monotonic())\n"
              "while True:\n    time.sleep(0.05)\n    print(time.monotonic())\n")
    stage.order(FIRST)
    eventually(lambda: stage.log(FIRST))
    again = f"{HOST}/0/2"
    stage.order(again)
    eventually(lambda: stage.log(again))
    stage.dispatcher.wait(lambda report: [w.report.worker for w in report.workers] == [again])
    assert float(stage.log(again).split()[0]) > float(stage.log(FIRST).split()[-1])


def test_a_name_is_never_started_twice(stage: Stage):
    stage.boot()
    stage.job(FOREVER)
    stage.order(FIRST)
    stage.dispatcher.wait_worker(FIRST, lambda w: w.pid)
    stage.order()
    stage.dispatcher.wait(lambda report: not report.workers)
    stage.order(FIRST)
    assert stage.dispatcher.wait_worker(FIRST, lambda w: w.exit).exit == Exit(-signal.SIGTERM)


def test_a_worker_that_was_asked_to_stop_is_not_done(stage: Stage):
    stage.boot()
    stage.job("import os, time\nwhile not os.path.exists('leave'): time.sleep(0.02)\n")
    stage.order(FIRST, orders=WorkerOrders(stop=True))
    stage.dispatcher.wait_worker(FIRST, lambda w: w.pid)
    (stage.home / "jobs/job/source/leave").touch()
    assert stage.dispatcher.wait_worker(FIRST, lambda w: w.exit).exit == Exit(0, done=False)


def test_a_killed_worker_is_reported_at_once(stage: Stage, record_property):
    stage.boot()
    stage.job(FOREVER)
    stage.order(FIRST)
    eventually(lambda: stage.log() == "running\n")
    pid = stage.dispatcher.wait_worker(FIRST, lambda w: w.pid).pid
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert stage.dispatcher.wait_worker(FIRST, lambda w: w.exit).exit == Exit(-9)
    record_property("death_to_report_s", round(stage.dispatcher.reported_at - begun, 4))
    print(f"SIGKILL of a worker to its report: {stage.dispatcher.reported_at - begun:.3f} s")


def test_what_a_worker_started_ends_with_it(stage: Stage):
    stage.boot()
    stage.job("import subprocess\nprint(subprocess.Popen(['sleep', '1000']).pid)\n" + FOREVER)
    stage.order(FIRST)
    eventually(lambda: "running" in stage.log())
    left = psutil.Process(int(stage.log().split()[0]))
    os.kill(stage.dispatcher.wait_worker(FIRST, lambda w: w.pid).pid, signal.SIGKILL)
    eventually(lambda: all_gone([left]))


@pytest.mark.parametrize("job", [{"script": "import subprocess\nsubprocess.Popen(['sleep', '1000'])\n" + FOREVER},
                                 {"run": "echo running; sleep 1000; sleep 1000"}], ids=["script", "command"])
def test_nothing_outlives_an_agent_that_was_killed(stage: Stage, job: dict):
    stage.boot()
    stage.job(**job)
    stage.order(FIRST, SECOND)
    eventually(lambda: "running" in stage.log(FIRST) and "running" in stage.log(SECOND))
    family = stage.processes()
    assert len(family) >= 6  # agent, zygote, two workers, and what each has started
    os.kill(stage.agent.pid, signal.SIGKILL)
    stage.agent.wait()
    eventually(lambda: all_gone(family))


def test_sigterm_ends_the_agent_and_its_workers(stage: Stage):
    stage.boot()
    stage.job("import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit('leaving'))\n" + FOREVER)
    stage.order(FIRST)
    eventually(lambda: "running" in stage.log())
    family = stage.processes()
    stage.agent.send_signal(signal.SIGTERM)
    assert stage.agent.wait(60) == 0
    eventually(lambda: all_gone(family))
    assert stage.log() == "running\nleaving\n"


def test_a_killed_zygote_takes_its_workers_along_and_another_starts(stage: Stage):
    stage.boot()
    stage.job("import subprocess\nsubprocess.Popen(['sleep', '1000'])\n" + FOREVER)
    stage.order(FIRST)
    eventually(lambda: "running" in stage.log())
    _, zygote, *workers = stage.processes()
    zygote.kill()
    assert stage.dispatcher.wait_worker(FIRST, lambda w: w.exit).exit == Exit(-9)
    eventually(lambda: all_gone(workers))
    again = f"{HOST}/0/2"
    stage.order(again)
    eventually(lambda: "running" in stage.log(again))


def test_secrets_are_in_no_command_line_file_or_log(stage: Stage):
    stage.boot()
    stage.job(run="echo ready; test -n \"$TOKEN\" && echo has it; sleep 1000", setup="true",
              secrets={"TOKEN": "hush-hush-4711"})
    stage.order(FIRST)
    eventually(lambda: stage.log() == "ready\nhas it\n")
    for process in stage.processes():
        assert "hush-hush-4711" not in " ".join(process.cmdline())
    for path in stage.home.rglob("*"):
        with suppress(FileNotFoundError):  # the agent has just replaced it
            assert not path.is_file() or b"hush-hush-4711" not in path.read_bytes(), path


def test_settings_that_only_a_new_interpreter_reads_are_obeyed(stage: Stage):
    stage.boot()
    ended = stage.run("import os, sys\nprint(sys.flags.hash_randomization, os.environ['TOKEN'], sys.argv)",
                      envs={"PYTHONHASHSEED": "0"}, secrets={"TOKEN": "hush"})
    assert ended.exit == Exit(0, done=True) and stage.log() == "0 hush ['train.py']\n"
