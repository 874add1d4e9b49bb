"""Machines on loopback, gone with the last test, and a laptop that has a fleet on them: see `shell_fleet.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotfleet import plugins
from spotfleet.api.access import ssh
from spotfleet.cli.app import run
from spotfleet.ssh import keys
from tests.support.shell import loopback_sshd, shell_fleet
from tests.support.shell.loopback_sshd import Machine
from tests.support.shell.shell_fleet import Laptop, Rack, Said


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Laptop]:
    """An account without an ~/.ssh, with no connection left at the end."""
    home = tmp_path / "o'brien's home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    plugins.installed.cache_clear()
    monkeypatch.syspath_prepend(shell_fleet.PLUGIN)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    found = Laptop(home, keys.make("digits"))
    yield found
    for folder in found.house.fleets():
        ssh.remove(folder)
    plugins.installed.cache_clear()


@pytest.fixture
def types(laptop: Laptop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """`spotfleet WORDS` in this process, which saves the start of one."""
    for name in ("HOME", "SPOTFLEET_HOME"):
        monkeypatch.setenv(name, laptop.environment[name])
    monkeypatch.chdir(laptop.home)

    def become(_path: str, line: list[str]) -> None:
        raise AssertionError(f"pytest was to become {line}: use `laptop.starts`")

    monkeypatch.setattr("os.execv", become)

    def run_command(*words: str) -> Said:
        capfd.readouterr()
        code = run(list(words))
        return Said(code, *capfd.readouterr())

    return run_command


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    """Three, each with an sshd that runs; those who change one need not change it back."""
    if missing := loopback_sshd.why_not():
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("machines")
    made = [Machine(folder / name, name, f"127.0.7.{i + 1}") for i, name in enumerate(("d", "w0", "w1"))]
    try:
        for one in made:
            one.start()
        yield made
    finally:
        for one in made:
            one.thaw()
            one.stop()


@pytest.fixture
def rack(laptop: Laptop, machines: list[Machine]) -> Iterator[Rack]:
    for one in machines:
        one.admit(laptop.pair.public)
    yield shell_fleet.make_rack(laptop, machines)
    for one in machines:
        one.mend()


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a far side that says nothing."""
    monkeypatch.setattr("spotfleet.ssh.tunnel.HANDSHAKE_S", 1.0)
