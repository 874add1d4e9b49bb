"""The bootstrap store of a generation: keys and values over plain sockets with numeric addresses.

torch's TCPStore resolves the names of its peers: five seconds a connection where the resolver is slow, none of which
an abort can end. gloo needs `set`, `get` and `wait` only, so this is all there is. Nothing is pickled.

A request is one byte ("S" set, "G" get), the sizes of key and value, key, value; the answer to a get is the value's
size and the value, sent once the key exists. Unauthenticated, as gloo itself: bound to the advertised address only.

Threads: `Server` has one of its own. A `Client` belongs to whichever thread forms its group.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_HEAD = struct.Struct("!cII")
_SIZE = struct.Struct("!I")
LARGEST = 1 << 20  # gloo's values are some hundred bytes; a client that announces more is cut off
CONNECT_LIMIT_S = 0.5  # callers try again
SEND_LIMIT_S = 5.0  # a client that does not read is cut off


class Server:
    """Serves until the process ends; each worker has one, and the lowest rank's serves a generation."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((address, 0))
        self._listener.listen(512)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, list[socket.socket]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        threading.Thread(target=self._serve, name="spotfleet-store", daemon=True).start()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.fileobj, key.data)  # type: ignore[arg-type]

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return  # it has gone again
        client.settimeout(SEND_LIMIT_S)
        self._selector.register(client, selectors.EVENT_READ, bytearray())

    def _read(self, client: socket.socket, pending: bytearray) -> None:
        try:
            data = client.recv(1 << 16)
            pending += data
            if not data or not self._requests(client, pending):
                raise ConnectionError
        except OSError:
            self._selector.unregister(client)
            client.close()

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
    """A view of the store at `host`:`port` under `prefix`. OSError (TimeoutError, ConnectionError) when it fails."""

    def __init__(self, host: str, port: int, prefix: str, limit_s: float) -> None:
        super().__init__()
        self._prefix = prefix
        self._sock = socket.create_connection((host, port), timeout=CONNECT_LIMIT_S)
        self._sock.settimeout(limit_s)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

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

    def close(self) -> None:
        self._sock.close()

    def _name(self, key: Any) -> bytes:
        return f"{self._prefix}/{key}".encode()

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._sock.recv(size - len(data))
            if not piece:
                raise ConnectionError("the bootstrap store has gone")
            data += piece
        return data
