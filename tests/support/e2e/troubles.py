"""Everything that can befall a fleet on the local cloud, one method each, at a victim that the dice choose.

Used by soak.py and chaos.py. Each method says in one line what it did, and raises one of MISSED when there was nobody
to hit. What comes later by itself (the end of a notice, a process that goes on) is in `busy_until`.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import psutil

from spotfleet.api import Fleet
from spotfleet.errors import SpotfleetError
from spotfleet.providers.local import LocalMachine
from tests.support.e2e.e2e_stage import Stage

MISSED = (SpotfleetError, psutil.Error, LookupError, StopIteration, ProcessLookupError)


class Troubles:
    def __init__(self, stage: Stage, fleet: Fleet, dice: random.Random, say: Callable[[str], None]) -> None:
        self.stage, self.fleet, self.dice, self.say = stage, fleet, dice, say
        self.busy_until = 0.0  # the last trouble's end, on the monotonic clock
        self.done: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self._timers: list[threading.Timer] = []

    def make(self, kind: str) -> str:
        """One trouble, by the name of its method; what it did, or that it found nobody."""
        try:
            what = getattr(self, kind)()
        except MISSED as error:
            what = f"({kind} missed: {error})"
            self.missed[kind] += 1
        else:
            self.done[kind] += 1
        self.busy_until = max(self.busy_until, time.monotonic())
        self.say(what)
        return what

    def close(self) -> None:
        """Nothing comes later any more; processes that are stopped go on."""
        for timer in self._timers:
            timer.cancel()
            if timer.is_alive():
                with suppress(*MISSED):
                    timer.function()

    # ---- processes

    def kill_worker(self) -> str:
        host, process = self.worker()
        process.kill()
        return f"SIGKILL worker {process.pid} of {host}"

    def kill_two_workers(self) -> str:
        there = self.workers()  # once: they come and go
        found = self.dice.sample(there, min(2, len(there)))
        for _, process in found:
            process.kill()
        return f"SIGKILL workers {[(p.pid, host) for host, p in found]}"

    def stop_worker(self) -> str:
        host, process = self.worker()
        stopped_s = self.dice.uniform(1, 4)
        process.suspend()
        self._later(stopped_s, process.resume)
        return f"SIGSTOP worker {process.pid} of {host} for {stopped_s:.1f} s"

    def kill_agent(self) -> str:
        host, machine = self.dice.choice(sorted(self.living().items()))
        os.kill(machine.processes[0], signal.SIGKILL)
        return f"SIGKILL agent {machine.processes[0]} of {host}"

    def kill_dispatcher(self) -> str:
        machine = next(m for m in self.stage.cloud.truth() if dispatches(m) and m.processes)
        os.kill(machine.processes[0], signal.SIGKILL)
        return f"SIGKILL dispatcher {machine.processes[0]}"

    # ---- hosts

    def kill(self) -> str:
        host = self.host()
        self.stage.cloud.interrupt(host, None)
        return f"kill {host}"

    def two_hosts(self) -> str:
        there = sorted(self.living())
        pair = self.dice.sample(there, min(2, len(there)))
        for host in pair:
            self.stage.cloud.interrupt(host, None)
        return f"kill {pair}"

    def all_hosts(self) -> str:
        everything = sorted(self.living())
        for host in everything:
            self.stage.cloud.interrupt(host, None)
        return f"kill all: {everything}"

    def both_at_once(self) -> str:
        """A worker alone, and a host a blink later."""
        return f"{self.kill_worker()} and {self.kill()}"

    def cut(self) -> str:
        """A host says nothing more, though no socket closes; later it is back, as if nothing had been."""
        host, cut_s = self.host(), self.dice.uniform(1, 12)
        stopped = [psutil.Process(pid) for pid in self.living()[host].processes]
        for process in stopped:
            with suppress(psutil.Error):
                process.suspend()

        def back() -> None:
            for process in stopped:
                with suppress(psutil.Error):
                    process.resume()

        self._later(cut_s, back)
        return f"cut {host} for {cut_s:.1f} s"

    # ---- notices, and what people do

    def notice(self) -> str:
        host, notice_s = self.host(), self.dice.uniform(3, 15)
        self.stage.cloud.interrupt(host, notice_s)
        self.busy_until = max(self.busy_until, time.monotonic() + notice_s)
        return f"notice of {notice_s:.1f} s to {host}"

    def withdraw(self) -> str:
        host, notice_s = self.host(), self.dice.uniform(6, 15)
        self.stage.cloud.interrupt(host, notice_s)
        after_s = self.dice.uniform(0.2, notice_s - 2)
        self._later(after_s, lambda: self.stage.cloud.withdraw_notice(host))
        return f"notice of {notice_s:.1f} s to {host}, withdrawn after {after_s:.1f} s"

    def drain(self) -> str:
        host = self.host()
        self.fleet.drain(host)
        return f"drain {host}"

    # ---- who can be hit

    def living(self) -> dict[str, LocalMachine]:
        """Worker hosts with processes."""
        return {m.request_id: m for m in self.stage.cloud.truth() if m.processes and not dispatches(m)}

    def host(self) -> str:
        return self.dice.choice(sorted(self.living()) or ["none"])

    def workers(self) -> list[tuple[str, psutil.Process]]:
        return [(host, p) for host, machine in sorted(self.living().items()) for p in workers_of(machine)]

    def worker(self) -> tuple[str, psutil.Process]:
        found = self.workers()
        if not found:
            raise psutil.NoSuchProcess(0, msg="there is no worker")
        return self.dice.choice(found)

    def _later(self, seconds: float, work: Callable[[], object]) -> None:
        def guarded() -> None:
            try:
                work()
            except (SpotfleetError, psutil.Error) as error:
                self.say(f"(too late: {error})")

        timer = threading.Timer(seconds, guarded)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)
        self.busy_until = max(self.busy_until, time.monotonic() + seconds)


def dispatches(machine: LocalMachine) -> bool:
    return "-d-" in machine.request_id


def workers_of(machine: LocalMachine) -> list[psutil.Process]:
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
    return "spotfleet.agent.processes.zygote" in process.cmdline() and (
        grandparent is None or "spotfleet.agent.processes.zygote" not in grandparent.cmdline())
