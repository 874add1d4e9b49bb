"""The Ray cluster of a fleet, as `spotfleet ray` starts, shows, uses and stops it."""

from __future__ import annotations

import importlib.util
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from spotfleet.api.home import FleetRecord, Home
from spotfleet.api.machine import Progress
from spotfleet.api.train import inside, refuse_leaks, ship_working_directory
from spotfleet.bundle import scripts, targets
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.model import RAY_KIND, JobSpec, Role
from spotfleet.plugins import Machines
from spotfleet.protocol.ray_cluster import TOKEN, DriverStart, RayDriver, RayStatus
from spotfleet.providers.plugin import traits_of
from spotfleet.transport.client import DispatcherClient
from spotfleet.version import install

RAYLET = "exec python -m spotfleet.ray.cluster.raylet"
POLL_S = 0.5
STOP_S = 60.0
LOG_WAIT_S = 10.0
GRACE_S = 15.0  # for a raylet and its processes to end, on a busy host


def _silent(_line: str) -> None:
    pass


@dataclass(frozen=True)
class RayStart:
    """Arguments of `start`."""

    hosts: tuple[int, int] | None = None  # fewest and most; None: all that other jobs leave
    priority: int = 0
    gpus: int = 0  # that each host must have
    wait: bool = False


class RayOnFleet:
    """The Ray cluster of one fleet."""

    def __init__(self, home: Home, record: FleetRecord, secrets: Mapping[str, str], client: DispatcherClient) -> None:
        self._home, self._record, self._secrets, self._client = home, record, secrets, client

    def start(self, request: RayStart = RayStart(), progress: Progress = _silent) -> str:
        """Start the cluster: its head beside the dispatcher, a raylet on each host. Returns the job's name at once.

        Raises UsageError where the machines have no Ray, or a cluster runs already.
        """
        spec = self._record.spec
        self._check_ray()
        status = self._client.status()
        if request.gpus:
            least = min((h.slots if h.gpus or _sells_gpus(self._record) else 0 for h in status.hosts
                         if h.role == Role.WORKER.value), default=request.gpus if _sells_gpus(self._record) else 0)
            if least < request.gpus:
                raise UsageError(f"--gpus {request.gpus}: the hosts of this fleet have {least or 'no'} GPUs",
                                 hint="name `accelerators` under `resources` in the fleet file, and `spotfleet up` a "
                                      "fleet of it")
        least, most = request.hosts or (1, max(status.max, 1))
        if not 1 <= least <= most:
            raise UsageError(f"--hosts: expected 1 <= MIN <= MAX, got {least}:{most}", hint="--hosts 2:4, or --hosts 4")
        bundle = ""
        if spec.setup:  # which may read files of the working directory
            bundle = ship_working_directory(self._home, self._record, self._secrets, self._client, progress).sha256
        job = JobSpec(
            name=RAY_KIND, run=RAYLET, setup=targets.with_targets(spec.setup, [*spec.file_mounts], spec.mounted),
            bundle=bundle, min_workers=least, max_workers=most, envs=dict(spec.envs), kind=RAY_KIND, per_host=True,
            priority=request.priority, setup_timeout_s=spec.setup_timeout_s, grace_s=GRACE_S)
        refuse_leaks(job, self._secrets)
        wait = request.wait or status.min == 0  # without a host yet, what Ray's programs ask for brings one
        return self._client.submit(job, {**self._secrets, TOKEN: token_hex(32)}, wait=wait)

    def _check_ray(self) -> None:
        spec = self._record.spec
        if spec.ray is None:
            raise UsageError(f"fleet {spec.name} has no Ray: its file has no `ray`",
                             hint='write `ray: {version: "2.60.*"}` in the fleet file, take the fleet down, and '
                                  "`spotfleet up` it again")
        if spec.container.image:
            raise UsageError("`container` and `ray` exclude each other: raylets run on the hosts themselves",
                             hint="install what your tasks need by `setup` or `environment.packages`")
        if traits_of(spec).machines is Machines.HERE and importlib.util.find_spec("ray") is None:
            raise UsageError("Ray is not installed here, and the hosts of provider local are processes of this machine",
                             hint=install("ray"))

    def status(self) -> RayStatus:
        """Return the cluster's status; one without a job if none runs."""
        return self._client.ray()

    def submit(self, words: Sequence[str], envs: Mapping[str, str] | None = None, progress: Progress = _silent) -> str:
        """Ship the working directory, and run a script or command on the head's machine; return its name there."""
        if not words:
            raise UsageError("nothing to run", hint="spotfleet ray submit SCRIPT.py [args], or -- COMMAND")
        if not self.status().job:
            raise UsageError("no Ray cluster runs on this fleet", hint="start it with `spotfleet ray start`")
        words = list(words)
        _refuse_habits(words[0])
        if words[0].endswith(".py"):
            workdir = Path(self._record.spec.workdir)
            words = ["python", inside(Path(words[0]), workdir), *words[1:]]
            if lost := scripts.uncollected(scripts.read(workdir / words[1]), together=False):
                progress(lost)
        shipped = ship_working_directory(self._home, self._record, self._secrets, self._client, progress)
        for line in shipped.left_out:
            progress(f"left out of the bundle: {line}")
        start = DriverStart(shlex.join(words), {**self._record.spec.envs, **(envs or {}), **self._secrets})
        return self._client.start_driver(shipped.sha256, start)

    def logs(self, driver: str, *, follow: bool = False) -> Iterator[bytes]:
        """Yield the output of a submitted script; with `follow` to its end."""
        offset = 0
        while True:
            chunk = self._client.driver_logs(driver, offset, wait_s=LOG_WAIT_S if follow else 0.0)
            if chunk.data:
                yield chunk.data
            if chunk.end or not (follow or chunk.data):
                return
            offset = chunk.offset

    def driver(self, name: str) -> RayDriver:
        """Return the state of a submitted script."""
        found = next((d for d in self.status().drivers if d.driver == name), None)
        if found is None:
            raise SpotfleetError(f"the Ray cluster has ended, and script {name} with it",
                                 hint="`spotfleet ray start` starts another one")
        return found

    def stop_driver(self, name: str) -> None:
        self._client.stop_driver(name)

    def stop(self, *, timeout_s: float = STOP_S) -> str:
        """End the cluster; return once its job has ended: nothing of Ray runs then. Returns the job, "" for none."""
        job = self.status().job
        if not job:
            return ""
        self._client.cancel(job)
        end = time.monotonic() + timeout_s
        while self.status().job == job:
            if time.monotonic() > end:
                raise SpotfleetError(f"job {job} has not ended within {timeout_s:g} s: {self._client.job(job).why}",
                                     hint="`spotfleet status` shows what it waits for")
            time.sleep(POLL_S)
        return job


