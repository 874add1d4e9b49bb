"""Time from an actor that cannot be placed until a host is asked for: a fleet, and Ray's own autoscaler, in one run.

    python bench/on_ray/demand.py [--actors N] [--turns N] [-o json] [--rows FILE]

One actor of one CPU after the other is made on a cluster without a worker node, so that each needs one host more. The
systems take turns, each on a cluster of its own on loopback, which ends before the next one begins:

- spotfleet           a fleet of provider local with `nodes: 0..N`; asked for: its event LaunchIntended
- autoscaler          Ray's autoscaler as it comes, on its fake multi-node provider; asked for: "Got 1 nodes to launch"
                      in its log. It looks each 5 s
- autoscaler 1 s      the same with AUTOSCALER_UPDATE_INTERVAL_S=1

The time between two actors is drawn from 8 to 13 s with a seed, the same for all systems. Exit status 0 whatever the
result.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from spotfleet.api import Fleet
from spotfleet.providers.local import LocalCloud

ADDRESS = "127.0.0.2"
LIMIT_S = 240.0
MARK = "SPOTFLEET_BENCH"
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_memory_monitor_refresh_ms": "0", "RAY_USAGE_STATS_ENABLED": "0",
       "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/", "RAY_raylet_start_wait_time_s": "180",
       "RAY_enable_metrics_collection": "0", "RAY_FAKE_CLUSTER": "1", "RAY_DEDUP_LOGS": "0"}
SYSTEMS: dict[str, dict[str, str]] = {
    "spotfleet": {},
    "autoscaler": {},
    "autoscaler 1 s": {"AUTOSCALER_UPDATE_INTERVAL_S": "1"},
}
LAUNCH = re.compile(r"Got (\d+) nodes to launch")
DRIVER = """
import sys, time, ray
ray.init(logging_level="ERROR", log_to_driver=False)

@ray.remote(num_cpus=1)
class Holder:
    pass

held = []
for pause_s in map(float, sys.argv[1:]):
    time.sleep(pause_s)
    print("asked at", time.time(), flush=True)
    held.append(Holder.remote())
