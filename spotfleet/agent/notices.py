"""Watches the host's metadata server. A notice is kept with a deadline on our own clock."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from spotfleet.errors import SpotfleetError
from spotfleet.interruptions import NoticeSource, load
from spotfleet.model import Notice

log = logging.getLogger("spotfleet.agent")

_MOVED_S = 1.0  # polls of one notice differ by latency; a deadline moves only by more than this


@dataclass(frozen=True)
class Held:
    notice: Notice
    deadline: float  # time.monotonic()

    def now(self, at: float) -> Notice:
        return replace(self.notice, seconds_left=self.deadline - at)


def hold(held: Held | None, notice: Notice | None, at: float) -> Held | None:
    """What is in force after a poll at `at` said `notice`; `held` itself when nothing of weight has changed."""
    if notice is None:
        return None
    new = Held(notice, at + notice.seconds_left)
    if held is None or replace(notice, seconds_left=0.0) != replace(held.notice, seconds_left=0.0):
        return new
    if notice.kind != "interruption":
        return held  # the seconds of a hint mean nothing
    return new if abs(new.deadline - held.deadline) > _MOVED_S else held


class NoticeWatch:
    def __init__(self, provider: str, metadata_url: str, changed: Callable[[], None]) -> None:
        self._provider = provider
        self._url = metadata_url
        self._changed = changed
        self._held: Held | None = None
        self._period_s = 0.5 if provider in ("local", "ssh") else 2.0  # there it costs nobody anything
        self._trouble = ""

    def notice(self) -> Notice | None:
        """The notice in force, with the seconds left now."""
        return self._held.now(time.monotonic()) if self._held else None

    async def run(self) -> None:
        """Poll until cancelled."""
        source = self._source()
        if source is None:
            await asyncio.Event().wait()
            return
        while True:
            await self._poll(source)
            await asyncio.sleep(self._period_s)

    def _source(self) -> NoticeSource | None:
        return _source(self._provider, self._url)

    async def _poll(self, source: NoticeSource) -> None:
        try:
            notice = await asyncio.to_thread(source.poll)
        except Exception as error:  # noqa: BLE001 - mostly NoticeFormat and OSError; a plugin's bug must not end training
            # Nobody has withdrawn anything: keep what is held.
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.warning("metadata server: %s", error or type(error).__name__)
            return
        self._trouble = ""
        held = hold(self._held, notice, time.monotonic())
        if held is not self._held:
            log.info("notice: %s", notice)
            self._held = held
            self._changed()


def tag_reader(provider: str, metadata_url: str, key: str) -> Callable[[], str] | None:
    """Reads a tag of this host, as `NoticeSource.tag`; None where there is nobody to ask."""
    source = _source(provider, metadata_url)
    return None if source is None else lambda: source.tag(key)


def _source(provider: str, metadata_url: str) -> NoticeSource | None:
    if provider == "local" and not metadata_url:
        return None  # the local cloud names each host's server; the clouds' own lie at a known address
    try:
        return load(provider, metadata_url)
    except SpotfleetError as error:
        log.warning("%s", error)
        return None
