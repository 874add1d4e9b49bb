"""State of a fleet as the page's viewers have it. They get all of it first, then only what changed.

The dispatcher sends ages, which change with each answer; here they become instants, so that a host that did nothing is
no news. Control characters of foreign texts become U+FFFD, as on all our pages.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from spotfleet.cli import event_text
from spotfleet.errors import SpotfleetError
from spotfleet.words import UNSEEN

POLL_S = 1.0
REST = 4.0  # the pause after a poll in durations of that poll, if longer: a large fleet over a slow link
MOST_EVENTS = 300
MOST_POINTS = 1500  # one job's; beyond, every second one is dropped
MOST_WAITING = 64  # messages; a viewer that takes none for so long is disconnected, and comes again
SAME_S = 2.0  # an instant made of an age and a clock moves by less
AGES = {"since_s": "since", "age_s": "since", "output_age_s": "output_at"}
LEFT = {"seconds_left": "until", "ends_in_s": "until", "deadline_in_s": "deadline", "finish_in_s": "finish"}
UNUSED = {"tick_s", "boots", "unsent"}

Poll = Callable[[int | None, float], Mapping[str, Any]]  # (after, since) -> answer of GET /v1/live


class ViewedFleet:
    """The newest state, and the difference that each answer makes. Pure."""

    def __init__(self) -> None:
        self.after: int | None = None
        self.since = 0.0
        self._fleet: dict[str, Any] = {}
        self._hosts: dict[str, dict[str, Any]] = {}
        self._jobs: dict[str, dict[str, Any]] = {}
        self._workers: dict[str, list[list[Any]]] = {}
        self._series: dict[str, dict[str, Any]] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)
        self._preempted: Mapping[str, str] = {}
        self._now = 0.0

    def whole(self) -> dict[str, Any]:
        """Return everything, for a new viewer."""
        return {"now": self._now, "fleet": self._fleet, "hosts": self._hosts, "jobs": self._jobs,
                "workers": self._workers, "series": self._series, "events": list(self._events), "gone": []}

    def update(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Take an answer of the dispatcher; return what changed, in the same form."""
        now, status = answer["now"], _clean(answer["status"])
        hosts = {h["host"]: h for h in status.pop("hosts")}
        jobs = {j["job"]: j for j in status.pop("jobs")}
        workers = {name: [[w["worker"], w["rank"], w["stage"]] for w in job.pop("workers")]
                   for name, job in jobs.items()}
        fleet = _dated({k: v for k, v in status.items() if k not in UNUSED}, self._fleet, now)
        gone = [name for name in (*self._hosts, *self._jobs) if name not in hosts and name not in jobs]
        changed = {"now": now, "fleet": fleet, "gone": gone, "events": self._add_events(answer["events"]),
                   "hosts": _changes(self._hosts, hosts, now), "jobs": _changes(self._jobs, jobs, now),
                   "workers": {name: of for name, of in workers.items() if of != self._workers.get(name, [])},
                   "series": self._add_series(answer["series"])}
        self._fleet, self._workers, self._now = fleet, workers, now
        for kept in (self._hosts, self._jobs, self._series):
            for name in gone:
                kept.pop(name, None)
        self.after = answer["last"]
        return changed

    def _add_events(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = []
        for row in rows:
            self._preempted = event_text.preemption(row, self._preempted)
            if row["kind"] not in event_text.ROUTINE:
                _, _, sentence = event_text.line(row, self._preempted).partition("  ")
                found.append({"seq": row["seq"], "at": row["at"], "kind": row["kind"], "text": _clean(sentence)})
        self._events.extend(found)
        return found[-MOST_EVENTS:]

    def _add_series(self, news: Mapping[str, Any]) -> dict[str, Any]:
        found = _clean(news)
        for job, of in found.items():
            kept = self._series.setdefault(job, {"points": [], "marks": [], "forgotten": 0})
            kept["points"] = thinned([*kept["points"], *of["points"]])
            generations = {(m["generation"], m["cause"]) for m in of["marks"]}
            kept["marks"] = [*(m for m in kept["marks"] if (m["generation"], m["cause"]) not in generations),
                             *of["marks"]]
            kept["forgotten"] = of["forgotten"]
            self.since = max([self.since, *(p[0] for p in of["points"])])
        return found


def thinned(points: list[Any]) -> list[Any]:
    """Return the points, or every second one and the last where there are too many."""
    return points if len(points) <= MOST_POINTS else [*points[:-1:2], points[-1]]


def _changes(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]], now: float) -> dict[str, Any]:
    """Put `after` into `before`; return the rows that changed."""
    found = {}
    for name, row in after.items():
        dated = _dated(row, before.get(name, {}), now)
        if dated != before.get(name):
            before[name] = found[name] = dated
    return found


