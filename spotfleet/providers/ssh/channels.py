"""What is said and heard over one channel of an SSH connection, in bounded time."""

from __future__ import annotations

import time
from contextlib import suppress
from threading import Timer
from typing import Any

MOST_BYTES = 4 << 20  # of what a script says


def ssh_error() -> type[Exception]:
    from paramiko import SSHException

    return SSHException


def closed(what: Any) -> None:
    """Closing says goodbye, and fails where the way there has just broken."""
    with suppress(OSError, EOFError, ssh_error()):
        what.close()


def ending(channel: Any, end: float) -> Timer:
    """Ends the channel's connection at `end`, until it is cancelled: paramiko waits without a limit for the answer to a
    request, and for a machine whose frozen sshd reads no more."""
    timer = Timer(max(0.0, end - time.monotonic()), closed, (channel.transport,))
    timer.daemon = True
    timer.start()
    return timer


def tell(channel: Any, words: bytes) -> None:
    """Where the other side has closed the channel already, what it said before that is still to be read."""
    try:
        channel.sendall(words)
        channel.shutdown_write()
    except OSError:
        if not (channel.closed and channel.transport.is_active()):
            raise


def printed(channel: Any) -> bool:
    return bool(channel.recv_ready() and channel.recv(1))


def read(channel: Any, receive: Any, end: float) -> str:
    parts, size = [], 0
    while size < MOST_BYTES:
        channel.settimeout(left(end))
        data = receive(65536)
        if not data:
            break
        parts.append(data)
        size += len(data)
    return b"".join(parts).decode("utf-8", "replace")


def left(end: float) -> float:
    left_s = end - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
