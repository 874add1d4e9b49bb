"""A gang whose machines really boot from the one user data that they share: real cloud-init, real sshd."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import pytest

from spotfleet.providers import Boot
from spotfleet.providers.aws import AwsProvider
from tests.support.aws.aws_hosts import pool, prepared, request
from tests.support.fakes.aws_machines import AwsMachines, why_not

pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not())]

LIMIT_S = 60.0
ROOT = "/root/.spotfleet-host"
CPU = pool(kind="m5.large", accelerator="")  # spot: each machine finds its place in its tag


@pytest.fixture
def machines(cloud) -> Iterator[AwsMachines]:
    with AwsMachines(cloud) as made:
        yield made
        for view in cloud.instances():
            cloud.client("ec2", view.region).terminate_instances(InstanceIds=[view.id])
        cloud.settle()
    assert cloud.runner_errors == []


def until(condition: Callable[[], object], machines: AwsMachines) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, machines.story()
        time.sleep(0.05)


def test_each_machine_of_a_gang_becomes_its_own_host_and_is_known_by_its_own_key(aws, cloud, machines):
    provider: AwsProvider = prepared(aws)
    hosts = ["f-3", "f-4"]
    provider.launch_together([request(CPU, host, boot=Boot("spotfleet.agent", {"boot.json": json.dumps(
        {"host": host, "dispatcher": "https://172.31.0.9:1", "ca": "", "token": "t"})})) for host in hosts])
    cloud.settle()
    for line in provider.hosts("f"):
        machine, host = machines[line.provider_id], line.request_id
        home = machine.path(f"{ROOT}/{host}")
        until(lambda home=home: (home / "state").exists(), machines)
        assert json.loads((home / "boot.json").read_text())["host"] == host
        until(lambda home=home: not (home.parent / "gang").exists(), machines)  # others' secrets go last of all
        assert sorted(p.name for p in home.parent.iterdir() if not p.name.startswith("env")) == ["claim", host]
        shown = machine.run("ssh-keyscan", "-T", "2", "127.0.0.1").stdout
        assert {" ".join(said.split()[1:3]) for said in shown.splitlines()} == set(line.ssh.host_keys)
    assert [h.request_id for h in provider.hosts("f")] == hosts
