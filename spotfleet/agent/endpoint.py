"""Endpoint of the fleet's dispatcher: its URL at the host's launch, or the one in a tag of the host.

    answers --not reached for AWAY_S--> searched: every TAG_PERIOD_S the tag is read, every known URL is tried in turn
       ^------------------------- a URL answers with orders ---------------------------------'

The tag is not authenticated and need not be: only https is tried, and the server must prove the fleet's certificate
before it receives a token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from spotfleet.errors import SpotfleetError

log = logging.getLogger("spotfleet.agent")

AWAY_S = 2.0
TAG_PERIOD_S = 2.0


class DispatcherEndpoint:
    """The dispatcher's known URLs, and the one to try next."""

    def __init__(self, first_url: str, read_tag: Callable[[], str] | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """`read_tag` may block for seconds, and raise SpotfleetError or OSError; None where hosts have no tags."""
        self.url = first_url.rstrip("/")  # the one that answered last
        self.answers = 0  # number of connections that brought orders; each may be to another dispatcher
        self._first_url, self._tag = self.url, ""
        self._read_tag, self._clock = read_tag, clock
        self._next = 0
        self._away_since: float | None = None
        self._tag_read_at = float("-inf")
        self._last_logged = ""

    def next(self) -> str:
        """Return the URL to try now: the one that answered last comes first, then each other known one."""
        places = list(dict.fromkeys(p for p in (self.url, self._tag, self._first_url) if p))
        return places[self._next % len(places)]

    def answered(self, url: str) -> None:
        """Record that the dispatcher has sent orders from `url`."""
        if url != self.url:
            log.info("the dispatcher is at %s now", url)
        self.url, self._next, self._away_since = url, 0, None
        self.answers += 1

    async def failed(self) -> bool:
        """Record a failed try or an ended connection, and read the tag if it is due.

        Returns whether the tag names a new URL, to be tried at once.
        """
        now = self._clock()
        if self._away_since is None:
            self._away_since = now
        if now - self._away_since < AWAY_S:
            return False
        self._next += 1
        if self._read_tag is None or now - self._tag_read_at < TAG_PERIOD_S:
            return False
        self._tag_read_at = now
        return await self._refresh_tag(self._read_tag)

    async def _refresh_tag(self, read_tag: Callable[[], str]) -> bool:
        try:
            found = (await asyncio.to_thread(read_tag)).strip().rstrip("/")
        except (SpotfleetError, OSError) as error:
            self._log_change(f"the host's tags cannot be read: {error or type(error).__name__}")
            return False
        if found and not found.startswith("https://"):
            self._log_change(f"the host's tag names {found!r} as the dispatcher, which is not https://ADDRESS:PORT")
        elif found != self._tag:
            self._tag, self._next = found, 1 if found != self.url else 0
            self._log_change(f"the host's tag names {found or 'no dispatcher'}")
            return bool(found)
        return False

    def _log_change(self, text: str) -> None:
        if text != self._last_logged:
            log.warning("%s", text)
        self._last_logged = text
