"""Bootstrap store of a generation: keys and values over plain sockets with numeric addresses.

torch's TCPStore resolves the names of its peers: up to five seconds a connection where the resolver is slow, and no
abort can interrupt that. gloo needs only `set`, `get` and `wait`, so this store has no more (torch_store.py adapts it
for torch). Nothing is pickled.

    client connects --nonce S--> client --nonce C, MAC(key, "client" S C)--> server --MAC(key, "server" S C)--> requests

A client without the job's key is disconnected before any request of it is read: after HELLO_LIMIT_S, at a wrong MAC,
or when there are MOST_STRANGERS. After the handshake a request is one byte ("S" set, "G" get), the sizes of key and
value, key, value; the answer to a get is the value's size and the value, sent once the key exists. The connection is
not encrypted; neither are gloo's.

The servers of this process are registered from their creation to their `close`. A connection accepted by one of them
may belong to another generation than the one that ends, so only the server shuts it (`served_ports`).

Threads: `Server` has one of its own. A `StoreClient` belongs to the thread that forms its group. `served_ports`: any.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from spotfleet.addresses import joined
from spotfleet.worker.handshake import MAC, NONCE, mac, prove, receive

_HEAD = struct.Struct("!cII")
_SIZE = struct.Struct("!I")
_SERVER = "bootstrap store"
LARGEST = 1 << 20  # gloo's values have some hundred bytes; a client that announces more is disconnected
CONNECT_LIMIT_S = 0.5  # callers try again
SEND_LIMIT_S = 5.0  # a client that does not read is disconnected
HELLO_LIMIT_S = 5.0  # time for a client to prove that it knows the key
MOST_STRANGERS = 512  # connections without that proof; the oldest of the most frequent address is closed first
_SWEEP_S, _GONE_S = 0.5, 0.005


@dataclass
class _Peer:
    """A connection; a stranger until it has proved that it knows the key."""

    address: str
    since: float
    nonce: bytes = b""
    known: bool = False
    pending: bytearray = field(default_factory=bytearray)


class Server:
    """Server of the store, open until `close` or the end of the process.

    Each worker has one; the one of the lowest rank serves a generation.
    """

    def __init__(self, address: str, key: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((address, 0))
        self._listener.listen(512)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._key = key
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, list[socket.socket]] = {}
        self._strangers: dict[socket.socket, _Peer] = {}  # oldest first
        self._closed = False
        self._closing = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        _serving.add(self)
        threading.Thread(target=self._serve, name="spotfleet-store", daemon=True).start()

    def close(self) -> None:
        """Stop serving: the server's thread closes all connections and ends. Any thread may call it."""
        with self._closing:
            if not self._closed:
                _serving.discard(self)
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the server's thread
                self._closed = True  # last, as that thread then closes the listener

    def _serve(self) -> None:
        with self._selector:
            while not self._closed:
                self._serve_once()
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]

    def _serve_once(self) -> None:
        for key, _ in self._selector.select(_SWEEP_S if self._strangers else None):
            if key.data is None:
                self._accept()
            elif key.fileobj.fileno() >= 0:  # type: ignore[union-attr]  # not disconnected since
                self._read(key.fileobj, key.data)  # type: ignore[arg-type]
        late = [s for s, p in self._strangers.items() if time.monotonic() - p.since > HELLO_LIMIT_S]
        for sock in late:
            self._cut_off(sock)

    def _accept(self) -> None:
        try:
            client, name = self._listener.accept()
        except OSError:
            time.sleep(_GONE_S)  # the client has gone, or no descriptor is left: no tight loop
            return
        client.settimeout(SEND_LIMIT_S)
        peer = _Peer(name[0], time.monotonic(), secrets.token_bytes(NONCE))
        self._strangers[client] = peer
        self._selector.register(client, selectors.EVENT_READ, peer)
        if len(self._strangers) > MOST_STRANGERS:
            crowd, _ = Counter(p.address for p in self._strangers.values()).most_common(1)[0]
            self._cut_off(next(s for s, p in self._strangers.items() if p.address == crowd))
        if client in self._strangers:
            self._send(client, peer.nonce)

    def _send(self, client: socket.socket, data: bytes) -> None:
        try:
            client.sendall(data)
        except OSError:
            self._cut_off(client)

    def _cut_off(self, client: socket.socket) -> None:
        self._strangers.pop(client, None)
        self._selector.unregister(client)
        client.close()

    def _read(self, client: socket.socket, peer: _Peer) -> None:
        try:
            data = client.recv(1 << 16)
            peer.pending += data
            if not data or not (peer.known or self._authenticate(client, peer)):
                raise ConnectionError
            if peer.known and not self._requests(client, peer.pending):
                raise ConnectionError
        except OSError:
            self._cut_off(client)

    def _authenticate(self, client: socket.socket, peer: _Peer) -> bool:
        """Check the client's proof; False if it does not know the key. A partial answer leaves it a stranger."""
        if len(peer.pending) < NONCE + MAC:
            return True
        client_nonce, proof = bytes(peer.pending[:NONCE]), bytes(peer.pending[NONCE:NONCE + MAC])
        if not hmac.compare_digest(proof, mac(self._key, b"client", peer.nonce, client_nonce)):
            return False
        del peer.pending[:NONCE + MAC]
        peer.known = True
        del self._strangers[client]
        client.sendall(mac(self._key, b"server", peer.nonce, client_nonce))
        return True

    def _requests(self, client: socket.socket, pending: bytearray) -> bool:
        """Handle every whole request; False at an invalid one."""
        while len(pending) >= _HEAD.size:
            kind, key_size, value_size = _HEAD.unpack_from(pending)
            if kind not in (b"S", b"G") or max(key_size, value_size) > LARGEST:
                return False
            end = _HEAD.size + key_size + value_size
            if len(pending) < end:
                return True
            key = bytes(pending[_HEAD.size:_HEAD.size + key_size])
            value = bytes(pending[_HEAD.size + key_size:end])
            del pending[:end]
            if kind == b"S":
                self._set(key, value)
            elif key in self._values:
                _answer(client, self._values[key])
            else:
                self._waiting.setdefault(key, []).append(client)
        return True

    def _set(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for client in self._waiting.pop(key, []):
            try:
                _answer(client, value)
            except OSError:
                continue  # it has gone; its own event closes it


_serving: set[Server] = set()


def served_ports() -> frozenset[int]:
    """Return the ports of this process's open stores."""
    return frozenset([server.port for server in tuple(_serving)])


def close_all() -> None:
    """Close every store of this process, for a process that goes on without them."""
    for server in tuple(_serving):
        server.close()


def open_store(address: str, key: str) -> tuple[Server, str]:
    """Open a bootstrap store on `address` only, for clients with the job's `key`; return it and its "address:port"."""
    store = Server(address, key)
    return store, joined(address, store.port)


def _answer(client: socket.socket, value: bytes) -> None:
    client.sendall(_SIZE.pack(len(value)) + value)


class StoreClient:
    """Client of the store at `host`:`port`, for the keys under `prefix`.

    OSError (TimeoutError, ConnectionError) when it fails, also where the server lacks the job's `key`.
    """

    def __init__(self, host: str, port: int, prefix: str, limit_s: float, key: str,
                 connect_s: float = CONNECT_LIMIT_S) -> None:
        """`connect_s`: more than 1 s lets the kernel resend a lost first packet."""
        super().__init__()  # torch's store, in a subclass of both
        self._prefix = prefix
        self._sock = socket.create_connection((host, port), timeout=connect_s)
        self._sock.settimeout(limit_s)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            prove(self._sock, key, _SERVER)
        except OSError:
            self._sock.close()
            raise

    def set(self, key: str, value: bytes | str) -> None:
        name, data = self._name(key), value.encode() if isinstance(value, str) else bytes(value)
        self._sock.sendall(_HEAD.pack(b"S", len(name), len(data)) + name + data)

    def get(self, key: str) -> bytes:
        """Return the value, once it has been set."""
        name = self._name(key)
        self._sock.sendall(_HEAD.pack(b"G", len(name), 0) + name)
        return self._receive(_SIZE.unpack(self._receive(_SIZE.size))[0])

    def wait(self, keys: Iterable[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def interrupt(self) -> None:
        """Make a call in another thread fail now. Any thread may call it."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # no longer connected

    def close(self) -> None:
        self._sock.close()

    def _name(self, key: Any) -> bytes:
        return f"{self._prefix}/{key}".encode()

    def _receive(self, size: int) -> bytes:
        return receive(self._sock, size, _SERVER)