def _dated(row: Mapping[str, Any], before: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return the row with instants in place of ages; an instant that hardly moved stays as it was `before`."""
    found = dict(row)
    for names, sign in ((AGES, -1), (LEFT, 1)):
        for name, called in names.items():
            if (seconds := found.pop(name, None)) is not None:
                at, known = now + sign * seconds, before.get(called)
                found[called] = known if known is not None and abs(known - at) < SAME_S else round(at, 1)
    return found


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return UNSEEN.sub("\ufffd", value)
    if isinstance(value, list):
        return [_clean(v) for v in value]
    return {k: _clean(v) for k, v in value.items()} if isinstance(value, dict) else value


class Feed:
    """Poller of the dispatcher, in a thread of its own, as long as somebody views the page."""

    def __init__(self, poll: Poll, period_s: float = POLL_S) -> None:
        self._poll, self._period_s = poll, period_s
        self._lock = threading.Lock()
        self._state = ViewedFleet()
        self._trouble = ""
        self._viewers: list[queue.Queue[str | None]] = []
        self._viewed, self._closed = threading.Event(), threading.Event()

    def run(self) -> None:
        """Poll until `close`."""
        while not self._closed.is_set():
            self._viewed.wait()
            if self._closed.is_set():
                return
            began = time.monotonic()
            self._once()
            self._closed.wait(max(self._period_s, REST * (time.monotonic() - began)))

    def close(self) -> None:
        self._closed.set()
        self._viewed.set()
        with self._lock:
            for viewer in self._viewers:
                viewer.put_nowait(None)

    @contextmanager
    def viewing(self) -> Iterator[queue.Queue[str | None]]:
        """Hold a place among the viewers. Its queue gets texts of server-sent events; None is the end."""
        viewer: queue.Queue[str | None] = queue.Queue()
        with self._lock:
            if self._state.after is not None:
                viewer.put_nowait(message("whole", self._state.whole()))
            if self._trouble:
                viewer.put_nowait(message("trouble", self._trouble))
            self._viewers.append(viewer)
            self._viewed.set()
        try:
            yield viewer
        finally:
            with self._lock:
                self._viewers = [v for v in self._viewers if v is not viewer]
                if not self._viewers and not self._closed.is_set():
                    self._viewed.clear()

    def _once(self) -> None:
        try:
            answer = self._poll(self._state.after, self._state.since)
        except SpotfleetError as error:
            self._report(f"{error}. {error.hint}" if error.hint else str(error))
            return
        with self._lock:
            first = self._state.after is None
            changed = self._state.update(answer)
            if self._trouble:
                self._trouble = ""
                self._send(message("trouble", ""))
            self._send(message("whole", self._state.whole()) if first else message("changed", changed))

    def _report(self, trouble: str) -> None:
        with self._lock:
            if trouble != self._trouble:
                self._trouble = trouble
                self._send(message("trouble", trouble))

    def _send(self, text: str) -> None:
        for viewer in self._viewers:
            viewer.put_nowait(text if viewer.qsize() < MOST_WAITING else None)


def message(name: str, value: Any) -> str:
    """Return the text of a server-sent event. JSON has no line breaks, so one line holds it."""
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n"
