"""Machines on a network of their own: Linux network namespaces on one bridge, whose links can be cut without a word.

    with Namespaces() as net:
        net.add("a", "ens5")                 # its address: net.address("a")
        net.start("a", ["sleep", "9"])       # a process in it
        net.cut("a"); net.restore("a")       # no FIN, no RST: packets are lost from now on
        net.call("a", fetch)                 # runs in a thread of this process that is in it

Needs root and `ip`; `why_not()` says what is missing. Everything is gone after `close`, processes too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
SWITCH = "switch"  # the namespace of the bridge itself
NETWORK, BITS = "10.213.7.", 24  # nobody else sees it
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
        self._prefix = f"sf{uuid.uuid4().hex[:8]}"
        self._hosts: dict[str, int] = {}  # name -> number, of its address and its port of the bridge
        self._ip("netns", "add", self._ns(SWITCH))
        try:
            self._in(SWITCH, "link", "set", "lo", "up")
            self._in(SWITCH, "link", "add", "br0", "type", "bridge")
            self._in(SWITCH, "link", "set", "br0", "up")
            self._in(SWITCH, "address", "add", f"{NETWORK}1/{BITS}", "dev", "br0")
        except RuntimeError:
            self.close()
            raise

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, name: str, interface: str) -> str:
        """A machine with one interface of this name, on the bridge; its address."""
        number = self._hosts[name] = len(self._hosts) + 2
        self._ip("netns", "add", self._ns(name))
        self._in(name, "link", "set", "lo", "up")
        self._in(SWITCH, "link", "add", f"port{number}", "type", "veth", "peer", "name", interface,
                 "netns", self._ns(name))
        self._in(SWITCH, "link", "set", f"port{number}", "master", "br0", "up")
        self._in(name, "address", "add", f"{self.address(name)}/{BITS}", "dev", interface)
        self._in(name, "link", "set", interface, "up")
        return self.address(name)

    def address(self, name: str) -> str:
        return f"{NETWORK}{1 if name == SWITCH else self._hosts[name]}"

    def cut(self, name: str) -> None:
        """Nothing comes in or goes out any more, and nobody is told."""
        self._in(SWITCH, "link", "set", f"port{self._hosts[name]}", "down")

    def restore(self, name: str) -> None:
        self._in(SWITCH, "link", "set", f"port{self._hosts[name]}", "up")

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

    def close(self) -> None:
        for name in [*self._hosts, SWITCH]:
            if Path("/run/netns", self._ns(name)).exists():
                self.kill(name)
                self._ip("netns", "delete", self._ns(name))
        self._hosts.clear()

    def _ns(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _in(self, name: str, *words: str) -> str:
        return self._ip("-n", self._ns(name), *words)

    def _ip(self, *words: str) -> str:
        done = subprocess.run(["ip", *words], text=True, capture_output=True, timeout=30)
        if done.returncode != 0:
            raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout
