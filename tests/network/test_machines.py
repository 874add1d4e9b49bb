"""The machines that other tests rely on: real sshd, links that are cut or slow, and nothing left of them."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.network.machines import USER, Build, Machines, why_not

pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not())]

BUILDS = [Build("laptop", "wlan0", door="none"), Build("d", "mgmt0"), Build("w0", "ens5"), Build("w1", "eth0"),
          Build("bare", "bond1", python=False), Build("mute", "wan7", door="silent"),
          Build("small", "enp0s3", disk_mib=2), Build("new", "eno1", families=(6,))]
FORGED = """
import sys
sys.path[:0] = {path!r}
from tests.support.network.machines import Build, Machines
lan = Machines([Build("a", "ens5"), Build("b", "eth0")])
lan.net.slow("a", 0.01)
print(*(m.pid for m in lan), lan["a"].start("sleep", "1000").pid, lan.net._wires["a"].pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def lan() -> Iterator[Machines]:
    with Machines(BUILDS) as lan:
        yield lan


def ssh(lan: Machines, to: str, *command: str, ok: bool = True, wait_s: int = 30) -> subprocess.CompletedProcess[str]:
    """`wait_s`: for its sshd; short only where there is none that answers."""
    return lan["laptop"].run("ssh", "-oBatchMode=yes", f"-oConnectTimeout={wait_s}", to, *command, ok=ok)


def opened(lan: Machines, to: str) -> subprocess.Popen[bytes]:
    """A session that says what it hears."""
    session = lan["laptop"].start("ssh", "-oBatchMode=yes", to, "cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    session.stdin.write(b"one\n")
    session.stdin.flush()
    assert session.stdout.readline() == b"one\n"
    return session


def rtt_s(lan: Machines, source: str, target: str, family: int = 4, size: int = 1) -> float:
    """The shortest of some times that `size` bytes and an answer take between two machines."""
    kind = socket.AF_INET if family == 4 else socket.AF_INET6
    address = lan.net.address(target, family)
    server = lan.net.call(target, lambda: socket.create_server((address, 0), family=kind))

    def serve() -> None:
        peer, _ = server.accept()
        with peer:
            while data := peer.recv(1 << 20, socket.MSG_WAITALL if size > 1 else 0):
                peer.sendall(data[-1:])

    def ask() -> float:
        with socket.create_connection((address, server.getsockname()[1]), 30) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            best = 99.0
            for _ in range(5 if size > 1 else 25):
                begun = time.monotonic()
                client.sendall(b"x" * size)
                assert client.recv(1) == b"x"
                best = min(best, time.monotonic() - begun)
            return best

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        return lan.net.call(source, ask)
    finally:
        thread.join(30)
        server.close()


def test_a_key_opens_each_machine_for_root_and_for_a_user_and_none_is_like_another(lan: Machines):
    words = "hostname; whoami; pwd; ls -A | grep ssh; ip -o link | grep -v lo: | cut -d ' ' -f 2"
    said = {to: " ".join(ssh(lan, to, words).stdout.split()) for to in ("d", "w0", "w1", f"{USER}@w0", "new")}
    assert {to: line.partition("@")[0] for to, line in said.items()} == {
        "d": "d root /root .ssh mgmt0", "w0": "w0 root /root .ssh ens5", "w1": "w1 root /root .ssh eth0",
        f"{USER}@w0": f"w0 {USER} /home/{USER} .ssh ens5", "new": "new root /root .ssh eno1"}


def test_a_door_refuses_another_user_and_another_key(lan: Machines):
    assert ssh(lan, "nobody@w0", "true", ok=False).returncode == 255
    lan["laptop"].run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/tmp/other")
    other = ssh(lan, "w0", "-oIdentitiesOnly=yes", "-i/tmp/other", "true", ok=False)
    assert "Permission denied" in other.stderr


def test_a_cut_link_drops_silently_and_what_was_open_goes_on_when_it_is_back(lan: Machines):
    session = opened(lan, "w1")
    lan.net.cut("w1")
    begun = time.monotonic()
    assert "timed out" in ssh(lan, "w1", "true", ok=False, wait_s=1).stderr
    assert time.monotonic() - begun >= 1.0  # neither a refusal nor a reset
    session.stdin.write(b"two\n")
    session.stdin.flush()
    lan.net.restore("w1")
    assert session.stdout.readline() == b"two\n"
    assert session.communicate(timeout=30)[0] == b""


@pytest.mark.parametrize("family", [4, 6])
def test_a_slow_link_takes_as_long_as_asked_each_way_and_carries_all(lan: Machines, family: int):
    quick = rtt_s(lan, "d", "w0", family)
    lan.net.slow("w0", 0.02)
    slow, large = rtt_s(lan, "d", "w0", family), rtt_s(lan, "d", "w0", family, size=1 << 20)
    lan.net.slow("w0", 0, 0)
    assert quick < 0.02
    assert 0.04 <= slow < 0.04 + 0.1
    assert large >= 0.04
    assert rtt_s(lan, "d", "w0", family) < 0.02


def connected(address: tuple[str, int]) -> socket.socket:
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.connect(address)
    return datagrams


def test_a_lossy_link_loses_what_was_asked(lan: Machines):
    def count(loss: float) -> int:
        lan.net.slow("w0", 0.0, loss) if loss else lan.net.slow("w0", 0, 0)
        target = lan.net.call("w0", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        target.bind((lan.net.address("w0"), 0))
        source = lan.net.call("d", lambda: connected(target.getsockname()))
        for _ in range(200):
            source.send(b"x")
        target.settimeout(2.0)  # after the last one
        got = 0
        try:
            while target.recv(9):
                got += 1
        except TimeoutError:
            return got
        finally:
            source.close()
            target.close()

    rtt_s(lan, "d", "w0")  # neighbours know each other: no packet waits for that
    assert count(0.0) == 200
    assert 50 <= count(0.5) <= 150
    lan.net.slow("w0", 0, 0)


def test_a_machine_without_python_a_full_one_and_one_that_says_nothing(lan: Machines):
    assert ssh(lan, "bare", "python3 -c ''; python -c ''; ls " + sys.executable, ok=False).stderr.count("\n") == 3
    assert "No space left on device" in ssh(lan, "small", "head -c 9000000 /dev/zero > /root/much", ok=False).stderr
    assert "timed out during banner exchange" in ssh(lan, "mute", "true", ok=False, wait_s=1).stderr


def test_a_frozen_door_answers_nobody_until_it_is_thawed(lan: Machines):
    lan["d"].freeze_door()
    assert "timed out" in ssh(lan, "d", "true", ok=False, wait_s=1).stderr
    lan["d"].thaw_door()
    assert ssh(lan, "d", "hostname").stdout == "d\n"


def test_a_machine_that_loses_power_keeps_its_disk_alone_and_answers_again(lan: Machines):
    ssh(lan, "new", "echo kept > ~/kept; echo lost > /tmp/lost; nohup sleep 1000 >/dev/null 2>&1 &")
    session = opened(lan, "new")
    lan["new"].power_off()
    assert "timed out" in ssh(lan, "new", "true", ok=False, wait_s=1).stderr
    assert session.poll() is None  # nobody told it
    lan["new"].power_on()
    assert ssh(lan, "new", "cat ~/kept; ls /tmp/lost 2>&1 | tail -c 26").stdout == "kept\nNo such file or directory\n"
    assert lan["new"].processes() == []
    assert session.communicate(b"is anybody there\n", timeout=30)[0] == b""


def test_all_that_a_command_leaves_on_a_machine_is_seen_and_what_it_removes_too(lan: Machines):
    machine = lan["w1"]
    before, real = machine.changes(), Path("/etc/debian_version").read_text()
    ssh(lan, "w1", "mkdir -p /opt/x /etc/cron.d; echo 1 > /etc/cron.d/x; rm /etc/debian_version; "
                   "echo key >> ~/.ssh/authorized_keys; nohup sleep 1000 >/dev/null 2>&1 &")

    def running() -> list[str]:
        return [line.split(" ", 1)[1] for line in machine.processes()]

    lan.wait("what it started, alone", lambda: running() == ["sleep 1000"])
    after = machine.changes()
    assert {k for k in {*before, *after} if before.get(k) != after.get(k)} == {
        "/opt/x", "/etc/cron.d/x", "/etc/debian_version", "/root/.ssh/authorized_keys"}
    assert after["/etc/debian_version"] == "gone" and Path("/etc/debian_version").read_text() == real


def test_nothing_is_left_of_machines_that_are_closed_nor_of_those_whose_maker_was_killed():
    path = [str(Path(__file__).parents[2])]
    maker = subprocess.Popen([sys.executable, "-c", FORGED.format(path=path)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in maker.stdout.readline().split()]
    assert len(pids) == 4 and all(psutil.pid_exists(pid) for pid in pids)
    mark = f"sf-of-{maker.pid}x"
    maker.kill()
    maker.communicate()
    _, alive = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], timeout=30)
    assert alive == []
    with Machines([Build("a", "ens5")]) as lan:
        of_closed, place = lan["a"].pid, lan.net._ns("a")
        assert list(Path("/run/netns").glob(f"{mark}*")) == []  # names only, which the next one removes
        assert Path("/run/netns", place).exists()
    assert not psutil.pid_exists(of_closed) and not Path("/run/netns", place).exists()
    assert "/run/netns/changes" not in Path("/proc/mounts").read_text()
