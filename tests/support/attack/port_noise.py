"""Random bytes at every port on which the workers of a fleet listen."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import psutil

PAUSE_S = 0.05
CONNECT_S, ANSWER_S = 1.0, 0.05
LIMIT_S = 30.0
MEANINGFUL = (b"\0" * 64, b"\xff" * 64, (2**62).to_bytes(8, "little") * 4, b"GET / HTTP/1.1\r\n\r\n",
              (5).to_bytes(4, "little") + b"abcde")


class PortNoise:
    """A thread that connects and sends, from `start` to `stop`."""

    def __init__(self, workers: Callable[[], list[psutil.Process]], seed: int) -> None:
        self._workers, self._dice = workers, random.Random(seed)
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.connections = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._enough.set()
        self._thread.join(LIMIT_S)

    def _run(self) -> None:
        held: list[socket.socket] = []
        try:
            while not self._enough.wait(PAUSE_S):
                for address in listening(self._workers()):
                    with suppress(OSError):
                        held += self._send(address)
        finally:
            for sock in held:
                sock.close()

    def _send(self, address: tuple[str, int]) -> list[socket.socket]:
        """Send something; return the connection if it stays open, as some peers never close theirs."""
        data = self._dice.choice([self._dice.randbytes(self._dice.randint(1, 3000)), *MEANINGFUL])
        sock = socket.create_connection(address, CONNECT_S)
        self.connections += 1
        try:
            sock.settimeout(ANSWER_S)
            sock.sendall(data)
            with suppress(TimeoutError):
                sock.recv(64)
        except OSError:
            sock.close()
            return []
        if self._dice.random() < 0.7:
            sock.close()
            return []
        return [sock]


def listening(processes: list[psutil.Process]) -> list[tuple[str, int]]:
    found = set()
    for process in processes:
        with suppress(psutil.Error):
            found |= {(c.laddr.ip, c.laddr.port) for c in process.net_connections("tcp") if c.status == "LISTEN"}
    return sorted(found)
