"""Podman as Debian ships it, with storage of its own, runc, and limits that need no CAP_SYS_RESOURCE."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

IMAGE = "localhost/debian:12"
LEFT_OUT = ("usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache", "var/lib/apt")
PARENT = "libpod_parent"  # Podman's folder in each hierarchy of cgroups; it stays
CONTAINERS_CONF = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
"""


class RealPodman:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        (folder / "containers.conf").write_text(CONTAINERS_CONF)
        (folder / "storage.conf").write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\n'
                                             f'runroot = "{folder}/run"\n')
        self.env = {"CONTAINERS_CONF": str(folder / "containers.conf"),
                    "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf")}
        self._had_parent = any(Path("/sys/fs/cgroup").glob(f"*/{PARENT}"))

    def __call__(self, *command: str) -> str:
        done = subprocess.run(["podman", *command], env={**os.environ, **self.env}, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise OSError(f"podman {command[0]}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def load(self, root: Path) -> None:
        """Import IMAGE and run it once. Raises OSError with Podman's reason where that cannot be."""
        archive = self._folder / "root.tar"
        left_out = [f"--exclude=./{name}" for name in LEFT_OUT]
        subprocess.run(["tar", "-C", str(root), *left_out, "-cf", str(archive), "."], check=True)
        self("import", "--quiet", str(archive), IMAGE)
        archive.unlink()
        self("run", "--rm", "--network", "host", "--log-driver", "none", IMAGE, "true")

    def end(self) -> None:
        """Remove all that Podman keeps outside its folder, and the folder."""
        for mount in (line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()):
            if mount.startswith(f"{self._folder}/"):
                subprocess.run(["umount", mount], check=True)
        if not self._had_parent:
            for parent in Path("/sys/fs/cgroup").glob(f"*/{PARENT}"):
                for folder in (*parent.glob("*"), parent):
                    if folder.is_dir():
                        folder.rmdir()
        shutil.rmtree(self._folder)
