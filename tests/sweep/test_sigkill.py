"""The same with real processes: SIGKILL at a random moment of each flow, the same once more, and nothing is left.

What the sweep in one process cannot show: that a killed command frees its lock, that a machine starts a killed
dispatcher again, and that files and ledgers on a real disk are whole.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotfleet.api import Fleet
from spotfleet.api.home import Home
from spotfleet.api.reports import laptop_events
from spotfleet.errors import DispatcherUnreachable, SpotfleetError
from spotfleet.fleet.domain.events import FleetCreated, FleetDown
from spotfleet.providers.local import LocalCloud

CLI = str(Path(sys.executable).with_name("spotfleet"))
LIMIT_S = 120.0  # for any one thing to happen on a busy machine
LATEST_S = 2.5  # the kill comes within so long of the command's start
SECRET = "the-users-secret"
SEEDS = 10 if os.environ.get("SPOTFLEET_LONG") else 1

pytestmark = pytest.mark.processes


class Life:
    """One fleet, whose commands and dispatcher are killed."""

    def __init__(self, home: Path, work: Path, seed: int) -> None:
        self.home, self.work, self.chance = home, work, random.Random(seed)
        self.cloud = LocalCloud(home)

    def file(self, hosts: int) -> str:
        (self.work / "fleet.yaml").write_text(
            f"name: digits\nprovider: local\nnodes: {{min: {hosts}, target: {hosts}, max: {hosts}}}\n"
            f"resources: {{instance_type: cpu.small}}\nsecrets: {{PASSWORD: {SECRET}}}\n")
        return "fleet.yaml"

    def command(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen([CLI, *words, "-y"], cwd=self.work, stdin=subprocess.DEVNULL, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def done(self, *words: str) -> None:
        process = self.command(*words)
        out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, f"spotfleet {' '.join(words)}\n{out}"

    def killed_command(self, *words: str) -> None:
        """SIGKILL it after a while, if it has not ended by then."""
        after_s = self.chance.uniform(0.0, LATEST_S)
        print(f"spotfleet {' '.join(words)} is killed after {after_s:.3f} s")
        process = self.command(*words)
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()

    def kill_dispatcher(self) -> None:
        after_s = self.chance.uniform(0.0, LATEST_S)
        time.sleep(after_s)
        machine = next((m for m in self.cloud.truth() if "-d-" in m.request_id and m.processes), None)
        print(f"the dispatcher is killed after {after_s:.3f} s" + ("" if machine else ": it is not there"))
        if machine is not None:
            os.kill(machine.processes[0], signal.SIGKILL)

    def living(self) -> list[str]:
        return sorted(m.request_id for m in self.cloud.truth() if m.state.value in ("pending", "running"))

    def settles(self, hosts: int) -> list[str]:
        """The worker hosts, once exactly so many are up and the cloud has these and the dispatcher's machine only."""
        up: list[str] = []

        def right() -> bool:
            nonlocal up
            try:
                up = sorted(h.host for h in Fleet("digits", home=self.home).hosts()
                            if h.role == "worker" and h.state == "up")
            except DispatcherUnreachable:
                return False
            return len(up) == hosts and self.living() == sorted([*up, "digits-d-0"])

        wait_for(f"{hosts} hosts", right)
        return up


def wait_for(what: str, condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {LIMIT_S:.0f} s"
        time.sleep(0.1)


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Life]:
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("SPOTFLEET_HOME", str(home))
    monkeypatch.setenv("SPOTFLEET_LOCAL_OWNER_PID", str(os.getpid()))
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    try:
        yield Life(home, work, seed)
    finally:
        LocalCloud(home).shutdown()


@pytest.mark.parametrize("life_number", range(SEEDS))
def test_a_sigkill_in_each_flow_leaves_what_is_wanted_and_the_clouds_own_bill(life: Life, life_number: int):
    life.killed_command("up", life.file(2))
    life.done("up", life.file(2))
    life.settles(2)

    life.killed_command("up", life.file(3))  # scale
    life.done("up", life.file(3))
    first = life.settles(3)[0]

    life.cloud.kill(first)  # replacement
    life.kill_dispatcher()
    wait_for("the loss is seen", lambda: first not in life.living())
    assert first not in life.settles(3)

    life.killed_command("down", "digits")
    life.kill_dispatcher()
    life.done("down", "digits")
    assert life.living() == []
    the_books_are_right(life)


def the_books_are_right(life: Life) -> None:
    fleet = Fleet("digits", home=life.home)
    bill = {line.host: line.micros for line in fleet.cost().lines}
    assert bill == life.cloud.invoice("digits").hosts
    kinds = [type(e) for e in laptop_events(Home(life.home).folder("digits"))]
    assert (kinds.count(FleetCreated), kinds.count(FleetDown)) == (1, 1)
    left = [p for p in (life.home / "fleets").rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]
    assert left == []
    with pytest.raises(SpotfleetError):
        fleet.client.healthy()
