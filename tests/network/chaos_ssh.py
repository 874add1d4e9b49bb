"""tests/e2e/chaos.py on machines over SSH, each with its own sshd, supervisor, agent and environment:
`python -m tests.network.chaos_ssh --events 100 --seed S`. Links are cut, machines lose power and begin anew, sshds stop
answering, processes of all kinds are killed. In the end each sample has been seen once an epoch, the weights are those
of plain torch bit for bit, and every machine is as it was. Needs root.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from spotfleet.protocol.messages import JobStatus
from tests.e2e.chaos import FILES, TRAIN, asked, chaos, plan
from tests.support.e2e.troubles import Troubles, workers_of
from tests.support.e2e.watch import Failure
from tests.support.network.ssh_stage import DISPATCHER, SshStage

HOSTS = 3
KINDS = {"kill_worker": 4, "kill_two_workers": 2, "stop_worker": 2, "kill_agent": 3, "kill_dispatcher": 2, "cut": 4,
         "power": 3, "freeze": 2, "notice": 2, "drain": 1}


class JobThere:
    """A job whose dispatcher is asked on its own machine."""

    def __init__(self, stage: SshStage, job: str) -> None:
        self.id, self._stage = job, stage

    def status(self) -> JobStatus:
        return self._stage.client_call(lambda client: client.job(self.id))


class SshStrokes(Troubles):
    target = HOSTS

    def __init__(self, stage: SshStage, say: Callable[[str], None]) -> None:
        super().__init__(None, None, random.Random(0), say)  # type: ignore[arg-type]  # neither local cloud nor API
        self.ssh = stage

    def living(self) -> dict[str, Any]:
        """Hosts with processes, by request id."""
        found = {}
        for name in self.ssh.hosts:
            if host := self.ssh.claim(name):
                pids = tuple(self.ssh.lan[name].pids())
                found[host] = SimpleNamespace(request_id=host, machine=name, processes=pids)
        return found

    def machine(self) -> str:
        return self.living()[self.host()].machine

    def cut(self) -> str:
        name, cut_s = self.machine(), self.dice.uniform(1, 12)
        self.ssh.lan.net.cut(name)
        self._later(cut_s, lambda: self.ssh.lan.net.restore(name))
        return f"cut {name} for {cut_s:.1f} s"

    def power(self) -> str:
        name, off_s = self.machine(), self.dice.uniform(0, 5)
        self.ssh.lan[name].power_off()
        self._later(off_s, self.ssh.lan[name].power_on)
        return f"{name} without power for {off_s:.1f} s"

    def freeze(self) -> str:
        machine, frozen_s = self.ssh.lan[self.machine()], self.dice.uniform(2, 12)
        machine.freeze_door()
        self._later(frozen_s, machine.thaw_door)
        return f"sshd of {machine.name} stopped for {frozen_s:.1f} s"

    def kill_worker(self) -> str:
        host, process = self.worker()
        process.kill()
        return f"SIGKILL worker {process.pid} of {host}"

    def kill_agent(self) -> str:
        return self._kill(self.machine(), "spotfleet.agent")

    def kill_dispatcher(self) -> str:
        return self._kill(DISPATCHER, "spotfleet.dispatcher")

    def _kill(self, name: str, module: str) -> str:
        for pid in self.ssh.lan[name].pids():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.cmdline()[1:3] == ["-m", module]:
                    process.kill()
                    return f"SIGKILL {module} of {name}"
        raise psutil.NoSuchProcess(0, msg=f"no {module} on {name}")

    def notice(self) -> str:
        host, notice_s = self.host(), self.dice.uniform(3, 10)
        self.ssh.client_call(lambda client: client.interrupt(host, notice_s))
        self.busy_until = max(self.busy_until, time.monotonic() + notice_s)
        return f"notice of {notice_s:.1f} s to {host}"

    def drain(self) -> str:
        host = self.host()
        self.ssh.client_call(lambda client: client.drain(host))
        return f"drain {host}"

    def workers(self) -> list[tuple[str, psutil.Process]]:
        return [(host, p) for host, machine in sorted(self.living().items()) for p in workers_of(machine)]


class SshWorld:
    """What chaos.LocalWorld is for the local cloud."""

    def __init__(self, stage: SshStage, work: Path) -> None:
        self.stage, self.work = stage, work

    def begin(self, say: Callable[[str], None]) -> None:
        self.strokes = SshStrokes(self.stage, say)
        self.stage.fleet_file(1, HOSTS, more="checkpoint: {interval: 2s}")
        self.stage.cli("up", "fleet.yaml", "-y")

    def train(self, args: list[str]) -> JobThere:
        for name in FILES:
            self.stage.write(name, (TRAIN / name).read_text())
        self.stage.cli("train", FILES[0], "-d", "--np", f"1:{HOSTS}", "--", *args)
        return JobThere(self.stage, self.stage.status()["jobs"][-1]["job"])

    def events(self) -> list[dict[str, Any]]:
        return self.stage.events()

    def end(self) -> None:
        self.stage.cli("down", "-y")
        if left := self.stage.left():
            raise Failure(f"machines are not as they were: {left}")

    def dump(self, job: JobThere) -> None:
        print(job.status())
        for event in self.events()[-100:]:
            print({k: v for k, v in event.items() if k not in ("ledger", "seq", "offer")})
        print(self.stage.story())


def trouble(work: Path, seed: int, events: int) -> None:
    """Raises Failure or chaos_reference.Differs; `work` is seen by all machines."""
    with SshStage.made(HOSTS, linked=[work]) as stage:
        chaos(SshWorld(stage, work), plan(seed, events, KINDS))  # type: ignore[arg-type]


def main() -> None:
    seed, events = asked()
    work = Path(tempfile.mkdtemp(prefix="chaos-ssh-"))
    trouble(work, seed, events)
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
