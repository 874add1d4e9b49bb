"""Machines that cannot be used, each for a reason of its own, in one fleet with two that can: what a person is told,
how soon, and that nothing of it keeps the others from training. Real sshds and real faults.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.support.network.machines import Build, why_not
from tests.support.network.ssh_stage import CLI, WORK, SshStage

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(400), pytest.mark.skipif(bool(why_not()), reason=why_not())]

GOOD = ("w0", "w1")
BAD = {  # machine -> what is said of it, and what is said to do
    "forged": r"forged: its host key has changed: .*`ssh-keygen -R 'forged'`",
    "stranger": r"stranger: its sshd refuses user 'nobody' with .*(`user`|`spotfleet up`)",
    "bare": r"bare: it has no \S+/python \(install Python 3.11 or newer there",
    "full": r"full: its host lan-\d+ could not be made: the disk of \S+ is full.*set another folder",
    "stuck": r"stuck: (it let us in and then said nothing|something accepts connections|it does not answer)",
    "mute": r"mute: something accepts connections at port 22 and does not speak SSH \(is its sshd hanging",
}
MORE = (Build("forged", "bond1", forged=True), Build("stranger", "wan7"), Build("bare", "eno1", python=False),
        Build("full", "enp0s3", disk_mib=1), Build("mute", "eth1", door="silent"), Build("stuck", "ib0"))
BOUND_S = 150.0  # about 25 s on a quiet machine, 60 s on one with six times as much to do as it can


@pytest.fixture
def stage() -> Iterator[SshStage]:
    with SshStage.made(hosts=2, more=MORE) as stage:
        yield stage


def test_each_machine_that_cannot_be_used_is_named_with_its_fault_and_its_mend_and_the_others_train(stage: SshStage):
    lines = ["{host: stranger, user: nobody}" if n == "stranger" else n for n in stage.hosts]
    stage.fleet_file(2, len(lines), hosts=lines)
    begun = time.monotonic()
    up = stage.laptop.start(CLI, "up", "fleet.yaml", "-y", cwd=WORK, stderr=subprocess.PIPE, text=True)
    stage.wait("a host on its way", lambda: stage.claim("stuck"))
    stage.lan["stuck"].freeze_door()  # its sshd accepts from now on, and says nothing in any session
    said = up.communicate(timeout=BOUND_S)[1]
    print(f"up took {time.monotonic() - begun:.1f} s\n{said}")
    assert up.returncode == 0
    job = stage.train((2, len(lines)))
    stage.wait("the two that train", lambda: stage.training(GOOD))

    def told(name: str) -> bool:
        return re.search(BAD[name], stage.cli("status").stdout) is not None

    for name in BAD:
        stage.wait(f"what is wrong with {name}, in status", lambda name=name: told(name), BOUND_S)
    for name in ("forged", "stranger", "mute"):  # those that keep us out are named by `up` itself
        assert re.search(BAD[name], said), name
    stage.enough()
    stage.wait("the end", lambda: stage.job(job)["state"] == "succeeded")
    stage.lan["stuck"].thaw_door()
    begun = time.monotonic()
    down = stage.cli("down", "-y")
    print(f"down took {time.monotonic() - begun:.1f} s\n{down.stdout}{down.stderr}")
    assert time.monotonic() - begun < BOUND_S
    assert stage.left() == {}  # also on those that we could enter and not use
