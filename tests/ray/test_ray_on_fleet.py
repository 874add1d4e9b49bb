"""A Ray cluster on a fleet of the local provider, with real raylets: one cluster for all tests, which go in this order.

Only real processes show that raylets join, leave and end as they do, and that Ray's reports, refusals and ends of nodes
are as `fleet/planner/demand.py` takes them. The rules alone are tested in tests/dispatcher/ray/,
tests/dispatcher/test_demand_rules.py, tests/ray/test_raylets.py and tests/membership/test_schedule.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from spotfleet.api import Fleet, Job
from spotfleet.api.ray_cluster import RayStart
from spotfleet.errors import UsageError
from spotfleet.protocol.ray_cluster import RayNode, RayStatus, folder_of
from spotfleet.providers.local import LocalCloud
from spotfleet.ray.cluster.processes import MARK
from spotfleet.version import install
from tests.conftest import RUN_MARK
from tests.support.e2e.e2e_stage import COUNTING, Stage, hosts, trains, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
LIMIT_S = 240.0  # on a busy machine a raylet takes up to half a minute
HEAD, RAYLET = "spotfleet.ray.cluster.head", "spotfleet.ray.cluster.raylet"
ASKS = """
import sys, ray
from beside import square
ray.init("auto", runtime_env={"working_dir": "."}, logging_level="ERROR")
print(ray.cluster_resources()["CPU"], ray.get(ray.remote(square).remote(7)), sys.argv[1:])
sys.exit(3)
"""
FILE = """
name: ring
provider: local
groups:
  base: {nodes: {min: 3, max: 3}, instance_type: cpu.small}
  gpu: {nodes: {min: 0, max: 2, idle_after: 3s}, accelerators: EMU:1}
ray: {object_store: 0.02}
workdir: .
"""
WANTS = """
import time, ray
ray.init(logging_level="ERROR")

@ray.remote(num_cpus=0, num_gpus=1)
def task():
    return ray.get_runtime_context().get_node_id()

waits = ray.remote(num_cpus=0, num_gpus=8)(lambda: None).remote()    # fits no host: reported, not bought
print("asked at", time.time(), flush=True)
ray.get(task.remote(), timeout=400)
print("ran", flush=True)
"""
HOLDS = """
import os, sys, time, ray
ray.init(logging_level="ERROR")

@ray.remote(num_cpus=1, max_restarts=0)
class Busy:
    def where(self):
        return ray.get_runtime_context().get_node_labels()["spotfleet-host"]

