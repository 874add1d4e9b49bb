"""A user with an AWS account that is a fake, whose machines really run: what end-to-end tests of provider aws have at
hand.

    with AwsStage.made() as stage:
        stage.fleet_file()                     # examples/aws-g5.yaml, for machines as they are here
        stage.cli("up", "fleet.yaml", "-y")    # the real command line, on a laptop with an access key
        job = stage.train((2, 2))              # tests/support/network/ssh_stage.py: counting.py, with a trace of each
        step stage.cloud.interrupt(...)             # and whatever else tests/support/fakes/aws can do
        ...
        assert stage.cloud.everything() == []

After `restrict`, the laptop's user `laptop` may do what the policy says that `spotfleet check --policy` prints, and
nothing else; the machines what the roles say that were made for them. Both are judged resource by resource.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from spotfleet.providers.aws.mapping import names
from spotfleet.transport.client import DispatcherClient, Endpoint
from tests.support.fakes.aws import AwsCloud, InstanceView, catalog
from tests.support.fakes.aws_machines import AwsMachines, why_not
from tests.support.network.machines import LIMIT_S, Machine, wait_for
from tests.support.network.network_scripts import Step
from tests.support.network.ssh_stage import CLI, COUNTING, SAMPLES, TRACE, WORK, counted, steps_of

__all__ = ["AwsStage", "why_not"]

USER = "laptop"
EXAMPLE = Path(__file__).parents[3] / "examples" / "aws-g5.yaml"


@dataclass
class AwsStage:
    cloud: AwsCloud
    machines: AwsMachines
    env: dict[str, str]  # for the laptop's commands, beside what a login has
    fleet: str = ""
    said: list[str] = field(default_factory=list)  # what the command line said, in order

    @staticmethod
    @contextmanager
    def made() -> Iterator[AwsStage]:
        """Hosts have an image without any SDK of a cloud, and with nothing that installs packages."""
        with AwsCloud() as cloud, AwsMachines(cloud, bare=(cloud.DEEP_LEARNING,)) as machines:
            key, secret = cloud.user(USER)
            env = {"AWS_ENDPOINT_URL": machines.endpoint, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
            stage = AwsStage(cloud, machines, env)
            stage.write("counting.py", COUNTING)
            yield stage
            assert cloud.runner_errors == [], stage.story()
            assert not cloud.findings, cloud.findings[:10]

    # ---- what a user does

    def write(self, name: str, text: str) -> None:
        path = self.machines.laptop.path(f"{WORK}/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def fleet_file(self, **changed: Any) -> dict[str, Any]:
        """fleet.yaml: the example, but for what the user's own place decides and what is `changed`.

        `environment` names an interpreter that has all that is needed: the images of the fake are ready ones. And the
        laptop's address is said, as there is no service here that tells it.
        """
        wanted = yaml.safe_load(EXAMPLE.read_text())
        wanted |= {"environment": {"python": sys.executable, "inherit": True}, "workdir": "."} | changed
        wanted["aws"] = wanted.get("aws", {}) | {"ssh_from": [f"{self.machines.laptop.address}/32"]}
        self.fleet = wanted["name"]
        self.write("fleet.yaml", yaml.safe_dump(wanted, sort_keys=False))
        return wanted

    def restrict(self) -> None:
        """The laptop's user may do from now on what `check --policy` prints for the fleet file, and nothing else."""
        self.cloud.attach(USER, json.loads(self.cli("check", "--policy", "laptop", "fleet.yaml").stdout))

    def cli(self, *command: str, ok: bool = True, timeout_s: float = 2 * LIMIT_S) -> subprocess.CompletedProcess[str]:
        try:
            done = self.machines.laptop.run(CLI, *command, ok=False, timeout_s=timeout_s, cwd=WORK, env=self.env)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None
        self.said.append(f"$ spotfleet {' '.join(command)}\n{done.stderr}{done.stdout}")
        assert not ok or done.returncode == 0, f"{self.said[-1]}\n{self.story()}"
        return done

    def train(self, workers: tuple[int, int], nap_s: float = 0.02) -> str:
        """Begin; the job's id."""
        self.cli("train", "counting.py", "--np", f"{workers[0]}:{workers[1]}", "-d", "-e", f"NAP={nap_s}",
                 "-e", "OMP_NUM_THREADS=1")
        return self.call(lambda client: client.status()).jobs[-1].job

    # ---- the truth

    def instances(self, role: str = "") -> list[InstanceView]:
        """Of the fleet, those that live; of "worker" or "dispatcher"."""
        return [view for view in self.cloud.instances() if role in ("", view.tags.get(names.ROLE))]

    def machine(self, view: InstanceView) -> Machine:
        return self.machines[view.id]

    def home(self, view: InstanceView) -> Path:
        """Where its host's process lives."""
        return self.machine(view).path(f"/root/.spotfleet-host/{view.tags[names.HOST]}")

    def call(self, work: Callable[[DispatcherClient], Any]) -> Any:
        """`work(client)` on the dispatcher's own machine, for what is asked often."""
        folder = self.machines.laptop.path(f"/root/.spotfleet/fleets/{self.fleet}")
        token, ca = json.loads((folder / "keys.json").read_text())["admin_token"], (folder / "ca.pem").read_text()
        (view,) = self.instances("dispatcher")
        url = f"https://{view.private_ip}:{names.DISPATCHER_PORT}"
        client = DispatcherClient(Endpoint(url, token, ca), patience_s=LIMIT_S)
        return self.machines.net.call(view.id, lambda: work(client))

    def job(self, job: str) -> Any:
        return next(j for j in self.call(lambda client: client.status()).jobs if j.job == job)

    def steps(self, view: InstanceView) -> list[Step]:
        """Those that were made on a machine, in order."""
        return steps_of(self.machine(view).path(TRACE)) if view.id in self.machines else []

    def training(self, views: list[InstanceView]) -> bool:
        """Do these machines, and no others, train together?"""
        made = {view.id: self.steps(view) for view in self.instances("worker")}
        newest = max((s[-1].generation for s in made.values() if s), default=0)
        return newest > 0 and {i for i, s in made.items() if s and s[-1].generation == newest} == {v.id for v in views}

    def bills(self) -> dict[str, float]:
        """By the fake's own books: host -> dollars, of all that has ever run."""
        return {self.cloud.machine(id).tags[names.HOST]: usd for id, usd in self.cloud.invoice().items()}

    def denials(self) -> list[str]:
        """Calls of anybody that were refused for want of a right."""
        words = ("Unauthorized", "AccessDenied", "AuthFailure")
        return [f"{c.principal}: {c.action}: {c.code}" for c in self.cloud.calls if c.code.startswith(words)]

    def wrongly_counted(self) -> list[Any]:
        """Of the workers' results that came home, those in which a sample was not counted once in each epoch."""
        archive = self.machines.laptop.path(f"/root/.spotfleet/fleets/{self.fleet}/archive")
        found = [counted(path.read_text()) for path in archive.glob("jobs/counting-*/outputs/*/counts.txt")]
        assert found, self.story()
        return [times for times, epochs in found if times != {epochs: SAMPLES}]

    def enough(self) -> None:
        """The epoch under way is the last."""
        for view in self.instances("worker"):
            folder = self.machine(view).path(TRACE)
            folder.mkdir(exist_ok=True)
            (folder / "enough").touch()

    def wait(self, what: str, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        try:
            wait_for(what, condition, limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def story(self) -> str:
        """All that helps to find out why."""
        calls = [f"{c.principal} {c.action} {c.code}" for c in self.cloud.calls][-60:]
        for command in ("status", "events"):
            done = self.machines.laptop.run(CLI, command, ok=False, cwd=WORK, env=self.env)
            self.said.append(f"$ spotfleet {command}\n{done.stderr}{done.stdout}")
        return "\n".join([self.machines.story(), "=== calls", *calls, "=== said", *self.said[-6:]])


def pools() -> list[tuple[str, str]]:
    """Zone and type of all spot pools of the fake."""
    return [(zone, kind) for region in catalog.REGIONS for zone in catalog.zones(region) for kind in catalog.TYPES]


def timed(work: Callable[[], Any]) -> float:
    begun = time.monotonic()
    work()
    return time.monotonic() - begun
