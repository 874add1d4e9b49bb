"""Environment variables and paths of a worker process. Pure."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from spotfleet.codec import to_text
from spotfleet.protocol.messages import WorkerLaunch

_AGENT_ONLY = {"SPOTFLEET_HOST_ADDRESS", "SPOTFLEET_HOST_PORT", "SPOTFLEET_METADATA_URL", "SPOTFLEET_HOME",
                 "SPOTFLEET_WHEEL"}


@dataclass(frozen=True)
class WorkerPaths:
    """Names, address and files of a worker on this host."""

    worker: str
    job: str
    local_rank: int
    address: str  # the host's advertised address
    socket: str  # the agent's
    folder: Path  # the worker's own

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def fetched(self) -> Path:
        """Folder of all workers of the job on this host, for a checkpoint that one of them fetches."""
        return self.folder.parents[1] / "fetched"

    @property
    def output(self) -> Path:
        return self.folder / "output"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def exit_file(self) -> Path:
        return self.folder / "exit.json"


def user_env(launch: WorkerLaunch) -> dict[str, str]:
    return {**launch.spec.envs, **launch.secrets}


def worker_env(base: dict[str, str], launch: WorkerLaunch, place: WorkerPaths) -> dict[str, str]:
    """Build a worker's environment.

    `base` is the agent's own environment, with the variables by which its provider finds the host's processes.
    """
    env = {k: v for k, v in base.items() if k not in _AGENT_ONLY}
    # `python` and `pip` in a setup or run command are those of the workers' interpreter.
    env["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", os.defpath)])
    env["OMP_NUM_THREADS"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    env.update(user_env(launch))
    env.update({
        "SPOTFLEET_SOCKET": place.socket,
        "SPOTFLEET_WORKER": place.worker,
        "SPOTFLEET_JOB": place.job,
        "SPOTFLEET_ADDRESS": place.address,
        "SPOTFLEET_WORK": str(place.work),
        "SPOTFLEET_FETCHED": str(place.fetched),
        "SPOTFLEET_OUTPUT": str(place.output),
        "SPOTFLEET_RESIZE": to_text(launch.spec.resize),
        "SPOTFLEET_WORKERS": f"{launch.spec.min_workers}:{launch.spec.max_workers}",
        "SPOTFLEET_LOCAL_RANK": str(place.local_rank),
    })
    return env
