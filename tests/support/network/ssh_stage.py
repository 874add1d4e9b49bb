"""A user at a laptop, a dispatcher's machine and hosts, each with a real sshd: what end-to-end tests of fleets over
SSH have at hand.

    with SshStage.made(hosts=3) as stage:
        stage.fleet_file()
        stage.cli("up", "fleet.yaml", "-y")       # the real command line, on the laptop
        job = stage.train((2, 3))                 # counting.py, which leaves a trace of each step in /tmp/trace
        ...
        assert stage.left() == {}                 # every machine as before, byte for byte, and no process of ours
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotfleet.transport.client import DispatcherClient, Endpoint
from tests.support.network import namespaces
from tests.support.network.machines import LIMIT_S, Build, Machine, Machines
from tests.support.network.network_scripts import Step

CLI = str(Path(sys.executable).with_name("spotfleet"))
WORK = "/root/work"  # on the laptop
TRACE = "/tmp/trace"  # on hosts: the test's own, removed before machines are compared
LAPTOP, DISPATCHER = "laptop", "d"
INTERFACES = ("ens5", "eth0", "enp0s3", "wan7", "bond1")  # no two machines agree on a name, and none has the others'
SAMPLES, BATCH = 96, 4

# Element i of the weights falls by exactly 1 when sample i is trained on, so that any lost or doubled sample shows.
COUNTING = f"""
import os, time
import torch
import spotfleet.train as hvd
from spotfleet.train import runtime

NAP, TRACE = float(os.environ.get("NAP", "0.02")), {TRACE!r}
os.makedirs(TRACE, exist_ok=True)
trace = open(os.path.join(TRACE, os.environ["SPOTFLEET_WORKER"].replace("/", "_")), "a", buffering=1)
hvd.init()
print("counting on", os.uname().nodename, flush=True)
weights = torch.nn.Parameter(torch.zeros({SAMPLES}))
opt = hvd.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), [("weights", weights)], op=hvd.Sum)
sampler = hvd.elastic.ElasticSampler({SAMPLES}, batch_size={BATCH})

@hvd.elastic.run
def train(state):
    while not state.over:
        sampler.set_epoch(state.epoch)
        for ids in sampler.batches():
            opt.zero_grad()
            weights[ids[:int(sampler.weight()[0])]].sum().backward()
            opt.step()
            sampler.record_batch(0)
            state.step += 1
            state.commit()
            print(time.monotonic(), state.step, runtime.current().generation, hvd.size(), file=trace)
            time.sleep(NAP)
        state.epoch += 1
        state.over = hvd.broadcast_object(os.path.exists(TRACE + "/enough"), 0)

