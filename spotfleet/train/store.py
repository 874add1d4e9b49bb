"""The bootstrap store of a generation: keys and values over plain sockets with numeric addresses.

torch's TCPStore resolves the names of its peers: five seconds a connection where the resolver is slow, none of which
an abort can end. gloo needs `set`, `get` and `wait` only, so this is all there is. Nothing is pickled.

    client connects --nonce S--> client --nonce C, MAC(key, "client" S C)--> server --MAC(key, "server" S C)--> requests

Whoever lacks the job's key is cut off before a request of theirs is read: after HELLO_LIMIT_S, at a wrong MAC, or when
MOST_STRANGERS are there. Afterwards a request is one byte ("S" set, "G" get), the sizes of key and value, key, value;
the answer to a get is the value's size and the value, sent once the key exists. Not encrypted, as gloo itself is not.

Threads: `Server` has one of its own. A `Client` belongs to whichever thread forms its group.
"""

from __future__ import annotations

import hashlib
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

import torch.distributed as dist

_HEAD = struct.Struct("!cII")
_SIZE = struct.Struct("!I")
_NONCE, _MAC = 16, 32  # bytes
LARGEST = 1 << 20  # gloo's values are some hundred bytes; a client that announces more is cut off
CONNECT_LIMIT_S = 0.5  # callers try again
SEND_LIMIT_S = 5.0  # a client that does not read is cut off
HELLO_LIMIT_S = 5.0  # a client that does not show in this time that it knows the key is cut off
MOST_STRANGERS = 512  # connections that have not shown it yet; the oldest of the most crowded address goes first
_SWEEP_S, _GONE_S = 0.5, 0.005


@dataclass
class _Peer:
    """A connection; a stranger until it has shown that it knows the key."""

    address: str
    since: float
    nonce: bytes = b""
    known: bool = False
    pending: bytearray = field(default_factory=bytearray)


def _mac(key: str, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.new(key.encode(), side + server_nonce + client_nonce, hashlib.sha256).digest()


class Server:
    """Serves until it or the process ends; each worker has one, and the lowest rank's serves a generation."""

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
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        threading.Thread(target=self._serve, name="spotfleet-store", daemon=True).start()

    def close(self) -> None:
        """Serve nobody any more: its thread ends and lets go of all connections. Any thread."""
        if not self._closed:
            self._closed = True
            self._listener.shutdown(socket.SHUT_RDWR)  # which its thread sees

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
            elif key.fileobj.fileno() >= 0:  # type: ignore[union-attr]  # not cut off since
                self._read(key.fileobj, key.data)  # type: ignore[arg-type]
        late = [s for s, p in self._strangers.items() if time.monotonic() - p.since > HELLO_LIMIT_S]
        for sock in late:
            self._cut_off(sock)

    def _accept(self) -> None:
        try:
            client, name = self._listener.accept()
        except OSError:
            time.sleep(_GONE_S)  # it has gone again; or no descriptor is left: no tight loop
            return
        client.settimeout(SEND_LIMIT_S)
        peer = _Peer(name[0], time.monotonic(), secrets.token_bytes(_NONCE))
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
            if not data or not (peer.known or self._meet(client, peer)):
                raise ConnectionError
            if peer.known and not self._requests(client, peer.pending):
                raise ConnectionError
        except OSError:
            self._cut_off(client)

    def _meet(self, client: socket.socket, peer: _Peer) -> bool:
        """False if it does not know the key; still a stranger while its answer is not here in full."""
        if len(peer.pending) < _NONCE + _MAC:
            return True
        theirs, shown = bytes(peer.pending[:_NONCE]), bytes(peer.pending[_NONCE:_NONCE + _MAC])
        if not hmac.compare_digest(shown, _mac(self._key, b"client", peer.nonce, theirs)):
            return False
        del peer.pending[:_NONCE + _MAC]
        peer.known = True
        del self._strangers[client]
        client.sendall(_mac(self._key, b"server", peer.nonce, theirs))
        return True

    def _requests(self, client: socket.socket, pending: bytearray) -> bool:
        """Take every whole request; False if the client makes no sense."""
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
                continue  # it has gone; its own event says so


def _answer(client: socket.socket, value: bytes) -> None:
    client.sendall(_SIZE.pack(len(value)) + value)


class Client(dist.Store):  # type: ignore[misc]  # torch's stub has no constructor
    """A view of the store at `host`:`port` under `prefix`.

    OSError (TimeoutError, ConnectionError) when it fails, also where whoever serves there lacks the job's `key`.
    """

    def __init__(self, host: str, port: int, prefix: str, limit_s: float, key: str,
                 connect_s: float = CONNECT_LIMIT_S) -> None:
        """`connect_s`: more than 1 s lets the kernel try again, where the network has lost its first word."""
        super().__init__()
        self._prefix = prefix
        self._sock = socket.create_connection((host, port), timeout=connect_s)
        self._sock.settimeout(limit_s)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._meet(key)
        except OSError:
            self._sock.close()
            raise

    def _meet(self, key: str) -> None:
        theirs, mine = self._receive(_NONCE), secrets.token_bytes(_NONCE)
        self._sock.sendall(mine + _mac(key, b"client", theirs, mine))
        if not hmac.compare_digest(self._receive(_MAC), _mac(key, b"server", theirs, mine)):
            raise ConnectionError("the bootstrap store does not know this job's key")

    def set(self, key: str, value: bytes | str) -> None:
        name, data = self._name(key), value.encode() if isinstance(value, str) else bytes(value)
        self._sock.sendall(_HEAD.pack(b"S", len(name), len(data)) + name + data)

    def get(self, key: str) -> bytes:
        """The value, as soon as somebody has set it."""
        name = self._name(key)
        self._sock.sendall(_HEAD.pack(b"G", len(name), 0) + name)
        return self._receive(_SIZE.unpack(self._receive(_SIZE.size))[0])

    def wait(self, keys: Iterable[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def interrupt(self) -> None:
        """Let a call that another thread is in fail now. Any thread."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was not connected any more

    def close(self) -> None:
        self._sock.close()

    def _name(self, key: Any) -> bytes:
        return f"{self._prefix}/{key}".encode()

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._sock.recv(size - len(data))
            if not piece:
                raise ConnectionError("the bootstrap store has gone, or refuses this job's key")
            data += piece
        return data
