"""What befalls machines over SSH while they train: an sshd that stops answering, a long cut, a loss of power, of the
dispatcher's machine too, and a `down` that cannot reach one. Counted to the last sample at the end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.support.network.machines import why_not
from tests.support.network.ssh_stage import DISPATCHER, SAMPLES, SshStage, counted

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not()),
              pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="`scripts/test --long` runs it")]
ALL = ("w0", "w1", "w2")
LONG_S = 25.0  # more than a machine may be silent before its host counts as away
BOUND_S = 60.0


@pytest.fixture(scope="module")
def stage() -> Iterator[SshStage]:
    with SshStage.made(hosts=3) as stage:
        stage.fleet_file(2, 3)
        stage.cli("up", "fleet.yaml", "-y")
        stage.job_id = stage.train((1, 3))
        yield stage


@pytest.fixture(autouse=True)
def whole(stage: SshStage, request: pytest.FixtureRequest) -> None:
    if "down" not in request.node.name:
        stage.wait("three that train", lambda: stage.training(ALL))


def steps_s(stage: SshStage, names: tuple[str, ...], seconds: float) -> None:
    """These go on training for so long, together."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        stage.wait("steps of all", lambda at=time.monotonic(): all(stage.first_after(n, at) for n in names))


def test_an_sshd_that_stops_answering_costs_the_job_nothing_and_is_named(stage: SshStage):
    generation = stage.job(stage.job_id)["generation"]
    stage.lan["w1"].freeze_door()
    steps_s(stage, ALL, LONG_S)
    begun = time.monotonic()
    said = stage.cli("exec", "--all", "--timeout", "5s", "--", "hostname", ok=False)
    print(said.stdout, said.stderr, time.monotonic() - begun)
    assert said.returncode != 0 and time.monotonic() - begun < BOUND_S
    assert {"lan-w0: w0", "lan-w2: w2"} <= set(said.stdout.splitlines()) and "lan-w1" in said.stderr
    print(stage.cli("status").stdout)
    stage.lan["w1"].thaw_door()
    assert stage.job(stage.job_id)["generation"] == generation


def test_a_host_returns_after_a_cut_of_any_length(stage: SshStage):
    stage.lan.net.cut("w1")
    steps_s(stage, ("w0", "w2"), LONG_S)
    print(stage.cli("status").stdout)
    stage.lan.net.restore("w1")
    begun = time.monotonic()
    stage.wait("three again", lambda: stage.training(ALL))
    print(f"back after {time.monotonic() - begun:.1f} s")


def test_a_machine_that_lost_power_trains_again_by_itself(stage: SshStage):
    stage.lan["w2"].power_off()
    steps_s(stage, ("w0", "w1"), 5.0)
    stage.lan["w2"].power_on()
    begun = time.monotonic()
    stage.wait("three again", lambda: stage.training(ALL))
    print(f"back after {time.monotonic() - begun:.1f} s")


def test_the_dispatchers_machine_may_lose_power_and_the_job_goes_on(stage: SshStage):
    stage.lan[DISPATCHER].power_off()
    steps_s(stage, ALL, 5.0)
    stage.lan[DISPATCHER].power_on()
    stage.cli("up", "fleet.yaml", "-y")
    assert stage.job(stage.job_id)["state"] == "running"
    steps_s(stage, ALL, 2.0)


def test_down_names_a_machine_that_it_cannot_clean_and_does_it_when_it_can(stage: SshStage):
    stage.enough()
    stage.wait("the end", lambda: stage.job(stage.job_id)["state"] == "succeeded")
    stage.lan["w1"].freeze_door()
    begun = time.monotonic()
    said = stage.cli("down", "-y", ok=False)
    print(said.stdout, said.stderr, time.monotonic() - begun)
    assert said.returncode != 0 and "w1" in said.stderr
    assert time.monotonic() - begun < 2 * BOUND_S
    stage.lan["w1"].thaw_door()
    stage.cli("down", "-y")
    assert stage.left() == {}
    archive = stage.laptop.path("/root/.spotfleet/fleets/lan/archive")
    counts = [counted(path.read_text()) for path in archive.glob("jobs/*/outputs/*/counts.txt")]
    assert counts and all(times == {epochs: SAMPLES} for times, epochs in counts), counts