count = int(sys.argv[1])
actors = [Busy.remote() for _ in range(count)]
print("on", *ray.get([a.where.remote() for a in actors]), flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.1)
print("still", *ray.get([a.where.remote() for a in actors]), flush=True)
"""
TRIAL = """
import os, sys, time, ray
from spotfleet.ray.tune.sizes import SizesClient, TrialClaim
ray.init(logging_level="ERROR")
nodes = {n["NodeID"]: 1 for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU")}
claim = TrialClaim("t1", 1, len(nodes), atoms=len(nodes), run="1", name="train_t1", nodes=nodes)
client = SizesClient()
while not os.path.exists(sys.argv[1]):
    client.claim(claim, 0, 0.0)
    time.sleep(0.5)
client.leave(claim)
print("over", flush=True)
time.sleep(3600)
"""


@dataclass
class RayStage:
    """A fleet with its Ray cluster."""

    stage: Stage
    fleet: Fleet
    up_s: float = 0.0  # from `ray start` until three raylets had joined
    cpu_s: float = 0.0  # the time of processors that its processes had used by then
    jobs: list[Job] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)  # where the cluster has its files on this machine

    @property
    def status(self) -> RayStatus:
        return self.fleet.ray.status()

    def nodes(self) -> dict[str, RayNode]:
        """The raylets of group `base` that have joined, by host; none while the head is not up."""
        report = self.status.report
        nodes = report.state.nodes if report is not None and report.state.up else ()
        return {n.host: n for n in nodes if "-base-" in n.host}

    def wait_for_nodes(self, count: int) -> None:
        wait_for(f"{count} raylets", lambda: len(self.nodes()) == count, LIMIT_S)

    def launched(self, group: str) -> list[dict]:
        """The requests of hosts of a group."""
        return [e for e in self.fleet.events() if e["kind"] == "LaunchIntended" and e["role"] == "worker"
                and e["group"] == group]

    def submit(self, *words: str) -> str:
        return self.fleet.ray.submit(words)

    def output(self, driver: str) -> str:
        return b"".join(self.fleet.ray.logs(driver)).decode()

    def why(self) -> list[str]:
        """The reasons of all changes of the job that holds hosts for Ray."""
        return [e["why"] for e in self.fleet.events() if e["kind"] == "JobChanged" and e["job"].startswith("ray")]

    def left(self) -> list[str]:
        """Processes and folders of the cluster on this machine."""
        running = [" ".join(p.cmdline())[:100] for p in [*processes(), *processes(HEAD), *processes(RAYLET)]]
        return running + [str(p) for p in self.folders if p.exists()]


def processes(module: str = "") -> list[psutil.Process]:
    """The processes of a module of ours that this test run has started; without one, those of Ray in its fleets."""
    found = []
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            if variables.get(RUN_MARK) == os.environ[RUN_MARK] and (
                    module in process.cmdline() if module else MARK in variables):
                found.append(process)
        except psutil.Error:
            continue  # ended meanwhile, or not ours
    return found


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayStage]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip(f"Ray is not installed: {install('ray')}")
    top = tmp_path_factory.mktemp("fleet")
    home, work = top / "home", top / "work"
    work.mkdir()
    for name, text in {"ring.yaml": FILE, "asks.py": ASKS, "wants.py": WANTS, "holds.py": HOLDS, "trial.py": TRIAL,
                       "counting.py": COUNTING, "beside.py": "def square(x):\n    return x * x\n"}.items():
        (work / name).write_text(text)
    folders: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPOTFLEET_HOME", str(home))
        patch.setenv("SPOTFLEET_LOCAL_OWNER_PID", str(os.getpid()))
        patch.chdir(work)
        stage = Stage(home, work)
        try:
            found = RayStage(stage, Fleet(work / "ring.yaml"))
            found.fleet.up(timeout_s=LIMIT_S)
            wait_for("3 hosts", lambda: len(hosts(found.fleet)) == 3)
            began = time.monotonic()
            stage.cli("ray", "start", "-d")
            found.folders = folders = [folder_in(home)]
            found.wait_for_nodes(3)
            found.up_s = time.monotonic() - began
            times = [p.cpu_times() for p in [*processes(), *processes(HEAD), *processes(RAYLET)]]
            found.cpu_s = sum(t.user + t.system for t in times)
            yield found
        finally:
            show(home)
            LocalCloud(home).shutdown()
            for folder in folders:  # its processes have ended with their machines
                shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def enough() -> Iterator[Path]:
    """A file that ends the script, where its user sees it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder) / "enough"


def folder_in(home: Path) -> Path:
    """The folder of the cluster that runs on this home's fleet."""
    secrets = next(home.glob("local/hosts/*/jobs/ray-*/secrets.json"))
    return Path(folder_of(json.loads(secrets.read_text())["RAY_AUTH_TOKEN"]))


def show(home: Path) -> None:
    """Print the logs of head and raylets, for a test that fails."""
    for log in sorted([*home.glob("local/hosts/*/ray.log"), *home.glob("local/hosts/*/jobs/*/workers/*/log")]):
        print(f"---- {log.relative_to(home)}", *log.read_text().splitlines()[-25:], sep="\n")


def test_a_submitted_script_uses_all_hosts_with_its_modules_and_its_exit_status_comes_back(ring: RayStage):
    print(f"3 hosts were up {ring.up_s:.1f} s after `ray start`, for which Ray took {ring.cpu_s:.1f} s of processors")
    done = ring.stage.cli("ray", "submit", "asks.py", "--flag", ok=False)
    assert done.stdout == "3.0 49 ['--flag']\n", done.stderr
    assert done.returncode == 3, done.stderr
    shown = json.loads(ring.stage.cli("ray", "status", "-o", "json").stdout)
    assert shown["drivers"][0]["state"] == "failed" and shown["drivers"][0]["exit_status"] == 3
    assert len(shown["report"]["state"]["nodes"]) == 4 and shown["report"]["state"]["up"]
    with pytest.raises(UsageError, match="Ray runs on this fleet already"):
        ring.fleet.ray.start(RayStart())


