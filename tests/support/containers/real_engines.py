"""The real Podman and Docker as Debian ships them, with storage of their own and runc.

Docker is unpacked and not installed, as an installed one would start its daemon and change the machine's firewall.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.support.containers.root_fs import kept, run

IMAGE = "localhost/debian:12"
LEFT_OUT = ("usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache", "var/lib/apt")
CGROUPS = {"podman": "libpod_parent", "docker": "docker"}  # folder in each hierarchy, which the engine leaves
DAEMON_S = MONITOR_S = 60.0
# Limits that a process without CAP_SYS_RESOURCE may set.
CONTAINERS_CONF = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
"""


class RealEngine:
    """One engine. `folder` has a short name, as there are sockets in it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._folder = name, folder
        self._daemon: subprocess.Popen[bytes] | None = None
        self._had_cgroups = any(Path("/sys/fs/cgroup").glob(f"*/{CGROUPS[name]}"))
        (folder / "containers.conf").write_text(CONTAINERS_CONF)
        (folder / "storage.conf").write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\n'
                                             f'runroot = "{folder}/run"\n')
        self.env = {"DOCKER_HOST": f"unix://{folder}/socket"} if name == "docker" else {
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf")}

    def __call__(self, *command: str) -> str:
        env = {**os.environ, **self.env}
        client = shutil.which(self.name, path=env["PATH"]) or self.name
        done = subprocess.run([client, *command], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=120)
        if done.returncode:
            raise OSError(f"{self.name} {command[0]}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def load(self, root: Path) -> None:
        """Import IMAGE and run it once. Raises OSError with the engine's reason where that cannot be."""
        if self.name == "docker":
            programs = kept("docker", _unpack_docker) / "usr"
            self.env["PATH"] = f"{programs}/bin:{programs}/sbin:{os.environ['PATH']}"
            self._start_daemon()
        archive = self._folder / "root.tar"
        left_out = [f"--exclude=./{name}" for name in LEFT_OUT]
        subprocess.run(["tar", "-C", str(root), *left_out, "-cf", str(archive), "."], check=True)
        self("import", str(archive), IMAGE)
        archive.unlink()
        self("run", "--rm", "--network", "host", "--log-driver", "none", IMAGE, "true")

    def _start_daemon(self) -> None:
        log = self._folder / "daemon.log"
        with log.open("wb") as output:
            self._daemon = subprocess.Popen(
                [shutil.which("dockerd", path=self.env["PATH"]) or "dockerd", "--bridge=none", "--iptables=false",
                 "--ip6tables=false", "--data-root",
                 f"{self._folder}/graph", "--exec-root", f"{self._folder}/run", "--pidfile", f"{self._folder}/pid",
                 "--host", self.env["DOCKER_HOST"], "--exec-opt", "native.cgroupdriver=cgroupfs"],
                env={**os.environ, **self.env}, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        until = time.monotonic() + DAEMON_S
        while "API listen on" not in log.read_text():
            if self._daemon.poll() is not None or time.monotonic() > until:
                raise OSError(f"dockerd: {log.read_text()[-500:]}")
            time.sleep(0.05)

    def end(self) -> None:
        """End the daemon, and remove all that the engine keeps outside its folder, and the folder."""
        if self._daemon is not None:
            self._daemon.terminate()
            self._daemon.wait(60)
        for mount in reversed([line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]):
            if mount.startswith(f"{self._folder}/"):
                subprocess.run(["umount", mount], check=True)
        if not self._had_cgroups:
            for parent in Path("/sys/fs/cgroup").glob(f"*/{CGROUPS[self.name]}"):
                for folder in (*(f for f in parent.glob("*") if f.is_dir()), parent):
                    _remove_cgroup(folder)
        shutil.rmtree(self._folder)


def _remove_cgroup(folder: Path) -> None:
    """Remove a cgroup once its last process, a container's monitor, has ended."""
    until = time.monotonic() + MONITOR_S
    while True:
        try:
            return folder.rmdir()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _unpack_docker(folder: Path) -> None:
    folder.mkdir()
    run("apt-get", "download", "docker.io", "containerd", cwd=folder)
    for package in folder.glob("*.deb"):
        run("dpkg", "-x", str(package), str(folder))
        package.unlink()


def why_not(name: str) -> str:
    """Return the reason why this engine cannot be tried; "" if it can."""
    missing = name == "podman" and shutil.which("podman") is None
    return "there is no podman: scripts/setup-tests installs it on Debian" if missing else ""
