"""Benchmark of boots: from the start of a host's set-up until its agent is warm, with a ready image and without.

    python bench/boot [--repeat 3] [-o json]        # root, mmdebstrap, the package archives; about five minutes
    python bench/boot --fleet aws|gcp               # root: whole fleets on the emulated clouds

A Debian 12 in a folder in memory is made a ready image by provision.sh for hosts without GPUs (`tests/support/image`).
Each boot gets its user data's files and runs the command line of the installed unit; the dispatcher is that of tests of
the agent. Nothing is read from a slow disk, and no kernel boots.

- image: as the image is
- other version: without the environment for hosts of this version, which the host makes then
- no bytecode: the same, without compiled files of Python either
- stock: no environment at all; pip installs from wheels on the disk, so that no download is counted

The parts: packages (set-up until the agent's process starts), agent (until it has connected), warm (until it has
imported torch, so that a worker is forked at once). CPU is that of all its processes until then.

--fleet: machines of the emulation have Python and torch, as a ready image has. Printed are, for each host, the seconds
from the cloud's "running" until the agent has joined and until the job's first step.

Aims: warm within 6 s on two cores with the image; first step within 15 s of "running".
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

TOP = Path(__file__).parents[2]
sys.path.insert(0, str(TOP))

from spotfleet.bootstrap import cloud_init  # noqa: E402
from spotfleet.bootstrap.wheel import build  # noqa: E402
from spotfleet.model import EnvironmentSpec  # noqa: E402
from tests.support.agent.agent_dispatcher import TOKEN, FakeDispatcher  # noqa: E402
from tests.support.image import debian, host  # noqa: E402

ARMS = ("image", "other version", "no bytecode", "stock")
LIMIT_S = 600.0
WHEELS = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": debian.WHEELS}


@dataclass(frozen=True)
class Boot:
    """One boot, in seconds from the start of its set-up."""

    arm: str
    packages: float
    agent: float
    warm: float
    cpu: float
    load: float


@contextmanager
def image() -> Iterator[debian.Debian]:
    import torch

    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    torch_ = f"torch=={torch.__version__}"
    wheels = debian.wheelhouse([*project["dependencies"], torch_, *(
        r for r in project["optional-dependencies"]["train"] if not r.startswith("torch"))])
    with tempfile.TemporaryDirectory(dir=debian.room(), prefix="spotfleet-boot-") as folder:
        made, wheel = debian.Debian(Path(folder, "root"), wheels), build()
        made.path(f"/root/{wheel.name}").write_bytes(wheel.data)
        shutil.copy(TOP / "spotfleet/bootstrap/provision.sh", made.path("/root"))
        begun = time.monotonic()
        made.ok("bash", "/root/provision.sh", "--wheel", f"/root/{wheel.name}", "--torch", torch_, env=WHEELS)
        print(f"provisioned in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        yield made


def prepare(machine: debian.Debian, arm: str) -> None:
    """Take away what this arm lacks. The arms are in the order in which they lack more."""
    if arm != "image":
        shutil.rmtree(machine.path(f"{cloud_init.ROOT}/envs"), ignore_errors=True)
    if arm == "no bytecode":
        for found in list(machine.path("/opt/spotfleet").rglob("__pycache__")):
            shutil.rmtree(found)


def boot(machine: debian.Debian, arm: str, dispatcher: FakeDispatcher) -> Boot:
    wheel, name = build(), f"boot-{secrets.token_hex(3)}"
    told = {"fleet": "f", "host": name, "provider": "local", "slots": 1, "dispatcher": dispatcher.url,
            "ca": dispatcher.ca, "token": TOKEN}
    stock = EnvironmentSpec(packages=()) if arm == "stock" else None
    wanted = host.plan(wheel, name, {"boot.json": json.dumps(told)}, stock)
    folder, load = host.folder_of(machine, wanted), os.getloadavg()[0]
    begun = time.clock_gettime(time.CLOCK_BOOTTIME)
    process = host.boot(machine, wanted, wheel if stock else None, **(WHEELS if stock else {}))
    try:
        dispatcher.wait(lambda report: report.host == name, LIMIT_S)
        agent = time.clock_gettime(time.CLOCK_BOOTTIME)
        dispatcher.wait(lambda report: report.host == name and "torch" not in report.why, LIMIT_S)
        warm, cpu = time.clock_gettime(time.CLOCK_BOOTTIME), _cpu(process.pid)
    except AssertionError as error:
        raise SystemExit(f"{error}\n{host.log(folder)}") from None
    finally:
        process.kill()
        process.wait()
    reached = {line.split()[0]: float(line.split()[2]) for line in (folder / "stages").read_text().splitlines()}
    shutil.rmtree(folder)
    return Boot(arm, round(reached["ready"] - begun, 2), round(agent - begun, 2), round(warm - begun, 2), round(cpu, 2),
                round(load, 1))


def _cpu(pid: int) -> float:
    """CPU seconds of a process and all below it, ended ones that were waited for included."""
    root = psutil.Process(pid)
    return sum(sum(process.cpu_times()[:4]) for process in [root, *root.children(recursive=True)])


def table(boots: list[Boot]) -> str:
    lines = ["| arm | n | packages, s | agent connected, s | warm, s: median (min-max) | CPU, s | load |",
             "|---|---|---|---|---|---|---|"]
    for arm in dict.fromkeys(b.arm for b in boots):
        of = [b for b in boots if b.arm == arm]
        warm = [b.warm for b in of]
        middle = [statistics.median(getattr(b, part) for b in of) for part in ("packages", "agent", "cpu", "load")]
        lines.append(f"| {arm} | {len(of)} | {middle[0]:.2f} | {middle[1]:.2f} | {statistics.median(warm):.2f} "
                     f"({min(warm):.2f}-{max(warm):.2f}) | {middle[2]:.1f} | {middle[3]:.1f} |")
    return "\n".join(lines)


def fleet(cloud: str) -> None:
    from tests.support.aws.aws_stage import AwsStage
    from tests.support.gcp.gcp_stage import GcpStage

    with (AwsStage if cloud == "aws" else GcpStage).made() as stage:
        stage.fleet_file(nodes={"min": 2, "target": 2})
        load = os.getloadavg()[0]
        stage.cli("up", "fleet.yaml", "-y")
        job = stage.train((2, 2))
        stage.wait("steps", lambda: stage.training(stage.instances("worker")))
        print(stage.cli("events").stdout)
        for line in json.loads(stage.cli("cost", "-o", "json").stdout)["boots"]:
            joined, step = line["joined_at"] - line["running_at"], (line["first_step_at"] or 0) - line["running_at"]
            print(f"{line['host']}: running -> joined {joined:.2f} s, -> first step {step:.2f} s; load {load:.1f}, "
                  f"{line['stages']}")
        stage.enough()
        stage.wait("the job's end", lambda: stage.job(job).state == "succeeded")
        print(stage.cli("cost").stdout)
        stage.cli("down", "-y")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument("--fleet", choices=("aws", "gcp"))
    parser.add_argument("-o", dest="output", choices=("table", "json"), default="table")
    given = parser.parse_args()
    if why := debian.why_not():
        sys.exit(why)
    if given.fleet:
        return fleet(given.fleet)
    boots: list[Boot] = []
    with image() as machine, tempfile.TemporaryDirectory() as folder:
        dispatcher = FakeDispatcher(Path(folder))
        dispatcher.start()
        try:
            for arm in given.arms:
                for _ in range(given.repeat):
                    prepare(machine, arm)
                    boots.append(boot(machine, arm, dispatcher))
                    print(boots[-1], file=sys.stderr, flush=True)
        finally:
            dispatcher.close()
    print(json.dumps([asdict(b) for b in boots], indent=1) if given.output == "json" else table(boots))


if __name__ == "__main__":
    try:
        main()
    except subprocess.SubprocessError as error:
        sys.exit(str(error))
