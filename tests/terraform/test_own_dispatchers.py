"""Dispatchers' machines that Terraform keeps: the disk for their state."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import yaml

from tests.terraform.schema.run import TestReport

KEPT = {"aws": "/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_vol0a1b2c3d4e5f67890",
        "gcp": "/dev/disk/by-id/google-spotfleet-state", "azure": "/dev/disk/azure/scsi1/lun10"}
RUNS = {"aws": "with_machines", "gcp": "complete", "azure": "complete"}


def first_boot(name: str, planned: Mapping[str, Any]) -> str:
    """Return what cloud-init reads."""
    if name == "aws":
        return planned["aws_instance.dispatcher[0]"]["user_data"]
    if name == "gcp":
        return planned["google_compute_instance.dispatcher[0]"]["metadata"]["user-data"]
    return base64.b64decode(planned["azurerm_linux_virtual_machine.dispatcher[0]"]["custom_data"]).decode()


@pytest.fixture
def script(module_tests: Callable[[str], TestReport]) -> Callable[[str], str]:
    def of(name: str) -> str:
        text = first_boot(name, module_tests(name).planned(RUNS[name]))
        assert text.startswith("#cloud-config\n")
        [script] = yaml.safe_load(text)["runcmd"]
        return script

    return of


@pytest.mark.parametrize("name", KEPT)
def test_the_device_of_the_script_is_that_of_the_disk(script, module_tests, name):
    assert f"disk={KEPT[name]} " in script(name)
    planned = module_tests(name).planned(RUNS[name])
    if name == "aws":
        assert KEPT[name].endswith("_" + planned["aws_ebs_volume.dispatcher[0]"]["id"].replace("-", ""))
    elif name == "gcp":
        [disk] = planned["google_compute_instance.dispatcher[0]"]["attached_disk"]
        assert KEPT[name].endswith(f"/google-{disk['device_name']}")
    else:
        attached = planned["azurerm_virtual_machine_data_disk_attachment.dispatcher[0]"]
        assert KEPT[name].endswith(f"/lun{attached['lun']}")


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("empty", [True, False])
def test_the_disk_is_formatted_only_while_it_is_empty_and_the_user_gets_the_folder(script, tmp_path, name, empty):
    """With stand-ins for the commands that change a machine; the second run is a new machine with the old disk."""
    log, fstab = tmp_path / "log", tmp_path / "fstab"
    fstab.write_text("LABEL=root / ext4 defaults 0 1\n")
    log.write_text("")
    for command, status in (("mkfs.ext4", 0), ("mount", 0), ("chown", 0), ("mountpoint", 1), ("id", 0),
                            ("blkid", 2 if empty else 0)):
        tool = tmp_path / "bin" / command
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f'#!/bin/sh\necho "{command} $*" >>{log}\nexit {status}\n')
        tool.chmod(0o755)
    text = script(name).replace("/etc/fstab", str(fstab)).replace("/var/lib/spotfleet", str(tmp_path / "state"))
    text = text.replace('[ -b "$disk" ]', "true")  # there is no such device here
    for _ in range(2):
        subprocess.run(["sh", "-c", text], env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}, check=True, timeout=60)
    ran = log.read_text().splitlines()
    formatted = [line for line in ran if line.startswith("mkfs")]
    assert formatted == 2 * empty * [f"mkfs.ext4 -q -L spotfleet-state {KEPT[name]}"]
    assert fstab.read_text().count("LABEL=spotfleet-state") == 1
    assert ran[-1] == f"chown ubuntu {tmp_path / 'state'}"
    assert name != "gcp" or ran[-2] == "id ubuntu"  # Google's agent makes the user beside cloud-init
