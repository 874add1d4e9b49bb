"""Tells hosts where this dispatcher is, by a tag that each reads from its metadata server.

A host was told at its birth; so only those are told whose agents are not here although the cloud lists them as running.

    not here --ANNOUNCE_AFTER_S--> tagged --refused--> tagged again each AGAIN_S    (said in `why` meanwhile)
                                      '-- not here still --> tagged again each ANEW_S

Again and again, because what a host knows may be wrong: it was asked for once more though another dispatcher had
launched it, or another, which has not ended yet, has tagged it since.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from spotfleet.errors import SpotfleetError
from spotfleet.model import CloudState, Role
from spotfleet.providers import DISPATCHER_TAG, Provider

if TYPE_CHECKING:
    from spotfleet.dispatcher.state import Dispatcher

log = logging.getLogger(__name__)
ANNOUNCE_AFTER_S = 2.0  # since we listen, or since the host was first seen away: most agents know where we are
LOOK_S = 0.5
AGAIN_S = 5.0
ANEW_S = 120.0  # longer than most machines take from their start to their agent's first word
AT_ONCE = 8


class Announcer:
    def __init__(self, dispatcher: Dispatcher, provider: Provider) -> None:
        self.why = ""  # what stands in the way; "" when every host knows
        self._dispatcher, self._provider = dispatcher, provider
        self._threads = ThreadPoolExecutor(AT_ONCE, "announce")
        self._told: dict[str, str] = {}  # host -> the URL that it knows
        self._away: dict[str, float] = {}  # host -> since when, or since it was told; monotonic
        self._again: dict[str, float] = {}  # host -> not asked again before; monotonic

    def born(self, host: str) -> None:
        """The host is told at its birth."""
        self._told[host] = self._dispatcher.url

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self._announce(self._due(time.monotonic()))
                await asyncio.sleep(LOOK_S)
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _due(self, now: float) -> list[str]:
        seats, url = self._dispatcher.seats, self._dispatcher.url
        away = [h.request_id for h in self._dispatcher.journal.state.hosts
                if h.role is Role.WORKER and h.cloud is CloudState.RUNNING and h.terminate_at is None
                and not (h.request_id in seats and seats[h.request_id].connected)]
        self._away = {host: self._away.get(host, now) for host in away}
        self._again = {host: at for host, at in self._again.items() if host in self._away}
        if not self._again:
            self.why = ""
        return [host for host, since in self._away.items() if now >= self._again.get(host, 0.0)
                and now - since >= (ANEW_S if self._told.get(host) == url else ANNOUNCE_AFTER_S)]

    async def _announce(self, hosts: list[str]) -> None:
        url, loop = self._dispatcher.url, asyncio.get_running_loop()
        answers = await asyncio.gather(*(loop.run_in_executor(self._threads, self._tag, h, url) for h in hosts))
        for host, problem in zip(hosts, answers, strict=True):
            if not problem:
                self._told[host], self._away[host] = url, time.monotonic()
                self._again.pop(host, None)
                log.info("%s: told that the dispatcher is at %s", host, url)
                continue
            self._again[host] = time.monotonic() + AGAIN_S
            why = f"{host} cannot be told where this dispatcher is: {problem}; tried again each {AGAIN_S:g} s"
            if why != self.why:
                log.warning("%s", why)
            self.why = why

    def _tag(self, host: str, url: str) -> str:
        """What went wrong; "" if nothing did."""
        try:
            self._provider.tag(host, {DISPATCHER_TAG: url})
        except (SpotfleetError, OSError) as error:
            return str(error) or type(error).__name__
        return ""
