"""What machines of EC2 are told, and what they were told read back: providers/kit/userdata.py."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from dataclasses import replace

import pytest

from spotfleet.bootstrap import gang, wheel
from spotfleet.errors import UsageError
from spotfleet.model import EnvironmentSpec
from spotfleet.providers import Boot
from spotfleet.providers.aws.section.spec import AwsSpec
from spotfleet.providers.aws.session import Settings
from spotfleet.providers.kit import userdata
from spotfleet.ssh.keys import derived_host_key, pinned
from tests.support.aws.aws_hosts import A, dispatcher, pool, prepared, raw, request

TORCH = EnvironmentSpec(packages=("torch==2.13.0",))
SETTINGS = Settings(AwsSpec(user="admin"), environment=TORCH, public_key="ssh-ed25519 AAAA fleet", secret="the fleet's")


def told(wanted, settings: Settings = SETTINGS) -> dict:
    return gang.parsed(gzip.decompress(userdata.user_data(settings.machine, [wanted])).decode())


def text_of(config: dict, name: str) -> str:
    return next(f["content"] for f in config["write_files"] if f["path"].endswith(f"/{name}"))


def setting(config: dict, name: str) -> str:
    return re.search(rf"^{name}=(.*)$", text_of(config, "settings.sh"), re.M)[1].strip("'")


def test_a_worker_trains_and_a_dispatcher_asks_the_cloud_and_both_power_their_machine_off():
    worker, head = told(request(A)), told(dispatcher())
    assert [setting(c, "EXTRAS") for c in (worker, head)] == ["[train]", "[aws]"]
    assert [setting(c, "PORT") for c in (worker, head)] == ["0", "7443"]
    for config in (worker, head):
        assert (setting(config, "POWER_OFF"), setting(config, "METADATA_URL")) == ("yes", "http://169.254.169.254")
        assert setting(config, "WHEEL_SHA256") == wheel.build().sha256


def test_the_packages_of_jobs_are_for_those_who_run_jobs():
    assert [text_of(told(r), "packages.txt") for r in (request(A), dispatcher())] == ["torch==2.13.0\n", ""]


READY = "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id"
INHERITED = EnvironmentSpec("/opt/pytorch/bin/python", ("aiohttp", "fabric"), inherit=True)


@pytest.mark.parametrize("own", [True, False], ids=["an image of its own", "the hosts' image"])
def test_hosts_of_awss_pytorch_image_use_its_torch_and_their_dispatcher_a_plain_python(own):
    settings = replace(SETTINGS, spec=AwsSpec(image=READY, dispatcher_image="" if own else READY),
                       environment=INHERITED)
    worker, head = told(request(A), settings), told(dispatcher(), settings)
    assert (setting(worker, "PYTHON"), setting(worker, "INHERIT")) == ("/opt/pytorch/bin/python", "yes")
    assert text_of(worker, "packages.txt") == "aiohttp\nfabric\n" and "packages" not in worker
    assert (setting(head, "PYTHON"), setting(head, "INHERIT")) == (
        ("python3", "") if own else ("/opt/pytorch/bin/python", "yes"))
    assert (head.get("packages") == ["python3-venv"]) is own


def test_awss_pytorch_image_is_launched_by_its_parameter_with_a_disk_that_holds_it(aws, cloud):
    provider = prepared(aws, image=READY, disk_gib=30)
    provider.launch(request(A))
    (machine,) = raw(cloud)
    assert machine["ImageId"] == cloud.parameters[READY] not in (cloud.UBUNTU, cloud.DEEP_LEARNING)
    disk = cloud.client("ec2").describe_volumes(VolumeIds=[machine["BlockDeviceMappings"][0]["Ebs"]["VolumeId"]])
    assert disk["Volumes"][0]["Size"] == 75
    provider.launch(dispatcher())
    assert raw(cloud, tag__spotfleet_role="dispatcher")[0]["ImageId"] == cloud.UBUNTU


def test_hosts_get_the_very_code_that_their_dispatcher_was_made_with(tmp_path, monkeypatch):
    mine = tmp_path / "spotfleet-0.0-py3-none-any.whl"
    mine.write_bytes(b"the code")
    monkeypatch.setenv("SPOTFLEET_WHEEL", str(mine))
    config = told(request(A))
    assert setting(config, "WHEEL_NAME") == mine.name
    assert setting(config, "WHEEL_SHA256") == hashlib.sha256(b"the code").hexdigest()


def test_a_machine_lets_in_the_fleets_key_alone_and_shows_the_key_that_is_derived_for_it():
    config = told(request(A))
    (user,) = config["users"]
    assert (user["name"], user["ssh_authorized_keys"], config["ssh_pwauth"]) == ("admin", [SETTINGS.public_key], False)
    assert config["ssh_keys"]["ed25519_public"] == derived_host_key("the fleet's", "f-1").public
    assert userdata.host_keys("the fleet's", "f-1") == (pinned(config["ssh_keys"]["ed25519_public"]),)


def test_who_does_not_know_the_secret_pins_no_key():
    assert userdata.host_keys("", "f-1") == ()
    assert "ssh_keys" not in told(request(A), Settings())


def test_what_a_host_was_told_is_read_back_without_what_all_are_told():
    files = {"boot.json": '{"a": "ü\\n"}', "more": "x"}
    data = userdata.user_data(SETTINGS.machine, [request(A, boot=Boot("a.b", files))])
    assert userdata.files(data, "f-1") == userdata.files(gzip.decompress(data), "f-1") == files


@pytest.mark.parametrize(("data", "said"), [
    (b"\x1f\x8bnot packed", "is damaged"), (b"\xff\xfe", "is damaged"), (b"#!/bin/sh\n", "none of ours"),
    (userdata.user_data(SETTINGS.machine, [request(A, "f-2")]), "that of another host")],
    ids=["not packed", "no text", "a script", "another's"])
def test_user_data_that_cannot_be_read_back_is_said_to_be_so(data, said):
    with pytest.raises(UsageError, match=said):
        userdata.files(data, "f-1")


@pytest.mark.parametrize(("boot", "lifetime_s"), [
    (json.dumps({"lifetime_s": 60}), 60.0), (json.dumps({}), 0.0), ("no json", 0.0), ("[]", 0.0),
    (json.dumps({"lifetime_s": None}), 0.0)], ids=["set", "missing", "no json", "a list", "null"])
def test_the_lifetime_of_a_host_is_what_its_agent_is_told(boot, lifetime_s):
    assert userdata.lifetime_s(request(A, boot=Boot("a.b", {"boot.json": boot}))) == lifetime_s


def test_a_host_joins_with_as_many_working_gpus_as_it_has_slots_and_a_dispatcher_looks_for_none():
    hosts = (request(pool(kind="g5.12xlarge", slots=4)), request(pool(accelerator="")), dispatcher())
    assert [setting(told(host), "GPUS") for host in hosts] == ["4", "0", "0"]
