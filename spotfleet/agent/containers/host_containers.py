"""Containers of this host, one for each job that asks for an image.

    wanted --engine chosen, image fetched--> starting --> up --no worker of the job is left--> ended

A folder in CONTAINERS names each container's engine. An agent that starts again removes the containers that are left at
these engines.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import spotfleet
from spotfleet.agent.boot import AgentBoot
from spotfleet.agent.containers.container import FIRST, PACKAGES, ContainerFailed, JobContainer, call
from spotfleet.agent.containers.engines import (
    AUTH_FILE,
    LOGIN,
    ContainerOrder,
    Engine,
    Mount,
    RegistryLogin,
    auth_file,
    candidates,
    login_of,
    mount_of,
)
from spotfleet.agent.containers.refusals import Refusal, meaning
from spotfleet.agent.files.bundles import PreparedLaunch, folder_name
from spotfleet.agent.processes.zygote_client import Processes
from spotfleet.model import JobSpec

log = logging.getLogger("spotfleet.agent")

CONTAINERS = "containers"  # folder in the agent's home
_ENGINE_FILE = "engine"
_DEVICES = ("/dev/infiniband",)
_GPU_NODES = ("nvidia[0-9]*", "nvidiactl", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools")  # in /dev
_NAME_CHARS = 40  # longest part of a container's name, for host and job each


@dataclass(frozen=True)
class ContainerHost:
    """Values and callables of the agent that its containers need."""

    boot: AgentBoot
    home: Path
    processes: Processes
    sockets: Callable[[], Path]  # folder of the agent's socket
    changed: Callable[[], None]
    gpus: Callable[[], bool] = lambda: any(Path("/dev").glob("nvidia[0-9]*"))


class Containers:
    def __init__(self, host: ContainerHost) -> None:
        self._host = host
        self._of: dict[str, JobContainer] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tries: defaultdict[str, int] = defaultdict(int)
        self._failures: dict[str, ContainerFailed] = {}  # the last one of each job
        self._closing: set[asyncio.Task[None]] = set()
        self._cleared = asyncio.Event()

    @property
    def labels(self) -> dict[str, str]:
        """The labels of all containers of this agent."""
        boot = self._host.boot
        return {"spotfleet.fleet": boot.fleet, "spotfleet.host": boot.host, "spotfleet.home": str(self._host.home)}

    async def run(self) -> None:
        """Remove the containers that an earlier agent has left; run until cancelled."""
        for name in sorted({file.read_text() for file in self._folder.glob(f"*/{_ENGINE_FILE}")}):
            await self._remove_orphans(candidates(name, "", self._state)[0])
        shutil.rmtree(self._folder, ignore_errors=True)
        self._cleared.set()
        await asyncio.Event().wait()

    async def _remove_orphans(self, engine: Engine) -> None:
        code, names, errors = await call(engine.list(self.labels))
        if code:
            log.error("the containers of an earlier agent cannot be listed: %s", errors.strip())
        for name in names.split():
            log.info("removing container %s, left by an earlier agent", name)
            await call(engine.remove(name))

    async def enter(self, prepared: PreparedLaunch, folder: Path, progress: Callable[[str], None]) -> JobContainer:
        """Return the job's container, started if need be. `folder` is the job's. Raises ContainerFailed."""
        job, spec = prepared.launch.job, prepared.launch.spec
        before = self._failures.get(job)
        async with self._locks[job]:
            await self._cleared.wait()
            found = self._of.get(job)
            if found is not None and found.alive:
                return found
            last = self._failures.get(job)
            if last is not None and last is not before:  # another worker's try, for which this one has waited
                raise last
            if found is not None:
                await self._of.pop(job).close()
            try:
                container = self._of[job] = await self._start(prepared, folder, progress)
                await container.require(script=bool(spec.argv), torch=False)
            except ContainerFailed as error:
                self._failures[job] = error
                raise
            return container

    def count_failure(self, job: str, error: ContainerFailed) -> int:
        """Return the number of this failure among those of the job's container here."""
        if not error.tries:
            self._tries[job] += 1
            error.tries = self._tries[job]
        return error.tries

    def leave(self, job: str) -> None:
        """End the container of a job without workers here."""
        if (container := self._of.pop(job, None)) is not None:
            task = asyncio.create_task(container.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End all containers."""
        for job in list(self._of):
            self.leave(job)
        await asyncio.gather(*self._closing)

    @property
    def _folder(self) -> Path:
        return self._host.home / CONTAINERS

    @property
    def _state(self) -> str:
        return str(self._host.home / "runc")

    async def _start(self, prepared: PreparedLaunch, job_folder: Path, progress: Callable[[str], None]) -> JobContainer:
        launch, wanted = prepared.launch, prepared.launch.spec.container
        progress("starting its container")
        engine, about = await self._engine(wanted.engine, wanted.image)
        login = login_of({**launch.spec.envs, **launch.secrets})
        image = login.image(wanted.image) if login else wanted.image
        name = "-".join(["spotfleet", folder_name(self._host.boot.host)[-_NAME_CHARS:],
                         folder_name(launch.job)[-_NAME_CHARS:], os.urandom(3).hex()])
        folder = self._folder / name
        folder.mkdir(parents=True, mode=0o700)
        (folder / _ENGINE_FILE).write_text(engine.name)
        try:
            await self._fetch(engine, image, login, folder, progress)
            progress("starting its container")
            mounts = self._mounts(launch.spec, job_folder, folder)
            gpus = self._host.gpus()
            if gpus and not engine.gpus:
                raise ContainerFailed(Refusal(f"container: {engine.name} gives a container no GPUs, and this host has "
                                              "some: use an image from a registry, with Docker or Podman"))
            order = ContainerOrder(
                name, image, str(folder), ("sh", "-c", FIRST, "sh", str(folder)), mounts, self.labels,
                engine.user_of(about, os.geteuid(), os.getegid()), gpus,
                tuple(device for device in _DEVICES if Path(device).exists()), gpu_nodes())
            container = JobContainer(engine, order, self._host.processes, self._host.sockets(), self._host.changed)
            await container.start()
            return container
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    async def _engine(self, wanted: str, image: str) -> tuple[Engine, str]:
        """Return the first engine that can be used, and what it prints about itself."""
        tried = candidates(wanted, image, self._state)
        why = ""
        for engine in tried:
            code, about, errors = await call(engine.about())
            if code == 0 and about.strip() not in ("", "null"):  # Docker's client prints that without its daemon
                return engine, about
            if code != 127:
                why = why or meaning(engine.name, image, errors or about).text
        missing = f"container: this host has no {' and no '.join(e.name for e in tried)}: " + "; or ".join(
            e.install for e in tried) + "; or use a machine image that has one. `setup` runs in the container"
        raise ContainerFailed(Refusal(why or missing))

    async def _fetch(self, engine: Engine, image: str, login: RegistryLogin | None, folder: Path,
                     progress: Callable[[str], None]) -> None:
        if (await call(engine.has(image)))[0] == 0:
            return
        if not (command := engine.pull(image)):
            raise ContainerFailed(Refusal(f"container: there is no root file system in folder {image} on this host"))
        progress(f"fetching the image {image}")
        env: Mapping[str, str] = {}
        auth = folder / "auth"
        try:
            if login is not None:
                env = _write_login(engine, login, auth)
            code, output, errors = await call(command, env)
        finally:
            shutil.rmtree(auth, ignore_errors=True)
        if code:
            raise ContainerFailed(meaning(engine.name, image, errors or output))

    def _mounts(self, spec: JobSpec, job_folder: Path, folder: Path) -> tuple[Mount, ...]:
        """Return the mounts: what a job has on a host without a container, at the same paths, and the user's own."""
        own = [mount_of(text) for text in spec.container.mounts]
        for mount in own:
            if not Path(mount.source).exists():
                raise ContainerFailed(Refusal(f"container.mounts: there is no {mount.source} on this host"))
        folders = [str(job_folder), str(self._host.sockets()), str(folder)]
        if spec.checkpoint.folder and Path(spec.checkpoint.folder).is_dir():
            folders.append(spec.checkpoint.folder)
        package = Mount(str(Path(spotfleet.__file__).parent), f"{PACKAGES}/spotfleet", True)
        return (*(Mount(path, path) for path in folders), package, *own)


def gpu_nodes(dev: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the device files of NVIDIA's GPUs on this host."""
    return tuple(sorted(str(node) for pattern in _GPU_NODES for node in dev.glob(pattern)))


def _write_login(engine: Engine, login: RegistryLogin, folder: Path) -> dict[str, str]:
    """Write the credentials for one `pull`; return the variables that name the file. No command line holds them."""
    folder.mkdir(mode=0o700)
    held = Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser()
    text = (held / AUTH_FILE).read_text() if (held / AUTH_FILE).is_file() else ""
    if (held / "contexts").is_dir():  # one of them may name the daemon
        (folder / "contexts").symlink_to(held / "contexts")
    encoded = base64.b64encode(f"{login.username}:{login.password}".encode()).decode()
    file = os.open(folder / AUTH_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w") as written:
        written.write(auth_file(login, text, encoded))
    return engine.auth_env(str(folder))


def without_login(env: dict[str, str]) -> dict[str, str]:
    """Return `env` without the registry's credentials, which the job itself does not need."""
    return {name: value for name, value in env.items() if name not in LOGIN}
