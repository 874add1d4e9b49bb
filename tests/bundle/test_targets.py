"""Targets of `file_mounts` outside the working directory: where their files lie."""

from __future__ import annotations

import pytest

from spotfleet.bundle.targets import name_of, with_targets


@pytest.mark.parametrize(("target", "name"), [
    ("data/raw", "data/raw"), ("/data", ".file_mounts/root/data"), ("~/.config/x", ".file_mounts/home/.config/x"),
    ("~/sky_workdir/ckpt/7B", "ckpt/7B"),
])
def test_files_for_a_target_outside_travel_in_the_working_directory(target, name):
    assert name_of(target) == name


def test_a_setup_without_such_targets_stays_as_it_is_and_others_keep_their_lines():
    assert with_targets("pip install x\nmake", ["data", "~/sky_workdir/more"], {}) == "pip install x\nmake"
    first, second = with_targets("pip install x\nmake", ["/data"], {"/out": "s3://b"}).split("\n")
    assert first.endswith("; pip install x") and second == "make"
