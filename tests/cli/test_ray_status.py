"""`spotfleet ray status`: head, nodes by host, waiting requests and scripts, as people read them."""

from __future__ import annotations

import pytest

from spotfleet.cli.ray.command import text
from spotfleet.protocol.ray_cluster import RayDriver, RayGang, RayNode, RayReport, RayRequest, RayState, RayStatus

ONE = RayRequest({"GPU": 1.0}, 2)
STATE = RayState(
    True, (RayNode("00"), RayNode("01", "f-1", {"CPU": 8.0, "memory": 32e9}, {"CPU": 6.0}),
           RayNode("02", "f-2", {"CPU": 8.0}, {"CPU": 8.0}, idle_s=90.0), RayNode("03", "f-3", {}, {}, draining=True)),
    (ONE,), (RayGang((RayRequest({"CPU": 4.0}), RayRequest({"CPU": 4.0}))),))
RUNS = RayStatus("ray-1", "Ray runs on 3 hosts", "10.0.0.1:6379", RayReport(STATE, 1, ray="2.60.0", python="3.11"),
                 drivers=(RayDriver("d1", "python x.py", "failed", 3, 60.0),), hosts=("f-1", "f-2", "f-3", "f-4"))


@pytest.mark.parametrize("line", [
    "job ray-1: Ray runs on 3 hosts", "head: up at 10.0.0.1:6379, Ray 2.60.0, Python 3.11",
    "dashboard: none; it needs ray[default] among `environment.packages`",
    "waiting for room: 2 x {1 GPU}; a group of 1 x {4 CPU}, 1 x {4 CPU}"])
def test_the_cluster_is_described_line_by_line(line: str):
    assert line in text(RUNS).splitlines()


@pytest.mark.parametrize(("host", "state"), [
    ("f-1", "busy"), ("f-2", "idle"), ("f-3", "draining"), ("f-4", "its raylet has not joined")])
def test_each_host_has_a_row_with_its_state(host: str, state: str):
    row = next(line for line in text(RUNS).splitlines() if line.startswith(host))
    assert state in row


def test_a_script_has_a_row_with_its_end():
    assert any("d1" in line and "failed (3)" in line and "python x.py" in line for line in text(RUNS).splitlines())


def test_a_head_that_was_lost_is_said_to_be_so():
    state = RayState(False, problem="the head starts")
    lost = RayReport(state, 2, "the head's processes ended with status 1", "2.60.0", "3.11", dashboard=8265)
    lines = text(RayStatus("ray-1", "", "a:1", lost)).splitlines()
    assert "head: not up: the head starts, Ray 2.60.0, Python 3.11" in lines
    assert "head: started 2 times; the head's processes ended with status 1" in lines
    assert "dashboard: spotfleet port-forward 8265" in lines
