"""A Ray cluster on a fleet of the local provider, with real raylets: one cluster for all tests, in this order.

Only real processes show that raylets join, leave and end as they do; the rules alone are in
tests/dispatcher/ray/test_leaving.py.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from spotfleet.api import Fleet
from spotfleet.protocol.ray_cluster import RayStatus
from spotfleet.providers.local import LocalCloud
from spotfleet.version import install
from tests.support.e2e.e2e_stage import Stage, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
LIMIT_S = 240.0  # raylets start one after the other on a busy machine
ASKS = """
import sys, ray
from beside import square
ray.init(logging_level="ERROR")
print(ray.cluster_resources()["CPU"], ray.get(ray.remote(square).remote(7)), sys.argv[1:])
sys.exit(3)
"""


@dataclass
class RayStage:
    """A fleet, its Ray cluster and the time that it took to be up."""

    stage: Stage
    fleet: Fleet
    up_s: float = 0.0

    @property
    def status(self) -> RayStatus:
        return self.fleet.ray.status()

    def nodes(self) -> dict[str, Any]:
        report = self.status.report
        return {n.host: n for n in report.state.nodes if n.host} if report is not None and report.state.up else {}

    def wait_for_nodes(self, count: int) -> None:
        wait_for(f"{count} raylets", lambda: len(self.nodes()) == count, LIMIT_S)

    def processes(self) -> list[psutil.Process]:
        """All processes of Ray on this machine that this test's fleet has started."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SPOTFLEET_RAY_FOLDER"):
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture(scope="module")
def ray_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayStage]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip(f"Ray is not installed: {install('ray')}")
    top = tmp_path_factory.mktemp("fleet")
    home, work = top / "home", top / "work"
    work.mkdir()
    (work / "asks.py").write_text(ASKS)
    (work / "beside.py").write_text("def square(x):\n    return x * x\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPOTFLEET_HOME", str(home))
        patch.setenv("SPOTFLEET_LOCAL_OWNER_PID", str(os.getpid()))
        patch.chdir(work)
        stage = Stage(home, work)
        try:
            fleet = stage.fleet("ring", least=1, target=3, more="ray: {object_store: 0.02}")
            began = time.monotonic()
            stage.cli("ray", "start", "-d")
            found = RayStage(stage, fleet)
            found.wait_for_nodes(3)
            found.up_s = time.monotonic() - began
            yield found
        finally:
            LocalCloud(home).shutdown()


def test_a_submitted_script_uses_all_hosts_with_its_modules_and_its_exit_status_comes_back(ray_stage: RayStage):
    print(f"3 hosts were up {ray_stage.up_s:.1f} s after `ray start`")
    done = ray_stage.stage.cli("ray", "submit", "asks.py", "--flag", ok=False)
    assert done.stdout == "3.0 49 ['--flag']\n", done.stderr
    assert done.returncode == 3, done.stderr
