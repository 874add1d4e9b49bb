"""OpenSSH's protocol between a client and the `ssh` that shares its connection (its PROTOCOL.mux, version 4).

It opens a stream to a far port without starting a process, and a refusal includes a reason.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

HELLO, ALIVE_CHECK, TERMINATE, NEW_STDIO_FWD, STOP_LISTENING = 1, 0x10000004, 0x10000005, 0x10000008, 0x10000009
OK, PERMISSION_DENIED, FAILURE, ALIVE, SESSION_OPENED = (0x80000000 | n for n in (1, 2, 3, 5, 6))
VERSION = 4
LONGEST = 256 << 10


class StreamRefused(ConnectionRefusedError):
    """Error: the connection lives, but the far side does not open the stream."""


@dataclass
class MuxControl:
    """Session with the `ssh` that listens at a control path. Raises TimeoutError when it does not answer in time,
    another OSError when it is gone."""

    sock: socket.socket
    deadline: float  # monotonic

    @classmethod
    def connect(cls, path: Path, deadline: float) -> MuxControl:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        control = cls(sock, deadline)
        try:
            control._hurry()
            sock.connect(str(path))
            control._send(struct.pack(">II", HELLO, VERSION))
            kind, body = control._receive()
            if kind != HELLO or struct.unpack_from(">I", body)[0] != VERSION:
                raise ConnectionError(f"whoever listens at {path} is no ssh that we know")
        except BaseException:
            sock.close()
            raise
        return control

    def pid(self) -> int:
        return struct.unpack_from(">I", self._ask(ALIVE_CHECK, b"", ALIVE))[0]

    def stop_listening(self) -> None:
        """Stop accepting clients; the process ends when the streams of the others have ended."""
        self._ask(STOP_LISTENING, b"", OK)

    def terminate(self) -> None:
        self._ask(TERMINATE, b"", OK)

    def open(self, address: str, port: int) -> socket.socket:
        """Open a stream to that port, as the far machine sees it; it lasts as long as this SSH connection.

        Raises StreamRefused.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                host = address.encode()
                self._send(struct.pack(">III", NEW_STDIO_FWD, 0, 0) + struct.pack(">I", len(host)) + host
                           + struct.pack(">I", port))
                for _ in ("stdin", "stdout"):
                    self._hurry()
                    socket.send_fds(self.sock, [b"\0"], [theirs.fileno()])
            self._answer(SESSION_OPENED)
        except BaseException:
            ours.close()
            raise
        return ours

    @property
    def over(self) -> bool:
        """Return whether the far side has closed the connection, as it does at the end of the stream."""
        self.sock.setblocking(False)
        try:
            return not self.sock.recv(LONGEST)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.sock.close()

    def _ask(self, kind: int, body: bytes, expected: int) -> bytes:
        self._send(struct.pack(">II", kind, 0) + body)
        return self._answer(expected)

    def _answer(self, expected: int) -> bytes:
        kind, body = self._receive()
        if kind in (FAILURE, PERMISSION_DENIED):
            raise StreamRefused(body[8:].decode(errors="replace"))
        if kind != expected:
            raise ConnectionError(f"ssh answers {kind:#x}, not {expected:#x}")
        return body[4:]  # without the number of the request

    def _send(self, packet: bytes) -> None:
        self._hurry()
        self.sock.sendall(struct.pack(">I", len(packet)) + packet)

    def _receive(self) -> tuple[int, bytes]:
        length = struct.unpack(">I", self._exactly(4))[0]
        if not 4 <= length <= LONGEST:
            raise ConnectionError(f"ssh announces {length} bytes")
        packet = self._exactly(length)
        return struct.unpack_from(">I", packet)[0], packet[4:]

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._hurry()
            more = self.sock.recv(size - len(data))
            if not more:
                raise ConnectionResetError("ssh has closed its control socket")
            data += more
        return data

    def _hurry(self) -> None:
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("ssh does not answer")
        self.sock.settimeout(left_s)
