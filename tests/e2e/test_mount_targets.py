"""Links and mounts on a host for `file_mounts` outside the working directory, as bash makes them before `setup`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from spotfleet.bundle.targets import name_of, with_targets


class Host:
    """A working directory and a home, in which bash runs a setup."""

    def __init__(self, folder: Path) -> None:
        self.work, self.home, self.bin = folder / "work", folder / "home", folder / "bin"
        for made in (self.work, self.home, self.bin):
            made.mkdir()
        self.tool("sudo", "exit 1")
        self.tool("mountpoint", "exit 1")

    def tool(self, name: str, text: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.bin / name).chmod(0o755)

    def sets_up(self, *files: str, mounted: dict[str, str] | None = None) -> tuple[int, str]:
        text = with_targets("echo set up", files, mounted or {})
        done = subprocess.run(["/bin/bash", "-c", text], cwd=self.work, capture_output=True, text=True, timeout=60,
                              env={"HOME": str(self.home), "PATH": f"{self.bin}:/usr/bin:/bin"})
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_link_leads_from_each_target_to_its_files_also_a_second_time(host: Host, tmp_path: Path):
    outside = f"{tmp_path}/a b/data"
    for target in (outside, "~/in/x.txt"):
        made = host.work / name_of(target)
        made.parent.mkdir(parents=True)
        made.write_text(target)
    for _ in range(2):
        assert host.sets_up(outside, "~/in/x.txt") == (0, "set up\n")
    assert Path(outside).read_text() == outside and (host.home / "in/x.txt").read_text() == "~/in/x.txt"


def test_an_empty_folder_gives_way_and_anything_else_is_left_alone(host: Host, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    assert host.sets_up(f"{tmp_path}/empty")[0] == 0
    (host.home / ".gitconfig").write_text("mine")
    code, said = host.sets_up("~/.gitconfig")
    assert (code, said) == (1, f"file_mounts: {host.home}/.gitconfig exists on this host, and is left as it is: choose "
                               "another target\n")
    assert (host.home / ".gitconfig").read_text() == "mine"


def test_a_bucket_is_mounted_by_the_stores_own_tool_else_by_rclone_else_the_job_fails(host: Host, tmp_path: Path):
    out = f"{tmp_path}/out"
    code, said = host.sets_up(mounted={out: "s3://bucket/runs"})
    assert code == 1 and f"file_mounts: {out}: mounting s3://bucket/runs needs mount-s3 or rclone on the hosts" in said
    host.tool("rclone", 'echo rclone "$@"')
    line = f"rclone mount --daemon --vfs-cache-mode writes :s3,provider=AWS,env_auth=true:bucket/runs {out}\nset up\n"
    assert host.sets_up(mounted={out: "s3://bucket/runs"}) == (0, line)
    host.tool("mount-s3", 'echo mount-s3 "$@"')
    assert host.sets_up(mounted={out: "s3://bucket/runs"}) == (
        0, f"mount-s3 --allow-delete --allow-overwrite --prefix runs/ bucket {out}\nset up\n")
    host.tool("gcsfuse", 'echo gcsfuse "$@"')
    assert host.sets_up(mounted={out: "gs://bucket"}) == (0, f"gcsfuse --implicit-dirs bucket {out}\nset up\n")


def test_the_tool_outlives_the_session_of_the_setup(host: Host, tmp_path: Path):
    host.tool("mount-s3", f"ps -o sid= -p $$ > {tmp_path}/session")
    host.sets_up(mounted={f"{tmp_path}/out": "s3://bucket"})
    assert int((tmp_path / "session").read_text()) != os.getsid(0)


def test_a_bucket_that_is_mounted_already_stays(host: Host, tmp_path: Path):
    host.tool("mountpoint", "exit 0")
    assert host.sets_up(mounted={f"{tmp_path}/out": "s3://bucket"}) == (0, "set up\n")
