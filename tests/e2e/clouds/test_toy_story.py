"""A third party's cloud from `up` to `down`: what the core needs of it is in its plugin alone.

The distribution is `tests/support/toy/plugin`, found by its entry point. The contract suite sees its provider only;
here its section, its regions, its account and its notices reach every part of a fleet.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from spotfleet import config
from spotfleet.api import Fleet
from spotfleet.api.account import leaks
from spotfleet.api.home import Home
from spotfleet.api.lifecycle.attach import attach
from tests.support.e2e.e2e_stage import LIMIT_S, Stage, hosts_of, output, repeated, trains, wait_for
from tests.support.toy import toy_world

pytestmark = pytest.mark.processes
FILE = """
name: story
provider: toy
nodes: {min: 2, target: 3}
resources: {accelerators: "TOY:1"}
dispatcher: {instance_type: toy.small}
workdir: .
"""


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An account of the toy cloud; its machines end with the test."""
    toy_world.install(monkeypatch)
    path = (str(toy_world.PLUGIN), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    account = tmp_path / "account"
    account.mkdir()
    yield account
    for pid in machines(account).values():
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    toy_world.forget()


def machines(account: Path) -> dict[str, int]:
    """The machines whose process runs: host -> pid."""
    state = account / "state.json"
    return {name: host["pid"] for name, host in json.loads(state.read_text())["hosts"].items()
            if host["pid"]} if state.exists() else {}


def test_a_cloud_of_a_third_party_trains_through_a_notice_and_a_kill_by_its_plugin_alone(
        stage: Stage, account: Path, tmp_path: Path):
    file = stage.work / "story.yaml"
    file.write_text(f"{FILE}toy: {{account: {account}}}\n")
    fleet = Fleet(file)
    plan = fleet.plan()
    assert (plan.region, [row.region for row in plan.regions]) == ("south", ["south", "north"])
    assert plan.beside == "not in these prices: the electricity of this machine"
    fleet.up(timeout_s=LIMIT_S)
    job = stage.counting(fleet, 300, (2, 3))
    wait_for("three workers that train", lambda: trains(job, 3, step=5))
    assert {h.pool for h in fleet.hosts()} == {"toy/south-1/toy.gpu/spot", "toy/south-1/toy.small/on-demand"}

    noticed = hosts_of(job)[1]
    fleet.interrupt(noticed, 8.0)
    wait_for("a replacement", lambda: trains(job, 3, without=noticed))
    wait_for("the host's end", lambda: noticed not in [h.host for h in fleet.hosts()])
    killed = hosts_of(job)[0]
    fleet.interrupt(killed, None)
    wait_for("a replacement", lambda: trains(job, 3, without=killed))
    second = Home(tmp_path / "second")
    assert attach(second, "story", "toy", config.load(file).spec).note == ""
    assert second.folder("story").record.provider_config["section"]["regions"] == ["south"]
    assert leaks.search(second).leaks == ()
    stage.hurry()
    job.wait(LIMIT_S)

    assert "counted -300.0 of -300" in output(job)
    assert repeated(fleet, job, "notice") == 0
    assert repeated(fleet, job, "death") <= 1
    assert fleet.plan().region == "south"  # the fleet stays there
    fleet.down()
    assert machines(account) == {}
