"""Timed reads and writes on one SSH channel."""

from __future__ import annotations

import time
from contextlib import suppress
from threading import Timer
from typing import Any

MOST_BYTES = 4 << 20  # maximum of a script's output


def ssh_error() -> type[Exception]:
    from paramiko import SSHException

    return SSHException


def close_quietly(what: Any) -> None:
    """Close quietly: closing sends a message, which fails on a broken connection."""
    with suppress(OSError, EOFError, ssh_error()):
        what.close()


def deadline_timer(channel: Any, end: float) -> Timer:
    """Start a timer that closes the channel's connection at `end`, unless cancelled.

    paramiko waits without a limit for the answer to a request, and for a machine whose frozen sshd stopped reading.
    """
    timer = Timer(max(0.0, end - time.monotonic()), close_quietly, (channel.transport,))
    timer.daemon = True
    timer.start()
    return timer


def send_stdin(channel: Any, data: bytes) -> None:
    """Send `data` as stdin. A channel closed by the other side is ignored: its buffered output can still be read."""
    try:
        channel.sendall(data)
        channel.shutdown_write()
    except OSError:
        if not (channel.closed and channel.transport.is_active()):
            raise


def has_output(channel: Any) -> bool:
    """Return whether a byte of output has arrived, and consume it."""
    return bool(channel.recv_ready() and channel.recv(1))


def read(channel: Any, receive: Any, end: float) -> str:
    """Read output until its end, or up to MOST_BYTES. Raises TimeoutError at `end`."""
    parts, size = [], 0
    while size < MOST_BYTES:
        channel.settimeout(seconds_left(end))
        data = receive(65536)
        if not data:
            break
        parts.append(data)
        size += len(data)
    return b"".join(parts).decode("utf-8", "replace")


def seconds_left(end: float) -> float:
    """Return the time until `end`; TimeoutError once it has passed."""
    left_s = end - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