def test_the_token_is_on_no_command_line_and_not_in_the_home_folder(ring: RayStage):
    token = processes(RAYLET)[0].environ()["RAY_AUTH_TOKEN"]
    lines = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert len(token) == 64 and not [line for line in lines if token in line]
    kept = Path("~/.ray/auth_token").expanduser()
    assert not kept.exists() or token not in kept.read_text()


@pytest.mark.skipif(os.getuid() != 0, reason="only a dispatcher that is root can start a head as another user")
def test_head_and_scripts_run_as_a_user_of_their_own_which_cannot_read_the_dispatchers_home(ring: RayStage):
    assert ring.status.report is not None and ring.status.report.shared == ""
    # On one machine the raylets of hosts run beside the head's processes.
    users = {p.name(): p.uids().effective for p in processes() if p.environ()[MARK].endswith("/h")}
    assert {"gcs_server", "raylet"} <= set(users) and len(set(users.values())) == 1 and 0 not in users.values(), users
    [keys] = ring.stage.home.glob("local/hosts/ring-*-d-0/boot.json")
    driver = ring.submit("bash", "-c", f"id -u; cat {keys}; ls {ring.stage.home}")
    wait_for("its end", lambda: ring.fleet.ray.driver(driver).state != "running")
    first, *rest = ring.output(driver).splitlines()
    assert int(first) == users["raylet"] and len(rest) == 2, rest
    assert all("Permission denied" in line or "No such file" in line for line in rest), rest


def test_a_task_makes_a_host_of_its_group_come(ring: RayStage):
    assert ring.launched("gpu") == []
    driver = ring.submit("wants.py")
    wait_for("the task", lambda: ring.fleet.ray.driver(driver).state != "running", LIMIT_S)
    output = ring.output(driver)
    assert "ran" in output, output
    [launch] = ring.launched("gpu")
    asked_at = float(output.partition("asked at ")[2].split()[0])
    print(f"the host was asked for {launch['at'] - asked_at:.2f} s after the task")
    [unmet] = [e for e in ring.fleet.events() if e["kind"] == "DemandUnmet" and e["shapes"]]
    assert list(unmet["shapes"]) == ["{'GPU': 8}"]


def test_a_command_can_be_ended(ring: RayStage):
    driver = json.loads(ring.stage.cli("ray", "submit", "-d", "-o", "json", "--", "sleep", "600").stdout)["driver"]
    ring.stage.cli("ray", "cancel", driver)
    wait_for("its end", lambda: ring.fleet.ray.driver(driver).state == "stopped")


def test_a_notice_drains_the_node_at_once_and_its_replacement_joins_before_it_goes(ring: RayStage, enough: Path):
    driver = ring.submit("holds.py", "3", str(enough))
    wait_for("actors", lambda: "on " in ring.output(driver), LIMIT_S)
    noticed = sorted(ring.nodes())[0]
    began = time.monotonic()
    ring.fleet.interrupt(noticed, 100.0)
    wait_for("a drain", lambda: ring.nodes()[noticed].draining)
    print(f"the node drained {time.monotonic() - began:.2f} s after the notice")
    wait_for("a replacement", lambda: len([n for n in ring.nodes() if n != noticed]) == 3, LIMIT_S)
    print(f"its replacement joined {time.monotonic() - began:.2f} s after the notice")
    assert ring.nodes()[noticed].draining  # it is still there, and runs what it ran
    enough.touch()
    wait_for("the script's end", lambda: ring.fleet.ray.driver(driver).state != "running")
    first, last = (line.split()[1:] for line in ring.stage.cli("ray", "logs", "-f", driver).stdout.splitlines())
    assert first == last and noticed in first and ring.fleet.ray.driver(driver).state == "succeeded"
    wait_for("the host's end", lambda: noticed not in [h.host for h in ring.fleet.hosts()])


