"""What the cloud says by itself of our machines, so that one whose agent hangs is drained and replaced, too.

    thread: hear --something--> held by provider_id, and a tick at once --its time has passed, or EXPIRE_S--> forgotten
                 --an error--> told once, heard again after AGAIN_S

Machines that the ledger does not know are nobody's business here; what is said of them is held all the same for as
long, because a launch may be told of before it is listed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from spotfleet.errors import SpotfleetError
from spotfleet.fleet.fold import Host
from spotfleet.model import Notice
from spotfleet.providers import Heard, Hears

log = logging.getLogger(__name__)
WAIT_S = 20.0  # of one call
AGAIN_S = 5.0
EXPIRE_S = 600.0  # after a notice's time, or after a hint
MOST = 4096  # machines; the oldest word goes first


@dataclass(frozen=True)
class _Held:
    notice: Notice
    until: float  # monotonic: when the cloud takes it
    expires: float  # monotonic


class Ear:
    def __init__(self, provider: Hears, fleet: str, ours: Callable[[], Iterable[Host]],
                 poke: Callable[[], None]) -> None:
        self.trouble = ""  # why nothing is heard
        self._provider, self._fleet, self._ours, self._poke = provider, fleet, ours, poke
        self._held: dict[str, _Held] = {}
        self._closed = threading.Event()

    def notices(self, now: float) -> dict[str, Notice]:
        """By request_id, with the seconds left; `now` is monotonic."""
        self._held = {i: h for i, h in self._held.items() if now < h.expires}
        said = {h.request_id: self._held[h.provider_id] for h in self._ours() if h.provider_id in self._held}
        return {name: replace(h.notice, seconds_left=h.until - now) if h.notice.kind == "interruption" else h.notice
                for name, h in said.items()}

    def take(self, heard: Iterable[Heard], now: float) -> None:
        ours = {h.provider_id for h in self._ours()}
        for word in heard:
            if word.notice is not None:
                self._hold(word.provider_id, word.notice, now)
            if word.provider_id in ours:
                self._poke()

    def _hold(self, provider_id: str, notice: Notice, now: float) -> None:
        known = self._held.pop(provider_id, None)
        if known is not None and known.notice.kind == "interruption" and notice.kind != "interruption":
            self._held[provider_id] = known  # a hint that comes late
            return
        left_s = notice.seconds_left if notice.kind == "interruption" else 0.0
        self._held[provider_id] = _Held(notice, now + left_s, now + left_s + EXPIRE_S)
        if len(self._held) > MOST:
            del self._held[next(iter(self._held))]

    async def run(self) -> None:
        """Until cancelled. The thread may be in the midst of a call then, and ends by itself."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, args=(loop,), name="ear", daemon=True).start()
        try:
            await asyncio.Event().wait()
        finally:
            self._closed.set()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._closed.is_set():
            try:
                heard = self._provider.hear(self._fleet, WAIT_S)
            except (SpotfleetError, OSError) as error:
                said = str(error) or type(error).__name__
                if said != self.trouble:
                    log.warning("the cloud's own word of its machines is not heard: %s", said)
                self.trouble = said
                self._closed.wait(AGAIN_S)
                continue
            self.trouble = ""
            if heard and not self._closed.is_set() and not loop.is_closed():
                loop.call_soon_threadsafe(self.take, heard, time.monotonic())


def both(agents: Mapping[str, Notice], cloud: Mapping[str, Notice]) -> dict[str, Notice]:
    """What is known of each host: its agent knows its time best, and a hint is less than a notice."""
    weaker = {n: said for n, said in agents.items() if said.kind != "interruption"}
    stronger = {n: said for n, said in agents.items() if said.kind == "interruption"}
    return {**weaker, **{n: s for n, s in cloud.items() if s.kind == "interruption" or n not in weaker}, **stronger}
