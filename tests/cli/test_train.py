"""`spotfleet train`, `jobs`, `logs`, `cancel`: what is shipped, shown and said."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from spotfleet import bundle
from spotfleet.api import Fleet
from spotfleet.api.lifecycle import upload
from spotfleet.cli.commands import follow, write
from spotfleet.errors import DispatcherUnreachable, UsageError
from spotfleet.model import JobState, ResizeSpec
from spotfleet.protocol.messages import JobStatus
from spotfleet.transport.client import LogChunk
from tests.support.cli.cli_cloud import FakeHandler, FakeJob

SLOW = "import os, time\nprint('begun')\nwhile not os.path.exists(os.environ['GO']): time.sleep(0.01)\n"
BROKEN = "print('before')\nraise ValueError('a bug')\n"


def test_train_ships_the_directory_once_and_shows_the_output_of_rank_0(up):
    first = up.ok("train hello.py --epochs 3")
    assert first.out == "hello --epochs 3 \n"
    assert "shipped 2 files" in first.err and "job hello-1 on fleet digits" in first.err
    assert "is there already" in up.ok("train hello.py").err
    assert up.dispatcher.uploads == 2  # the manifest and the one piece


def test_a_working_directory_that_is_too_large_is_refused_before_it_is_sent(up, monkeypatch):
    monkeypatch.setattr(upload, "LIMIT_BYTES", 10)
    assert ".spotfleetignore" in up.fails("train hello.py", code=2).err
    assert up.dispatcher.uploads == 0


def test_a_train_that_succeeds_ends_with_the_next_commands(up):
    said = up.ok("train hello.py")
    assert said.err.splitlines()[-2:] == ["next: spotfleet cost digits", "      spotfleet down digits"]


@pytest.mark.parametrize(("line", "argv"), [
    ("train hello.py --epochs 3 -v --np 1:2", ["hello.py", "--epochs", "3", "-v"]),
    ("train --np 1:2 hello.py -- --np 3 -d", ["hello.py", "--np", "3", "-d"]),
    ("train hello.py a b", ["hello.py", "a", "b"]),
])
def test_our_options_may_stand_anywhere_before_two_dashes_and_the_rest_is_the_scripts(up, line, argv):
    up.ok(line)
    assert list(up.dispatcher.jobs["hello-1"].spec.argv) == argv


def test_np_is_min_and_max_and_by_default_all_slots(up):
    up.ok("train hello.py")
    up.ok("train hello.py --np 2")
    up.ok("train hello.py --np 1:2 --name other")
    found = [(j.spec.name, j.spec.min_workers, j.spec.max_workers) for j in up.dispatcher.jobs.values()]
    assert found == [("hello", 2, 3), ("hello", 2, 2), ("other", 1, 2)]


def test_a_resize_policy_and_a_growth_go_before_the_fleet_files(up):
    up.ok("train hello.py")
    up.ok("train hello.py --np 1:3 --resize-policy scale-lr --growth 0:1,5:3")
    found = [j.spec.resize for j in up.dispatcher.jobs.values()]
    assert found == [ResizeSpec(), ResizeSpec("scale-lr", growth=((0, 1), (5, 3)))]


@pytest.mark.parametrize(("options", "said"), [
    ("--growth 2:4", "--growth 2:4: expected epochs in order, 0 first"),
    ("--growth four", "--growth four: expected EPOCH: WORKERS pairs"),
    ("--np 1:2 --growth 0:1,9:4", "growth: 4 workers from epoch 9, but the job may have 1 to 2"),
    ("--resize-policy faster", "resize policy 'faster' is unknown"),
])
def test_a_growth_or_policy_that_makes_no_sense_is_refused(up, options, said):
    assert said in up.fails(f"train hello.py {options}", code=2).err


def test_spares_are_kept_out_of_the_default_number_of_workers(up):
    up.ok("train hello.py --spares 1")
    up.ok("train hello.py --spares 1 --np 3")
    found = [(j.spec.min_workers, j.spec.max_workers, j.spec.spares) for j in up.dispatcher.jobs.values()]
    assert found == [(2, 2, 1), (3, 3, 1)]


@pytest.mark.parametrize("np", ["x", "3:2", "0:2", "1:2:3"])
def test_np_that_is_no_range_is_refused(up, np):
    assert f"--np {np}: expected MIN:MAX" in up.fails(f"train hello.py --np {np}", code=2).err


def test_a_script_is_found_from_here_and_from_the_working_directory(up, monkeypatch):
    (up.work / "sub").mkdir()
    up.write("sub/deep.py", "print('deep')")
    assert up.ok("train sub/deep.py").out == "deep\n"
    monkeypatch.chdir(up.work / "sub")
    assert up.ok("train deep.py").out == "deep\n"
    assert up.ok("train hello.py").out == "hello \n"


def test_a_missing_script_or_one_outside_the_working_directory_is_refused(up, tmp_path):
    (tmp_path / "outside.py").write_text("")
    assert "there is no script nowhere.py" in up.fails("train nowhere.py", code=2).err
    said = up.fails(f"train {tmp_path / 'outside.py'}", code=2)
    assert "is outside the working directory" in said.err and "set `workdir`" in said.err
    assert up.dispatcher.jobs == {}


def test_without_a_script_the_run_of_the_fleet_file_is_run(user):
    user.write("fleet.yaml", "name: digits\nresources: {instance_type: cpu.small}\nrun: echo ran\n")
    assert "next: spotfleet train\n" in user.ok("up fleet.yaml -y").err
    assert user.ok("train").out == "ran\n"


def test_without_a_script_and_a_run_there_is_nothing_to_run(up):
    assert "nothing to run" in up.fails("train", code=2).err


def test_a_failing_script_ends_with_1_and_its_traceback_is_shown_once(up):
    up.write("broken.py", BROKEN)
    said = up.fails_with_traceback("train broken.py")
    assert (said.out + said.err).count("ValueError: a bug") == 1
    assert "error: job broken-1 failed: the script failed on every worker" in said.err
    assert "spotfleet logs broken-1" in said.err


def test_too_little_capacity_is_an_error_and_leaves_no_job(up):
    assert "needs 9 workers" in up.fails("train hello.py --np 9:9").err
    assert up.dispatcher.jobs == {}


def test_detached_it_returns_at_once_and_says_how_to_attach(up):
    up.write("long.py", "import time\nprint('begun')\ntime.sleep(60)\n")
    said = up.ok("train long.py -d")
    assert "next: spotfleet logs -f long-1" in said.err and "spotfleet cancel long-1" in said.err
    assert "running" in up.ok("jobs").out
    up.ok("cancel long-1")
    assert "cancelled" in up.ok("jobs").out
    assert "has ended already (cancelled: by its user); nothing to cancel" in up.ok("cancel long-1").err


def test_cancel_without_a_job_lists_those_that_run_and_cancel_all_ends_them(up):
    up.write("long.py", "import time\ntime.sleep(60)\n")
    up.ok("train long.py -d --np 1")
    up.ok("train long.py -d --np 1")
    assert "that have not ended: long-1, long-2; `spotfleet cancel --all`" in up.fails("cancel", code=2).err
    assert "expected a job or --all" in up.fails("cancel long-1 --all", code=2).err
    assert "running" in up.ok("jobs").out
    assert "cancelling 2 jobs of fleet digits: long-1, long-2" in up.ok("cancel --all").err
    assert "that have not ended: none" in up.fails("cancel", code=2).err


def test_ctrl_c_detaches_and_says_how_to_attach_or_cancel(up, monkeypatch):
    up.write("long.py", "import time\nprint('begun')\ntime.sleep(60)\n")
    polls: list[int] = []
    answer = FakeHandler._log
    monkeypatch.setattr(FakeHandler, "_log", lambda self, job, at: (polls.append(at), answer(self, job, at)))

    def interrupt() -> None:
        while polls.count(len("begun\n")) < 2:  # what it has got it has shown, and now it asks for more
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    said = up.ok("train long.py")
    assert said.out == "begun\n"
    assert "detached; job long-1 goes on" in said.err
    assert "spotfleet logs -f long-1" in said.err and "spotfleet cancel long-1" in said.err
    assert "running" in up.ok("jobs").out


def test_ctrl_c_in_followed_logs_says_that_the_job_goes_on(up, monkeypatch):
    up.write("long.py", "import time\nprint('begun')\ntime.sleep(60)\n")
    up.ok("train long.py -d")
    monkeypatch.setattr(Fleet, "logs", lambda *_, **__: iter([signal.raise_signal(signal.SIGINT)]))
    said = up.types("logs -f long-1")
    assert said.code == 130 and "the output is no longer shown; job long-1 goes on" in said.err


def wait_for_log(up, text: bytes) -> None:
    while not (jobs := up.dispatcher.jobs) or text not in next(iter(jobs.values())).log:
        time.sleep(0.01)


class SetupLogs:
    """A dispatcher's client, for the logs of setups."""

    def __init__(self, logs: dict[str, bytes]) -> None:
        self.logs = logs

    def log_workers(self, job: str) -> list[str]:
        return [*self.logs]

    def stream(self, job: str, offset: int, *, worker: str, follow: bool) -> list[LogChunk]:
        assert (job, follow) == ("a-1", False)
        log = self.logs[worker]
        return [LogChunk(log[offset:], len(log), False)] if log[offset:] else []


