"""`provision.sh` in a real Debian: what it makes, and that a host of this version starts from it and trains.

A cheaper test cannot show that the packages fit together: apt, pip, sshd and systemd judge them here.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from spotfleet import bundle
from spotfleet.bootstrap import cloud_init, script
from spotfleet.bootstrap.wheel import build
from spotfleet.codec import to_json
from spotfleet.model import JobSpec
from spotfleet.providers import LaunchRequest
from tests.image.conftest import provision
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.image import host
from tests.support.image.debian import Debian
from tests.support.image.host import UNIT

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
SLOW_S = 240.0  # on a busy machine: torch is imported from a cold disk
TRAIN = """
import torch
import spotfleet.train as hvd

hvd.init()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters())

@hvd.elastic.run
def train(state):
    for state.batch in range(state.batch, 3):
        opt.zero_grad()
        model(torch.ones(1)).sum().backward()
        opt.step()
        state.commit()

train(hvd.elastic.TorchState(model, opt, batch=0))
print("counted", model.weight.item(), "by", torch.__file__, flush=True)
hvd.shutdown()
"""


def test_the_second_run_changes_no_file(image: Debian):
    before = image.tree()
    assert provision(image).splitlines() == ["provision.sh: done: environment: {python: /opt/spotfleet/bin/python, "
                                             "inherit: true}"]
    after = image.tree()
    assert {path: (before.get(path), after.get(path)) for path in before.keys() | after.keys()
            if before.get(path) != after.get(path)} == {}


def test_sshd_lets_nobody_in_by_a_password_and_root_not_at_all(image: Debian):
    image.path("/run/sshd").mkdir(exist_ok=True)
    found = dict(line.split(" ", 1) for line in image.ok("/usr/sbin/sshd", "-T").splitlines() if " " in line)
    wanted = {"passwordauthentication": "no", "kbdinteractiveauthentication": "no", "permitrootlogin": "no",
              "x11forwarding": "no", "maxauthtries": "3", "pubkeyauthentication": "yes"}
    assert {key: found[key] for key in wanted} == wanted


def test_a_fleet_whose_user_is_root_still_gets_in_by_its_key(image: Debian):
    keys = image.path("/root/.ssh/authorized_keys")
    keys.parent.mkdir(mode=0o700, exist_ok=True)
    keys.write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIExample f\n")
    try:
        image.ok("bash", "/root/provision.sh", "--configure")
        assert "permitrootlogin without-password" in image.ok("/usr/sbin/sshd", "-T")
    finally:
        keys.unlink()
    image.ok("bash", "/root/provision.sh", "--configure")
    assert "permitrootlogin no" in image.ok("/usr/sbin/sshd", "-T")


def test_systemd_takes_the_unit_without_a_remark_and_starts_it_at_boot(image: Debian):
    done = image.run("systemd-analyze", "verify", UNIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert image.ok("systemctl", "is-enabled", "spotfleet-host").strip() == "enabled"
    assert image.ok("systemctl", "is-enabled", "chrony").strip() == "enabled"
    for line in ("LimitMEMLOCK=infinity", "LimitNOFILE=1048576", "KillMode=mixed",
                 "ConditionPathExists=/root/.spotfleet-host/claim"):
        assert line in image.path(UNIT).read_text().splitlines()


def test_a_stock_machine_gets_from_bootstrap_what_the_image_has(image: Debian):
    """The same script sets both, so on a machine made from the image it finds nothing to do."""
    before = image.tree("/etc")
    assert image.run("bash", "/root/provision.sh", "--configure").stderr == ""
    assert image.tree("/etc") == before
    for path in ("/etc/ssh/sshd_config.d/10-spotfleet.conf", "/etc/security/limits.d/90-spotfleet.conf"):
        image.path(path).unlink()
    image.ok("bash", "/root/provision.sh", "--configure")
    assert image.tree("/etc") == before


def test_what_apt_would_install_for_gpus_is_known_to_its_archive(image: Debian):
    shown = image.ok("bash", "/root/provision.sh", "--gpus", "--simulate")
    assert "Inst nvidia-kernel-dkms" in shown and "Inst libcuda1" in shown


class ImageHost:
    """The agent of a launch, as `Stage` wants it."""

    def __init__(self, machine: Debian, request: LaunchRequest) -> None:
        wanted = host.plan(build(), request.request_id, request.boot.files)
        self.folder = host.folder_of(machine, wanted)
        self.environment = machine.path(f"{cloud_init.ROOT}/envs/{script.environment_digest(wanted)}")
        assert (self.environment / "complete").exists(), "the image has another environment than its hosts use"
        self.made_at = (self.environment / "complete").stat().st_mtime_ns
        self.process = host.boot(machine, wanted)
        self.task = asyncio.create_task(asyncio.to_thread(self.process.wait))

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)  # --kill-child ends all of its namespace


class ImageStage(Stage):
    machine: Debian

    def start_agent(self, host: str, request: LaunchRequest | None = None) -> ImageHost:  # type: ignore[override]
        self.agents[host] = made = ImageHost(self.machine, request or self.cloud.machines[host])  # type: ignore
        return made

    async def bundled(self, work: Path) -> str:
        blobs: list[bytes] = []

        def hold(blob: bytes) -> str:
            blobs.append(blob)
            return hashlib.sha256(blob).hexdigest()

        packed = bundle.pack(bundle.scan(work), lambda made: hold(made.blob))
        digest = hold(bundle.dump(packed.manifest))
        for blob in [blobs[-1], *blobs[:-1]]:  # the manifest before its pieces
            await self.call("PUT", f"/v1/bundles/{hashlib.sha256(blob).hexdigest()}", data=blob)
        return digest


def play(folder: Path, scene: Callable[[ImageStage], Awaitable[None]]) -> None:
    async def main() -> None:
        async with ImageStage(folder / "dispatcher", spec(target=1)) as stage:
            try:
                await scene(stage)
            finally:
                for agent in stage.agents.values():
                    agent.end()

    asyncio.run(main())


def test_the_installed_unit_starts_an_agent_that_joins_and_trains_and_nothing_is_installed(image: Debian,
                                                                                           tmp_path: Path,
                                                                                           monkeypatch):
    monkeypatch.setattr(ImageStage, "machine", image, raising=False)
    monkeypatch.setattr("spotfleet.dispatcher.dispatcher.SAVE_S", 1.0)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(TRAIN)

    async def scene(stage: ImageStage) -> None:
        job = JobSpec("count", argv=("train.py",), bundle=await stage.bundled(tmp_path / "work"))
        body = {"spec": to_json(job), "secrets": {}, "wait": True}
        name = (await stage.call("POST", "/v1/jobs", body))[1]["job"]
        try:
            ended = await stage.stands(name, "succeeded", SLOW_S)
        except AssertionError as error:
            logs = [host.log(agent.folder) for agent in stage.agents.values()]
            raise AssertionError("\n".join([str(error), *logs])) from error
        assert ended.version == 3
        [agent] = stage.agents.values()
        said = host.log(agent.folder)
        assert "pip" not in said.replace("inherit.py", "") and "fetches" not in said
        assert "provision.sh --configure" in said  # which found nothing to do
        assert (agent.environment / "complete").stat().st_mtime_ns == agent.made_at
        assert (agent.folder / "state").read_text().split()[::2] == ["running", "spotfleet.agent"]

    play(tmp_path, scene)


def test_a_sealed_image_has_nothing_of_this_machine(image: Debian):
    assert list(image.path("/etc/ssh").glob("ssh_host_*_key")), "Debian made none"
    image.path("/root/.bash_history").write_text("export TOKEN=1\n")
    provision(image, "--seal")
    assert image.path("/etc/machine-id").read_text() == ""
    left = [*image.path("/etc/ssh").glob("ssh_host_*"), *image.path("/root").glob(".*_history"),
            *image.path("/var/lib/apt/lists").iterdir(), *image.path("/tmp").iterdir(),
            *image.path("/root/.ssh").glob("authorized_keys"), image.path(f"{cloud_init.ROOT}/image")]
    assert [path for path in left if path.exists()] == []
    logs = [path for path in image.path("/var/log").rglob("*") if path.is_file() and not path.is_symlink()]
    assert [path for path in logs if path.stat().st_size] == []
    assert Path(image.path(f"{cloud_init.ROOT}")).stat().st_mode & 0o77 == 0
