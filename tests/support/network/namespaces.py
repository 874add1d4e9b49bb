"""Machines on a network of their own: Linux network namespaces on one bridge, whose links can be cut without a word.

    with Namespaces() as net:
        net.add("a", "ens5")                 # its address: net.address("a")
        net.start("a", ["sleep", "9"])       # a process in it
        net.cut("a"); net.restore("a")       # no FIN, no RST: packets are lost from now on
    net.slow("a", 0.01, loss=0.001)      # so long each way, and so much lost: userland, as not every kernel has netem
        net.call("a", fetch)                 # runs in a thread of this process that is in it

Needs root and `ip`; `why_not()` says what is missing. Everything is gone after `close`, processes too; what a killed
test run left, the next one removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
SWITCH = "switch"  # the namespace of the bridge itself
NETWORK, BITS = "10.213.7.", 24  # nobody else sees it
NETWORK6, BITS6 = "fd00:213:7::", 64
BOTH = (4, 6)
WIRE = Path(__file__).with_name("wire.py")
_CLONE_NEWNET = 0x40000000
_END_S = 10.0
_libc = ctypes.CDLL(None, use_errno=True)


@functools.cache
def why_not() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (Debian: iproute2)"
    try:
        with Namespaces() as net:
            net.add("probe", "eth9")
    except RuntimeError as error:
        return f"no network namespaces here: {error}"
    return ""


class Namespaces:
    def __init__(self) -> None:
        _sweep()
        self._prefix = f"{_MARK}{os.getpid()}x{uuid.uuid4().hex[:8]}"
        self._hosts: dict[str, int] = {}  # name -> number, of its address and its port of the bridge
        self._numbers = itertools.count(2)
        self._wires: dict[str, subprocess.Popen[bytes]] = {}
        self._ip("netns", "add", self._ns(SWITCH))
        try:
            self._in(SWITCH, "link", "set", "lo", "up")
            self._in(SWITCH, "link", "add", "br0", "type", "bridge")
            # Said, since a bridge takes the lowest address of its ports otherwise: a new one, and nobody finds it.
            self._in(SWITCH, "link", "set", "br0", "address", "02:00:0a:d5:07:01", "up")
            self._in(SWITCH, "address", "add", f"{NETWORK}1/{BITS}", "dev", "br0")
            self._in(SWITCH, "address", "add", f"{NETWORK6}1/{BITS6}", "dev", "br0", "nodad")
        except RuntimeError:
            self.close()
            raise

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, name: str, interface: str, families: Sequence[int] = (4,)) -> str:
        """A machine with one interface of this name, on the bridge, and an address of each family; the first one, "" if
        it shall have none yet."""
        number = self._hosts[name] = next(self._numbers)
        self._ip("netns", "add", self._ns(name))
        self._in(name, "link", "set", "lo", "up")
        self._in(SWITCH, "link", "add", f"port{number}", "type", "veth", "peer", "name", interface,
                 "netns", self._ns(name))
        self._in(SWITCH, "link", "set", f"port{number}", "master", "br0", "up")
        for family in families:
            bits, more = (BITS, []) if family == 4 else (BITS6, ["nodad"])
            self._in(name, "address", "add", f"{self.address(name, family)}/{bits}", "dev", interface, *more)
        self._in(name, "link", "set", interface, "up")
        return self.address(name, families[0]) if families else ""

    def address(self, name: str, family: int = 4) -> str:
        number = 1 if name == SWITCH else self._hosts[name]
        return f"{NETWORK}{number}" if family == 4 else f"{NETWORK6}{number:x}"

    def cut(self, name: str) -> None:
        """Nothing comes in or goes out any more, and nobody is told."""
        self._in(SWITCH, "link", "set", f"port{self._hosts[name]}", "down")

    def restore(self, name: str) -> None:
        self._in(SWITCH, "link", "set", f"port{self._hosts[name]}", "up")

    def slow(self, name: str, delay_s: float, loss: float = 0.0) -> None:
        """From now on all that the machine sends or gets takes so long on its link, and the part `loss` of it is lost;
        (0, 0) makes the link what it was."""
        number = self._hosts[name]
        port, left, right = f"port{number}", f"left{number}", f"right{number}"
        if wire := self._wires.pop(name, None):
            _end(wire)
            self._in(SWITCH, "link", "delete", left)
        if not delay_s and not loss:
            self._in(SWITCH, "link", "set", port, "master", "br0")
            return
        self._in(SWITCH, "link", "set", port, "nomaster")
        self._in(SWITCH, "link", "add", left, "type", "veth", "peer", "name", right)
        self._in(SWITCH, "link", "set", right, "master", "br0", "up")
        for silent in (port, left):  # the switch itself says nothing on them
            self._in(SWITCH, "link", "set", silent, "addrgenmode", "none")
        self._in(SWITCH, "link", "set", left, "up")
        wire = self.start(SWITCH, [sys.executable, "-I", "-S", str(WIRE), port, left, str(delay_s), str(loss)],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._wires[name] = wire
        assert wire.stdout is not None
        if not wire.stdout.readline():
            raise RuntimeError(f"the wire of {name} does not carry")

    def ip(self, name: str, *words: str) -> str:
        """What `ip ...` says on the machine."""
        return self._in(name, *words)

    def start(self, name: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["ip", "netns", "exec", self._ns(name), *command], **options)

    def call(self, name: str, work: Callable[[], T]) -> T:
        """`work()`, whose sockets are those of the machine."""
        result: list[Any] = []

        def run() -> None:
            try:
                with open(f"/run/netns/{self._ns(name)}") as namespace:
                    if _libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                        raise OSError(ctypes.get_errno(), "setns")
                result.extend([work(), None])
            except Exception as error:  # noqa: BLE001 - raised again below, in the thread that asked
                result.extend([None, error])

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        value, error = result
        if error is not None:
            raise error
        return value

    def pids(self, name: str) -> list[int]:
        """Of the processes in it."""
        return [int(p) for p in self._ip("netns", "pids", self._ns(name)).split()]

    def kill(self, name: str) -> None:
        """SIGKILL to every process in it, as a machine that loses power; returns when none is left."""
        end = time.monotonic() + _END_S
        while pids := [p for p in self.pids(name) if p != os.getpid()]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > end:
                raise RuntimeError(f"{name}: {pids} survive SIGKILL")
            time.sleep(0.01)

    def remove(self, name: str) -> None:
        """The machine and all that runs on it are gone."""
        if wire := self._wires.pop(name, None):
            _end(wire)
        self._delete(name)
        del self._hosts[name]

    def close(self) -> None:
        for wire in self._wires.values():
            _end(wire)
        self._wires.clear()
        for name in [*self._hosts, SWITCH]:
            self._delete(name)
        self._hosts.clear()

    def _delete(self, name: str) -> None:
        if Path("/run/netns", self._ns(name)).exists():
            self.kill(name)
            self._ip("netns", "delete", self._ns(name))

    def _ns(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _in(self, name: str, *words: str) -> str:
        return self._ip("-n", self._ns(name), *words)

    def _ip(self, *words: str) -> str:
        done = subprocess.run(["ip", *words], text=True, capture_output=True, timeout=30)
        if done.returncode != 0:
            raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout


_MARK = "sf-of-"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(_END_S)
    for end in (process.stdin, process.stdout):
        if end is not None:
            end.close()


def _sweep() -> None:
    """Remove the namespaces of test runs that were killed; their processes have ended with them or are ended here."""
    for place in Path("/run/netns").glob(f"{_MARK}*x*"):
        owner = int(place.name.removeprefix(_MARK).partition("x")[0])
        if not Path("/proc", str(owner)).exists():
            pids = subprocess.run(["ip", "netns", "pids", place.name], text=True, capture_output=True).stdout.split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", place.name], capture_output=True)