# Options of `ray job submit` and `ray submit`, with ours for the same purpose.
HABITS = {
    "--working-dir": "leave it out: the fleet's working directory (`workdir`) is always shipped",
    "--no-wait": "-d returns at once",
    "--runtime-env": "packages belong into `environment.packages` or `setup` of the fleet file, variables into -e K=V; "
                     "a script may also give ray.init(runtime_env=...)",
    "--entrypoint": "leave it out: the script runs beside the head, and takes no resources of the cluster",
    "--address": "-c FLEET names the fleet", "--submission-id": "scripts are named d1, d2 ...",
    "--start": "`spotfleet ray start` first", "--stop": "`spotfleet ray stop` afterwards",
    "--tmux": "-d returns at once", "--screen": "-d returns at once",
    "--port-forward": "`spotfleet port-forward PORT`", "-p": "`spotfleet port-forward PORT`",
}


def _refuse_habits(word: str) -> None:
    """Raise UsageError for a cluster file or an option in the place of the script."""
    if word.lower().endswith((".yaml", ".yml")):
        raise UsageError(f"{word} is a YAML file, not a script",
                         hint="`spotfleet ray submit SCRIPT.py`; -c FLEET names the fleet, where there are several")
    if word.startswith("-"):
        known = next((text for name, text in HABITS.items() if word.startswith(name)), "")
        raise UsageError(f"ray submit has no option {word.partition('=')[0]}",
                         hint=known or "`spotfleet ray submit --help` lists them; the script's own come after it")


def _sells_gpus(record: FleetRecord) -> bool:
    return any(need.accelerator for need in record.spec.any_of)
