"""Blocking work for hosts' requests: a few threads of its own, so that nothing else of the dispatcher waits for a host.

    request --fewer than MOST_WAITING of its host are here--> its host's turn --a thread is free--> done
       |                                                        '--its caller has gone, its host is trusted no more, or
       '--503: the agent tries again                               the dispatcher ends--> stopped, soon
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from aiohttp import web

from spotfleet.dispatcher.http.requests import caller_of, host_of

THREADS = 4
MOST_WAITING = 32  # requests of one host that are here; a body may have 4 MiB
CHECK_S = 0.2  # period of the checks whether somebody still waits for the answer

T = TypeVar("T")


class HostWork:
    """Threads for hosts' requests. Each host has one at a time."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "hosts")
        self._waiting: Counter[str] = Counter()
        self._turns: dict[str, asyncio.Lock] = {}

    @contextmanager
    def admitted(self, host: str) -> Iterator[None]:
        """Count a request of this host, before its body is read. Raises HTTPServiceUnavailable: it is one too many."""
        if self._waiting[host] >= MOST_WAITING:
            raise web.HTTPServiceUnavailable(text="")
        self._waiting[host] += 1
        try:
            yield
        finally:
            self._waiting[host] -= 1
            if not self._waiting[host]:
                del self._waiting[host]
                self._turns.pop(host, None)

    async def run(self, request: web.Request, work: Callable[[Callable[[], bool]], T]) -> T:
        """Return the result of `work`, which gets a function that returns True once it is to stop. The request has been
        `admitted`."""
        async with self._turns.setdefault(host_of(request), asyncio.Lock()):
            host_of(request)  # it may be revoked by now
            stop = threading.Event()
            running = self._threads.submit(work, stop.is_set)
            done = asyncio.wrap_future(running)
            try:
                while not (await asyncio.wait({done}, timeout=CHECK_S))[0]:
                    if not _is_awaited(request):
                        stop.set()
                return done.result()
            except asyncio.CancelledError:
                stop.set()
                running.cancel()
                await asyncio.wait({done})
                raise

    def close(self) -> None:
        """Start nothing more. Work under way ends with its request."""
        self._threads.shutdown(wait=False, cancel_futures=True)


HOST_WORK: web.AppKey[HostWork] = web.AppKey("host_work")


def _is_awaited(request: web.Request) -> bool:
    """Return whether the caller is still connected, and trusted."""
    return request.transport is not None and not request.transport.is_closing() and caller_of(request) is not None
