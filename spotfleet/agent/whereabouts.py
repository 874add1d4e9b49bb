"""Where the fleet's dispatcher is: where it was at this host's birth, or where a tag of the host says it is by now.

    answers --not reached for AWAY_S--> looked for: each LOOK_S the tag is read, and every known place is tried in turn
       ^------------------------- some place answers with orders -------------------------------'

A tag proves nothing, and need not: only https is tried, and whoever answers must hold the fleet's certificate before
it hears a token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from spotfleet.errors import SpotfleetError

log = logging.getLogger("spotfleet.agent")

AWAY_S = 2.0
LOOK_S = 2.0


class Whereabouts:
    def __init__(self, birth: str, read_tag: Callable[[], str] | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """`read_tag` may block for seconds, and raise SpotfleetError or OSError; None where hosts have no tags."""
        self.url = birth.rstrip("/")  # where it answered last
        self.answers = 0  # connections on which it has given orders: with each it may be another one
        self._birth, self._tag = self.url, ""
        self._read_tag, self._clock = read_tag, clock
        self._turn = 0
        self._away_since: float | None = None
        self._looked_at = float("-inf")
        self._said = ""

    def next(self) -> str:
        """Where to try now: the place that answered last first, then each other that is known."""
        places = list(dict.fromkeys(p for p in (self.url, self._tag, self._birth) if p))
        return places[self._turn % len(places)]

    def answered(self, url: str) -> None:
        """The dispatcher has given orders at `url`."""
        if url != self.url:
            log.info("the dispatcher is at %s now", url)
        self.url, self._turn, self._away_since = url, 0, None
        self.answers += 1

    async def failed(self) -> bool:
        """A try has failed or a connection has ended: look for another place, if it is time to; whether there is one
        that has not been tried yet."""
        now = self._clock()
        if self._away_since is None:
            self._away_since = now
        if now - self._away_since < AWAY_S:
            return False
        self._turn += 1
        if self._read_tag is None or now - self._looked_at < LOOK_S:
            return False
        self._looked_at = now
        return await self._look(self._read_tag)

    async def _look(self, read_tag: Callable[[], str]) -> bool:
        try:
            found = (await asyncio.to_thread(read_tag)).strip().rstrip("/")
        except (SpotfleetError, OSError) as error:
            self._say(f"the host's tags cannot be read: {error or type(error).__name__}")
            return False
        if found and not found.startswith("https://"):
            self._say(f"the host's tag names {found!r} as the dispatcher, which is not https://ADDRESS:PORT")
        elif found != self._tag:
            self._tag, self._turn = found, 1 if found != self.url else 0
            self._say(f"the host's tag names {found or 'no dispatcher'}")
            return bool(found)
        return False

    def _say(self, text: str) -> None:
        if text != self._said:
            log.warning("%s", text)
        self._said = text
