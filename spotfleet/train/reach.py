"""Which peers cannot be reached from here: looked at only when a generation takes long to form, or fails to.

Each worker listens with its bootstrap store, so a connection to that shows whether there is a way. One that is refused
shows it, too: the machine answers, and of a process that has ended others know better.

Threads: one of its own for each generation, while that forms, and one for each that failed, for ANSWER_S at most.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from spotfleet.addresses import split

AFTER_S = 3.0  # most generations have formed long before
ANSWER_S = 2.0  # a machine that has not answered by then cannot be reached
AGAIN_S = 3.0
AT_ONCE = 64


def watch(peers: Callable[[], Sequence[tuple[str, str]]], forms: Callable[[], bool],
          tell: Callable[[tuple[str, ...]], None]) -> None:
    """While `forms()`, tell whom of `peers` (worker, "address:port") there is no way to, whenever that changes."""

    def run() -> None:
        said: tuple[str, ...] = ()
        end = time.monotonic() + AFTER_S
        while forms():
            if time.monotonic() < end:
                time.sleep(0.05)
                continue
            found = unreached(peers())
            if found != said and forms():
                said = found
                tell(found)
            end = time.monotonic() + AGAIN_S

    threading.Thread(target=run, name="spotfleet-reach", daemon=True).start()


def look(peers: Sequence[tuple[str, str]], tell: Callable[[tuple[str, ...]], None]) -> None:
    """Tell once whom there is no way to, if there is anybody; soon, where the kernel knows no route."""

    def run() -> None:
        if found := unreached(peers):
            tell(found)

    threading.Thread(target=run, name="spotfleet-reach", daemon=True).start()


def unreached(peers: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """ "WORKER at ADDRESS", of each peer that does not answer, in order."""
    found: list[str] = []
    for first in range(0, len(peers), AT_ONCE):
        found += _silent(peers[first:first + AT_ONCE])
    return tuple(found)


def _silent(peers: Sequence[tuple[str, str]]) -> list[str]:
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        left: dict[int, str] = {}
        for number, (worker, place) in enumerate(peers):
            address, port = split(place)
            sock = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
            sock.setblocking(False)
            left[number] = f"{worker} at {address}"
            with suppress(OSError):  # no route: it stays on the list
                if sock.connect_ex((address, port)) in (0, errno.EINPROGRESS, errno.ECONNREFUSED):
                    selector.register(sock, selectors.EVENT_WRITE, number)
        end, over = time.monotonic() + ANSWER_S, False
        while selector.get_map() and not over:
            wait_s = end - time.monotonic()
            over = wait_s <= 0  # one more look: it may be this process that has stood still, and not its peers
            for key, _ in selector.select(max(0.0, wait_s)):
                selector.unregister(key.fileobj)
                problem = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                if problem in (0, errno.ECONNREFUSED):
                    del left[key.data]
    return list(left.values())
