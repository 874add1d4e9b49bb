"""A slow wire between two network interfaces: `python wire.py LEFT RIGHT DELAY_S LOSS`, for `Namespaces.slow`.

What comes in at one interface leaves at the other DELAY_S later, or never, with probability LOSS. It does what `tc
netem` does, also on kernels that have no netem. Prints a line once it carries; ends when stdin does.
"""

from __future__ import annotations

import random
import select
import socket
import sys
import time
from collections import deque

_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
_RCVBUFFORCE, _SNDBUFFORCE = 33, 32
_EVERY_PROTOCOL = 3  # ETH_P_ALL
_LARGEST = 1 << 17  # a frame may stand for many: segmentation is left to the card, and there is none
_BATCH = 64


def opened(interface: str) -> socket.socket:
    """Frames of the interface, each behind the header that says what is left to the card: checksum and segmentation."""
    frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    frames.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    frames.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    frames.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, 64 << 20)
    frames.setsockopt(socket.SOL_SOCKET, _SNDBUFFORCE, 64 << 20)
    frames.bind((interface, _EVERY_PROTOCOL))
    frames.setblocking(False)
    return frames


class Direction:
    def __init__(self, source: socket.socket, target: socket.socket, delay_s: float, loss: float) -> None:
        self._source, self._target, self._delay_s, self._loss = source, target, delay_s, loss
        self._queue: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        for _ in range(_BATCH):
            try:
                frame = self._source.recv(_LARGEST)
            except BlockingIOError:
                return
            except OSError:  # the interface is down: what it had is lost
                return
            if not self._loss or random.random() >= self._loss:
                self._queue.append((time.monotonic() + self._delay_s, frame))

    def give(self) -> float | None:
        """Send what is due; seconds until more is, None if nothing waits."""
        while self._queue:
            wait_s = self._queue[0][0] - time.monotonic()
            if wait_s > 0:
                return wait_s
            frame = self._queue.popleft()[1]
            try:
                self._target.send(frame)
            except OSError:  # down, or its queue is full: lost
                continue
        return None


def main() -> None:
    left, right, delay_s, loss = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    ends = [opened(left), opened(right)]
    ways = {ends[0].fileno(): Direction(ends[0], ends[1], delay_s, loss),
            ends[1].fileno(): Direction(ends[1], ends[0], delay_s, loss)}
    poll = select.epoll()
    for number in ways:
        poll.register(number, select.EPOLLIN)
    poll.register(sys.stdin.fileno(), select.EPOLLIN | select.EPOLLHUP)
    print("carries", flush=True)
    while True:
        waits = [s for s in (way.give() for way in ways.values()) if s is not None]
        for number, _ in poll.poll(min(waits) if waits else None):
            if number not in ways:
                return
            ways[number].take()


if __name__ == "__main__":
    main()