state = hvd.elastic.TorchState(weights=weights, optimizer=opt, sampler=sampler, epoch=0, step=0, over=False)
train(state)
out = os.path.join(os.environ["SPOTFLEET_OUTPUT"], "counts.txt")
open(out, "w").write(" ".join(str(int(-x)) for x in weights.tolist()) + f" of {{state.epoch}}")
print("counted", sorted(set((-weights).tolist())), "of", state.epoch, flush=True)
hvd.shutdown()
"""


@dataclass
class SshStage:
    lan: Machines
    hosts: tuple[str, ...]
    user: str = "root"  # user of the machines
    before: dict[str, dict[str, str]] = field(default_factory=dict)
    job_id: str = ""

    @staticmethod
    @contextmanager
    def made(hosts: int = 3, families: tuple[int, ...] = namespaces.BOTH,
             more: Sequence[Build] = (), linked: Sequence[Path] = (), user: str = "root") -> Iterator[SshStage]:
        names = tuple(f"w{i}" for i in range(hosts))
        builds = [Build(LAPTOP, "wlan0", door="none", families=families), Build(DISPATCHER, "mgmt0", families=families),
                  *(Build(n, i, families=families) for n, i in zip(names, INTERFACES, strict=False)), *more]
        with Machines(builds, linked) as lan:
            stage = SshStage(lan, (*names, *(b.name for b in more)), user)
            stage.write("counting.py", COUNTING)
            stage.before = {m.name: m.changes() for m in lan}
            yield stage

    @property
    def laptop(self) -> Machine:
        return self.lan[LAPTOP]

    # ---- what a user does

    def write(self, name: str, text: str) -> None:
        path = self.laptop.path(f"{WORK}/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def fleet_file(self, least: int, most: int, hosts: Sequence[str] = (), more: str = "", ssh: str = "") -> None:
        """fleet.yaml, of fleet `lan`; `hosts` are lines of the list."""
        lines = "".join(f"    - {h}\n" for h in hosts or self.hosts)
        self.write("fleet.yaml", f"name: lan\nprovider: ssh\nnodes: {{min: {least}, target: {most}, max: {most}}}\n"
                   f"ssh:\n  user: {self.user}\n  dispatcher: {DISPATCHER}\n{ssh}  hosts:\n{lines}"
                   f"environment: {{python: {sys.executable}, inherit: true}}\nworkdir: .\n{more}\n")

    def cli(self, *command: str, ok: bool = True, timeout_s: float = 2 * LIMIT_S) -> subprocess.CompletedProcess[str]:
        return self.laptop.run(CLI, *command, ok=ok, timeout_s=timeout_s, cwd=WORK)

    def train(self, workers: tuple[int, int], nap_s: float = 0.02, script: str = "counting.py") -> str:
        """Begin; the job's id."""
        self.cli("train", script, "--np", f"{workers[0]}:{workers[1]}", "-d", "-e", f"NAP={nap_s}")
        return self.status()["jobs"][-1]["job"]

    def client_call(self, work: Callable[[DispatcherClient], Any]) -> Any:
        """`work(client)` on the dispatcher's own machine, for what is asked often."""
        fleet = self.laptop.path("/root/.spotfleet/fleets/lan")
        token, ca = json.loads((fleet / "keys.json").read_text())["admin_token"], (fleet / "ca.pem").read_text()
        listing = json.loads(next(self.ours(DISPATCHER).glob("*/listing.json")).read_text())
        host = f"[{listing['address']}]" if ":" in listing["address"] else listing["address"]
        client = DispatcherClient(Endpoint(f"https://{host}:{listing['port']}", token, ca), patience_s=LIMIT_S)
        return self.lan.net.call(DISPATCHER, lambda: work(client))

    def ours(self, name: str) -> Path:
        """The folder of a machine in which everything of a fleet lies."""
        return self.lan[name].path(f"{'/root' if self.user == 'root' else f'/home/{self.user}'}/.spotfleet-host")

    def claim(self, name: str) -> str:
        """The host that has the machine; empty if none has."""
        try:
            return (self.ours(name) / "claim").read_text().strip()
        except FileNotFoundError:
            return ""

    def status(self) -> dict[str, Any]:
        return json.loads(self.cli("status", "-o", "json").stdout)

    def job(self, job: str) -> dict[str, Any]:
        return next(j for j in self.status()["jobs"] if j["job"] == job)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        found = json.loads(self.cli("events", "-o", "json").stdout)
        return [e for e in found if e["kind"] in kinds or not kinds]

    def enough(self) -> None:
        """The epoch under way is the last."""
        for name in self.hosts:
            folder = self.lan[name].path(TRACE)
            folder.mkdir(exist_ok=True)
            (folder / "enough").touch()

    # ---- the truth

    def steps(self, name: str) -> list[Step]:
        """Those that were made on a machine, in order."""
        return steps_of(self.lan[name].path(TRACE))

    def first_after(self, name: str, at: float, generation: int = 0) -> Step | None:
        return next((s for s in self.steps(name) if s.at > at and s.generation > generation), None)

    def training(self, names: Sequence[str]) -> bool:
        """Do these machines, and no others, train together?"""
        made = {name: self.steps(name) for name in self.hosts}
        newest = max((s[-1].generation for s in made.values() if s), default=0)
        return newest > 0 and {n for n, s in made.items() if s and s[-1].generation == newest} == set(names)

    def left(self) -> dict[str, Any]:
        """What differs from before the first command, by machine: files and processes."""
        for name in self.hosts:
            self.lan[name].run("rm", "-rf", TRACE)
        found: dict[str, Any] = {}
        for machine in self.lan:
            was, now = self.before[machine.name], machine.changes()
            ours = (f"{WORK}", "/root/.spotfleet") if machine.name == LAPTOP else ()
            differs = {k: (was.get(k), now.get(k)) for k in sorted({*was, *now})
                       if was.get(k) != now.get(k) and not k.startswith(ours)}
            if differs or machine.processes():
                found[machine.name] = (differs, machine.processes())
        return found

    def wait(self, what: str, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, f"{what}: not within {limit_s:.0f} s\n{self.story()}"
            time.sleep(0.05)

    def story(self) -> str:
        """All that helps to find out why."""
        parts = [self.cli("status", ok=False).stdout]
        for machine in self.lan:
            for path in [*self.ours(machine.name).glob("*/*.log"), *self.ours(machine.name).glob("*/state")]:
                parts.append(f"--- {machine.name}: {path.name}\n{path.read_text(errors='replace')[-2000:]}")
        return "\n".join(parts)


def steps_of(trace: Path) -> list[Step]:
    rows = [line.split() for path in sorted(trace.glob("*_*")) for line in path.read_text().splitlines()]
    return sorted((Step(float(r[0]), int(r[1]), int(r[2])) for r in rows if len(r) == 4), key=lambda s: s.at)


def counted(text: str) -> tuple[Counter[int], int]:
    """How often samples were counted, and how often each should have been, from a worker's counts.txt."""
    words = text.split()
    return Counter(int(w) for w in words[:SAMPLES]), int(words[-1])
