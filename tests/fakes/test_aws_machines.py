"""Instances that really run: from their user data alone, with the metadata of the fake, gone without a trace."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.support.fakes.aws import AwsCloud, InstanceView
from tests.support.fakes.aws_machines import AwsMachines, image, why_not
from tests.support.network.machines import Key

pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not())]

REGION = "us-east-1"
CLAIM = "/root/.made/claim"
TOKEN = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
LIMIT_S = 60.0
ASK = """
import json, sys, urllib.error, urllib.request
def ask(path, method="GET", **headers):
    request = urllib.request.Request("http://169.254.169.254/latest/" + path, method=method, headers=headers)
    try:
        return urllib.request.urlopen(request, timeout=10).read().decode()
    except urllib.error.HTTPError as error:
        return error.code
bare = ask("meta-data/instance-id")
token = {"X-aws-ec2-metadata-token": ask("api/token", "PUT", **{"X-aws-ec2-metadata-token-ttl-seconds": "60"})}
print(json.dumps([bare, *(ask(path, **token) for path in sys.argv[1:])]))
"""
WHO = """
import boto3, sys
print(boto3.client("sts", "us-east-1", endpoint_url=sys.argv[1]).get_caller_identity()["Arn"])
"""
MAKER = """
import sys
sys.path[:0] = {path!r}
from tests.support.fakes.aws import AwsCloud
from tests.support.fakes.aws_machines import AwsMachines
with AwsCloud() as cloud, AwsMachines(cloud) as machines:
    ec2 = cloud.client("ec2", "us-east-1")
    ec2.run_instances(ImageId=cloud.UBUNTU, InstanceType="m5.large", MinCount=1, MaxCount=1)
    cloud.settle()
    print(*(machines[i].pid for i in machines), machines.laptop.pid, flush=True)
    sys.stdin.read()
