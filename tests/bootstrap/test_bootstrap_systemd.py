"""A real systemd, as the first process of a namespace of its own, keeps a host: the long form, since it takes a while.

The cheaper tests cannot show that the unit which bootstrap.sh writes is one that systemd starts, starts again after a
kill, and forgets."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfleet.model import EnvironmentSpec
from tests.support.bootstrap.existing_machine import F1, LONG, ExistingMachine, alive, plan, wait_until

SYSTEMD = Path("/lib/systemd/systemd")
NAMESPACES = ["--pid", "--mount", "--uts", "--ipc", "--cgroup"]
# Units of ours alone: nothing that this machine has installed is started.
BEGIN = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /etc/systemd/system
mount -t tmpfs tmpfs /lib/systemd/system
mount -t tmpfs tmpfs /lib/systemd/system-generators
cd /lib/systemd/system
for name in basic sysinit shutdown multi-user network-online; do printf '[Unit]\\nDescription=x\\n' >$name.target; done
ln -s multi-user.target default.target
echo $$ >"$1"
while [ ! -e "$1.go" ]; do sleep 0.05; done
export container=test
exec {systemd} --system --log-target=null --show-status=no
"""


class MachineWithSystemd(ExistingMachine):
    """Everything is run beside its systemd."""

    leader = 0

    def run(self, command: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        enter = f"exec nsenter -t {self.leader} -m -p -u -i -C sh -c '{command}'"
        return super().run(enter, stdin, **env)

    def unit(self) -> str:
        """How often it was started again, and how it is."""
        shown = self.run(f"systemctl show -p LoadState,ActiveState,NRestarts --value spotfleet-{F1}.service")
        return " ".join(shown.stdout.split())


def control_groups() -> set[Path]:
    return {Path(folder) for folder, _, _ in os.walk("/sys/fs/cgroup")}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[MachineWithSystemd]:
    if os.geteuid() != 0 or not SYSTEMD.exists() or not shutil.which("unshare"):
        pytest.skip("it takes root, systemd and unshare")
    if Path("/run/systemd/system").exists():
        pytest.skip("this machine's own systemd has its control groups")
    groups = control_groups()
    made = MachineWithSystemd(tmp_path)
    ready = tmp_path / "ready"
    begin = subprocess.Popen(
        ["unshare", *NAMESPACES, "--fork", "--kill-child", "bash", "-c", BEGIN.replace("{systemd}", str(SYSTEMD)), "-",
         str(ready)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: ready.exists() or begin.poll() is not None)
        if begin.poll() is not None:
            pytest.skip(f"no systemd can be started here: {begin.stderr.read()}")
        made.leader = int(Path(f"/proc/{begin.pid}/task/{begin.pid}/children").read_text().split()[0])
        (tmp_path / "ready.go").touch()
        wait_until(lambda: made.run("systemctl is-active multi-user.target").stdout == "active\n")
        yield made
        assert made.remove().stderr == ""
    finally:
        begin.send_signal(signal.SIGKILL)  # and the namespace's first process with it
        begin.wait()
        if made.leader:
            wait_until(lambda: not alive(made.leader))
        for folder in sorted(control_groups() - groups, reverse=True):
            folder.rmdir()


@LONG
def test_systemd_starts_a_host_starts_it_again_and_forgets_it(machine: MachineWithSystemd, idle_wheel):
    machine.bring(plan(idle_wheel), idle_wheel)
    machine.start()
    machine.life()
    assert machine.unit() == "0 loaded active"
    supervisor = machine.run(f"systemctl show -p MainPID --value spotfleet-{F1}.service").stdout.strip()
    machine.run(f"kill -9 {supervisor}")
    assert machine.life(1)["env"]["SPOTFLEET_HOST_MARK"] == F1
    wait_until(lambda: machine.look() == ("running", "spotfleet.idle"), machine.log)
    assert machine.unit() == "1 loaded active"
    machine.end_process(0)
    assert machine.wait_for("off")
    wait_until(lambda: machine.unit() == "1 loaded inactive", machine.unit)
    assert machine.remove().stderr == ""
    assert (machine.unit(), machine.root.exists()) == ("0 not-found inactive", False)
    assert machine.run("find /etc/systemd/system -name *spotfleet*").stdout == ""


@LONG
def test_systemd_does_not_start_again_what_cannot_be_installed(machine: MachineWithSystemd, idle_wheel):
    machine.bring(plan(idle_wheel, environment=EnvironmentSpec(python="nope")), idle_wheel)
    machine.start()
    assert machine.wait_for("failed").startswith("no Python 3.11 or newer on this machine: there is no nope")
    wait_until(lambda: machine.unit() == "0 loaded failed", machine.unit)
