"""The look at a host's GPUs before it joins: one that works for each slot, or the reason in `state`, and the machine
goes off soon."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from spotfleet.bootstrap import Wheel, script
from tests.support.bootstrap.existing_machine import plan

WHEEL = Wheel("spotfleet-0.1.0-py3-none-any.whl", "ab" * 32, b"")
TWO = "0, 00000000:10:1C.0, 0\n1, 00000000:10:1D.0, [N/A]\n"
LOST = "0, 00000000:10:1C.0, 0\nUnable to determine the device handle for GPU1: 0000:10:1D.0: Unknown Error\n"
XID_OF_SCRIPT = "[ 9.1] NVRM: Xid (PCI:0000:10:1d): 31, pid=7, name=python, Ch 00000008, MMU Fault\n"
XID_OF_GPU = "[ 9.1] NVRM: Xid (PCI:0000:10:1d): 79, pid=7, GPU has fallen off the bus.\n"
LAST = "\ntrap 'echo off in ${FAIL_S:-900} s' EXIT\ncheck_gpus && echo joins\n"


def look(folder: Path, gpus: int, smi: str | None, kernel: str = "", status: int = 0) -> tuple[str, str]:
    """What `check_gpus` of bootstrap.sh finds: (its output, the last line of `state`)."""
    text = script.text("bootstrap.sh")
    text, found, _ = text.partition("\ncase ${1:-} in\n")
    assert found and "GPUS_S=120" in text
    home, tools = folder / "f-1", folder / "tools"
    for made in (home, tools):
        made.mkdir()
    (home / "bootstrap.sh").write_text(text.replace("GPUS_S=120", "GPUS_S=0") + LAST)
    (home / "settings.sh").write_text(script.files(plan(WHEEL, gpus=gpus))["settings.sh"])
    for name, says in (("nvidia-smi", smi), ("dmesg", kernel)):
        if says is not None:
            ends = status if name == "nvidia-smi" else 0
            (tools / name).write_text(f"#!/bin/sh\ncat <<'END'\n{says}END\nexit {ends}\n")
            (tools / name).chmod(0o755)
    env = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(["bash", str(home / "bootstrap.sh")], env=env, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    state = home / "state"
    return done.stdout.splitlines()[-1] if "joins" not in done.stdout else "joins", (
        state.read_text().strip() if state.exists() else "")


def test_a_host_whose_gpus_work_joins_and_one_without_gpus_is_asked_for_none(tmp_path: Path):
    assert look(tmp_path, 2, TWO, XID_OF_SCRIPT)[0] == "joins"
    (tmp_path / "cpu").mkdir()
    assert look(tmp_path / "cpu", 0, None) == ("joins", "")


@pytest.mark.parametrize("smi, status, kernel, why", [
    (LOST, 0, "", "nvidia-smi shows 1 of 2 GPUs, none for slot 1: 0, 00000000:10:1C.0, 0 Unable to determine"),
    ("No devices were found\n", 6, "", "nvidia-smi shows 0 of 2 GPUs, none for slot 0 1: No devices"),
    (TWO.replace("[N/A]", "3"), 0, "", "a GPU is broken: slot 1: GPU 00000000:10:1D.0 has 3 uncorrected ECC errors;"),
    (TWO, 0, XID_OF_GPU, "a GPU is broken: slot 1: GPU 0000:10:1d had Xid 79: pid=7, GPU has fallen off the bus.;"),
], ids=["lost", "no-driver-for-it", "ecc", "xid"])
def test_a_host_with_a_broken_gpu_does_not_join_and_goes_off_soon(tmp_path: Path, smi, status, kernel, why):
    last, state = look(tmp_path, 2, smi, kernel, status)
    assert last == "off in 60 s"
    assert state.startswith("failed ") and why in state, state


def test_an_image_without_a_driver_is_named_and_stays_on_for_a_look_at_it(tmp_path: Path):
    last, state = look(tmp_path, 1, None)
    assert last == "off in 900 s" and "no nvidia-smi, so no driver for the 1 GPUs: name an image" in state
