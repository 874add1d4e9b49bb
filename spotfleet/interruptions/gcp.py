"""Notices from the metadata server of Google Cloud. Standard library only.

    GET instance/preempted           FALSE; TRUE from NOTICE_S before the machine is taken
    GET instance/maintenance-event   NONE, MIGRATE_ON_HOST_MAINTENANCE or TERMINATE_ON_HOST_MAINTENANCE
    GET instance/attributes/KEY      404, or the metadata item

Each request has the header `Metadata-Flavor: Google`, and so has each answer: another server at this address, such as a
proxy's, is no metadata server. With `wait_for_change` the server holds a request until the value differs from that of
`last_etag`, or until `timeout_sec`; it may answer earlier with an unchanged value.

A second witness is the file GOING, which the machine's shutdown script makes: it is gone after a restart.

The server does not tell whether the machine will be stopped or deleted: its launch leaves that in the item BEHAVIOR.

The server gives no time: a notice counts from the first answer TRUE. A process that never read FALSE cannot know how
long ago that was, so it assumes LEAST_S.

Sources: Compute Engine, "Query VM metadata", "Spot VMs: preemption notice", "Host maintenance events".
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from urllib.parse import quote, urlsplit

from spotfleet.errors import NoticeFormat
from spotfleet.model import Notice

URL = "http://metadata.google.internal/computeMetadata/v1"
FLAVOR = ("Metadata-Flavor", "Google")
POLL_S = 2.0  # limit for all requests of one poll together
HOLD_S = 1  # the server holds a request for so long while nothing changes
NOTICE_S = 120.0  # as every Spot machine of a fleet is launched
GOING, GOING_S = "/run/spotfleet-going", 10.0  # what is left, about, once the system shuts down
LEAST_S = 30.0  # what is left at least of a preemption that began before this process
MAINTENANCE_S = 3600.0  # a machine with GPUs is warned so long before it is stopped
NEAR_S = 600.0  # maintenance counts as a notice from so long before
MAINTENANCE_EVERY_S = 10.0  # pause between two requests
PREEMPTED, MAINTENANCE, TAG = "/instance/preempted", "/instance/maintenance-event", "/instance/attributes/"
BEHAVIOR = "spotfleet-behavior"  # "stop" or "terminate"
MIGRATES, TERMINATES = "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE"


class GcpSource:
    """Notice source that polls one metadata server."""

    def __init__(self, metadata_url: str, now: Callable[[], float] = time.monotonic, going: str = GOING) -> None:
        split = urlsplit(metadata_url or URL)
        self._address, self._base = (split.hostname or "", split.port or 80), split.path.rstrip("/")
        self._now, self._going = now, going
        self._gone_at: float | None = None
        self._action = ""  # not read yet
        self._etag = ""
        self._seen_free = False  # "FALSE" was read
        self._taken_at: float | None = None  # when the machine will be taken, by `now`
        self._maintained_at: float | None = None
        self._seen_quiet = False  # "NONE" was read
        self._event, self._event_until = "NONE", 0.0

    def poll(self) -> Notice | None:
        """Return the shutdown or preemption in force, else maintenance, else None. Takes at most about 2 s.

        Raises NoticeFormat for an answer it cannot read, OSError when no answer comes in time.
        """
        if os.path.exists(self._going):
            if self._gone_at is None:
                self._gone_at = self._now() + GOING_S
            left_s = max(0.0, self._gone_at - self._now())
            return Notice(left_s, self._action or "terminate", why="the system of this host shuts down")
        deadline = time.monotonic() + POLL_S
        if not self._action:
            self._action = "stop" if self._get(TAG + BEHAVIOR, deadline)[0] == "stop" else "terminate"
        held = f"?wait_for_change=true&last_etag={quote(self._etag)}&timeout_sec={HOLD_S}" if self._etag else ""
        body, etag = self._get(PREEMPTED + held, deadline)
        word = (body or "").upper()
        if word not in ("TRUE", "FALSE"):
            raise NoticeFormat(f"metadata server: {PREEMPTED}: expected TRUE or FALSE, got {word[:80]!r}",
                               hint="watching on")
        self._etag = etag
        if word == "TRUE":
            if self._taken_at is None:
                self._taken_at = self._now() + (NOTICE_S if self._seen_free else LEAST_S)
            return Notice(max(0.0, self._taken_at - self._now()), self._action, why="Google Cloud preempts this host")
        self._seen_free, self._taken_at = True, None
        return self._maintenance(deadline)

    def _maintenance(self, deadline: float) -> Notice | None:
        if self._now() >= self._event_until:
            self._event = self._get(MAINTENANCE, deadline)[0] or "NONE"
            self._event_until = self._now() + MAINTENANCE_EVERY_S
        if self._event == MIGRATES:
            return Notice(0.0, kind="maintenance", why="Google Cloud will move this host to another machine")
        if self._event != TERMINATES:  # a word that is new to us is no reason to leave
            self._seen_quiet, self._maintained_at = True, None
            return None
        if self._maintained_at is None:
            self._maintained_at = self._now() + (MAINTENANCE_S if self._seen_quiet else NEAR_S)
        left_s, why = self._maintained_at - self._now(), "Google Cloud stops this host for maintenance of its machine"
        return Notice(max(0.0, left_s), why=why) if left_s <= NEAR_S else Notice(0.0, kind="maintenance", why=why)

    def tag(self, key: str) -> str:
        """See `NoticeSource`."""
        return self._get(TAG + quote(key), time.monotonic() + POLL_S)[0] or ""

    def _get(self, path: str, deadline: float) -> tuple[str | None, str]:
        """Return the body, None for 404, and its ETag."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"metadata server: no answer within {POLL_S} s")
        connection = HTTPConnection(*self._address, timeout=left_s)
        try:
            connection.request("GET", self._base + path, headers=dict([FLAVOR]))
            answer = connection.getresponse()
            body, headers = answer.read(65536).decode("utf-8", "replace").strip(), answer.headers
        except HTTPException as error:
            raise NoticeFormat(f"metadata server: {path} answered no HTTP: {error!r}", hint="watching on") from error
        finally:
            connection.close()
        if headers.get(FLAVOR[0]) != FLAVOR[1]:
            raise NoticeFormat(f"metadata server: {path}: the answer is not Google's: it has no {FLAVOR[0]}",
                               hint="is another server at this address? watching on")
        if answer.status == 404:
            return None, ""
        if answer.status != 200:
            raise NoticeFormat(f"metadata server: {path} answered {answer.status}", hint="expected 200; watching on")
        return body, headers.get("ETag", "")
