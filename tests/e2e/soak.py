"""Trouble of every kind at random moments, for minutes: `python tests/e2e/soak.py SEED MINUTES`.

A local fleet trains counting jobs, one after another. Bursts of one to four troubles hit each, from its start to its
end, some apart by milliseconds, some timed to hit a generation that forms. After each burst the job must train with all
its workers again within RECOVER_S; each count must be exact, and at the end the cloud's invoice our cost. The same seed
makes the same plan of troubles, though the moments differ with the machine. What went wrong is printed with all that is
needed to find out why, and kept on disk.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
from e2e_stage import COUNTING, Stage, output, wait_for

from spotfleet.api import Fleet, Job
from spotfleet.errors import SpotfleetError
from spotfleet.messages import JobStatus
from spotfleet.providers.local import LocalCloud, Machine

RECOVER_S = 60.0  # from the last trouble's end until all workers train again
STEADY_STEPS = 5  # so many steps in one generation of all workers are "trains again"
STEPS = 2000  # of a job
JOB_S = 50.0  # then the job may hurry to its end
HEAVY = 1_000_000  # numbers that some jobs count with as well, so that trouble also hits transfers
END_LIMIT_S = 180.0
ENDED = ("succeeded", "failed", "cancelled")
ROUTINE = ("PriceChanged", "CheckpointKept", "JobProgress")


class Failure(AssertionError):
    pass


class Soak:
    """One fleet, one job, and the dice."""

    def __init__(self, stage: Stage, seed: int, minutes: float) -> None:
        self.stage, self.dice = stage, random.Random(seed)
        self.minutes = minutes
        self.target = self.dice.choice([3, 3, 4])
        self.done: Counter[str] = Counter()
        self.began = time.monotonic()
        self.busy_until = 0.0  # the last trouble's end
        self.timers: list[threading.Timer] = []
        self.slowest_s = 0.0

    def run(self) -> None:
        self.fleet: Fleet = self.stage.fleet("soak", least=1, target=self.target, more="checkpoint: {interval: 2s}")
        until = time.monotonic() + 60 * self.minutes
        while time.monotonic() < until:
            self.one_job(min(until, time.monotonic() + JOB_S))
        for timer in self.timers:
            timer.cancel()
        self.fleet.down()
        billed, ours = self.stage.cloud.invoice("soak").micros, self.fleet.cost().micros
        if billed != ours or self.stage.cloud.truth():
            raise Failure(f"the cloud bills {billed}, our cost is {ours}; left: {self.stage.cloud.truth()}")
        self.say(f"{billed} micros; slowest recovery {self.slowest_s:.1f} s; {dict(self.done)}")

    def one_job(self, until: float) -> None:
        """Trouble from its start, sometimes, to its end."""
        least, every = self.dice.randint(1, self.target - 1), self.dice.choice([1, 7, 1000])
        (self.stage.work / "hurry").unlink(missing_ok=True)
        weights = self.dice.choice([1, 1, HEAVY])
        (self.stage.work / "counting.py").write_text(script(weights))
        self.say(f"a job of {least} to {self.target} workers, {weights} weights, a commit each {every}")
        self.job: Job = self.stage.counting(self.fleet, STEPS, (least, self.target), every, wait=True)
        if self.dice.random() < 0.5:
            time.sleep(self.dice.uniform(0, 4))  # while it forms its first generation, or just before or after
            self.recovers(self.burst())
        self.recovers("the start")
        while time.monotonic() < until and self.status().version < STEPS - 300:
            self.recovers(self.burst())
        self.end()

    def burst(self) -> str:
        made = []
        for number in range(self.dice.choice([1, 1, 2, 2, 3, 4])):
            if number:
                self.pause()
            made.append(self.trouble())
        return ", ".join(made)

    def pause(self) -> None:
        """Until the next trouble of a burst: at once, or while a generation forms, or while it trains."""
        kind, after_s = self.dice.choice(["at once", "forming", "forming", "later"]), self.dice.uniform(0, 0.05)
        if kind == "forming":
            before, limit = self.status(), time.monotonic() + 10
            while time.monotonic() < limit and (now := self.status()).generation == before.generation:
                if now.state in ENDED:
                    return
                time.sleep(0.005)
        elif kind == "later":
            after_s = self.dice.uniform(0.05, 5)
        time.sleep(after_s)

    def trouble(self) -> str:
        kinds: dict[Callable[[], str], int] = {
            self.notice: 4, self.kill: 4, self.kill_worker: 4, self.kill_agent: 2, self.kill_dispatcher: 2,
            self.drain: 2, self.stop_worker: 3, self.two_hosts: 2, self.all_hosts: 1, self.withdraw: 2,
            self.both_at_once: 2,
        }
        kind = self.dice.choices(list(kinds), list(kinds.values()))[0]
        try:
            what = kind()
        except (SpotfleetError, psutil.Error, LookupError, StopIteration, ProcessLookupError) as error:
            what = f"({kind.__name__} missed: {error})"
        else:
            self.done[kind.__name__] += 1
        self.busy_until = max(self.busy_until, time.monotonic())
        self.say(what)
        return what

    # ---- troubles

    def notice(self) -> str:
        host, notice_s = self.host(), self.dice.uniform(3, 15)
        self.stage.cloud.interrupt(host, notice_s)
        self.busy_until = max(self.busy_until, time.monotonic() + notice_s)
        return f"notice of {notice_s:.1f} s to {host}"

    def kill(self) -> str:
        host = self.host()
        self.stage.cloud.interrupt(host, None)
        return f"kill {host}"

    def two_hosts(self) -> str:
        pair = self.dice.sample(sorted(self.living()), min(2, len(self.living())))
        for host in pair:
            self.stage.cloud.interrupt(host, None)
        return f"kill {pair}"

    def all_hosts(self) -> str:
        everything = sorted(self.living())
        for host in everything:
            self.stage.cloud.interrupt(host, None)
        return f"kill all: {everything}"

    def kill_worker(self) -> str:
        host, process = self.worker()
        process.kill()
        return f"SIGKILL worker {process.pid} of {host}"

    def both_at_once(self) -> str:
        """A worker alone, and a host a blink later."""
        return f"{self.kill_worker()} and {self.kill()}"

    def kill_agent(self) -> str:
        host, machine = self.dice.choice(sorted(self.living().items()))
        os.kill(machine.processes[0], signal.SIGKILL)
        return f"SIGKILL agent {machine.processes[0]} of {host}"

    def kill_dispatcher(self) -> str:
        machine = next(m for m in self.stage.cloud.truth() if _dispatches(m) and m.processes)
        os.kill(machine.processes[0], signal.SIGKILL)
        return f"SIGKILL dispatcher {machine.processes[0]}"

    def drain(self) -> str:
        host = self.host()
        self.fleet.drain(host)
        return f"drain {host}"

    def stop_worker(self) -> str:
        host, process = self.worker()
        stopped_s = self.dice.uniform(1, 4)
        process.suspend()
        self.later(stopped_s, process.resume)
        return f"SIGSTOP worker {process.pid} of {host} for {stopped_s:.1f} s"

    def withdraw(self) -> str:
        host, notice_s = self.host(), self.dice.uniform(6, 15)
        self.stage.cloud.interrupt(host, notice_s)
        after_s = self.dice.uniform(0.2, notice_s - 2)
        self.later(after_s, lambda: self.stage.cloud.withdraw_notice(host))
        return f"notice of {notice_s:.1f} s to {host}, withdrawn after {after_s:.1f} s"

    def later(self, seconds: float, work: Callable[[], object]) -> None:
        def guarded() -> None:
            try:
                work()
            except (SpotfleetError, psutil.Error) as error:
                self.say(f"(too late: {error})")

        timer = threading.Timer(seconds, guarded)
        timer.daemon = True
        timer.start()
        self.timers.append(timer)
        self.busy_until = max(self.busy_until, time.monotonic() + seconds)

    # ---- who can be hit

    def living(self) -> dict[str, Machine]:
        """Worker hosts with processes."""
        return {m.request_id: m for m in self.stage.cloud.truth() if m.processes and not _dispatches(m)}

    def host(self) -> str:
        return self.dice.choice(sorted(self.living()) or ["none"])

    def worker(self) -> tuple[str, psutil.Process]:
        found = [(host, p) for host, machine in sorted(self.living().items()) for p in workers(machine)]
        if not found:
            raise psutil.NoSuchProcess(0, msg="there is no worker")
        return self.dice.choice(found)

    # ---- what must hold

    def status(self) -> JobStatus:
        """The job; waits for a dispatcher that was killed."""
        limit = time.monotonic() + RECOVER_S
        while True:
            try:
                return self.job.status()
            except SpotfleetError:
                if time.monotonic() > limit:
                    raise
                time.sleep(0.1)

    def recovers(self, after: str) -> None:
        """Return once all workers train: some steps in one generation, after everything announced has happened."""
        first, begun = None, time.monotonic()
        while True:
            status = self.status()
            ranked = [w for w in status.workers if w.rank >= 0]
            if status.state in ENDED:
                raise Failure(f"the job has {status.state} after {after}: {status.why}\n{status.error}")
            now = time.monotonic()
            whole = status.state == "running" and len(ranked) == self.target and now > self.busy_until
            whole = whole and {w.host for w in ranked} <= set(self.living())
            if not whole or first is None or first.generation != status.generation:
                first = status if whole else None
            elif status.version >= first.version + STEADY_STEPS:
                break
            if now > max(self.busy_until, begun) + RECOVER_S:
                raise Failure(f"does not train with {self.target} workers {RECOVER_S:.0f} s after {after}")
            time.sleep(0.1)
        took_s = max(0.0, time.monotonic() - max(self.busy_until, begun))
        self.slowest_s = max(self.slowest_s, took_s)
        self.say(f"  trains at generation {status.generation}, step {status.version} ({took_s:.1f} s)")

    def end(self) -> None:
        """The last steps in a hurry, with more trouble in them, and the sum."""
        self.stage.hurry()
        near = STEPS - self.dice.randrange(300)
        wait_for(f"step {near}", lambda: (s := self.status()).version >= near or s.state in ENDED, END_LIMIT_S)
        self.say("near the end:")
        self.burst()
        wait_for("the job's end", lambda: self.status().state in ENDED, END_LIMIT_S)
        said = f"counted -{STEPS}.0 of -{STEPS}"
        if self.status().state != "succeeded" or said not in output(self.job):
            raise Failure(f"expected '{said}', got: {self.status()} {output(self.job)[-300:]!r}")
        self.say(f"{said}; {self.status().repeated} steps repeated")

    # ---- words

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:7.2f}  {text}", flush=True)

    def dump(self) -> None:
        """All that helps to find out why."""
        status = self.status()
        print(f"--- job\n{status}\n--- hosts at {time.time():.2f}")
        for host in self.fleet.hosts():
            print(host)
        print("--- events")
        for event in [e for e in self.fleet.events() if e["kind"] not in ROUTINE][-100:]:
            print({k: v for k, v in event.items() if k not in ("ledger", "seq", "offer")})
        for host, machine in sorted(self.living().items()):
            for process in workers(machine):
                print(f"--- {host}: worker {process.pid}, {process.status()}", flush=True)
                spy = Path(sys.executable).with_name("py-spy")
                if spy.exists():
                    command = [str(spy), "dump", "--native", "--pid", str(process.pid)]
                    subprocess.run(command, timeout=60, check=False)


def script(weights: int) -> str:
    """COUNTING with 30 ms a step, and so many weights of which each must have counted alike."""
    text = COUNTING.replace("range(20)", "range(3)").replace("Linear(1, 1, bias", f"Linear(1, {weights}, bias")
    return text.replace("train(hvd.elastic", """
