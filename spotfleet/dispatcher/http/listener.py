"""Listening sockets of the dispatcher: a bounded number of connections without a valid token.

`admission.py` decides which connections stay; here are their sockets. TLS begins with the first byte that a connection
sends, so a silent one costs no TLS state. The number of members is not limited: a valid token makes its connection a
member's (`admit`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import logging
import resource
import socket
import ssl
from asyncio import sslproto
from collections.abc import Callable
from dataclasses import dataclass

from spotfleet.dispatcher.http.admission import KnownNetworks, Places, network_of

log = logging.getLogger(__name__)
BACKLOG = 1024  # after a restart all agents connect at once
MOST_WAITING = 4096  # silent connections, which cost about 2 kB; also at most a quarter of the file descriptors
MOST_OPEN = 256  # connections with TLS, which cost about 100 kB
STRANGER_S = 30.0  # a connection keeps its place for this time without a valid token
ACCEPTS = 64  # connections accepted in a row; then others get their turn
SWEEP_S = 0.5
CROWD = 64  # after so many connections at once the memory that they had is given back to the system
NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
NO_FILES_S = 0.2  # pause after one of these
TLS_BUFFER = 32 << 10  # bytes; asyncio takes 256 KiB for each connection, and a TLS record has 16


@dataclass(eq=False)
class Stranger:
    """Connection without a valid token."""

    sock: socket.socket
    network: str
    since: float
    places: Places[Stranger]
    waiting: bool = True  # no protocol has the socket yet
    transport: asyncio.Transport | None = None  # once TLS is established


class Listener:
    """Listening sockets and the connections without a valid token. Used in one event loop."""

    def __init__(self, make_protocol: Callable[[], asyncio.Protocol], tls: ssl.SSLContext) -> None:
        sslproto.SSLProtocol.max_size = TLS_BUFFER
        self._make_protocol, self._tls = make_protocol, tls
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        waiting = MOST_WAITING if limit == resource.RLIM_INFINITY else min(MOST_WAITING, limit // 4)
        self._strangers, self._acquainted = (Places[Stranger](waiting, MOST_OPEN) for _ in range(2))
        self._known = KnownNetworks()
        self._by_protocol: dict[object, Stranger] = {}
        self._sockets: list[socket.socket] = []
        self._handshakes: set[asyncio.Task[None]] = set()
        self._sweeping: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def listen(self, address: str, port: int) -> int:
        """Listen; return the port. Raises OSError."""
        infos = socket.getaddrinfo(address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, place in dict.fromkeys((info[0], info[4]) for info in infos):
                sock = socket.create_server(place, family=family, backlog=BACKLOG)
                sock.setblocking(False)
                self._sockets.append(sock)
        except OSError:
            self._close_sockets()
            raise
        for sock in self._sockets:
            self._loop.add_reader(sock, self._accept, sock)
        self._sweeping = asyncio.create_task(self._sweep())
        return self._sockets[0].getsockname()[1]

    @property
    def count(self) -> int:
        """Number of connections without a valid token."""
        return sum(len(places.waiting) + len(places.open) for places in (self._strangers, self._acquainted))

    def admit(self, protocol: object) -> None:
        """Make the connection of this protocol a member's: its token is valid."""
        stranger = self._by_protocol.get(protocol)
        if stranger is not None:
            self._known.note(stranger.network, self._loop.time())
            self._remove(stranger, protocol)

    async def close(self) -> None:
        """Close the listening sockets and all connections whose TLS is not established; the others are their
        protocols' to close."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._close_sockets()
        for places in (self._strangers, self._acquainted):
            places.ready.clear()
            for stranger in (*places.waiting, *(s for s in places.open if s.transport is None)):
                self._close(stranger)
        await asyncio.gather(*self._handshakes, *filter(None, [self._sweeping]), return_exceptions=True)

    def _close_sockets(self) -> None:
        for sock in self._sockets:
            self._loop.remove_reader(sock)
            sock.close()
        self._sockets.clear()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                if error.errno not in NO_FILES:
                    raise
                log.warning("no more connections can be accepted now: %s", error.strerror)
                self._loop.remove_reader(listening)
                self._loop.call_later(NO_FILES_S, self._resume, listening)
                return
            sock.setblocking(False)
            now, network = self._loop.time(), network_of(peer[0])
            places = self._acquainted if self._known.has(network, now) else self._strangers
            stranger = Stranger(sock, network, now, places)
            surplus = places.arrive(stranger)
            self._loop.add_reader(sock, self._first_byte, stranger)
            if surplus is not None:
                self._end(surplus)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _first_byte(self, stranger: Stranger) -> None:
        self._loop.remove_reader(stranger.sock)
        try:
            gone = not stranger.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            self._loop.add_reader(stranger.sock, self._first_byte, stranger)
            return
        except OSError:
            gone = True
        self._close(stranger) if gone else self._open(stranger)

    def _open(self, stranger: Stranger) -> None:
        """Begin TLS if there is a place."""
        entered, surplus = stranger.places.enter(stranger)
        if surplus is not None:
            self._end(surplus)
        if entered:
            stranger.waiting, stranger.since = False, self._loop.time()
            task = asyncio.create_task(self._shake_hands(stranger))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, stranger: Stranger) -> None:
        protocol = self._make_protocol()
        self._by_protocol[protocol] = stranger
        with contextlib.suppress(OSError):  # no TLS, or the connection is gone
            stranger.transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol, stranger.sock, ssl=self._tls, ssl_handshake_timeout=STRANGER_S)
        if stranger.transport is None or stranger.transport.is_closing():
            self._remove(stranger, protocol)

    def _remove(self, stranger: Stranger, protocol: object = None) -> None:
        """Free the place, and open the connections that have waited for one."""
        self._by_protocol.pop(protocol, None)
        if stranger.places.leave(stranger):
            while (following := stranger.places.next_ready()) is not None:
                self._open(following)

    def _close(self, stranger: Stranger) -> None:
        self._end(stranger)
        self._remove(stranger)

    def _end(self, stranger: Stranger) -> None:
        """End the connection, whatever its state."""
        if stranger.waiting:
            self._loop.remove_reader(stranger.sock)
            stranger.sock.close()
        elif stranger.transport is not None:
            stranger.transport.abort()
        else:  # asyncio has the socket; its handshake fails now
            with contextlib.suppress(OSError):
                stranger.sock.shutdown(socket.SHUT_RDWR)

    async def _sweep(self) -> None:
        """Close what has had its time, and free the places of connections that have ended."""
        most = 0
        while True:
            most = max(most, self.count)
            await asyncio.sleep(SWEEP_S)
            now = self._loop.time()
            if most >= CROWD and self.count < most // 4:
                most = self.count
                give_memory_back()
            for places in (self._strangers, self._acquainted):
                for stranger in places.overdue(now, STRANGER_S):
                    self._close(stranger)
                for stranger in places.open:
                    if stranger.transport is not None and stranger.transport.is_closing():
                        self._remove(stranger)
            self._by_protocol = {p: s for p, s in self._by_protocol.items() if s in s.places.open}


def give_memory_back() -> None:
    """Return free memory to the system: the allocator of the C library keeps it otherwise."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc
        trim(0)
