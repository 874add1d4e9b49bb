"""One Ray cluster for all tests of this folder: a head and raylets of one CPU each, on loopback."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from spotfleet.version import install

SETTINGS = {
    "RAY_AUTH_MODE": "disabled",  # else it writes a token into the user's home directory
    "RAY_memory_monitor_refresh_ms": "0",  # it kills tasks when the machine is full
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_enable_metrics_collection": "0",
    "RAY_worker_niceness": "0",  # else 15: on a busy machine workers wait for everybody else
}
ADDRESS = "127.0.0.2"  # a driver takes 127.0.0.1 for the address of the machine
LIMIT_S = 120.0
NODES = 4


class TestCluster:
    """The cluster, with its nodes by a resource of their name."""

    __test__ = False

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.ray = ray
        self._args = {"node_ip_address": ADDRESS, "object_store_memory": 80 << 20, "include_dashboard": False}
        head = {**self._args, "num_cpus": 0, "include_log_monitor": False, "no_monitor": True}
        self._cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        self.nodes: list[Any] = []
        for _ in range(NODES):
            self.add(wait=False)
        self._cluster.wait_for_nodes(LIMIT_S)
        ray.init(self._cluster.address, _node_ip_address=ADDRESS, log_to_driver=False, logging_level="ERROR")

    @property
    def address(self) -> str:
        return self._cluster.address

    @property
    def head(self) -> Any:
        return self._cluster.head_node

    def add(self, cpus: int = 1, gpus: int = 0, *, wait: bool = True) -> Any:
        args = {k: v for k, v in self._args.items() if k != "include_dashboard"}
        self.nodes.append(self._cluster.add_node(wait=wait, num_cpus=cpus, num_gpus=gpus, **args))
        return self.nodes[-1]

    def whole(self) -> None:
        """Replace nodes that tests have lost."""
        draining = self.ray._private.state.state.get_draining_nodes()
        for node in [n for n in self.nodes if n.node_id in draining]:
            self.lose(node)
        while len(self.nodes) < NODES:
            self.add()

    def workers_of(self, node: Any) -> list[psutil.Process]:
        """Ray's worker processes on a node."""
        raylets = [p.process.pid for p in node.all_processes.get("raylet", ())]
        return [child for pid in raylets for child in psutil.Process(pid).children(recursive=True)]

    def lose(self, node: Any) -> None:
        """Kill everything of a node, as its machine would take everything with it."""
        processes = self.workers_of(node)
        node.kill_raylet(check_alive=False)
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._cluster.remove_node(node, allow_graceful=False)
        self.nodes.remove(node)

    def close(self) -> None:
        self.ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="session")
def one_cluster() -> Iterator[TestCluster]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip(f"Ray is not installed: {install('ray')}")
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: the path of a Unix socket has 107 bytes
    (Path(folder) / "ray").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**SETTINGS, "RAY_TMPDIR": folder}.items():
            patch.setenv(name, value)
        made: list[TestCluster] = []
        with ended_with_this_process(folder):
            try:
                made.append(TestCluster())
                yield made[0]
            finally:
                for cluster in made:
                    cluster.close()
                end_all(folder)
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def ended_with_this_process(folder: str) -> Iterator[None]:
    """Have the cluster ended also if this process is killed, or ends itself at a test's time limit."""
    code = "import sys; from tests.ray.conftest import end_all; sys.stdin.read(); end_all(sys.argv[1])"
    with subprocess.Popen([sys.executable, "-c", code, folder], stdin=subprocess.PIPE, start_new_session=True,
                          env={**os.environ, "RAY_TMPDIR": ""}):
        yield  # the watcher's standard input ends with this process


def end_all(folder: str) -> None:
    """End each process of a cluster that has not ended, also of one that never came up."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("RAY_TMPDIR") == folder:
                process.kill()
                left.append(process)
        except psutil.Error:
            continue  # ended meanwhile, or not ours
    psutil.wait_procs(left, timeout=30)


@pytest.fixture
def cluster(one_cluster: TestCluster) -> TestCluster:
    """The cluster with all its nodes."""
    one_cluster.whole()
    return one_cluster


@pytest.fixture
def shut_down() -> Iterator[Callable[[Any], Any]]:
    """Shut executors down at the test's end, also when it fails."""
    made: list[Any] = []

    def note(executor: Any) -> Any:
        made.append(executor)
        return executor

    yield note
    for executor in made:
        executor.shutdown()


def eventually(holds: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Return the first true value of `holds`."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if found := holds():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {limit_s:g} s")
