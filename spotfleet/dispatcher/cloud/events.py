"""Listener for the cloud's own events about our machines: a host whose agent hangs is drained and replaced, too.

    thread: poll --an event--> held by provider_id, and a tick at once --its time has passed by EXPIRE_S--> dropped
                 --an error--> logged once, polled again after AGAIN_S

Events about machines that the ledger does not know are held for the same time, because an event may arrive before the
launched machine is listed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from spotfleet.errors import SpotfleetError
from spotfleet.fleet.domain.state import Host
from spotfleet.model import Notice
from spotfleet.providers import CloudEvent, InterruptionEvents

log = logging.getLogger(__name__)
WAIT_S = 20.0  # longest wait of one call
AGAIN_S = 5.0
EXPIRE_S = 600.0  # after a notice's time, or after a hint
MOST = 4096  # machines; the oldest event is dropped first


@dataclass(frozen=True)
class _Held:
    notice: Notice
    until: float  # monotonic: when the cloud takes it
    expires: float  # monotonic


class CloudEventListener:
    """Thread that polls the cloud's events, and the notices in force."""

    def __init__(self, provider: InterruptionEvents, fleet: str, hosts: Callable[[], Iterable[Host]],
                 wake: Callable[[], None]) -> None:
        self.problem = ""  # why no events can be read; "" if they can
        self._provider, self._fleet, self._hosts, self._wake = provider, fleet, hosts, wake
        self._held: dict[str, _Held] = {}
        self._closed = threading.Event()

    def notices(self, now: float) -> dict[str, Notice]:
        """Return the notices in force by request_id, with the seconds left; `now` is monotonic."""
        self._held = {i: h for i, h in self._held.items() if now < h.expires}
        held = {h.request_id: self._held[h.provider_id] for h in self._hosts() if h.provider_id in self._held}
        return {name: replace(h.notice, seconds_left=h.until - now) if h.notice.kind == "interruption" else h.notice
                for name, h in held.items()}

    def receive(self, events: Iterable[CloudEvent], now: float) -> None:
        hosts = {h.provider_id for h in self._hosts()}
        for event in events:
            if event.notice is not None:
                self._hold(event.provider_id, event.notice, now)
            if event.provider_id in hosts:
                self._wake()

    def _hold(self, provider_id: str, notice: Notice, now: float) -> None:
        known = self._held.pop(provider_id, None)
        if known is not None and known.notice.kind == "interruption" and notice.kind != "interruption":
            self._held[provider_id] = known  # a late hint does not replace a notice
            return
        left_s = notice.seconds_left if notice.kind == "interruption" else 0.0
        self._held[provider_id] = _Held(notice, now + left_s, now + left_s + EXPIRE_S)
        if len(self._held) > MOST:
            del self._held[next(iter(self._held))]

    async def run(self) -> None:
        """Listen until cancelled. The thread may be in a call then, and ends by itself."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, args=(loop,), name="cloud-events", daemon=True).start()
        try:
            await asyncio.Event().wait()
        finally:
            self._closed.set()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._closed.is_set():
            try:
                events = self._provider.poll_events(self._fleet, WAIT_S)
            except (SpotfleetError, OSError) as error:
                problem = str(error) or type(error).__name__
                if problem != self.problem:
                    log.warning("the cloud's own events about its machines cannot be read: %s", problem)
                self.problem = problem
                self._closed.wait(AGAIN_S)
                continue
            self.problem = ""
            if events and not self._closed.is_set() and not loop.is_closed():
                loop.call_soon_threadsafe(self.receive, events, time.monotonic())


def merge_notices(agents: Mapping[str, Notice], cloud: Mapping[str, Notice]) -> dict[str, Notice]:
    """Merge the notices of agents and cloud: an agent's time is more exact, and a notice overrides a hint."""
    weaker = {n: held for n, held in agents.items() if held.kind != "interruption"}
    stronger = {n: held for n, held in agents.items() if held.kind == "interruption"}
    return {**weaker, **{n: s for n, s in cloud.items() if s.kind == "interruption" or n not in weaker}, **stronger}
