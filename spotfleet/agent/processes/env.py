"""Environment variables and paths of a worker process. Pure."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from spotfleet.addresses import split
from spotfleet.codec import to_text
from spotfleet.protocol.messages import Assignment, GangOrder, WorkerLaunch

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


def host_env(own: dict[str, str]) -> dict[str, str]:
    """Return the environment of processes on the host, without their job's part.

    `own` is the agent's environment, with the variables by which its provider finds the host's processes.
    """
    # `python` and `pip` in a setup or run command are those of the workers' interpreter.
    return own | {"PATH": os.pathsep.join([os.path.dirname(sys.executable), own.get("PATH", os.defpath)])}


def container_env(image: dict[str, str], own: dict[str, str]) -> dict[str, str]:
    """Return the same for processes in a container, from the image's environment."""
    return image | {k: v for k, v in own.items() if k.startswith("SPOTFLEET_")}


def worker_env(base: dict[str, str], launch: WorkerLaunch, place: WorkerPaths, packages: str = "") -> dict[str, str]:
    """Build a worker's environment from that of its host or container. `packages` is a folder for Python's path."""
    env = {k: v for k, v in base.items() if k not in _AGENT_ONLY}
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
    if packages:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), packages]))
    return env


@dataclass(frozen=True)
class GangPlace:
    """Place of a gang's process, with what its host has."""

    assignment: Assignment
    gang: GangOrder
    slots: int  # that this host has
    gpus: int

    @property
    def node(self) -> int:
        """The rank of this host among those of the gang."""
        hosts = list(dict.fromkeys(m.partition("/")[0] for m in self.assignment.members))
        return hosts.index(self.assignment.members[self.assignment.rank].partition("/")[0])


def gang_env(launch: WorkerLaunch, place: GangPlace) -> dict[str, str]:
    """Build the variables by which the processes of a gang find each other.

    The names are those that torchrun gives its workers, those from which torchrun itself reads its options (PET_),
    those of SkyPilot, and ours. A process for each host counts as one worker, which may start others.
    """
    own, gang, spec = place.assignment, place.gang, launch.spec
    address, port = split(own.store)
    nodes, node = len(gang.addresses), place.node
    local = (0, 1) if spec.per_host else (own.local_rank, own.local_size)
    counts = (own.rank, own.world_size, *local, node, nodes)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    env = dict(zip(names, counts, strict=True))
    env |= {"ROLE_NAME": "default", "ROLE_RANK": own.rank, "ROLE_WORLD_SIZE": own.world_size, "NODE_RANK": node,
            "MASTER_ADDR": address, "MASTER_PORT": port, "RESTART_COUNT": gang.restarts,
            "TORCHELASTIC_RESTART_COUNT": gang.restarts, "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": launch.job, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    if spec.per_host:
        env |= {"PET_NNODES": nodes, "PET_NODE_RANK": node, "PET_MASTER_ADDR": address, "PET_MASTER_PORT": port,
                "PET_NPROC_PER_NODE": place.slots}
    ips = "\n".join(gang.addresses)
    for prefix, per_node in (("SKYPILOT", "GPUS"), ("SPOTFLEET", "SLOTS")):
        count = place.gpus if per_node == "GPUS" else place.slots
        env |= {f"{prefix}_NODE_IPS": ips, f"{prefix}_NODE_RANK": node, f"{prefix}_NUM_NODES": nodes,
                f"{prefix}_NUM_{per_node}_PER_NODE": count}
    return {name: str(value) for name, value in env.items()} | {
        "SKYPILOT_TASK_ID": launch.job, "SPOTFLEET_LAUNCHER": "torchrun"}
