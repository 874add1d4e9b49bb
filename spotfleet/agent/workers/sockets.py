"""Unix socket server: workers send reports and receive orders as JSON lines.

A connection belongs to the worker that its first line names, if the kernel confirms that the peer is in the session of
the process started under that name. Reports and orders are forwarded at once; orders are also repeated each second.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import struct
import tempfile
from pathlib import Path

from spotfleet.agent.workers.supervisor import Workers
from spotfleet.protocol.messages import WorkerOrders, WorkerReport, dump, load

log = logging.getLogger("spotfleet.agent")

_LINE_BYTES = 1 << 20
_FIRST_LINE_S = 10.0  # a peer that has not sent its name by then is disconnected
_PERIOD_S = 1.0
_PATH_BYTES = 107  # longest address of a Unix socket


class WorkerSockets:
    """The server, and one connection per worker."""

    def __init__(self, workers: Workers, home: Path) -> None:
        self._workers = workers
        self._folder = home / "socket"
        self._server: asyncio.Server | None = None
        self._peers: dict[str, asyncio.StreamWriter] = {}
        self._last: dict[str, WorkerOrders] = {}

    @property
    def path(self) -> str:
        return str(self._folder / "agent")

    async def start(self) -> None:
        if len(os.fsencode(self.path)) > _PATH_BYTES:
            self._folder = Path(tempfile.mkdtemp(prefix="spotfleet-", dir="/tmp"))
        self._folder.mkdir(mode=0o700, exist_ok=True)
        Path(self.path).unlink(missing_ok=True)  # left by an agent that was killed
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=_LINE_BYTES)

    async def run(self) -> None:
        """Repeat the orders each second until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            for name in list(self._peers):
                self._send(name, self._workers.orders_for(name))

    def push(self, name: str) -> None:
        """Send the orders of `name` if they have changed."""
        if name in self._peers:
            orders = self._workers.orders_for(name)
            if orders != self._last.get(name):
                self._send(name, orders)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for peer in self._peers.values():
            peer.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, name: str, orders: WorkerOrders) -> None:
        peer = self._peers[name]
        if peer.transport.get_write_buffer_size() > _LINE_BYTES:
            return  # it reads nothing; it receives the newest once it reads again
        self._last[name] = orders
        peer.write(dump(orders).encode() + b"\n")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = ""
        try:
            async with asyncio.timeout(_FIRST_LINE_S):
                first = load(WorkerReport, await reader.readline())
                named = await self._is(first.worker, writer)
            if not named:
                log.warning("a process that is not %s reported in its name; closed", first.worker)
                return
            name = first.worker
            if old := self._peers.get(name):
                old.close()
            self._peers[name] = writer
            self._workers.attached(name, yes=True)
            self._workers.receive(first)
            self._send(name, self._workers.orders_for(name))
            while line := await reader.readline():
                self._receive(name, line)
        except (ValueError, ConnectionError, TimeoutError) as error:
            log.warning("worker %s: %s", name or "unknown", error or type(error).__name__)
        finally:
            if self._peers.get(name) is writer:
                del self._peers[name]
                self._last.pop(name, None)
                self._workers.attached(name, yes=False)
            writer.close()

    def _receive(self, name: str, line: bytes) -> None:
        report = load(WorkerReport, line)
        if report.worker != name:
            raise ValueError(f"WorkerReport.worker: expected {name}, got {report.worker}")
        self._workers.receive(report)

    async def _is(self, name: str, writer: asyncio.StreamWriter) -> bool:
        sock = writer.get_extra_info("socket")
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        session = await self._workers.session_of(name)
        try:
            return session != 0 and pid > 0 and os.getsid(pid) == session
        except ProcessLookupError:
            return False
