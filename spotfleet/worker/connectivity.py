"""Connectivity probes of peers, made only when a generation takes long to form, or fails to.

Each worker listens with its bootstrap store, so a connection to the store shows whether the peer can be reached. A
refused connection also shows it: the machine answers, and the end of a process is detected elsewhere.

Threads: one for each generation while it forms, and one for each that failed, for at most ANSWER_S.
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
          report: Callable[[tuple[str, ...]], None]) -> None:
    """Pass the unreachable ones of `peers` (worker, "address:port") to `report` on each change, while `forms()`."""

    def run() -> None:
        reported: tuple[str, ...] = ()
        end = time.monotonic() + AFTER_S
        while forms():
            if time.monotonic() < end:
                time.sleep(0.05)
                continue
            found = unreached(peers())
            if found != reported and forms():
                reported = found
                report(found)
            end = time.monotonic() + AGAIN_S

    threading.Thread(target=run, name="spotfleet-reach", daemon=True).start()


def probe(peers: Sequence[tuple[str, str]], report: Callable[[tuple[str, ...]], None]) -> None:
    """Pass the unreachable peers to `report` once, if there are any; at once where the kernel has no route."""

    def run() -> None:
        if found := unreached(peers):
            report(found)

    threading.Thread(target=run, name="spotfleet-reach", daemon=True).start()


def unreached(peers: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """List the peers that do not answer, in order, each as "WORKER at ADDRESS"."""
    found: list[str] = []
    for first in range(0, len(peers), AT_ONCE):
        found += _unanswered(peers[first:first + AT_ONCE])
    return tuple(found)


def _unanswered(peers: Sequence[tuple[str, str]]) -> list[str]:
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
            over = wait_s <= 0  # poll once more: this process may have been stopped, and not its peers
            for key, _ in selector.select(max(0.0, wait_s)):
                selector.unregister(key.fileobj)
                problem = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                if problem in (0, errno.ECONNREFUSED):
                    del left[key.data]
    return list(left.values())
