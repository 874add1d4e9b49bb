"""Task that delivers notifications: to a webhook, and to a command on this machine.

Each of the two follows the ledger by itself and goes on where it stopped, also after a restart (`notified.json`), so
nothing waits in memory and neither delays the other or the dispatcher. A delivery that fails is tried again for
GIVE_UP_S; after that the next ones get a single try until one succeeds, so that a dead webhook does not hold them up.
`spotfleet up` may change both while the fleet is up: then `notify.json` counts instead of the boot file.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

import aiohttp

from spotfleet.codec import from_json, to_json
from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.disk.space import is_full
from spotfleet.dispatcher.live.notices import Notification, NotificationReader
from spotfleet.model import NotifySpec
from spotfleet.retry import Backoff
from spotfleet.storage import atomic, json_file
from spotfleet.words import counted

log = logging.getLogger(__name__)
FILE = "notified.json"  # positions
CHANGED = "notify.json"  # what a later `up` has set; holds a secret
PAGE = 500  # events read at once
BEFORE = 2000  # events before the position, which show the notices of hosts that are taken later
FIRST_S, LAST_S = 1.0, 60.0  # pauses between tries
GIVE_UP_S = 3600.0
ANSWER_S = 15.0  # for the webhook
COMMAND_S = 60.0  # for the command
FOR_EVER = (408, 425, 429)  # statuses of a client's error that may pass; others stay
ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME", "http_proxy", "https_proxy", "no_proxy")
DAMAGED = "notifications go on with the events from now on"
LOST_CHANGE = "`notify` is that of the fleet's first `up` again: change it and `spotfleet up FILE`"


class Undelivered(Exception):
    """Failure of one try; its text contains no secret."""

    def __init__(self, why: str, *, lasts: bool = False) -> None:
        """`lasts`: another try would fail as well."""
        super().__init__(why)
        self.lasts = lasts


@dataclass
class Channel:
    """One way of delivery, and how far in the ledger it has come."""

    name: str
    deliver: Callable[[Notification], Awaitable[None]]  # raises Undelivered
    seq: int
    failing: str = ""  # the reason of the last failure, until a delivery succeeds
    lost: int = 0  # notifications given up since then


class Notifier:
    """Notifications of a fleet."""

    def __init__(self, core: Core) -> None:
        self._core, self._path = core, core.home / FILE
        self._spec, self._webhook = self._changed() or (core.boot.spec.notify, core.boot.webhook)
        self._renewed = asyncio.Event()
        self._channels = self._opened(self._read())

    def _opened(self, known: Mapping[str, int]) -> list[Channel]:
        """Return a channel for each way that is wanted, at its known position or else the newest event."""
        last = self._core.journal.last
        channels = (("webhook", self._post, self._webhook), ("command", self._run, self._spec.command))
        return [Channel(name, deliver, min(known.get(name, last), last)) for name, deliver, to in channels if to]

    def change(self, spec: NotifySpec, webhook: str) -> None:
        """Replace what is notified and how; it is on disk once this returns."""
        atomic.write(self._core.home / CHANGED, json_file.text_of({"notify": to_json(spec), "webhook": webhook}))
        self._spec, self._webhook = spec, webhook
        self._channels = self._opened({channel.name: channel.seq for channel in self._channels})
        self._renewed.set()

    @property
    def why(self) -> str:
        """The problem, for `status`; empty while all is delivered."""
        return "; ".join(f"the {c.name} of `notify` fails: {c.failing}" + (
            f", {counted(c.lost, 'notification')} given up" if c.lost else "") for c in self._channels if c.failing)

    async def run(self) -> None:
        """Deliver until cancelled."""
        while True:
            self._renewed.clear()
            if self._channels:
                self._save()  # what comes from now on is delivered, whichever process is there to do it
            tasks = [asyncio.create_task(part) for part in (
                self._renewed.wait(), *(self._follow(channel) for channel in self._channels))]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, channel: Channel) -> None:
        journal, reader = self._core.journal, NotificationReader(self._core.boot.spec.name, self._spec.events)
        read = max(0, channel.seq - BEFORE)
        while True:
            if not (page := await journal.page(read, PAGE)):
                await journal.signal.wait(LAST_S)
                continue
            for read, event in page:
                found = reader.take(event)
                if read > channel.seq and found is not None:
                    await self._try(channel, found)
                    channel.seq = read
                    self._save()
            channel.seq = max(channel.seq, read)

    async def _try(self, channel: Channel, found: Notification) -> None:
        backoff, until = Backoff(FIRST_S, LAST_S), time.monotonic() + (0.0 if channel.lost else GIVE_UP_S)
        while True:
            try:
                await channel.deliver(found)
                channel.failing, channel.lost = "", 0
                return
            except Undelivered as error:
                if channel.failing != str(error):
                    log.warning("notify: the %s fails: %s", channel.name, error)
                channel.failing = str(error)
                if error.lasts or time.monotonic() >= until:
                    channel.lost += 1
                    return
            await asyncio.sleep(backoff.next_s())

    # ---- the two ways

    async def _post(self, found: Notification) -> None:
        """Send the text as Slack, Mattermost and others take it."""
        url = self._webhook
        place = urlsplit(url).hostname or "its host"  # the rest of the URL is a secret
        try:
            async with (aiohttp.ClientSession(trust_env=True, timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session,
                        session.post(url, json={"text": found.text}, allow_redirects=False) as answer):
                if answer.status >= 300:
                    raise Undelivered(f"{place} answers {answer.status}",
                                      lasts=300 <= answer.status < 500 and answer.status not in FOR_EVER)
        except TimeoutError:
            raise Undelivered(f"{place} does not answer within {ANSWER_S:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise Undelivered(f"{place} cannot be reached: {error.os_error.strerror or type(error).__name__}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a host's name that cannot be one
            raise Undelivered(f"{place}: {type(error).__name__}") from None

    async def _run(self, found: Notification) -> None:
        """Run the command, with the notification in its environment and as JSON on stdin."""
        own = {name: value for name in ENVIRONMENT if (value := os.environ.get(name)) is not None}
        env = {**own, "SPOTFLEET_EVENT": found.event, "SPOTFLEET_TEXT": found.text, "SPOTFLEET_FLEET": found.fleet,
               "SPOTFLEET_SUBJECT": found.subject}
        try:
            process = await asyncio.create_subprocess_exec(
                "/bin/sh", "-c", self._spec.command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, env=env, cwd="/",
                start_new_session=True)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the command
            raise Undelivered(f"it cannot be started: {error}") from None
        try:
            async with asyncio.timeout(COMMAND_S):
                await process.communicate(json.dumps(asdict(found)).encode())
        except TimeoutError:
            raise Undelivered(f"it did not end within {COMMAND_S:g} s", lasts=True) from None
        finally:
            with suppress(ProcessLookupError):  # what it started as well
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            raise Undelivered(f"it ended with status {process.returncode}")

    # ---- the position

    def _changed(self) -> tuple[NotifySpec, str] | None:
        path = self._core.home / CHANGED
        try:
            value = json_file.read(path)
            return from_json(NotifySpec, value["notify"]), from_json(str, value["webhook"])
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            self._core.damage.set_aside(path, "it cannot be read", LOST_CHANGE)
            return None

    def _read(self) -> dict[str, int]:
        try:
            value = json_file.read(self._path)
        except FileNotFoundError:
            return {}
        except ValueError as error:
            self._core.damage.set_aside(self._path, str(error), DAMAGED)
            return {}
        found = value if isinstance(value, dict) else {}
        return {name: seq for name, seq in found.items() if isinstance(seq, int) and seq >= 0}

    def _save(self) -> None:
        text = json_file.text_of({channel.name: channel.seq for channel in self._channels})
        try:
            atomic.write(self._path, text)
        except OSError as error:
            if not is_full(error):
                raise
            log.warning("notify: %s cannot be written: a restart repeats notifications", FILE)
