"""Ray's demand makes hosts: a fleet without a host gets one for a submitted task, and gives it back.

Only a real cluster shows that its reports, its refusals and its ends of nodes are as `fleet/planner/demand.py` takes
them; the decisions have tests of their own.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator

import pytest

from spotfleet.api import Fleet
from spotfleet.providers.local import LocalCloud
from spotfleet.version import install
from tests.ray.test_ray_on_fleet import folder_in
from tests.support.e2e.e2e_stage import Stage, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
LIMIT_S = 240.0  # raylets start one after the other on a busy machine
FILE = """
name: ondemand
provider: local
groups:
  cpu: {nodes: {min: 0, max: 2, idle_after: 5s}, instance_type: cpu.small}
  gpu: {nodes: {min: 0, max: 2, idle_after: 5s}, accelerators: EMU:1}
ray: {object_store: 0.02}
workdir: .
"""
ASKS = """
import time, ray
ray.init(logging_level="ERROR")

@ray.remote(num_cpus=1)
def task():
    return ray.get_runtime_context().get_node_id()

waits = ray.remote(num_cpus=0, num_gpus=8)(lambda: None).remote()    # fits no host: reported, not bought
print("asked at", time.time(), flush=True)
ray.get(task.remote(), timeout=400)
print("ran", flush=True)
"""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A fleet without a host whose Ray head is up."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip(f"Ray is not installed: {install('ray')}")
    top = tmp_path_factory.mktemp("fleet")
    found = Stage(top / "home", top / "work")
    found.work.mkdir()
    (found.work / "asks.py").write_text(ASKS)
    (found.work / "ondemand.yaml").write_text(FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPOTFLEET_HOME", str(found.home))
        patch.setenv("SPOTFLEET_LOCAL_OWNER_PID", str(os.getpid()))
        patch.chdir(found.work)
        try:
            fleet = Fleet(found.work / "ondemand.yaml")
            fleet.up(timeout_s=LIMIT_S)
            found.cli("ray", "start", "-d")
            wait_for("the head", lambda: (r := fleet.ray.status().report) is not None and r.state.up, LIMIT_S)
            yield found
        finally:
            folders = [folder_in(found.home)] if list(found.home.glob("local/hosts/*/jobs/ray-*/secrets.json")) else []
            LocalCloud(found.home).shutdown()
            for folder in folders:  # its processes have ended with their machines
                shutil.rmtree(folder, ignore_errors=True)


def test_a_submitted_task_makes_a_host_of_its_group_come_and_go_and_the_bill_shows_it(stage: Stage):
    fleet = Fleet(stage.work / "ondemand.yaml")
    assert _launched(fleet) == []

    done = stage.cli("ray", "submit", "asks.py", ok=False)
    assert "ran" in done.stdout, done.stdout + done.stderr
    asked_at = float(done.stdout.partition("asked at ")[2].split()[0])
    [launch] = _launched(fleet)
    print(f"the host was asked for {launch['at'] - asked_at:.2f} s after the task")
    assert launch["offer"]["instance_type"] == "cpu.small"
    [unmet] = [e for e in fleet.events() if e["kind"] == "DemandUnmet" and e["shapes"]]
    assert list(unmet["shapes"]) == ["{'GPU': 8}"]

    wait_for("the idle host is given back", lambda: not _workers(fleet), LIMIT_S)
    ended = [e for e in fleet.events() if e["kind"] == "TerminateIntended"]
    assert [e["request_id"] for e in ended] == [launch["request_id"]]
    assert "no task needs it" in ended[0]["why"]
    assert len(_launched(fleet)) == 1
    decided = [(e["group"], e["hosts"]) for e in fleet.events() if e["kind"] == "DemandDecided"]
    assert decided == [("cpu", 1), ("cpu", 0)]
    assert launch["request_id"] in stage.cli("cost", "--by", "host").stdout


def _launched(fleet: Fleet) -> list[dict]:
    return [e for e in fleet.events() if e["kind"] == "LaunchIntended" and e["role"] == "worker"]


def _workers(fleet: Fleet) -> list[str]:
    return [h.host for h in fleet.hosts() if h.role == "worker"]
