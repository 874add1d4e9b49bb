"""Connection of a worker to its agent: one thread sends reports, receives orders and outlives the agent.

The agent listens on a Unix socket. A coordinator on another machine, as on Ray, takes the agent's part over TCP; both
sides then prove first that they know the job's key.

    connect -> report -> [orders | change | 1 s] -> ... -> EOF -> connect again (50 ms, doubling to 1 s)

Training never waits for this thread; while the agent is away the newest orders stay in force.

Threads: the control thread alone touches the sockets and writes `orders`. Any thread may call `update`, `flush`
and `close`, and read `orders` (a frozen value, replaced whole). `cv` guards `orders`, the report and whatever
`on_orders` touches; it is a re-entrant lock, held while `on_orders` runs, so `on_orders` must not block.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spotfleet.addresses import split
from spotfleet.protocol.messages import WorkerOrders, WorkerReport, dump, load
from spotfleet.worker.handshake import prove

PERIOD_S = 1.0
SEND_LIMIT_S = 2.0  # an agent that reads nothing for this long is disconnected, and dialed again
FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0
PEER_GONE_S = 3.0
TCP = "tcp:"  # before ADDRESS:PORT, in place of the path of a Unix socket
TICK_S = 0.02  # while an aborted group still forms: its new sockets must be shut too


class AgentLine:
    """The control thread, its newest orders and the report that it sends."""

    def __init__(self, path: str, report: WorkerReport, key: str = "") -> None:
        """`path`: that of the agent's socket, or tcp:ADDRESS:PORT of a coordinator, which proves to know `key`."""
        self.orders = WorkerOrders()
        self.has_orders = False  # orders have been received at least once
        self.cv = threading.Condition(threading.RLock())
        self.on_orders: Callable[[WorkerOrders], None] = lambda orders: None
        self.live: Callable[[], dict[str, Any]] = dict  # fields read anew for each report: cheap ones, no waking
        self.tick: Callable[[], bool] = lambda: False  # True: call again in TICK_S
        self._path, self._key = path, key
        self._report = report
        self._changes = 1  # counts `update`; `_sent` is the count of the last report that was sent
        self._sent = 0
        self._closed = False
        self._sock: socket.socket | None = None
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_w.setblocking(False)
        self._wake_r.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="spotfleet-control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def update(self, **fields: Any) -> None:
        """Change the report and send it at once."""
        with self.cv:
            self._report = replace(self._report, **fields)
            self._changes += 1
        self._wake()

    @property
    def report(self) -> WorkerReport:
        with self.cv:
            return replace(self._report, **self.live())

    def flush(self, timeout_s: float) -> bool:
        """Wait until the agent has been sent the newest report; False when that took too long."""
        with self.cv:
            wanted = self._changes
            return self.cv.wait_for(lambda: self._sent >= wanted or self._closed, timeout_s) and self._sent >= wanted

    def close(self) -> None:
        with self.cv:
            self._closed = True
            self.cv.notify_all()
        self._wake()
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(SEND_LIMIT_S + 1)

    def descriptors(self) -> list[int]:
        """File descriptors that a forked child must not keep."""
        sockets = [s for s in (self._sock, self._wake_r, self._wake_w) if s is not None]
        return [s.fileno() for s in sockets if s.fileno() >= 0]

    def _wake(self) -> None:
        try:
            self._wake_w.send(b"x")
        except (BlockingIOError, OSError):
            pass  # a full pipe wakes as well; a closed one has no reader

    def _run(self) -> None:
        delay_s = FIRST_RETRY_S
        while not self._closed:
            try:
                sock = connect(self._path, self._key)
            except OSError:
                self._pause(delay_s)
                delay_s = min(2 * delay_s, LAST_RETRY_S)
                continue
            self._sock = sock
            try:
                if self._serve(sock):
                    delay_s = FIRST_RETRY_S
            except OSError:
                pass  # the agent is gone: dial again
            finally:
                self._sock = None
                sock.close()
            self._pause(delay_s)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._closed and (left := end - time.monotonic()) > 0:
            _readable(min(left, self._patience(left)), self._wake_r)
            self._drain_wake()

    def _patience(self, left_s: float) -> float:
        with self.cv:
            return TICK_S if self.tick() else left_s

    def _serve(self, sock: socket.socket) -> bool:
        """Exchange reports and orders until the agent disconnects; return whether it sent anything."""
        pending, due, received, sent = b"", 0.0, False, 0
        while not self._closed:
            now = time.monotonic()
            if now >= due or sent != self._changes:
                sent = self._send(sock)
                due = now + PERIOD_S
            wait_s = self._patience(max(0.0, due - time.monotonic()))
            readable = _readable(wait_s, sock, self._wake_r)
            if self._wake_r in readable:
                self._drain_wake()
            if sock in readable:
                data = sock.recv(1 << 16)
                if not data:
                    return received
                *lines, pending = (pending + data).split(b"\n")
                received = True
                if lines:
                    self._receive(lines[-1])  # complete states: only the newest counts
        if sent != self._changes:
            self._send(sock)
        return received

    def _send(self, sock: socket.socket) -> int:
        with self.cv:
            count, line = self._changes, dump(self.report)
        sock.sendall(line.encode() + b"\n")
        with self.cv:
            self._sent = count
            self.cv.notify_all()
        return count

    def _receive(self, line: bytes) -> None:
        try:
            orders = load(WorkerOrders, line)
        except ValueError as error:
            print(f"spotfleet: orders that cannot be read are ignored: {error}", file=sys.stderr)
            return
        with self.cv:
            self.orders, self.has_orders = orders, True
            self.on_orders(orders)
            self.cv.notify_all()

    def _drain_wake(self) -> None:
        try:
            while self._wake_r.recv(4096):
                pass
        except (BlockingIOError, OSError):
            pass


def connect(path: str, key: str) -> socket.socket:
    """Connect to an agent or a coordinator. OSError if it cannot be reached, or does not know `key`."""
    sock = _tcp(path.removeprefix(TCP)) if path.startswith(TCP) else socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(SEND_LIMIT_S)
        if path.startswith(TCP):
            prove(sock, key, "coordinator")
        else:
            sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


def _tcp(place: str) -> socket.socket:
    sock = socket.create_connection(split(place), timeout=SEND_LIMIT_S)
    no_delay(sock)
    return sock


def no_delay(sock: socket.socket) -> None:
    """Send each line at once, and end the connection where the peer's machine acknowledges nothing for PEER_GONE_S."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * PEER_GONE_S))


def silence(fds: list[int]) -> None:
    """Replace `fds` by /dev/null in a forked child, so that no number is reused by another file."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(null, fd)
    os.close(null)


def _readable(wait_s: float, *socks: socket.socket) -> list[socket.socket]:
    """Wait up to `wait_s` for a readable socket; return all readable ones.

    A script may have thousands of files open: `select.select` takes no descriptor beyond 1023.
    """
    poll = select.poll()
    for sock in socks:
        poll.register(sock, select.POLLIN)
    found = {descriptor for descriptor, _ in poll.poll(1000 * wait_s)}
    return [sock for sock in socks if sock.fileno() in found]
