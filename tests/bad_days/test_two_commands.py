"""Two commands at once: `down` wins over `up`, on one machine and from two; a signal leaves a fleet to go on with."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotfleet.api import home
from spotfleet.api.home import Busy, Home
from spotfleet.providers.local import LocalCloud
from tests.support.cli.cli_user import User

LIMIT_S = 60.0
SPOT = "local/local-a/cpu.small/spot"
ON_DEMAND = "local/local-a/cpu.small/on-demand"


def until(what: str, condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {LIMIT_S:g} s"
        time.sleep(0.02)


def in_background(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except Busy as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


@pytest.mark.parametrize("refused", [ON_DEMAND, SPOT], ids=["no dispatcher yet", "waiting for hosts"])
def test_a_down_stops_an_up_that_waits_and_then_ends_the_fleet(user: User, refused: str, monkeypatch):
    from spotfleet.api import Fleet

    user.cloud.market.refuse(refused, "type", user.cloud.clock())
    fleet = Fleet("fleet.yaml")
    upping, raised = in_background(lambda: fleet.up(timeout_s=LIMIT_S))
    until("a fleet on its way up", lambda: (user.home / "fleets" / "digits" / "fleet.json").exists() and (
        refused == ON_DEMAND or Home(user.home).folder("digits").record.reached))
    said = user.ok("down digits -y")
    upping.join(LIMIT_S)
    assert "fleet digits is down: the provider lists nothing of it" in said.err
    assert [str(e) for e in raised] == [
        f"stopped: `spotfleet down` was asked by process {os.getpid()}, and takes fleet 'digits' down"]
    assert raised[0].hint == "once it has ended, `spotfleet up FILE` makes the fleet anew"
    assert user.cloud.living() == []


def test_an_up_is_refused_while_a_down_is_at_work(up: User):
    folder = Home(up.home).folder("digits")
    with folder.locked_for_down(lambda _line: None):
        said = up.fails("up fleet.yaml -y")
    assert said.err.endswith(
        f"error: stopped: `spotfleet down` was asked by process {os.getpid()}, and takes fleet 'digits' down\n"
        "hint: once it has ended, `spotfleet up FILE` makes the fleet anew\n")
    assert "nothing to change: fleet digits is up" in up.ok("up fleet.yaml -y").err  # the lock went with its holder


def test_commands_that_only_ask_do_not_take_each_other_for_a_down(up: User):
    with (up.home / "fleets" / "digits.down").open("a+") as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # as long as another `up` asks
        assert "nothing to change: fleet digits is up" in up.ok("up fleet.yaml -y").err


def test_a_second_down_waits_for_the_first_and_finds_nothing_left_to_do(up: User, monkeypatch):
    monkeypatch.setattr(home, "REPORT_AFTER_S", 0.0)
    from spotfleet.api import Fleet

    told: list[str] = []
    folder = Home(up.home).folder("digits")
    with folder.locked_for_down(lambda _line: None):
        second, raised = in_background(
            lambda: told.append(f"already: {Fleet('digits').down(progress=told.append).already}"))
        until("the second one to wait", lambda: told)
        folder.update(down_at=1.0)
    second.join(LIMIT_S)
    assert (told, raised) == ([f"waiting for another spotfleet command (process {os.getpid()}) to stop",
                               "already: True"], [])


def test_a_down_that_an_up_does_not_heed_says_so_in_the_end(up: User, monkeypatch):
    monkeypatch.setattr(home, "YIELD_S", 0.2)
    with Home(up.home).folder("digits").locked():
        assert up.fails("down -y").err.endswith(
            f"error: another spotfleet command (process {os.getpid()}) is changing fleet 'digits'\n"
            "hint: wait for it, or interrupt it\n")


def test_down_twice_says_that_nothing_is_left(up: User):
    up.ok("down -y")
    archive = up.home / "fleets/digits/archive"
    assert up.ok("down -y").err == (
        f"fleet digits is down already; nothing of it is left; its results are in {archive}\n")


def test_a_down_from_another_laptop_wins_over_an_up_that_waits(up: User):
    from spotfleet.api import Fleet
    from spotfleet.errors import SpotfleetError

    up.write("fleet.yaml", "name: digits\nnodes: {min: 9, target: 9}\nresources: {instance_type: cpu.small}\n")
    up.cloud.market.refuse(SPOT, "type", up.cloud.clock())
    up.dispatcher.going_down = "asked by `spotfleet down`"  # from elsewhere
    with pytest.raises(SpotfleetError, match=r"fleet 'digits' is (going )?down: asked by `spotfleet down`"):
        Fleet("fleet.yaml").up(timeout_s=LIMIT_S)


def test_an_up_whose_fleet_vanishes_says_that_it_was_taken_down(up: User):
    from spotfleet.api import Fleet
    from spotfleet.api.lifecycle.up import _status
    from spotfleet.errors import SpotfleetError

    folder, client = Home(up.home).folder("digits"), Fleet("digits").client
    client.patience_s = 0.2
    for host in up.cloud.living():
        up.cloud.terminate(host)
    with pytest.raises(SpotfleetError, match="was taken down meanwhile: the provider lists nothing of it"):
        _status(folder, client)


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home with the emulated cloud of real processes, in whose pools no spot host is to be had."""
    monkeypatch.setenv("SPOTFLEET_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTFLEET_LOCAL_OWNER_PID", str(os.getpid()))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.yaml").write_text("name: f\nresources: {instance_type: cpu.small}\n")
    try:
        LocalCloud(tmp_path / "home").refuse(SPOT, "type")
        yield tmp_path / "home"
    finally:
        LocalCloud(tmp_path / "home").shutdown()


def command(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "spotfleet.cli", *words], text=True, stderr=subprocess.PIPE,
                            stdin=subprocess.DEVNULL)


@pytest.mark.processes
def test_real_processes_an_up_that_is_terminated_and_a_down_that_stops_the_next(real: Path):
    """Signals and locks between processes are what the cheaper tests cannot show."""
    first = command("up", "f.yaml", "-y")
    try:
        folder = Home(real).folder("f")
        until("the machine's intent", lambda: folder.ledger.exists())
        first.send_signal(signal.SIGTERM)
        _, said = first.communicate(timeout=LIMIT_S)
        assert first.returncode == 143
        assert said.endswith("interrupted; the machines asked for so far stay. `spotfleet up f.yaml` goes on, "
                             "`spotfleet down f` ends them\n")
    finally:
        first.kill()
        first.wait()
    second = command("up", "f.yaml", "-y")
    try:
        until("it to go on", lambda: folder.record.reached)
        down = subprocess.run([sys.executable, "-m", "spotfleet.cli", "down", "-y"], text=True, capture_output=True,
                              timeout=LIMIT_S)
        assert (down.returncode, "fleet f is down: the provider lists nothing of it" in down.stderr) == (0, True), down
        _, said = second.communicate(timeout=LIMIT_S)
        assert second.returncode == 1
        assert "error: stopped: `spotfleet down` was asked by process " in said, said
    finally:
        second.kill()
        second.wait()
    assert LocalCloud(real).truth() == []
