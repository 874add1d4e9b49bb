"""Results that hosts have not sent yet: what each host holds, and how long a draining host stays to send it. Pure.

    holds results --all have arrived--> released, and ended by the planner
         |  ^--a byte arrives: the time without progress starts again
         '--no byte for `quiet_s`, `most_s` since the drain began, its agent away for DRAIN_S,
            or all of it is in the checkpoint target--> given up: recorded (ResultsLost), then ended

`now` is monotonic. When a host or its agent dies, the results in its last report are recorded as lost.

Only bytes that the dispatcher has received give a host more time. Its own figures are for people: a compromised host
may report any, and restart its agent or change its list of results as often as it likes. Nor may it send bytes that are
no result: once a checkpoint had another digest than named, those that follow count when they are whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace

from spotfleet.dispatcher.hosts import DRAIN_S
from spotfleet.fleet.domain.events import ResultsLost
from spotfleet.protocol.messages import AgentReport, Unsent, UnsentStatus
from spotfleet.words import results as format_results

TARGET_S = 20.0  # without progress for this time, a host of a fleet that ends by itself uses the checkpoint target
WHY_CHARS = 300
KINDS = ("output", "log", "checkpoint")
SENDS, WAITS = "sending what it left", "its output waits"  # in the `why` of an older agent, which has no `unsent`


@dataclass(frozen=True)
class Patience:
    """Time limits of a draining host that holds results."""

    quiet_s: float  # without a new byte at the dispatcher
    most_s: float = math.inf  # since the drain began


STAYS = Patience(DRAIN_S, 3600.0)  # the fleet stays
ASKED = Patience(3600.0)  # `down`: a person decides, and may need time to make room
BY_ITSELF = Patience(600.0, 3600.0)  # autostop, `train --down`
LIMITED = Patience(240.0, 240.0)  # max_cost and max_lifetime, which reserve 300 s for the end
DISCARD = Patience(10.0, DRAIN_S)  # `down --discard`
OLD = Patience(DRAIN_S, DRAIN_S)  # an agent that does not report amounts


@dataclass(frozen=True)
class Holding:
    """Results that one host holds, as last reported."""

    incarnation: str
    results: tuple[Unsent, ...]
    moved_at: float  # when a byte last arrived, at first when they were reported
    why: str = ""
    old: bool = False  # its agent does not report amounts
    away_since: float | None = None
    draining_since: float | None = None
    noticed_until: float = -math.inf  # the cloud leaves it the host until then
    recorded: bool = False  # its loss is in the ledger

    @property
    def stored(self) -> bool:
        """Whether all of it is in the checkpoint target."""
        return all(r.stored for r in self.results)


class UnsentTracker:
    """Results that hosts hold."""

    def __init__(self, target: str = "") -> None:
        """`target`: the folder to which hosts can copy what does not arrive."""
        self._target = target
        self._hosts: dict[str, Holding] = {}
        self._moved: dict[str, float] = {}  # host -> `moved_at`, for all lives of its agent
        self._draining: dict[str, float] = {}  # the same for `draining_since`
        self._suspect: set[str] = set()  # hosts whose last checkpoint had another digest than they named
        self._ended: list[tuple[str, Holding]] = []  # held by agents that have ended, and with them their files

    def receive(self, report: AgentReport, given: Callable[[str], bool], now: float) -> None:
        """Process a report; only results of jobs that the host was `given` count."""
        before = self._hosts.pop(report.host, None)
        results = tuple(r for r in results_of(report) if r.kind in KINDS and given(r.job))
        if before is not None and before.incarnation != report.incarnation:
            self._ended.append((report.host, before))
            before = None
        if not results:
            if report.host not in self._draining:
                self._moved.pop(report.host, None)
            return
        held = Holding(report.incarnation, results, self._moved.setdefault(report.host, now), report.why,
                       report.unsent is None, draining_since=self._draining.get(report.host))
        copied = before is not None and held.stored and not before.stored
        self._hosts[report.host] = replace(held, recorded=before is not None and before.recorded and not copied)

    def note_arrival(self, host: str, now: float) -> None:
        """Record that bytes of this host's results have arrived."""
        if (found := self._hosts.get(host)) is not None:
            self._moved[host] = now
            self._hosts[host] = replace(found, moved_at=now, recorded=False)

    def note_piece(self, host: str, now: float) -> None:
        """Record that a piece of a checkpoint has arrived, whose digest is not known yet."""
        if host not in self._suspect:
            self.note_arrival(host, now)

    def note_checkpoint(self, host: str, now: float, *, right: bool) -> None:
        """Record that a whole checkpoint, or a whole part of one, has arrived; `right`: it has the digest named."""
        if right:
            self._suspect.discard(host)
            self.note_arrival(host, now)
        else:
            self._suspect.add(host)

    def mark_away(self, host: str, now: float) -> None:
        """Record that the host's agent has disconnected."""
        if (found := self._hosts.get(host)) is not None and found.away_since is None:
            self._hosts[host] = replace(found, away_since=now)

    def note_draining(self, draining: Mapping[str, float], now: float) -> None:
        """Record which hosts drain; `draining`: host -> seconds until the end of its notice, 0 without one."""
        self._draining = {h: since for h, since in self._draining.items() if h in draining}
        for host, found in self._hosts.items():
            since = self._draining.setdefault(host, now) if host in draining else None
            self._hosts[host] = replace(found, draining_since=since, noticed_until=now + draining.get(host, 0.0))

    def holds(self, host: str) -> bool:
        return host in self._hosts

    def of_job(self, job: str) -> dict[str, list[Unsent]]:
        """Return by host the results of `job` that have not arrived."""
        found = {h: [r for r in held.results if r.job == job] for h, held in self._hosts.items()}
        return {host: results for host, results in found.items() if results}

    def stays_s(self, patience: Patience, now: float) -> dict[str, float]:
        """Return for each draining host with results how many more seconds it stays if no byte arrives; 0: it ends."""
        return {host: 0.0 if found.stored else max(0.0, _left_s(found, patience, now))
                for host, found in self._hosts.items() if found.draining_since is not None}

    def stuck(self, patience: Patience, now: float) -> frozenset[str]:
        """Return the draining hosts whose results should go to the checkpoint target: their bytes do not arrive."""
        return frozenset(h for h, left_s in self.stays_s(patience, now).items()
                         if now - self._hosts[h].moved_at >= TARGET_S or left_s < TARGET_S)

    def status(self, patience: Patience, now: float) -> tuple[UnsentStatus, ...]:
        stays_s = self.stays_s(patience, now)
        return tuple(UnsentStatus(host, r.job, r.kind, r.bytes, now - found.moved_at, stays_s.get(host), found.why)
                     for host, found in self._hosts.items() for r in found.results if not r.stored)

    def lines(self, patience: Patience, now: float) -> list[str]:
        """Describe for people the results that should have arrived and have not."""
        late = [u for u in self.status(patience, now) if u.stays_s is not None or u.quiet_s >= TARGET_S]
        return [f"{u.host} still holds {format_results(u.kind, u.bytes, u.job)}" for u in late]

    # ---- losses

    def give_up(self, patience: Patience, goes_on: Callable[[str], bool], now: float, unix: float) -> list[ResultsLost]:
        """Return the events for hosts that end now although they hold results; the event comes before the end.
        `goes_on`: whether a job is still running, so that other hosts have its state."""
        events = []
        for host, left_s in self.stays_s(patience, now).items():
            found = self._hosts[host]
            if left_s <= 0 and not found.recorded:
                self._hosts[host] = replace(found, recorded=True)
                events += self._losses(host, found, goes_on, unix)
        return events

    def forget(self, gone: Container[str], goes_on: Callable[[str], bool], unix: float) -> list[ResultsLost]:
        """Drop hosts and agents that have ended; return the events for results that ended with them."""
        ended, self._ended = self._ended, []
        ended += [(host, self._hosts.pop(host)) for host in list(self._hosts) if host in gone]
        for host in [h for h in self._moved if h in gone]:
            del self._moved[host]
        self._suspect = {h for h in self._suspect if h not in gone}
        return [e for host, found in ended if not found.recorded for e in self._losses(host, found, goes_on, unix)]

    def _losses(self, host: str, found: Holding, goes_on: Callable[[str], bool], unix: float) -> list[ResultsLost]:
        """Return the events for a host's results, one for each job and kind. Of a job that goes on, other hosts have
        the state."""
        counts: dict[tuple[str, str, bool], int] = {}
        for r in found.results:
            if (r.bytes or found.old) and not (r.kind == "checkpoint" and goes_on(r.job)):
                key = (r.job, r.kind, r.stored)
                counts[key] = counts.get(key, 0) + r.bytes
        return [ResultsLost(unix, job, host, kind, count, found.why.partition("\n")[0][:WHY_CHARS],
                            self._target if stored else "") for (job, kind, stored), count in counts.items()]


