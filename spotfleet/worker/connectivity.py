"""Connectivity probes of peers, made when a generation takes long to form or fails to, and in a long wait over NCCL.

Each worker listens with its bootstrap store, so a connection to the store shows whether the peer can be reached. A
refused connection also shows it: the machine answers. It means that the process has ended, which `RefusalWatch` looks
for. A machine that does not answer may be slow or cut off: nothing follows from it there.

Threads: one for each generation while it forms, and one for each that failed, for at most ANSWER_S; one for each look
of a `RefusalWatch`.
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
REFUSED_AGAIN_S = 2.0


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


class RefusalWatch:
    """Search for peers whose process has ended, while a wait goes on that may never report it."""

    def __init__(self, peers: Callable[[], Sequence[tuple[str, str]]]) -> None:
        self._peers = peers
        self._gone: tuple[str, ...] = ()
        self._before: frozenset[str] = frozenset()  # those that refused in the last look
        self._looking: threading.Thread | None = None
        self._next_look = 0.0

    def gone(self) -> tuple[str, ...]:
        """Return the peers that have refused in two looks in a row. Never blocks; polled in a wait."""
        now = time.monotonic()
        if now >= self._next_look and not (self._looking and self._looking.is_alive()):
            self._next_look = now + REFUSED_AGAIN_S * max(1.0, len(self._peers()) / AT_ONCE)
            self._looking = threading.Thread(target=self._look, name="spotfleet-reach", daemon=True)
            self._looking.start()
        return self._gone

    def _look(self) -> None:
        found = refusing(self._peers())
        self._gone = tuple(peer for peer in found if peer in self._before)
        self._before = frozenset(found)


def unreached(peers: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """List the peers that do not answer, in order, each as "WORKER at ADDRESS"."""
    return _listed(peers, lambda answer: answer not in (0, errno.ECONNREFUSED))


def refusing(peers: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """List the peers whose machine answers and whose process does not listen any more, as `unreached` does."""
    return _listed(peers, lambda answer: answer == errno.ECONNREFUSED)


def _listed(peers: Sequence[tuple[str, str]], wanted: Callable[[int | None], bool]) -> tuple[str, ...]:
    found: list[str] = []
    for first in range(0, len(peers), AT_ONCE):
        part = peers[first:first + AT_ONCE]
        found += [f"{worker} at {split(place)[0]}" for (worker, place), answer in zip(part, _answers(part), strict=True)
                  if wanted(answer)]
    return tuple(found)


def _answers(peers: Sequence[tuple[str, str]]) -> list[int | None]:
    """Return for each peer the error of a connection to it, 0 for none; None without an answer."""
    found: list[int | None] = [None] * len(peers)
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for number, (_, place) in enumerate(peers):
            address, port = split(place)
            sock = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
            sock.setblocking(False)
            with suppress(OSError):  # no route: no answer
                if sock.connect_ex((address, port)) in (0, errno.EINPROGRESS, errno.ECONNREFUSED):
                    selector.register(sock, selectors.EVENT_WRITE, number)
        end, over = time.monotonic() + ANSWER_S, False
        while selector.get_map() and not over:
            wait_s = end - time.monotonic()
            over = wait_s <= 0  # poll once more: this process may have been stopped, and not its peers
            for key, _ in selector.select(max(0.0, wait_s)):
                selector.unregister(key.fileobj)
                found[key.data] = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
    return found
