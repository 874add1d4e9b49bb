"""Watch of the host's metadata server for notices. A notice is kept with a deadline on our own clock."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from spotfleet import plugins
from spotfleet.errors import SpotfleetError
from spotfleet.interruptions import NoticeSource, load
from spotfleet.model import Notice
from spotfleet.plugins import Traits

log = logging.getLogger("spotfleet.agent")

_MOVED_S = 1.0  # polls of one notice differ by latency; a deadline moves only by more than this


@dataclass(frozen=True)
class PendingNotice:
    notice: Notice
    deadline: float  # time.monotonic()

    def now(self, at: float) -> Notice:
        return replace(self.notice, seconds_left=self.deadline - at)


def hold(held: PendingNotice | None, notice: Notice | None, at: float) -> PendingNotice | None:
    """Return the notice in force after a poll at `at` returned `notice`; `held` itself without a relevant change."""
    if notice is None:
        return None
    new = PendingNotice(notice, at + notice.seconds_left)
    if held is None or replace(notice, seconds_left=0.0) != replace(held.notice, seconds_left=0.0):
        return new
    if notice.kind != "interruption":
        return held  # `seconds_left` of a hint means nothing
    return new if abs(new.deadline - held.deadline) > _MOVED_S else held


class NoticeWatch:
    """Poller of the provider's notice source; calls `changed` when the notice in force changes."""

    def __init__(self, provider: str, metadata_url: str, changed: Callable[[], None]) -> None:
        self._provider = provider
        self._url = metadata_url
        self._changed = changed
        self._held: PendingNotice | None = None
        self._period_s = Traits.notice_poll_s
        self._problem = ""

    def notice(self) -> Notice | None:
        """Return the notice in force, with the seconds left now."""
        return self._held.now(time.monotonic()) if self._held else None

    async def run(self) -> None:
        """Poll until cancelled."""
        source = self._source()
        if source is None:
            await asyncio.Event().wait()
            return
        self._period_s = plugins.load(self._provider).traits.notice_poll_s
        while True:
            await self._poll(source)
            await asyncio.sleep(self._period_s)

    def _source(self) -> NoticeSource | None:
        return _source(self._provider, self._url)

    async def _poll(self, source: NoticeSource) -> None:
        try:
            notice = await asyncio.to_thread(source.poll)
        except Exception as error:  # noqa: BLE001 - mostly NoticeFormat and OSError; a plugin's bug must not end training
            # A failed poll withdraws nothing: the held notice stays in force.
            if str(error) != self._problem:
                self._problem = str(error)
                log.warning("metadata server: %s", error or type(error).__name__)
            return
        self._problem = ""
        held = hold(self._held, notice, time.monotonic())
        if held is not self._held:
            log.info("notice: %s", notice)
            self._held = held
            self._changed()


def tag_reader(provider: str, metadata_url: str, key: str) -> Callable[[], str] | None:
    """Return a reader of this host's tag `key`, as `NoticeSource.tag`; None without a metadata server."""
    source = _source(provider, metadata_url)
    return None if source is None else lambda: source.tag(key)


def _source(provider: str, metadata_url: str) -> NoticeSource | None:
    try:
        return load(provider, metadata_url)
    except SpotfleetError as error:
        log.warning("%s", error)
        return None