time.sleep(30)
"""


@dataclass(frozen=True)
class Row:
    system: str
    asked_s: float  # from the actor until the host was asked for
    load: float


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def wait_for(what: str, holds: Callable[[], Any]) -> Any:
    end = time.monotonic() + LIMIT_S
    while not (found := holds()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {LIMIT_S:g} s")
        time.sleep(0.2)
    return found


def rows_of(system: str, asked: list[float], launched: list[float], load: float) -> list[Row]:
    """Return a row per actor: the host of the n-th one is the n-th that was asked for."""
    pairs = zip(asked, launched, strict=False)
    return [Row(system, round(then - at, 3), round(load, 1)) for at, then in pairs]


def instants(output: str) -> list[float]:
    return [float(line.removeprefix("asked at ")) for line in output.splitlines() if line.startswith("asked at ")]


# ---- a fleet


def on_fleet(pauses: list[float]) -> tuple[list[float], list[float]]:
    top = Path(tempfile.mkdtemp(prefix="demand-"))
    home, work = top / "home", top / "work"
    work.mkdir()
    (work / "driver.py").write_text(DRIVER)
    file = work / "demand.yaml"
    file.write_text(f"name: demand\nprovider: local\nnodes: {{min: 0, max: {len(pauses)}}}\n"
                    "resources: {instance_type: cpu.small}\nray: {object_store: 0.02}\nworkdir: .\n")
    os.environ.update(SPOTFLEET_HOME=str(home), SPOTFLEET_LOCAL_OWNER_PID=str(os.getpid()))
    try:
        fleet = Fleet(file)
        fleet.up(timeout_s=LIMIT_S)
        fleet.ray.start()
        wait_for("the head", lambda: (r := fleet.ray.status().report) is not None and r.state.up)
        before = os.getcwd()
        os.chdir(work)
        try:
            driver = fleet.ray.submit(["driver.py", *map(str, pauses)])
        finally:
            os.chdir(before)
        output = b"".join(fleet.ray.logs(driver, follow=True)).decode()
        launched = [e["at"] for e in fleet.events() if e["kind"] == "LaunchIntended" and e["role"] == "worker"]
        return instants(output), launched
    finally:
        LocalCloud(home).shutdown()
        shutil.rmtree(top, ignore_errors=True)


# ---- Ray's autoscaler


def config(hosts: int, address: str) -> dict[str, Any]:
    provider = {"type": "fake_multinode", "gcs_address": address}
    worker = {"resources": {"CPU": 1, "object_store_memory": 80 << 20}, "node_config": {}, "min_workers": 0,
              "max_workers": hosts}
    return {"cluster_name": "demand", "max_workers": hosts, "provider": provider, "upscaling_speed": 1.0,
            "idle_timeout_minutes": 5, "head_node_type": "ray.head.default",
            "available_node_types": {"cpu": worker, "ray.head.default": {
                "resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}},
            "auth": {}, "docker": {}, "file_mounts": {}, "cluster_synced_files": [], "rsync_exclude": [],
            "rsync_filter": [], "file_mounts_sync_continuously": False,
            **{f"{kind}_commands": [] for kind in ("initialization", "setup", "head_setup", "worker_setup",
                                                   "head_start_ray", "worker_start_ray")}}


@contextmanager
def head(hosts: int, settings: dict[str, str]) -> Iterator[tuple[str, Path, dict[str, str]]]:
    """Run a head with the autoscaler; yield its address, its folder, and the environment of its processes."""
    folder = Path(tempfile.mkdtemp(prefix="rd", dir="/tmp"))  # short: the path of a Unix socket has 107 bytes
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        port = probe.getsockname()[1]
    address = f"{ADDRESS}:{port}"
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | RAY | settings | {MARK: str(folder)}
    (folder / "config.json").write_text(json.dumps(config(hosts, address)))
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}",
               f"--node-ip-address={ADDRESS}", f"--temp-dir={folder}", "--num-cpus=0", "--include-dashboard=false",
               f"--object-store-memory={80 << 20}", "--disable-usage-stats",
               f"--autoscaling-config={folder / 'config.json'}"]
    with (folder / "head.log").open("wb") as output:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                   start_new_session=True)
    try:
        wait_for("the autoscaler", lambda: logs(folder))
        yield address, folder, env
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        end_all(folder)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def end_all(folder: Path) -> None:
    left = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == str(folder):
                process.kill()
                left.append(process)
        except psutil.Error:
            continue  # ended meanwhile, or not ours
    psutil.wait_procs(left, timeout=30)


def logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("session_*/logs/monitor*.*"))


def launches(folder: Path) -> list[float]:
    """Return when the autoscaler asked for each node, by its log."""
    found: set[tuple[float, int]] = set()
    for path in logs(folder):
        for line in path.read_text(errors="replace").splitlines():
            if (match := LAUNCH.search(line)) and (stamp := re.match(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})", line)):
                at = datetime.datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
                found.add((at, int(match[1])))
    return [at for at, count in sorted(found) for _ in range(count)]


def on_autoscaler(pauses: list[float], settings: dict[str, str]) -> tuple[list[float], list[float]]:
    with head(len(pauses), settings) as (address, folder, env):
        (folder / "driver.py").write_text(DRIVER)
        done = subprocess.run([sys.executable, folder / "driver.py", *map(str, pauses)], text=True,
                              capture_output=True, env=env | {"RAY_ADDRESS": address},
                              timeout=LIMIT_S + sum(pauses) + 30)
        if done.returncode:
            raise RuntimeError(f"the driver failed: {done.stderr[-2000:]}")
        return instants(done.stdout), launches(folder)


# ---- all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--actors", type=int, default=5, help="in each turn of a system (default: 5)")
    parser.add_argument("--turns", type=int, default=3, help="of each system (default: 3)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="separated by commas (default: all)")
    parser.add_argument("--rows", help="append each row to this file, as a line of JSON")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    args = parser.parse_args()
    rows: list[Row] = []
    systems = args.systems.split(",")
    for turn in range(args.turns):
        rng = random.Random(turn)
        pauses = [round(rng.uniform(8, 13), 2) for _ in range(args.actors)]
        for system in systems[turn % len(systems):] + systems[:turn % len(systems)]:
            log(f"turn {turn + 1}: {system}")
            try:
                asked, launched = (on_fleet(pauses) if system == "spotfleet"
                                   else on_autoscaler(pauses, SYSTEMS[system]))
            except (OSError, RuntimeError, TimeoutError, subprocess.SubprocessError) as error:
                log(f"{system}: {error}")
                continue
            found = rows_of(system, asked, launched, os.getloadavg()[0])
            if len(found) < len(asked):
                log(f"{system}: {len(asked) - len(found)} of {len(asked)} actors got no host")
            rows += found
            if args.rows:
                with open(args.rows, "a") as file:
                    file.writelines(json.dumps(asdict(row)) + "\n" for row in found)
    print(json.dumps([asdict(r) for r in rows]) if args.output == "json" else table(rows))


def table(rows: list[Row]) -> str:
    """Return the medians, each with its range and as a multiple of ours."""
    times = {name: sorted(r.asked_s for r in rows if r.system == name) for name in SYSTEMS}
    ours = statistics.median(times["spotfleet"]) if times["spotfleet"] else None
    lines = ["| system | events | asked for after, s | range | times ours | load |", "|---|---|---|---|---|---|"]
    for name, found in times.items():
        if found:
            median = statistics.median(found)
            ratio = f"{median / ours:.1f}" if ours else "-"
            load = statistics.median(r.load for r in rows if r.system == name)
            lines.append(f"| {name} | {len(found)} | {median:.2f} | {found[0]:.2f} to {found[-1]:.2f} | {ratio} | "
                         f"{load:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
