"""Notices from a metadata server with AWS IMDSv2: EC2's, and that of the local provider. Standard library only.

    PUT /latest/api/token                                   a token for TOKEN_TTL_S
    GET /latest/meta-data/spot/instance-action              404, or {"action": "stop", "time": "2017-09-18T08:22:00Z"}
    GET /latest/meta-data/events/recommendations/rebalance  404, or {"noticeTime": "2020-10-27T08:22:00Z"}
    GET /latest/meta-data/events/maintenance/scheduled      [], or [{"Code": "system-reboot", "State": "active",
                                                            "NotBefore": "21 Jan 2019 09:00:43 GMT", ...}]
    GET /latest/meta-data/tags/instance/KEY                 404, or the tag (where the launch allowed tags in metadata)

spot/termination-time is not used: it is older, and may hold a time that has passed, or none.

Source: EC2 User Guide, "Spot Instance interruption notices", "EC2 instance rebalance recommendations", "Scheduled
events for your instances" and "View tags for your EC2 instances using instance metadata".
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException
from urllib.parse import quote, urlsplit

from spotfleet.errors import NoticeFormat
from spotfleet.interruptions.maintenance import Planned, notice_of
from spotfleet.model import Notice

AWS_URL = "http://169.254.169.254"
TOKEN_TTL_S = 21600
TOKEN_SPARE_S = 15  # a token is renewed this long before its end
POLL_S = 2.0  # limit for all requests of one poll together
ACTION_PATH = "/latest/meta-data/spot/instance-action"
TAG_PATH = "/latest/meta-data/tags/instance/"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
MAINTENANCE_PATH = "/latest/meta-data/events/maintenance/scheduled"
MAINTENANCE_S = 30.0  # pause between two requests; maintenance is planned days before
ACTIONS = ("terminate", "stop", "hibernate")


class ImdsSource:
    """Notice source that polls one metadata server; it keeps a token between polls."""

    def __init__(self, metadata_url: str, now: Callable[[], float] = time.time) -> None:
        split = urlsplit(metadata_url or AWS_URL)
        self._address = (split.hostname or "", split.port or 80)
        self._now = now
        self._token = ""
        self._token_until = 0.0  # on the monotonic clock
        self._planned: tuple[Planned, ...] = ()
        self._planned_until = 0.0  # on the monotonic clock: time of the next request

    def poll(self) -> Notice | None:
        """Return the interruption notice in force, else a maintenance notice, else a hint, else None. Takes at most
        about 2 s.

        Raises NoticeFormat for an answer it cannot read, OSError when no answer comes in time.
        """
        deadline = time.monotonic() + POLL_S
        if (action := self._get(ACTION_PATH, deadline)) is not None:
            return _interruption(action, self._now())
        hint = self._get(REBALANCE_PATH, deadline)
        planned = notice_of(self._maintenance(deadline), self._now())
        if hint is not None and (planned is None or planned.kind != "interruption"):
            return _rebalance(hint)
        return planned

    def _maintenance(self, deadline: float) -> tuple[Planned, ...]:
        """Return the maintenance planned for this machine. If the answer cannot be read, one poll in MAINTENANCE_S
        raises, and the others use the last answer that was read."""
        if time.monotonic() >= self._planned_until:
            self._planned_until = time.monotonic() + MAINTENANCE_S
            body = self._get(MAINTENANCE_PATH, deadline)
            self._planned = () if body is None else tuple(map(_planned, _objects(MAINTENANCE_PATH, body)))
        return self._planned

    def tag(self, key: str) -> str:
        """See `NoticeSource`."""
        return self._get(TAG_PATH + quote(key), time.monotonic() + POLL_S) or ""

    def _get(self, path: str, deadline: float) -> str | None:
        """Return the body; None for 404. A refused token is renewed once."""
        for renew in (False, True):
            token = self._fresh_token(deadline, renew)
            status, body = self._ask("GET", path, {"X-aws-ec2-metadata-token": token}, deadline)
            if status != 401:
                break
        if status == 404:
            return None
        if status != 200:
            raise NoticeFormat(f"metadata server: {path} answered {status}", hint="expected 200 or 404; watching on")
        return body

    def _fresh_token(self, deadline: float, renew: bool) -> str:
        if renew or not self._token or time.monotonic() > self._token_until:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
            status, token = self._ask("PUT", "/latest/api/token", headers, deadline)
            if status != 200 or not token:
                raise NoticeFormat(f"metadata server: no token, answered {status}", hint="is this IMDSv2? watching on")
            self._token, self._token_until = token, time.monotonic() + TOKEN_TTL_S - TOKEN_SPARE_S
        return self._token

    def _ask(self, method: str, path: str, headers: dict[str, str], deadline: float) -> tuple[int, str]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"metadata server: no answer within {POLL_S} s")
        connection = HTTPConnection(*self._address, timeout=left_s)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(65536).decode("utf-8", "replace").strip()
        except HTTPException as error:
            raise NoticeFormat(f"metadata server: {path} answered no HTTP: {error!r}", hint="watching on") from error
        finally:
            connection.close()


def _interruption(body: str, now: float) -> Notice:
    data = _object(ACTION_PATH, body)
    action = data.get("action")
    if action not in ACTIONS:
        raise NoticeFormat(f"metadata server: action: expected one of {', '.join(ACTIONS)}, got {action!r}",
                           hint="watching on")
    left_s = max(0.0, _instant("time", data.get("time")) - now)
    return Notice(left_s, "terminate" if action == "terminate" else "stop", why=f"the cloud will {action} this host")


def _rebalance(body: str) -> Notice:
    _instant("noticeTime", _object(REBALANCE_PATH, body).get("noticeTime"))
    return Notice(0.0, kind="rebalance", why="the cloud recommends to leave this host")


def _planned(event: dict[str, object]) -> Planned:
    text = event.get("NotBefore")
    try:
        at = parsedate_to_datetime(str(text))
    except ValueError:
        raise NoticeFormat(f"metadata server: NotBefore: expected a date, got {text!r}", hint="watching on") from None
    return Planned(str(event.get("Code", "")), (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp(),
                   str(event.get("State", "active")))


def _object(path: str, body: str) -> dict[str, object]:
    data = _json(body)
    if not isinstance(data, dict):
        raise NoticeFormat(f"metadata server: {path}: expected a JSON object, got {body[:80]!r}", hint="watching on")
    return data


def _objects(path: str, body: str) -> list[dict[str, object]]:
    data = _json(body)
    if not isinstance(data, list) or not all(isinstance(event, dict) for event in data):
        raise NoticeFormat(f"metadata server: {path}: expected a list of objects, got {body[:80]!r}",
                           hint="watching on")
    return data


def _json(body: str) -> object:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _instant(key: str, text: object) -> float:
    """Parse an ISO time to Unix seconds; without a zone it is UTC."""
    try:
        at = datetime.fromisoformat(str(text))
    except ValueError:
        raise NoticeFormat(f"metadata server: {key}: expected an ISO time, got {text!r}", hint="watching on") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
