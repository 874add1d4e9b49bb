"""Command lines of head and raylets, versions that must agree, and folders of a cluster. No Ray is started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.protocol.ray_cluster import RayDrain, RayNode, folder_of, mismatch
from spotfleet.ray.cluster import processes, start
from spotfleet.ray.cluster.observer import Drainer
from spotfleet.ray.cluster.raylet import node_of

NODE = start.Node("f-1", 8, 2, 4 << 30)


def test_on_machines_of_their_own_every_port_is_fixed_and_none_is_on_a_shared_one():
    own = start.raylet("10.0.0.1:6379", "10.0.0.2", "/tmp/x/r", NODE)
    ports = [flag for flag in own if flag.startswith("--") and "port" in flag]
    assert len(ports) == 8 and all(int(flag.partition("=")[2]) > 0 for flag in ports)
    assert [flag for flag in start.raylet("127.1.0.1:50000", "127.1.0.2", "/tmp/x/r", NODE)
            if flag.startswith("--") and "port" in flag] == [
        "--min-worker-port=0", "--max-worker-port=0"]


def test_a_raylet_has_the_hosts_resources_and_its_name():
    command = start.raylet("10.0.0.1:6379", "10.0.0.2", "/tmp/x/r", NODE)
    assert {"--address=10.0.0.1:6379", "--num-cpus=8", "--num-gpus=2", f"--object-store-memory={4 << 30}",
            "--labels=spotfleet-host=f-1", "--block"} <= set(command)


def test_the_head_runs_no_task_and_shows_its_dashboard_on_loopback_only():
    plain, shown = (start.head("10.0.0.1:6379", "/tmp/x/h", port) for port in (0, 8265))
    assert {"--num-cpus=0", "--num-gpus=0", "--disable-usage-stats", "--include-dashboard=false"} <= set(plain)
    assert "ray.scripts" not in plain and "sys.modules['grpc'] = None" in plain[2], "no port of a server for ray://"
    assert {"--include-dashboard=true", "--dashboard-host=127.0.0.1", "--dashboard-port=8265"} <= set(shown)


def test_a_lost_node_is_found_within_seconds_except_where_hosts_share_one_machine():
    assert start.head_settings("10.0.0.1")["RAY_health_check_failure_threshold"] == "3"
    assert start.head_settings("127.1.0.1") == {"RAY_memory_monitor_refresh_ms": "0"}


@pytest.mark.parametrize(("ray", "python", "named"), [
    ("2.60.0", "3.11", ""), ("2.59.0", "3.11", "host f-1 has Ray 2.59.0, and the head Ray 2.60.0"),
    ("2.60.0", "3.12", "host f-1 has Python 3.12, and the head Python 3.11"), ("", "3.11", "host f-1 has no Ray")])
def test_a_host_with_another_ray_or_python_is_refused_with_both_versions(ray: str, python: str, named: str):
    found = mismatch("2.60.0 3.11", ray, python, "f-1")
    assert found.startswith(named) and bool(found) == bool(named)


def test_a_refused_host_ends_with_the_reason(tmp_path: Path):
    done = subprocess.run([sys.executable, "-m", "spotfleet.ray.cluster.raylet"], text=True, capture_output=True,
                          env={**os.environ, "SPOTFLEET_RAY_VERSIONS": "1.0.0 3.11", "SPOTFLEET_RAY_HOST": "f-1"})
    assert done.returncode == 1 and "and the head Ray 1.0.0: install the same on both" in done.stdout


def test_a_node_that_is_released_ends_if_it_is_idle_and_else_stays():
    ended: list[str] = []

    def drain(node_id: str, why: str, left_s: float, *, idle_only: bool) -> str:
        refused = "no longer idle" if node_id == "busy" and idle_only else ""
        ended.extend([] if refused else [node_id])
        return refused

    drainer, gcs = Drainer(), SimpleNamespace(drain=drain)
    drainer.releases = frozenset({"f-1", "f-2", "f-3"})
    nodes = RayNode("idle", "f-1"), RayNode("busy", "f-2"), RayNode("drains", "f-3", draining=True)
    assert drainer.ask(gcs, nodes) and ended == ["idle"]


def test_a_host_offers_what_its_variables_allow():
    found = node_of({"SPOTFLEET_RAY_HOST": "f-1", "SPOTFLEET_RAY_CPUS": "3", "SPOTFLEET_RAY_GPUS": "1",
                     "SPOTFLEET_RAY_STORE": "0.000001"})
    assert (found.host, found.cpus, found.gpus) == ("f-1", 3, 1) and 0 < found.store_bytes < 10 << 20
    assert node_of({"SPOTFLEET_RAY_HOST": "f-1"}).cpus == len(os.sched_getaffinity(0))


class Asked:
    """A GCS that takes drains, and refuses to end nodes that are busy."""

    def __init__(self, *busy: str) -> None:
        self.busy, self.asked = busy, []

    def drain(self, node_id: str, why: str, left_s: float, *, idle_only: bool) -> str:
        self.asked.append((node_id, idle_only))
        return "it is no longer idle" if idle_only and node_id in self.busy else ""


def test_a_host_that_is_given_back_ends_if_idle_and_else_drains_and_a_noticed_one_drains_at_once():
    drainer, gcs = Drainer(), Asked("busy")
    drainer.wanted = {"f-1": RayDrain("f-1", 60.0, idle_only=True), "f-2": RayDrain("f-2", 60.0, idle_only=True),
                      "f-3": RayDrain("f-3", 90.0)}
    nodes = (RayNode("head"), RayNode("idle", "f-1"), RayNode("busy", "f-2"), RayNode("noticed", "f-3"),
             RayNode("stays", "f-4"))
    assert drainer.ask(gcs, nodes)
    assert gcs.asked == [("idle", True), ("busy", True), ("busy", False), ("noticed", False)]
    gcs.asked.clear()
    assert not drainer.ask(gcs, tuple(replace(n, draining=n.host in drainer.wanted) for n in nodes[2:]))
    assert not gcs.asked


def test_a_host_that_drains_and_then_gets_a_notice_drains_until_the_earlier_end():
    drainer, gcs = Drainer(), Asked()
    drainer.wanted = {"f-1": RayDrain("f-1", 120.0)}
    assert drainer.ask(gcs, (RayNode("a", "f-1"),))
    drains = (RayNode("a", "f-1", draining=True),)
    for left_s, again in ((119.0, False), (30.0, True), (29.0, False)):
        drainer.wanted = {"f-1": RayDrain("f-1", left_s)}
        assert drainer.ask(gcs, drains) is again
    restarted = Drainer()
    restarted.wanted = {"f-1": RayDrain("f-1", 28.0)}
    assert restarted.ask(gcs, drains) and not restarted.ask(gcs, drains), "it does not know what Ray was asked for"
    assert gcs.asked == 3 * [("a", False)]


def test_a_raylet_that_does_not_answer_delays_no_other_drain():
    class Partly(Asked):
        def drain(self, node_id: str, why: str, left_s: float, *, idle_only: bool) -> str:
            super().drain(node_id, why, left_s, idle_only=idle_only)
            if node_id == "stopped":
                raise ConnectionError("deadline exceeded")
            return ""

    drainer, gcs = Drainer(), Partly()
    drainer.wanted = {"f-1": RayDrain("f-1", 60.0), "f-2": RayDrain("f-2", 60.0)}
    assert drainer.ask(gcs, (RayNode("stopped", "f-1"), RayNode("fine", "f-2")))
    assert gcs.asked == [("stopped", False), ("fine", False)]
    drainer.ask(gcs, (RayNode("stopped", "f-1"),))
    assert len(gcs.asked) == 2, "it is not asked at once again"


def test_a_node_whose_drain_was_accepted_is_reported_as_draining_before_rays_own_state_shows_it():
    drainer, gcs = Drainer(), Asked()
    drainer.wanted = {"f-1": RayDrain("f-1", 90.0)}
    nodes = RayNode("noticed", "f-1"), RayNode("stays", "f-2"), RayNode("drains", "f-3", draining=True)
    assert [n.draining for n in drainer.marked(nodes)] == [False, False, True]
    drainer.ask(gcs, nodes)
    assert [n.draining for n in drainer.marked(nodes)] == [True, False, True]


def test_the_folder_of_a_cluster_follows_from_its_token_and_leaves_room_for_sockets():
    socket = f"{folder_of('t')}/0123abcd/session_2026-11-26_19-08-48_123456_1234567/sockets/plasma_store"
    assert len(socket) <= 107 and folder_of("t") == folder_of("t") != folder_of("u")


def test_every_process_of_a_folder_is_found_and_ended_with_its_children_and_no_other_is(tmp_path: Path):
    folder, other = processes.make(tmp_path / "c"), processes.make(tmp_path / "d")
    (folder / "h").mkdir()
    script = "sleep 600 & wait"
    ours, foreign = (subprocess.Popen(["bash", "-c", script], env={"PATH": os.environ["PATH"], processes.MARK: str(at)},
                                      start_new_session=True) for at in (folder / "h", other))
    try:
        end = time.monotonic() + 30
        while ours.pid not in processes.marked(folder):  # a program that starts has no environment for a moment
            assert time.monotonic() < end
        assert foreign.pid not in processes.marked(folder)
        processes.end_all(folder)
        assert ours.wait(10) == -9 and not processes.marked(folder) and not folder.exists()
        assert foreign.poll() is None
    finally:
        processes.end_all(folder)
        processes.end_all(other)
        foreign.wait(10)


def test_no_variable_of_another_cluster_reaches_a_process_of_this_one(tmp_path: Path):
    found = processes.environment({"RAY_ADDRESS": "10.0.0.9:6379", "RAY_AUTH_TOKEN": "t", "PATH": "/bin"}, tmp_path)
    assert "RAY_ADDRESS" not in found and found["RAY_AUTH_TOKEN"] == "t" and found["PATH"] == "/bin"
    assert found[processes.MARK] == str(tmp_path)
    assert found["RAY_worker_niceness"] == "0", "a worker that trains is no background task"