def test_the_idle_host_is_given_back_and_the_bill_shows_it(ring: RayStage):
    [launch] = ring.launched("gpu")
    wait_for("its end", lambda: launch["request_id"] not in [h.host for h in ring.fleet.hosts()], LIMIT_S)
    [why] = [e["why"] for e in ring.fleet.events() if e["kind"] == "TerminateIntended"
             and e["request_id"] == launch["request_id"]]
    assert "no task needs it" in why and len(ring.launched("gpu")) == 1
    decided = [e["hosts"] for e in ring.fleet.events() if e["kind"] == "DemandDecided" and e["group"] == "gpu"]
    assert decided == [1, 0]
    assert launch["request_id"] in ring.stage.cli("cost", "--by", "host").stdout


def test_a_trial_of_tune_is_in_the_bill_as_a_part_of_the_cluster(ring: RayStage, enough: Path):
    """From its claims, as its coordinator repeats them, to `cost`; tests/ray/test_elastic_trials.py has real trials."""
    driver = ring.submit("trial.py", str(enough))
    held = lambda: [e for e in ring.fleet.events() if e["kind"] == "TrialHeld"]  # noqa: E731
    wait_for("the trial in the ledger", held, LIMIT_S)
    time.sleep(3)
    enough.touch()
    wait_for("its end in the ledger", lambda: held()[-1]["workers"] == 0, LIMIT_S)
    ring.fleet.ray.stop_driver(driver)
    assert [(e["trial"], e["name"], e["workers"], list(e["hosts"].values())) for e in held()] == [
        ("t1", "train_t1", 3, [10**6] * 3), ("t1", "train_t1", 0, [])]
    found = json.loads(ring.stage.cli("cost", "-o", "json").stdout)
    [trial], job = found["trials"], next(j for j in found["jobs"] if j["job"].startswith("ray"))
    assert trial["slot_s"] >= 3 * 3 and 0 < trial["micros"] < job["micros"]
    assert trial["micros"] + job["no_trial_micros"] == job["micros"]
    assert "train_t1" in ring.stage.cli("cost").stdout


def test_a_job_of_a_higher_priority_gets_a_host_of_ray_and_none_is_held_by_both(ring: RayStage):
    job = ring.stage.counting(ring.fleet, 2000, (1, 1), priority=5, group="base")
    ring.jobs.append(job)
    wait_for("training", lambda: trains(job, 1), LIMIT_S)
    ring.wait_for_nodes(2)
    for host in hosts(ring.fleet):
        assert len(host.jobs) == 1, f"{host.host} is held by {host.jobs}"


def test_training_goes_on_when_the_head_is_killed_and_raylets_join_the_next_head(ring: RayStage):
    job = ring.jobs[0]
    step = job.status().version
    next(p for p in processes() if p.name() == "gcs_server").kill()
    wait_for("the loss in `status`", lambda: not ring.nodes() or (ring.status.report and ring.status.report.starts > 1))
    wait_for("the next head", lambda: ring.status.report is not None and ring.status.report.starts == 2, LIMIT_S)
    ring.wait_for_nodes(2)
    assert "head's processes ended" in ring.stage.cli("ray", "status").stdout
    assert [why for why in ring.why() if "the head's processes ended" in why], ring.why()
    assert trains(job, 1, step=step + 1) and not job.status().repeated


def test_nothing_of_ray_is_left_after_stop_although_parts_of_it_were_killed(ring: RayStage):
    for module in (HEAD, RAYLET):
        processes(module)[0].kill()
    ring.stage.cli("ray", "stop")
    wait_for("an end of all of it", lambda: not ring.left())
    assert not ring.status.job and trains(ring.jobs[0], 1)
    assert "no Ray cluster runs" in ring.stage.cli("ray", "status").stdout
    assert ring.output("d1") == "3.0 49 ['--flag']\n" and ring.fleet.ray.driver("d1").exit_status == 3
    with pytest.raises(UsageError, match="no Ray cluster runs on this fleet"):
        ring.fleet.ray.submit(["asks.py"])


def test_nothing_of_ray_is_left_after_down_while_a_cluster_starts(ring: RayStage):
    ring.stage.cli("ray", "start", "-d")
    ring.folders.append(folder_in(ring.stage.home))
    wait_for("head and raylets", lambda: processes(HEAD) and processes(RAYLET) and processes(), LIMIT_S)
    ring.fleet.down(discard=True)
    assert not ring.left() and ring.stage.cloud.truth() == []