def same(found):
    assert found.min() == found.max(), found
    return found[0]

train(hvd.elastic""").replace("model.weight.item()", "same(model.weight).item()")


def _dispatches(machine: Machine) -> bool:
    return "-d-" in machine.request_id


def workers(machine: Machine) -> list[psutil.Process]:
    """The training processes on a machine: children of the process that forks them."""
    found = []
    for pid in machine.processes:
        try:
            process = psutil.Process(pid)
            parent = process.parent()
            if parent is not None and _is_zygote(parent) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # it has just ended
    return found


def _is_zygote(process: psutil.Process) -> bool:
    grandparent = process.parent()
    return "spotfleet.agent.zygote" in process.cmdline() and (
        grandparent is None or "spotfleet.agent.zygote" not in grandparent.cmdline())


def soak(stage: Stage, seed: int, minutes: float) -> None:
    """Raises Failure, after all that is known about it has been printed."""
    run = Soak(stage, seed, minutes)
    try:
        run.run()
    except BaseException as error:
        run.say(f"FAILED: {error!r}")
        if hasattr(run, "job"):
            run.dump()
        raise


def main(seed: int, minutes: float) -> None:
    print(f"seed {seed}, {minutes:g} min", flush=True)
    top = Path(tempfile.mkdtemp(prefix="soak-"))
    work = top / "work"
    work.mkdir()
    os.environ |= {"SPOTFLEET_HOME": str(top / "home"), "SPOTFLEET_LOCAL_OWNER_PID": str(os.getpid())}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(work)
    try:
        soak(Stage(top / "home", work), seed, minutes)
    except BaseException:
        kept = Path(f"{top}-failed")
        shutil.copytree(top, kept, symlinks=True, ignore_dangling_symlinks=True, ignore=_sockets)
        print(f"kept: {kept}", flush=True)
        raise
    finally:
        LocalCloud(top / "home").shutdown()
        shutil.rmtree(top, ignore_errors=True)


def _sockets(folder: str, names: list[str]) -> list[str]:
    return [n for n in names if (Path(folder) / n).is_socket()]


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
