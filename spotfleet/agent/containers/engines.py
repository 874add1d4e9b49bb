"""Command lines of the container engines, behind one interface: Docker, Podman and runc. Pure.

docs/containers.md says which of them were run for real, and which only against their documentation.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

AUTH_FILE = "config.json"
CONFIG = "config.json"  # file of a bundle, as the OCI runtime specification has it
DOCKER_HUB = "https://index.docker.io/v1/"  # its name in a file of credentials
# The capabilities that Docker gives a container.
CAPABILITIES = [f"CAP_{name}" for name in (
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "NET_RAW",
    "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT")]


@dataclass(frozen=True)
class Mount:
    """A folder or file of the host in a container."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class ContainerOrder:
    """One container to start."""

    name: str
    image: str
    folder: str  # the container's own folder on the host
    command: tuple[str, ...]  # its first process; the image's entry point is not run
    mounts: tuple[Mount, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    user: str = "0:0"
    gpus: bool = False
    devices: tuple[str, ...] = ()
    gpu_nodes: tuple[str, ...] = ()  # device files of the host's GPUs


class Engine(Protocol):
    """An engine. Each method returns the arguments of a command; [] where there is nothing to run."""

    name: str
    install: str  # next step of a user whose host does not have it
    gpus: bool  # it can give GPUs to a container

    def about(self) -> list[str]:
        """Print what `user_of` reads; exit with an error where the engine cannot be used."""

    def user_of(self, about: str, uid: int, gid: int) -> str:
        """Return the user in the container, UID:GID, whose files belong to the agent's user on the host."""

    def has(self, image: str) -> list[str]:
        """Exit with 0 where the host has the image."""

    def pull(self, image: str) -> list[str]:
        """Fetch the image, with the credentials that `auth_env` names."""

    def auth_env(self, folder: str) -> dict[str, str]:
        """Return the variables by which `pull` reads credentials from AUTH_FILE in `folder`."""

    def files(self, order: ContainerOrder) -> dict[str, str]:
        """Return files, by name, that `start` needs in the container's folder."""

    def start(self, order: ContainerOrder) -> list[str]:
        """Run the container in the foreground, and remove it at its end."""

    def enter(self, name: str) -> list[str]:
        """Return what comes in front of a command that is to run in the container."""

    def list(self, labels: Mapping[str, str]) -> list[str]:
        """Print the names of all containers with these labels, one a line."""

    def remove(self, name: str) -> list[str]:
        """End the container, if there is one, and remove it."""


class _Client:
    """Commands that are the same for Docker and Podman."""

    name: str
    gpus = True

    def pull(self, image: str) -> list[str]:
        return [self.name, "pull", "--quiet", image]

    def files(self, order: ContainerOrder) -> dict[str, str]:
        return {}

    def _start(self, order: ContainerOrder, more: Sequence[str]) -> list[str]:
        command = [self.name, "run", "--rm", "--name", order.name, "--pull", "never", "--network", "host",
                   "--ipc", "host", "--user", order.user, "--workdir", "/", "--security-opt", "label=disable",
                   "--log-driver", "none", *more]
        for name, value in order.labels.items():
            command += ["--label", f"{name}={value}"]
        for mount in order.mounts:
            text = f"type=bind,source={mount.source},target={mount.target}"
            command += ["--mount", text + (",readonly" if mount.read_only else "")]
        for device in order.devices:
            command += ["--device", device, "--ulimit", "memlock=-1:-1"]  # RDMA locks memory
        return [*command, "--entrypoint", order.command[0], order.image, *order.command[1:]]

    def enter(self, name: str) -> list[str]:
        return [self.name, "exec", "--interactive", name]

    def list(self, labels: Mapping[str, str]) -> list[str]:
        command = [self.name, "ps", "--all", "--format", "{{.Names}}"]
        for name, value in labels.items():
            command += ["--filter", f"label={name}={value}"]
        return command

    def remove(self, name: str) -> list[str]:
        return [self.name, "rm", "--force", name]


class Docker(_Client):
    name = "docker"
    install = "install Docker Engine (https://docs.docker.com/engine/install), and add the agent's user to group docker"

    def about(self) -> list[str]:
        return ["docker", "info", "--format", "{{json .SecurityOptions}}"]

    def user_of(self, about: str, uid: int, gid: int) -> str:
        return "0:0" if "name=rootless" in about else f"{uid}:{gid}"

    def has(self, image: str) -> list[str]:
        return ["docker", "image", "inspect", "--format", "{{.Id}}", image]

    def auth_env(self, folder: str) -> dict[str, str]:
        return {"DOCKER_CONFIG": folder}

    def start(self, order: ContainerOrder) -> list[str]:
        """Name the GPUs' device files, too. Files that only NVIDIA's hook adds are lost when systemd reloads its units,
        as each upgrade of a package makes it do (NVIDIA/nvidia-container-toolkit#48)."""
        nodes = [word for node in order.gpu_nodes for word in ("--device", node)]
        return self._start(order, ["--gpus", "all", *nodes] if order.gpus else [])


class Podman(_Client):
    """Podman, rootless where the agent is not root. Root in such a container is the agent's user outside."""

    name = "podman"
    install = "install Podman: apt-get install podman, or dnf install podman"

    def about(self) -> list[str]:
        return ["podman", "info", "--format", "{{.Host.Security.Rootless}}"]

    def user_of(self, about: str, uid: int, gid: int) -> str:
        return "0:0"

    def has(self, image: str) -> list[str]:
        return ["podman", "image", "exists", image]

    def auth_env(self, folder: str) -> dict[str, str]:
        return {"REGISTRY_AUTH_FILE": f"{folder}/{AUTH_FILE}"}

    def start(self, order: ContainerOrder) -> list[str]:
        gpus = ["--device", "nvidia.com/gpu=all"] if order.gpus else []
        return self._start(order, ["--pids-limit", "-1", *gpus])


class Runc:
    """runc, with a folder of the host in the image's place: an unpacked root file system, which stays unchanged.

    Its overlay is mounted in a mount namespace of its own, so that it ends with the container. There are no limits, and
    no cgroup of its own. runc has no labels: `state` holds the containers of one agent.
    """

    name = "runc"
    gpus = False
    install = "install runc: apt-get install runc"

    def __init__(self, state: str) -> None:
        self._runc = ["runc", "--root", state]

    def about(self) -> list[str]:
        return ["runc", "--version"]

    def user_of(self, about: str, uid: int, gid: int) -> str:
        return f"{uid}:{gid}"

    def has(self, image: str) -> list[str]:
        return ["test", "-d", f"{image}/bin"]

    def pull(self, image: str) -> list[str]:
        return []

    def auth_env(self, folder: str) -> dict[str, str]:
        return {}

    def files(self, order: ContainerOrder) -> dict[str, str]:
        uid, gid = map(int, order.user.split(":"))
        capabilities = {kind: CAPABILITIES for kind in ("bounding", "effective", "permitted")}
        mounts: list[dict[str, Any]] = [
            _mounted("/proc", "proc", "proc", "nosuid", "noexec", "nodev"),
            _mounted("/dev", "tmpfs", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
            _mounted("/dev/pts", "devpts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"),
            *(_bound(Mount(path, path, only)) for path, only in (
                ("/dev/shm", False), ("/sys", True), ("/etc/resolv.conf", True), ("/etc/hosts", True))),
            *map(_bound, order.mounts)]
        return {CONFIG: json.dumps({
            "ociVersion": "1.0.2",
            "process": {
                "terminal": False, "user": {"uid": uid, "gid": gid}, "args": list(order.command), "cwd": "/",
                "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
                "capabilities": capabilities},
            "root": {"path": f"{order.folder}/merged", "readonly": False},
            "mounts": mounts,
            "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}]}}, indent=1)}

    def start(self, order: ContainerOrder) -> list[str]:
        upper, work, merged = (shlex.quote(f"{order.folder}/{name}") for name in ("upper", "work", "merged"))
        run = shlex.join([*self._runc, "run", "--bundle", order.folder, order.name])
        overlay = f"lowerdir={shlex.quote(order.image)},upperdir={upper},workdir={work}"
        script = f"mkdir -p {upper} {work} {merged} && mount -t overlay overlay -o {overlay} {merged} && exec {run}"
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]

    def enter(self, name: str) -> list[str]:
        return [*self._runc, "exec", name]

    def list(self, labels: Mapping[str, str]) -> list[str]:
        return [*self._runc, "list", "--quiet"]

    def remove(self, name: str) -> list[str]:
        return [*self._runc, "delete", "--force", name]


def _mounted(target: str, kind: str, source: str, *options: str) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": source, "options": list(options)}


def _bound(mount: Mount) -> dict[str, Any]:
    return _mounted(mount.target, "bind", mount.source, "rbind", "ro" if mount.read_only else "rw")


def candidates(wanted: str, image: str, state: str) -> tuple[Engine, ...]:
    """Return the engines to try, in order, for `ContainerSpec.engine`. A folder in the image's place is for runc."""
    runc = Runc(state)
    if wanted == "runc" or image.startswith("/"):
        return (runc,)
    return tuple(engine for engine in (Docker(), Podman()) if wanted in ("auto", engine.name))


def mount_of(text: str) -> Mount:
    """Parse FOLDER[:TARGET][:ro]."""
    parts = text.split(":")
    read_only = parts[-1] == "ro"
    source, *target = parts[:-1] if read_only else parts
    return Mount(source, target[0] if target else source, read_only)


@dataclass(frozen=True)
class RegistryLogin:
    """Credentials of a private registry, from SkyPilot's three variables."""

    server: str
    username: str
    password: str = field(repr=False)

    def image(self, image: str) -> str:
        """Return the image's name with its registry in front, as SkyPilot does."""
        return image if not self.server or image.startswith(f"{self.server}/") else f"{self.server}/{image}"

    @property
    def registry(self) -> str:
        return DOCKER_HUB if self.server in ("", "docker.io", "index.docker.io") else self.server


LOGIN = ("SKYPILOT_DOCKER_SERVER", "SKYPILOT_DOCKER_USERNAME", "SKYPILOT_DOCKER_PASSWORD")


def login_of(values: Mapping[str, str]) -> RegistryLogin | None:
    """Return the credentials among the job's variables and secrets; None without any."""
    server, username, password = (values.get(name, "") for name in LOGIN)
    return RegistryLogin(server, username, password) if username and password else None


def auth_file(login: RegistryLogin, held: str, encoded: str) -> str:
    """Return the text of AUTH_FILE. `held` is the text of the user's own file of Docker, or ""; `encoded` is
    base64 of USERNAME:PASSWORD. The user's credential helpers are left out, as they would come before it."""
    data: dict[str, Any] = json.loads(held) if held else {}
    kept = {key: value for key, value in data.items() if key not in ("credsStore", "credHelpers")}
    auths = {**kept.get("auths", {}), login.registry: {"auth": encoded}}
    if login.registry == DOCKER_HUB:
        auths["docker.io"] = auths[DOCKER_HUB]  # its name in Podman's
    return json.dumps({**kept, "auths": auths})
