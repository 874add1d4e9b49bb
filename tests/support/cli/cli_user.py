"""A user in front of the command line, with a cloud that runs in the test's process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest
import typer.main

from spotfleet import providers
from spotfleet.api import fleet as fleet_module
from spotfleet.api import home as home_module
from spotfleet.api import machine as machine_module
from spotfleet.api.lifecycle import down as down_module
from spotfleet.api.lifecycle import up as up_module
from spotfleet.cli.app import run
from spotfleet.fleet import reconcile
from spotfleet.providers.plugin import usable
from tests.support.cli.cli_cloud import FakeCloud, FakeDispatcher
from tests.support.command_line import Said

FILE = "name: digits\nnodes: {min: 2, target: 3}\nresources: {instance_type: cpu.small}\n"
COMMANDS = cache(typer.main.get_command)  # made anew for each command line they take a tenth of a second


@dataclass
class User:
    """Types commands in `work`."""

    work: Path
    home: Path
    cloud: FakeCloud
    capture: pytest.CaptureFixture[str]
    files: dict[str, str] = field(default_factory=dict)

    def write(self, name: str, text: str) -> None:
        (self.work / name).write_text(text)

    def types(self, line: str, *more: str) -> Said:
        self.capture.readouterr()
        code = run([*line.split(), *more])
        out, err = self.capture.readouterr()
        return Said(code, out, err)

    def ok(self, line: str, *more: str) -> Said:
        said = self.types(line, *more)
        assert said.code == 0, said
        return said

    def fails(self, line: str, *more: str, code: int = 1) -> Said:
        said = self.types(line, *more)
        assert said.code == code, said
        assert said.err.startswith("error: ") or "\nerror: " in said.err, said
        assert "Traceback" not in said.err, said
        return said

    def fails_with_traceback(self, line: str) -> Said:
        """Fails with the user's own traceback, which may be shown."""
        said = self.types(line)
        assert said.code == 1 and "Traceback" in said.out + said.err, said
        return said

    @property
    def dispatcher(self) -> FakeDispatcher:
        return next(iter(self.cloud.dispatchers.values()))

    def workers(self) -> list[str]:
        return [name for name in self.cloud.living() if "-d-" not in name]


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[User]:
    cloud = FakeCloud(tmp_path / "disks")
    real = providers.load
    monkeypatch.setattr(providers, "load", lambda name, config: cloud if name == "local" else real(name, config))
    monkeypatch.setattr(typer.main, "get_command", COMMANDS)
    monkeypatch.setattr(down_module, "PATIENCE_S", 1.0)
    monkeypatch.setattr(down_module, "TRY_S", 0.2)
    monkeypatch.setattr(fleet_module, "PATIENCE_S", 1.0)
    monkeypatch.setattr(fleet_module, "READ_PATIENCE_S", 0.5)
    monkeypatch.setattr(home_module, "LOCK_WAIT_S", 0.2)
    monkeypatch.setattr(machine_module, "QUIET_S", 0.3)
    monkeypatch.setattr(machine_module, "QUIET_TICK_S", 0.1)
    waits = ((down_module, "POLL_S"), (up_module, "POLL_S"),  # the period of a poll, not its limit
             (machine_module, "END_TICK_S"))
    for module, often in waits:
        monkeypatch.setattr(module, often, 0.03)
    for plugin in usable():
        monkeypatch.setattr(plugin, "traits", replace(plugin.traits, poll_s=min(plugin.traits.poll_s, 0.1)))
    monkeypatch.setattr(reconcile, "ASK_AGAIN_S", 0.3)
    monkeypatch.setenv("SPOTFLEET_HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    user = User(tmp_path / "work", tmp_path / "home", cloud, capsys)
    user.write("fleet.yaml", FILE)
    user.write("hello.py", "import os, sys\nprint('hello', *sys.argv[1:], os.environ.get('A', ''))\n")
    yield user
    cloud.close()


@pytest.fixture
def up(user: User) -> User:
    """A user whose fleet `digits` is up with three hosts."""
    os.environ.pop("TOKEN", None)
    user.ok("up fleet.yaml -y")
    return user
