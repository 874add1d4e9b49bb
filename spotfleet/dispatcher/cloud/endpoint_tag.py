"""Endpoint tag: the dispatcher's URL as a tag on each host, which the host reads from its metadata server.

A host receives the URL at its launch. So only hosts are tagged whose agents are not connected although the cloud lists
them as running.

    not connected --ANNOUNCE_AFTER_S--> tagged --refused--> tagged again each AGAIN_S    (reported in `why`)
                                          '-- still not connected --> tagged again each ANEW_S

The tag is repeated because a host's URL may be wrong: another dispatcher may have launched the host under the same
request_id, or another dispatcher that has not ended yet may have tagged it since.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor

from spotfleet.dispatcher.core import Core
from spotfleet.errors import SpotfleetError
from spotfleet.model import CloudState, Role
from spotfleet.providers import DISPATCHER_TAG, Provider

log = logging.getLogger(__name__)
ANNOUNCE_AFTER_S = 2.0  # since the start, or since the host was first seen disconnected: most agents know our URL
LOOK_S = 0.5
AGAIN_S = 5.0
ANEW_S = 120.0  # longer than most machines take from their start to their agent's first report
AT_ONCE = 8


class EndpointTagger:
    """Task that tags disconnected hosts with our URL."""

    def __init__(self, core: Core, provider: Provider) -> None:
        self.why = ""  # the problem; "" when every host has our URL
        self._core, self._provider = core, provider
        self._threads = ThreadPoolExecutor(AT_ONCE, "announce")
        self._tagged: dict[str, str] = {}  # host -> the URL that it has
        self._away: dict[str, float] = {}  # host -> disconnected since, or tagged at; monotonic
        self._again: dict[str, float] = {}  # host -> not tagged again before; monotonic

    def launched(self, host: str) -> None:
        """Record that a launched host receives our URL at its launch."""
        self._tagged[host] = self._core.url

    async def run(self) -> None:
        """Tag hosts until cancelled."""
        try:
            while True:
                await self._announce(self._due(time.monotonic()))
                await asyncio.sleep(LOOK_S)
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _due(self, now: float) -> list[str]:
        connections, url = self._core.connections, self._core.url
        away = [h.request_id for h in self._core.journal.state.hosts
                if h.role is Role.WORKER and h.cloud is CloudState.RUNNING and h.terminate_at is None
                and not (h.request_id in connections and connections[h.request_id].connected)]
        self._away = {host: self._away.get(host, now) for host in away}
        self._again = {host: at for host, at in self._again.items() if host in self._away}
        if not self._again:
            self.why = ""
        return [host for host, since in self._away.items() if now >= self._again.get(host, 0.0)
                and now - since >= (ANEW_S if self._tagged.get(host) == url else ANNOUNCE_AFTER_S)]

    async def _announce(self, hosts: list[str]) -> None:
        url, loop = self._core.url, asyncio.get_running_loop()
        answers = await asyncio.gather(*(loop.run_in_executor(self._threads, self._tag, h, url) for h in hosts))
        for host, problem in zip(hosts, answers, strict=True):
            if not problem:
                self._tagged[host], self._away[host] = url, time.monotonic()
                self._again.pop(host, None)
                log.info("%s: told that the dispatcher is at %s", host, url)
                continue
            self._again[host] = time.monotonic() + AGAIN_S
            why = f"{host} cannot be told where this dispatcher is: {problem}; tried again each {AGAIN_S:g} s"
            if why != self.why:
                log.warning("%s", why)
            self.why = why

    def _tag(self, host: str, url: str) -> str:
        """Tag a host; return the problem, or ""."""
        try:
            self._provider.tag(host, {DISPATCHER_TAG: url})
        except (SpotfleetError, OSError) as error:
            return str(error) or type(error).__name__
        return ""