"""


class Account:
    """What one test does in the cloud."""

    def __init__(self, cloud: AwsCloud, machines: AwsMachines) -> None:
        self.cloud, self.machines, self.ec2 = cloud, machines, cloud.client("ec2", REGION)
        self.host_key = Key.make()

    def launch(self, *run: str, boots: bool = True, **more: Any) -> str:
        """An instance whose user data run these lines once; returns when it has booted, if it does."""
        said = {"users": [{"name": "ubuntu", "shell": "/bin/bash", "lock_passwd": True,
                           "sudo": "ALL=(ALL) NOPASSWD:ALL", "ssh_authorized_keys": [self.public_key()]}],
                "write_files": [{"path": CLAIM, "permissions": "0600", "owner": "root:root", "content": "made\n"},
                                {"path": "/var/lib/cloud/scripts/per-boot/each", "permissions": "0755",
                                 "content": "#!/bin/sh\necho boot >>/root/boots\n"}],
                "packages": ["python3-venv"],
                "runcmd": [["sh", "-c", line] for line in run],
                "ssh_keys": {"ed25519_private": self.host_key.private, "ed25519_public": self.host_key.public}}
        data = gzip.compress(b"#cloud-config\n" + yaml.safe_dump(said).encode())
        wanted = {"ImageId": self.cloud.UBUNTU, "InstanceType": "m5.large", "MinCount": 1, "MaxCount": 1} | more
        made = self.ec2.run_instances(UserData=data, **wanted)["Instances"][0]["InstanceId"]
        if boots:
            self.booted(made)
        return made

    def public_key(self) -> str:
        return self.machines.laptop.run("ssh-keygen", "-y", "-f", "/root/.ssh/id_ed25519").stdout.strip()

    def booted(self, instance: str, times: int = 1) -> None:
        self.cloud.settle()
        log = self.machines[instance].path(image.BOOT_LOG)
        self.wait(lambda: log.exists() and log.read_text().count("has booted at") == times)

    def read(self, instance: str, path: str) -> str:
        return self.machines[instance].path(path).read_text()

    def state(self, instance: str) -> str:
        return self.cloud.instance(instance).state

    def wait(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, self.machines.story()
            time.sleep(0.02)

    def ssh(self, view: InstanceView, *command: str, wait_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        options = ("-oBatchMode=yes", "-oStrictHostKeyChecking=no", f"-oConnectTimeout={wait_s:.0f}")
        return self.machines.laptop.run("ssh", *options, f"ubuntu@{view.public_ip}", *command, ok=False)


@pytest.fixture(scope="module")
def account() -> Iterator[Account]:
    with AwsCloud() as cloud, AwsMachines(cloud, bare=(cloud.DEEP_LEARNING,)) as machines:
        yield Account(cloud, machines)
        assert cloud.runner_errors == []
        assert cloud.findings == []


@pytest.fixture(autouse=True)
def nothing_left(account: Account) -> Iterator[None]:
    yield
    for view in account.cloud.instances():
        account.ec2.terminate_instances(InstanceIds=[view.id])
    account.cloud.settle()
    assert list(account.machines) == []


def test_a_machine_does_what_its_user_data_say_and_knows_nothing_of_the_test(account: Account):
    one = account.launch("env >/root/env; hostname >/root/name", "command -v spotfleet >/root/found")
    machine = account.machines[one]
    about = machine.path(CLAIM).stat()
    assert (account.read(one, CLAIM), about.st_mode & 0o777, about.st_uid) == ("made\n", 0o600, 0)
    assert account.read(one, "/root/name") == f"ip-{account.cloud.instance(one).private_ip.replace('.', '-')}\n"
    assert {line.partition("=")[0] for line in account.read(one, "/root/env").splitlines()} <= {
        "PATH", "LANG", "HOME", "PWD", "SHLVL", "OLDPWD", "_"}
    assert account.read(one, "/root/found") == ""
    assert "apt-get" in account.read(one, image.INSTALLS) and "python3-venv" in account.read(one, image.INSTALLS)
    said = machine.run(sys.executable, "-c", "import spotfleet.errors", env={"PYTHONPATH": ""}, ok=False)
    assert "ModuleNotFoundError" in said.stderr  # our code comes as a wheel, not from this checkout


def test_the_metadata_server_is_that_of_the_instance_and_wants_a_token(account: Account):
    one = account.launch(MetadataOptions={"HttpTokens": "required", "InstanceMetadataTags": "enabled"},
                         TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": "k", "Value": "v"}]}])
    paths = ["meta-data/instance-id", "meta-data/tags/instance/k", "meta-data/spot/instance-action"]
    said = account.machines[one].run(sys.executable, "-I", "-c", ASK, *paths).stdout
    assert json.loads(said) == [401, one, "v", 404]


def test_boto3_on_a_machine_has_the_rights_of_its_profile_alone(account: Account):
    iam = account.cloud.client("iam", REGION)
    iam.create_role(RoleName="of-a-host", AssumeRolePolicyDocument="{}")
    iam.create_instance_profile(InstanceProfileName="of-a-host")
    iam.add_role_to_instance_profile(InstanceProfileName="of-a-host", RoleName="of-a-host")
    one = account.launch(IamInstanceProfile={"Name": "of-a-host"})
    said = account.machines[one].run(sys.executable, "-I", "-c", WHO, account.machines.endpoint)
    assert "of-a-host" in said.stdout
    account.cloud.settle()
    assert account.cloud.actions("role/of-a-host") == {"sts:GetCallerIdentity"}


@pytest.mark.parametrize(("behavior", "state"), [("terminate", "terminated"), ("stop", "stopped")])
def test_a_machine_that_powers_itself_off_is_switched_off(account: Account, behavior: str, state: str):
    one = account.launch("systemctl poweroff || shutdown -h now", boots=False,
                         InstanceInitiatedShutdownBehavior=behavior)
    account.wait(lambda: account.state(one) == state)
    account.cloud.settle()
    assert (one in account.machines, one in account.machines.ended) == (state == "stopped", state == "terminated")


def test_a_stopped_machine_keeps_its_disk_and_boots_from_it(account: Account):
    one = account.launch("echo once >>/root/runs; echo gone >/tmp/x; (setsid sleep 1000 &)")
    before = account.cloud.instance(one)
    account.ec2.stop_instances(InstanceIds=[one])
    account.cloud.settle()
    assert account.machines[one].processes() == []
    account.ec2.start_instances(InstanceIds=[one])
    account.booted(one, times=2)
    after = account.cloud.instance(one)
    assert (account.read(one, "/root/runs"), account.read(one, "/root/boots")) == ("once\n", "boot\nboot\n")
    assert not account.machines[one].path("/tmp/x").exists()
    assert (after.private_ip == before.private_ip, after.public_ip == before.public_ip) == (True, False)


def test_machines_reach_each_other_and_the_laptop_those_whose_group_lets_it_in(account: Account):
    group = account.ec2.create_security_group(GroupName="door", Description="of the test")["GroupId"]
    laptop = {"CidrIp": f"{account.machines.laptop.address}/32"}
    account.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[
        {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [laptop]}])
    open_, closed = account.launch(SecurityGroupIds=[group]), account.launch()
    views = [account.cloud.instance(i) for i in (open_, closed)]
    said = account.ssh(views[0], f"sudo cat {CLAIM}; head -c 3 </dev/tcp/{views[1].private_ip}/22")
    assert (said.returncode, said.stdout) == (0, "made\nSSH"), said.stderr
    assert account.ssh(views[1], "true", wait_s=3).returncode == 255  # nothing answers, however long one waits


def test_an_image_without_sdk_can_train_and_neither_talk_to_a_cloud_nor_install(account: Account):
    one = account.launch(ImageId=account.cloud.DEEP_LEARNING)
    python = [sys.executable, "-I", "-c"]
    assert account.machines[one].run(*python, "import yaml, aiohttp, psutil").returncode == 0
    for name in ("boto3", "botocore", "pip", "ensurepip"):
        said = account.machines[one].run(*python, f"import {name}", ok=False)
        assert "this image has none" in said.stderr, name


def test_nothing_is_left_of_the_machines_of_a_test_that_was_killed():
    path = [str(Path(__file__).parents[2])]
    maker = subprocess.Popen([sys.executable, "-c", MAKER.format(path=path)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in maker.stdout.readline().split()]
    assert len(pids) == 2
    living = [psutil.Process(pid) for pid in pids]
    maker.kill()
    maker.communicate()
    _, alive = psutil.wait_procs(living, timeout=LIMIT_S)
    assert alive == []