def unknown_s(hosts: Iterable[str], began: float, now: float) -> dict[str, float]:
    """Return how many more seconds draining hosts stay whose agents have not connected since our restart at `began`:
    nobody knows what they hold."""
    left_s = DRAIN_S - (now - began)
    return dict.fromkeys(hosts, left_s) if left_s > 0 else {}


def patience_of(*, going_down: bool, by_ourselves: bool = False, limited: bool = False,
                discard: bool = False) -> Patience:
    """Return the time limits for what is happening to the fleet."""
    if not going_down:
        return STAYS
    return DISCARD if discard else LIMITED if limited else BY_ITSELF if by_ourselves else ASKED


def results_of(report: AgentReport) -> tuple[Unsent, ...]:
    """Return the unsent results in a report. An older agent gives no amounts, but its `why` says that it sends."""
    if report.unsent is not None:
        return report.unsent
    if SENDS not in report.why and WAITS not in report.why:
        return ()
    return tuple(Unsent(w.report.job, "output", 0, worker=w.report.worker) for w in report.workers if w.pid == 0)


def _left_s(found: Holding, patience: Patience, now: float) -> float:
    since = now if found.draining_since is None else found.draining_since
    patience = OLD if found.old else patience
    left_s = min(patience.quiet_s - (now - max(found.moved_at, since)), patience.most_s - (now - since))
    if found.away_since is not None:
        left_s = min(left_s, DRAIN_S - (now - found.away_since))
    return max(left_s, found.noticed_until - now)
