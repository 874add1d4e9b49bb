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


# ---- a file system that the hosts share, as NFS: a bind mount into the mount namespace of each


class SharingHosts:
    """Hosts with a job's folder of their own at one path, and one shared folder at another, in mount namespaces."""

    def __init__(self, base: Path, number: int) -> None:
        self.base, self.share, self.number = base, base / "mnt", number
        for name in ("job", "mnt", "exported"):
            (base / name).mkdir()
        for n in range(number):
            (base / f"disk-{n}").mkdir()

    def writes(self, target: str) -> None:
        for n in range(self.number):
            made = self.base / f"disk-{n}" / name_of(target)
            made.parent.mkdir(parents=True, exist_ok=True)
            made.write_text(f"of host {n}")

    def run(self, text: str) -> list[tuple[int, str]]:
        """Run a text on all hosts at once."""
        mounts = 'mount --bind exported mnt && mount --bind "disk-$0" job && cd "$PWD/job" && exec bash -c "$1"'
        started = [subprocess.Popen(["unshare", "-m", "sh", "-c", mounts, str(n), text], text=True,
                                    cwd=self.base, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                   for n in range(self.number)]
        return [(process.returncode, said) for process in started for said, _ in [process.communicate(timeout=60)]]


@pytest.fixture
def sharing(tmp_path: Path) -> SharingHosts:
    if subprocess.run(["unshare", "-m", "mount", "--bind", "/tmp", "/tmp"], capture_output=True).returncode:
        pytest.skip("mount namespaces need root")
    return SharingHosts(tmp_path, 3)


def test_a_target_in_a_shared_file_system_leads_each_host_to_its_own_files(sharing: SharingHosts):
    target = f"{sharing.share}/team/data.txt"
    sharing.writes(target)
    for _ in range(3):
        assert sharing.run(with_targets("true", [target], {})) == [(0, "")] * 3
    assert sharing.run(f"cat {target}") == [(0, f"of host {n}") for n in range(3)]
    assert [p.name for p in (sharing.base / "exported" / "team").iterdir()] == ["data.txt"], "one link, nothing else"


def test_files_of_a_shared_file_system_and_its_mount_point_are_left_alone(sharing: SharingHosts):
    (sharing.base / "exported" / "precious").write_text("shared")
    for target in (f"{sharing.share}/precious", f"{sharing.share}"):
        for code, said in sharing.run(with_targets("true", [target], {})):
            assert code == 1 and f"{target} exists on this host, and is left as it is" in said
    assert sharing.run(f"cat {sharing.share}/precious") == [(0, "shared")] * 3
