"""Real workers for the parts of run.py, each with its own NCCL_HOSTID: NCCL takes them for hosts that share a card.

They talk over sockets on the loopback interface, as two hosts would over a network, and run under the tests' own small
dispatcher (tests/support/train/train_stage.py). No package but torch and numpy is needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spotfleet.protocol.messages import Stage
from tests.support.train import train_stage
from tests.support.train.train_stage import Fleet, Zygote

HERE = Path(__file__).parent
TOP = HERE.parent.parent
FOUNDERS = ("h0/0/1", "h1/0/1", "h2/0/1")
SOCKETS_ONLY = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "=lo", "NCCL_MNNVL_ENABLE": "0",
                "NCCL_CUMEM_HOST_ENABLE": "0"}
train_stage.LIMIT_S = 300.0  # for the imports of a zygote, on a machine whose cores are in use


class Spawner:
    """Starter of worker processes, with the methods of `Zygote`. A process that uses CUDA is better not forked."""

    def __init__(self) -> None:
        self.exits: dict[int, int] = {}

    def fork(self, script: Path, env: dict[str, str], log: Path) -> int:
        with open(log, "wb") as out:
            process = subprocess.Popen([sys.executable, str(script)], env={**os.environ, **env}, stdout=out, stderr=out,
                                       stdin=subprocess.DEVNULL, start_new_session=True)
        threading.Thread(target=self._await, args=(process,), daemon=True).start()
        return process.pid

    def _await(self, process: subprocess.Popen[bytes]) -> None:
        self.exits[process.pid] = process.wait()

    def close(self) -> None:
        pass


def starter(device: str) -> Any:
    return Zygote() if device == "cpu" else Spawner()


def variables(device: str, worker: str) -> dict[str, str]:
    """Return a worker's environment."""
    common = {"PYTHONPATH": os.pathsep.join([str(TOP), *filter(None, [os.environ.get("PYTHONPATH", "")])]),
              "DEVICE": device, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
              "SPOTFLEET_BACKEND": "gloo" if device == "cpu" else "nccl"}
    if device == "cpu":
        return common
    return common | SOCKETS_ONLY | {"NCCL_HOSTID": worker.replace("/", "-"), "NCCL_DEBUG": os.environ.get(
        "NCCL_DEBUG", "WARN")}


class Training:
    """A training under way: founders that have formed, and spares that are ready."""

    def __init__(self, start: Any, folder: Path, device: str, limit_s: float, spares: int = 0,
                 checkpoint_every_s: float = 0.0, **env: str) -> None:
        folder.mkdir(parents=True)
        self._limit_s, self._device, self._env = limit_s, device, env
        self.fleet = Fleet(start, folder, f"import runpy\nrunpy.run_path({str(HERE / 'worker.py')!r})\n",
                           checkpoint_every_s=checkpoint_every_s)
        self.fleet.hold = True
        self._began = False
        for _ in range(len(FOUNDERS) + spares):
            self.add()

    def add(self) -> str:
        name = f"h{len(self.fleet.workers)}/0/1"
        return self.fleet.start(name, **variables(self._device, name) | self._env)

    def begin(self) -> None:
        """Form the first generation, wait for the spares, and let the dispatcher's part work."""
        fleet = self.fleet
        self.wait(lambda: self._at(FOUNDERS, Stage.INIT), "founders")
        fleet.form(FOUNDERS, "start")
        self.wait(lambda: self._at([n for n in fleet.workers if n not in FOUNDERS], Stage.READY), "spares")
        fleet.hold = False

    def _at(self, names: Any, stage: Stage) -> bool:
        return all(self.fleet.report(n).stage is stage for n in names) or any(
            w.exit not in (None, -9) for w in self.fleet.workers.values())

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        self.fleet.wait(condition, self._limit_s, what)

    def end(self) -> dict[str, Any]:
        """Wait for the end of all; return what they printed and how they ended."""
        fleet = self.fleet
        fleet.wait_end(self._limit_s)
        digests = [line.split()[0] for line in fleet.lines("DIGEST")]
        return {"digests": digests, "members": list(fleet.members),
                "exits": {n: w.exit for n, w in fleet.workers.items()},
                "generations": [[list(members), cause] for _, members, cause in fleet.history],
                "pause_ms": {n: round(1e3 * fleet.report(n).pause_s, 1) for n in fleet.members},
                "repeated": {n: fleet.report(n).recomputed for n in fleet.members}}

    def close(self) -> None:
        self.fleet.close()