def test_the_lines_of_setup_on_the_first_host_are_shown_once_and_whole():
    logs = {"h-1#setup": b""}
    setup, dispatcher = follow.SetupOutput("a-1"), SetupLogs(logs)
    assert setup.lines(dispatcher) == []
    logs |= {"h-1#setup": b"one\ntw", "h-0#setup": b"other\n"}
    assert setup.lines(dispatcher) == ["setup on h-1: one"]
    logs["h-1#setup"] += b"o\nthree\n"
    assert setup.lines(dispatcher) == ["setup on h-1: two", "setup on h-1: three"]
    assert setup.lines(dispatcher) == []


def test_setup_is_shown_until_the_job_has_started(monkeypatch, capsys):
    monkeypatch.setattr(follow, "POLL_S", 0.0)
    over, logs = threading.Event(), {"h-0#setup": b""}
    states = iter(["starting", "starting", "running", "running"])

    def status() -> JobStatus:
        if (state := next(states, "")) == "":
            over.set()
        logs["h-0#setup"] += b"line\n"
        return JobStatus("a-1", "a", state or "running", "", 1, 1, 5, 0.0, 0, 1, 1)

    fleet = SimpleNamespace(job=lambda job: SimpleNamespace(status=status), client=SetupLogs(logs))
    follow._poll(fleet, "a-1", over)
    assert capsys.readouterr().err.count("setup on h-0: line") == 3


