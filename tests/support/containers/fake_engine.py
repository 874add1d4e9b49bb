"""Clients named `docker` and `podman` that check their command lines (`contract.py`) and run containers by runc.

They refuse as the engines do: without the daemon, without an image, with wrong credentials, without the runtime of
NVIDIA, in the engines' own words. All they do is in one folder, which tests look at.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from spotfleet.agent.containers.engines import AUTH_FILE, DOCKER_HUB, ContainerOrder, Mount, Runc
from tests.support.containers.contract import (
    NO_DAEMON,
    NO_GPU,
    NOT_FOUND,
    REFUSED,
    OutOfContract,
    check_run,
    mount_of,
    parsed,
)


@dataclass
class EngineWorld:
    """What the engines' registry and host have."""

    images: dict[str, str] = field(default_factory=dict)  # image -> folder of its root file system
    logins: dict[str, str] = field(default_factory=dict)  # registry -> USERNAME:PASSWORD that it wants
    daemon: bool = True
    gpu_runtime: bool = True


class FakeEngines:
    """The folder of the fakes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, world: EngineWorld, *names: str) -> str:
        """Write the clients; return the folder for PATH."""
        bin_folder = self.folder / "bin"
        bin_folder.mkdir(parents=True, exist_ok=True)
        self.set(world)
        for name in names:
            client = bin_folder / name
            client.write_text(f"#!{sys.executable} -IB\nimport sys\nsys.path[:0] = {sys.path!r}\n"
                              f"from tests.support.containers.fake_engine import main\n"
                              f"main({name!r}, {str(self.folder)!r}, sys.argv[1:])\n")
            client.chmod(0o755)
        return str(bin_folder)

    def set(self, world: EngineWorld) -> None:
        (self.folder / "world.json").write_text(json.dumps(asdict(world)))

    @property
    def world(self) -> EngineWorld:
        return EngineWorld(**json.loads((self.folder / "world.json").read_text()))

    @property
    def calls(self) -> list[list[str]]:
        """All command lines so far."""
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def violations(self) -> str:
        path = self.folder / "violations"
        return path.read_text() if path.exists() else ""

    @property
    def runc(self) -> Runc:
        return Runc(str(self.folder / "runc"))

    def running(self) -> list[str]:
        return subprocess.run(self.runc.list({}), capture_output=True, text=True, check=True).stdout.split()


def main(engine: str, folder: str, argv: list[str]) -> None:
    fakes = FakeEngines(Path(folder))
    with (fakes.folder / "calls").open("a") as calls:
        calls.write(json.dumps([engine, *argv]) + "\n")
    try:
        command, options, rest = parsed(engine, argv)
        _Client(engine, fakes).answer(command, options, rest)
    except OutOfContract as error:
        with (fakes.folder / "violations").open("a") as violations:
            violations.write(f"{engine} {argv}: {error}\n")
        _fail(str(error), 125)


class _Client:
    def __init__(self, engine: str, fakes: FakeEngines) -> None:
        self._engine, self._fakes, self._world = engine, fakes, fakes.world

    def answer(self, command: str, options: list[tuple[str, str]], rest: list[str]) -> None:
        given = dict(options)
        if self._engine == "docker" and not self._world.daemon:
            _fail(NO_DAEMON, 1)
        match command:
            case "info":
                print('["name=seccomp,profile=default"]' if self._engine == "docker" else "false")
            case "image inspect" | "image exists":
                sys.exit(0 if self._pulled(rest[0]).exists() else 1)
            case "pull":
                self._pull(rest[0])
            case "run":
                self._run(options, rest)
            case "exec":
                if "--interactive" not in given:
                    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                self._exec([*self._fakes.runc.enter(rest[0]), *rest[1:]])
            case "ps":
                wanted = [value.removeprefix("label=") for name, value in options if name == "--filter"]
                for name in self._fakes.running():
                    labels = json.loads((self._folder(name) / "labels.json").read_text())
                    if set(wanted) <= set(labels):
                        print(name)
            case "rm":
                self._exec(self._fakes.runc.remove(rest[0]))

    def _folder(self, name: str) -> Path:
        return self._fakes.folder / "containers" / name

    def _pulled(self, image: str) -> Path:
        return self._fakes.folder / "pulled" / base64.urlsafe_b64encode(image.encode()).decode()

    def _pull(self, image: str) -> None:
        registry = image.partition("/")[0] if "." in image.partition("/")[0] else DOCKER_HUB
        if wanted := self._world.logins.get(registry):
            given = self._login(registry)
            if given != wanted:
                _fail(REFUSED[self._engine].format(image=image), 1)
        if image not in self._world.images:
            _fail(NOT_FOUND[self._engine].format(image=image), 1)
        self._pulled(image).parent.mkdir(exist_ok=True)
        self._pulled(image).touch()

    def _login(self, registry: str) -> str:
        file = os.environ.get("REGISTRY_AUTH_FILE") if self._engine == "podman" else \
            os.path.join(os.environ["DOCKER_CONFIG"], AUTH_FILE) if "DOCKER_CONFIG" in os.environ else None
        if not file:
            return ""
        assert os.stat(file).st_mode & 0o077 == 0, "credentials that others can read"
        auths = json.loads(Path(file).read_text())["auths"]
        return base64.b64decode(auths.get(registry, {}).get("auth", "")).decode()

    def _run(self, options: list[tuple[str, str]], rest: list[str]) -> None:
        check_run(self._engine, options)
        given, image = dict(options), rest[0]
        if ("--gpus" in given or given.get("--device", "").startswith("nvidia.com/")) and not self._world.gpu_runtime:
            _fail(NO_GPU[self._engine], 125)
        if not self._pulled(image).exists():
            raise OutOfContract(f"--pull never, and no image {image}")
        for needed, value in (("--network", "host"), ("--ipc", "host"), ("--rm", "")):
            if given.get(needed) != value:
                raise OutOfContract(f"the jobs need {needed} {value}")
        mounts = [mount_of(value) for name, value in options if name == "--mount"]
        folder = self._folder(given["--name"])
        folder.mkdir(parents=True)
        (folder / "labels.json").write_text(json.dumps([value for name, value in options if name == "--label"]))
        order = ContainerOrder(
            given["--name"], self._world.images[image], str(folder), (given["--entrypoint"], *rest[1:]),
            tuple(Mount(m["source"], m["target"], "readonly" in m) for m in mounts), user=given["--user"])
        for name, text in self._fakes.runc.files(order).items():
            (folder / name).write_text(text)
        self._exec(self._fakes.runc.start(order))

    def _exec(self, command: list[str]) -> None:
        found = shutil.which(command[0])
        assert found, f"there is no {command[0]}"
        sys.stdout.flush()
        os.execv(found, command)


def _fail(text: str, code: int) -> None:
    print(text, file=sys.stderr)
    sys.exit(code)
