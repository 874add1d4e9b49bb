"""Process that has imported torch and forks workers from itself: 0.06 s each, where an import takes seconds.

    agent --fork, kill--> zygote --started, ended, warm--> agent        JSON lines over a socketpair

`python -m spotfleet.agent.processes.zygote FD` has one thread and no CUDA, so that forking is safe. It leads a session
of its own and watches the socketpair. When that closes (the agent is gone, even by SIGKILL), it ends every worker's
process group and itself. If it dies first, the kernel ends the workers (PR_SET_PDEATHSIG). If an import has started
threads, a worker gets a new interpreter.
`zygote_client.py` is the agent's side. With a path in place of FD it connects to a Unix socket, from within a container
(`agent/containers`), where its pids are those of the container's namespace.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import os
import pkgutil
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

from spotfleet.agent.processes import child
from spotfleet.codec import from_json

SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Otherwise torch prints C++ backtraces into the user's log whenever a peer is lost; read when torch is imported.
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
_WARM = ("numpy", "torch", "torch._dynamo")
_RUNTIME = ("spotfleet.worker", "spotfleet.train")  # whichever exist: any worker may need all of it


class Zygote:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._buffer = b""
        self._children: dict[int, str] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._single_threaded = True

    def serve(self) -> None:
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up descriptor needs a handler
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._warm()
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wake_read in ready:
                self._drain_wake_ups()
            self._reap()
            if self._control.fileno() in ready:
                self._receive()

    def _warm(self) -> None:
        begun = time.monotonic()
        for name in itertools.chain(_WARM, modules_of(_RUNTIME)):
            try:
                __import__(name)
            except ImportError:
                continue  # no torch on this host: shell commands and plain scripts still run
            except Exception:  # noqa: BLE001 - a broken package is the script's problem, and raises again there
                traceback.print_exc()
        threads = len(os.listdir("/proc/self/task"))
        self._single_threaded = threads == 1
        gc.collect()
        gc.freeze()  # otherwise the collector would touch, and so copy, every page after a fork
        self._send({"event": "warm", "threads": threads, "seconds": time.monotonic() - begun,
                    "torch": "torch" in sys.modules})

    def _receive(self) -> None:
        try:
            data = self._control.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self._end()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if request["do"] == "fork":
                self._fork(request["spec"])
            elif request["do"] == "kill":
                self._kill(request["id"], request["signal"])

    def _fork(self, data: dict[str, Any]) -> None:
        begun = time.monotonic()
        spec = from_json(child.ChildSpec, data)
        me = os.getpid()
        # A signal that reached the child before it has dropped our handlers would end its siblings.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if pid == 0:
            self._be_child(spec, me)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self._children[pid] = spec.id
        self._send({"event": "started", "id": spec.id, "pid": pid, "seconds": time.monotonic() - begun})

    def _be_child(self, spec: child.ChildSpec, parent: int) -> None:
        try:
            child.begin(spec, parent, (self._control.detach(), self._wake_read, self._wake_write),
                        fresh=not self._single_threaded)
        except BaseException:  # noqa: BLE001 - must never return into the zygote's loop
            traceback.print_exc()
        finally:
            os._exit(70)

    def _kill(self, name: str, signum: int) -> None:
        """Send a signal to the process with this id. Only the zygote knows that its pid has not been reaped."""
        for pid, id_ in self._children.items():
            if id_ == name:
                os.kill(pid, signum)

    def _reap(self) -> None:
        while self._children:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            pid = ended.si_pid
            _kill_group(pid)  # while it is a zombie, its pid cannot be reused
            _, status = os.waitpid(pid, 0)
            name = self._children.pop(pid, None)
            if name is not None:
                self._send({"event": "ended", "id": name, "code": os.waitstatus_to_exitcode(status)})

    def _drain_wake_ups(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            pass

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._control.sendall(json.dumps(message).encode() + b"\n")
        except ConnectionError:
            self._end()

    def _end(self, *_: object) -> None:
        for pid in self._children:
            _kill_group(pid)
        os._exit(0)


def modules_of(packages: Iterable[str]) -> Iterator[str]:
    """Yield the names of the `packages` that exist and of all modules in them; a package precedes its modules.

    Each name is searched for only on request, so the caller's import of a package raises first. A package that cannot
    be imported yields no modules.
    """
    for package in packages:
        found = importlib.util.find_spec(package)
        if found is None:
            continue
        yield package
        modules = pkgutil.walk_packages(found.submodule_search_locations, f"{package}.", onerror=lambda name: None)
        yield from (module.name for module in modules)


def _kill_group(pid: int) -> None:
    """Kill a worker's process group, or the worker alone if it has not made one yet."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)


def main(where: str) -> None:
    if where.isdigit():
        child.die_with_parent(signal.SIGTERM)
        control = socket.socket(fileno=int(where))
        control.set_inheritable(False)
    else:  # its parent is the engine's client, or none that it can see
        control = socket.socket(socket.AF_UNIX)
        control.connect(where)
    Zygote(control).serve()


if __name__ == "__main__":
    main(sys.argv[1])