@pytest.mark.parametrize("line", ["train slow.py", "logs -f slow-1"])
def test_while_attached_each_change_of_the_job_is_told_beside_its_output(up, monkeypatch, line):
    monkeypatch.setattr(follow, "POLL_S", 0.02)
    up.write("slow.py", SLOW)
    go = up.work / "go"
    if line.startswith("logs"):
        up.ok(f"train slow.py -d --env GO={go}")
    else:
        line += f" --env GO={go}"
    looks: list[FakeJob] = []
    ask = FakeJob.status

    def status(job: FakeJob) -> JobStatus:
        looks.append(job)
        return ask(job)

    monkeypatch.setattr(FakeJob, "status", status)

    def story() -> None:
        wait_for_log(up, b"begun")
        job = up.dispatcher.jobs["slow-1"]
        for state, why in ((JobState.QUEUED, "needs 1 host"), (JobState.QUEUED, "needs 1 host"),
                           (JobState.RUNNING, "generation 2 on 2 workers")):
            job.state, job.why = state, why
            before = len(looks)
            while len(looks) < before + 3:  # looks that begin after the change
                time.sleep(0.005)
        go.write_text("")

    teller = threading.Thread(target=story, daemon=True)
    teller.start()
    said = up.ok(line)
    teller.join()
    assert said.out == "begun\n"
    assert said.err.count("  job slow-1 is queued: needs 1 host\n") == 1
    assert said.err.count("  job slow-1 is running: generation 2 on 2 workers\n") == 1


def test_logs_show_the_newest_job_or_the_one_named(up):
    up.ok("train hello.py one")
    up.ok("train hello.py two")
    assert up.ok("logs").out == "hello two \n"
    assert up.ok("logs hello-1").out == up.ok("logs -f hello-1 --rank 0").out == "hello one \n"
    assert "no job 'hello-9'" in up.fails("logs hello-9").err


def test_a_script_that_misses_a_package_fails_with_the_way_to_get_it(up):
    up.write("lacks.py", "import surely_not_there\n")
    assert "the hosts have no module surely_not_there: " in up.fails_with_traceback("train lacks.py").err


def test_a_mistyped_option_before_the_script_is_not_called_a_missing_script(up):
    said = up.fails("train --fleet digits hello.py", code=2)
    assert "error: train has no option --fleet" in said.err and "-c FLEET" in said.err


def test_logs_say_how_a_followed_job_ended_and_why_one_has_no_output(up):
    up.ok("train hello.py")
    assert "job hello-1 has succeeded: " in up.ok("logs -f").err and up.ok("logs").err == ""
    up.write("mute.py", "import time\ntime.sleep(60)\n")
    up.ok("train mute.py -d")
    up.dispatcher.jobs["mute-2"].state = JobState.QUEUED
    up.dispatcher.jobs["mute-2"].why = "needs 1 host"
    said = up.ok("logs")
    assert (said.out, said.err) == ("", "job mute-2 is queued: needs 1 host; no output of it so far\n")
    assert up.ok("logs -n 0").err == ""


def test_down_with_train_ends_the_fleet_after_the_job(up):
    said = up.ok("train hello.py --down")
    assert said.out == "hello \n" and "fleet digits is down" in said.err
    assert up.cloud.living() == []


def test_down_with_train_ends_the_fleet_also_when_the_job_fails(up):
    up.write("broken.py", BROKEN)
    up.fails_with_traceback("train broken.py --down")
    assert up.cloud.living() == []


def test_the_state_of_a_job_is_found_also_when_its_fleet_has_ended_with_it():
    def gone():
        raise DispatcherUnreachable("no answer")

    other, failed = SimpleNamespace(job="a-1", state="succeeded"), SimpleNamespace(job="a-2", state="failed")
    job = SimpleNamespace(id="a-2", status=gone)
    ended = SimpleNamespace(status=lambda: SimpleNamespace(jobs=[other, failed]))
    assert write.final_status(ended, job) is failed
    with pytest.raises(DispatcherUnreachable):
        write.final_status(SimpleNamespace(status=lambda: SimpleNamespace(jobs=[])), job)


@pytest.mark.parametrize(("kind", "workers", "said"), [
    ("command", 2, True), ("restart", 2, True), ("command", 1, False), ("elastic", 2, False), ("", 2, False)])
def test_the_end_of_a_job_names_the_output_of_its_other_ranks(kind, workers, said):
    found = write.other_ranks(SimpleNamespace(job="a-1", kind=kind, max_workers=workers))
    assert ("`spotfleet logs a-1 --all`" in found) is said


def test_variables_are_passed_and_a_missing_one_is_refused(up, monkeypatch):
    assert up.ok("train hello.py --env A=1").out == "hello 1\n"
    monkeypatch.setenv("A", "mine")
    assert up.ok("train hello.py -e A").out == "hello mine\n"
    assert "--env NOPE: is not in your environment" in up.fails("train hello.py --env NOPE", code=2).err


# --- secrets


def everything_written(up) -> bytes:
    """All files that we or the dispatcher wrote, but for the two that may hold secrets."""
    files = [p for root in (up.home, up.cloud.disk) for p in root.rglob("*") if p.is_file() and p.name != "keys.json"]
    return b"".join(p.read_bytes() for p in files)


def test_a_secret_reaches_the_script_and_nothing_else(user, monkeypatch):
    monkeypatch.setenv("TOKEN", "hunter22")
    user.write("fleet.yaml", "name: digits\nresources: {instance_type: cpu.small}\n"
                             "secrets: {TOKEN: , LIT: lit3ral-one}\n")
    user.write("secret.py", "import os\nprint(os.environ['TOKEN'][::-1], os.environ['LIT'][::-1])\n")
    said = [user.ok("up fleet.yaml -y"), user.ok("train secret.py")]
    assert said[1].out == "22retnuh eno-lar3til\n"
    assert "left out of the bundle: fleet.yaml" in said[1].err
    said += [user.ok(c) for c in ("status -o json", "events -o json", "jobs -o json", "cost -o json", "up fleet.yaml")]
    seen = everything_written(user) + "".join(s.out + s.err for s in said).encode()
    assert b"hunter22" not in seen and b"lit3ral-one" not in seen
    assert (user.home / "fleets/digits/keys.json").stat().st_mode & 0o777 == 0o600


