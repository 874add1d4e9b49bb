"""Instances of the fake of Google Cloud that really run: cloud-init, startup script, metadata, tokens, firewall."""

from __future__ import annotations

import base64
import gzip
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.support.fakes.gcp import GcpCloud
from tests.support.fakes.gcp_machines import GcpMachines, image, why_not
from tests.support.gcp.gcp_asks import PLATFORM, UNNOTICED, act, instance, made, refused, status
from tests.support.network.machines import Key

pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not())]

CLAIM, LIMIT_S = "/root/made", 60.0
WHO = """
import google.auth, google.auth.transport.requests, sys
from google.api_core.client_options import ClientOptions
from google.cloud import compute_v1
credentials, project = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
client = compute_v1.ZonesClient(credentials=credentials, client_options=ClientOptions(api_endpoint=sys.argv[1]))
print(project, len(list(client.list(project=project))))
"""


class Account:
    """What one test does in the project."""

    def __init__(self, cloud: GcpCloud, machines: GcpMachines) -> None:
        self.cloud, self.machines, self.host_key = cloud, machines, Key.make()

    def launch(self, *run: str, name: str = "f-1", tags: tuple[str, ...] = (), **metadata: str) -> str:
        """An instance whose user data run these lines once; its number, when it has booted."""
        key = self.machines.laptop.run("ssh-keygen", "-y", "-f", "/root/.ssh/id_ed25519").stdout.strip()
        said = {"users": [{"name": "ubuntu", "shell": "/bin/bash", "lock_passwd": True,
                           "sudo": "ALL=(ALL) NOPASSWD:ALL", "ssh_authorized_keys": [key]}],
                "write_files": [{"path": CLAIM, "permissions": "0600", "content": "made\n"}],
                "runcmd": [["sh", "-c", line] for line in run],
                "ssh_keys": {"ed25519_private": self.host_key.private, "ed25519_public": self.host_key.public}}
        data = base64.b64encode(gzip.compress(b"#cloud-config\n" + yaml.safe_dump(said).encode())).decode()
        items = {"user-data": data, "user-data-encoding": "base64"} | {
            k.replace("_", "-"): v for k, v in metadata.items()}
        found = made(self.cloud, instance(
            name, kind="n1-standard-2", scheduling=UNNOTICED, tags={"items": list(tags)},
            metadata={"items": [{"key": k, "value": v} for k, v in items.items()]},
            service_accounts=[{"email": "default", "scopes": [PLATFORM]}]))
        self.booted(str(found.id))
        return str(found.id)

    def booted(self, id: str, times: int = 1) -> None:
        self.cloud.settle()
        log = self.machines[id].path(image.plain.BOOT_LOG)
        self.wait(lambda: log.exists() and log.read_text().count("has booted at") == times)

    def read(self, id: str, path: str) -> str:
        return self.machines[id].path(path).read_text()

    def wait(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, self.machines.story()
            time.sleep(0.02)

    def ssh(self, id: str, *command: str, wait_s: float = LIMIT_S) -> Any:
        options = ("-oBatchMode=yes", "-oStrictHostKeyChecking=no", f"-oConnectTimeout={wait_s:.0f}")
        address = self.cloud.instance(id).public_ip
        return self.machines.laptop.run("ssh", *options, f"ubuntu@{address}", *command, ok=False)


@pytest.fixture(scope="module")
def account() -> Iterator[Account]:
    with GcpCloud() as cloud, GcpMachines(cloud) as machines:
        yield Account(cloud, machines)
        assert cloud.runner_errors == []


@pytest.fixture(autouse=True)
def nothing_left(account: Account) -> Iterator[None]:
    yield
    for view in account.cloud.instances():
        act(account.cloud, "delete", view.name, view.zone)
    account.cloud.settle()
    assert list(account.machines) == []
    assert not account.cloud.findings and not account.cloud.bugs


def test_cloud_init_does_what_the_user_data_say_and_the_startup_script_runs_at_each_boot(account: Account):
    one = account.launch("hostname >/root/host", startup_script="#!/bin/sh\necho started >>/root/starts\n")
    assert (account.read(one, CLAIM), account.read(one, "/root/host")) == ("made\n", "f-1\n"), (
        account.machines.story())
    assert account.read(one, "/root/starts") == "started\n", account.machines.story()
    act(account.cloud, "stop")
    account.cloud.settle()
    assert account.machines[one].processes() == []
    act(account.cloud, "start")
    account.booted(one, times=2)
    assert account.read(one, "/root/starts") == "started\n" * 2  # and the disk is the same


def test_a_machine_calls_the_api_as_its_service_account(account: Account):
    one = account.launch()
    said = account.machines[one].run(sys.executable, "-I", "-c", WHO, account.machines.endpoint)
    assert said.stdout.split() == [account.cloud.project, "10"]
    assert account.cloud.calls[-1].principal == account.cloud.default_account


def test_a_machine_that_powers_itself_off_is_terminated(account: Account):
    one = account.launch("touch /root/done")
    account.machines[one].run("systemctl", "poweroff", ok=False)
    account.wait(lambda: status(account.cloud) == "TERMINATED")
    account.cloud.settle()
    assert account.machines[one].processes() == []


def test_a_preempted_machine_stops_and_one_to_be_deleted_goes(account: Account):
    one = account.launch()
    account.cloud.preempt("f-1", notice_s=None, room=None)
    account.cloud.settle()
    assert account.machines[one].processes() == [] and status(account.cloud) == "TERMINATED"
    act(account.cloud, "delete")
    account.cloud.settle()
    assert one in account.machines.ended
    with refused("notFound"):
        status(account.cloud)


def test_the_laptop_reaches_what_a_firewall_rule_lets_it_in_to(account: Account):
    for rule in ("default-allow-ssh", "default-allow-internal"):  # the laptop's address here is a private one
        account.cloud.client("FirewallsClient").delete(project=account.cloud.project, firewall=rule)
    laptop = account.machines.laptop.address
    rule = {"name": "door", "network": "global/networks/default", "source_ranges": [f"{laptop}/32"],
            "target_tags": ["door"], "allowed": [{"I_p_protocol": "tcp", "ports": ["22"]}]}
    account.cloud.client("FirewallsClient").insert(project=account.cloud.project, firewall_resource=rule)
    open_, closed = account.launch(tags=("door",)), account.launch(name="f-2")
    other = account.cloud.instance(closed).private_ip
    said = account.ssh(open_, f"sudo cat {CLAIM}; head -c 3 </dev/tcp/{other}/22")
    assert (said.returncode, said.stdout) == (0, "made\nSSH"), said.stderr
    assert account.ssh(closed, "true", wait_s=3).returncode == 255