def test_a_secret_on_the_command_line_is_refused_without_showing_it(up, monkeypatch):
    said = up.fails("train hello.py --secret TOKEN=hunter22", code=2)
    assert "hunter22" not in said.err and "can be seen by everybody" in said.err
    monkeypatch.setenv("TOKEN", "hunter22")
    said = up.fails("train hello.py --secret TOKEN --key=hunter22", code=2)
    assert "hunter22" not in said.err and "argument 1 holds the value of secret TOKEN" in said.err
    said = up.fails("train hello.py --secret TOKEN --env A=hunter22", code=2)
    assert "hunter22" not in said.err and "variable A" in said.err
    assert "--secret NOPE: is not in your environment" in up.fails("train hello.py --secret NOPE", code=2).err


def test_a_script_that_holds_a_secret_is_not_shipped(up, monkeypatch):
    monkeypatch.setenv("TOKEN", "hunter22")
    up.write("holds.py", "token = 'hunter22'\n")
    assert "the script cannot be shipped" in up.fails("train holds.py --secret TOKEN", code=2).err


def test_a_dispatcher_that_has_lost_its_disk_between_upload_and_submission_gets_it_all_again(up, monkeypatch):
    submit, lost = up.dispatcher.submit, []

    def lose(spec, *more):
        if not lost:
            lost.extend(path for path in up.dispatcher.home.iterdir() if len(path.name) == 64)
            for path in lost:
                path.unlink()
        if not (up.dispatcher.home / spec.bundle).exists():
            raise UsageError(f"spec.bundle: {spec.bundle} has not been uploaded")
        return submit(spec, *more)

    monkeypatch.setattr(up.dispatcher, "submit", lose)
    assert up.ok("train hello.py").out == "hello \n"
    assert len(lost) == 2 and up.dispatcher.uploads == 4


def test_a_submission_that_is_refused_for_another_reason_is_not_tried_again(up, monkeypatch):
    tries = []

    def refuse(*_):
        tries.append(1)
        raise UsageError("spec.run: no")

    monkeypatch.setattr(up.dispatcher, "submit", refuse)
    assert "spec.run: no" in up.fails("train hello.py", code=2).err
    assert (len(tries), up.dispatcher.uploads) == (1, 2)


def test_an_interrupted_train_sends_only_what_is_missing_the_next_time(up, monkeypatch):
    monkeypatch.setattr("spotfleet.bundle.blob.RACY_S", -3600.0)
    for name, size in (("LEAST_BYTES", 1000), ("USUAL_BYTES", 10), ("MOST_BYTES", 3000), ("ENTRY_BYTES", 0)):
        monkeypatch.setattr(f"spotfleet.bundle.grouping.{name}", size)
    for number in range(60):
        (up.work / f"data{number}").write_text(f"{number}" * 600)
    make, tries = bundle.make, itertools.count(1)

    def interrupt(*given):
        if next(tries) == 12:
            raise KeyboardInterrupt
        return make(*given)

    monkeypatch.setattr(bundle, "make", interrupt)
    assert up.types("train hello.py").code != 0
    sent = up.dispatcher.uploads
    assert 0 < sent < 30
    assert up.ok("train hello.py").out == "hello \n"
    names = {path.name for path in up.dispatcher.home.iterdir() if len(path.name) == 64}
    assert up.dispatcher.uploads == len(names)  # none twice


def test_a_large_directory_is_told_of_while_it_is_looked_at_read_and_sent(up, monkeypatch):
    monkeypatch.setattr(upload, "REPORT_S", 0.0)
    monkeypatch.setattr(upload, "LONG_BYTES", 1)
    monkeypatch.setattr("spotfleet.bundle.tree.TELL_EACH", 10)
    for name, size in (("LEAST_BYTES", 1000), ("USUAL_BYTES", 10)):
        monkeypatch.setattr(f"spotfleet.bundle.grouping.{name}", size)
    for number in range(30):
        up.write(f"data{number}", f"{number}" * 100_000)
    lines = [line.strip() for line in up.ok("train hello.py").err.splitlines()]
    assert "looking at the working directory: 30 files so far" in lines
    assert "shipping the working directory: 5.0 MB of 5.0 MB to be read" in lines
    assert any(line.startswith("shipping: ") and line.endswith("B/s") and " of 5.0 MB read, " in line
               for line in lines)
    assert any(line.startswith("shipped 32 files, 5.0 MB (") for line in lines)
