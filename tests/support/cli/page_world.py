"""A made-up fleet for the page: what a dispatcher would answer, from one poll to the next."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from spotfleet.codec import to_json
from spotfleet.dispatcher.live.series import JobSeries, SeriesMark
from spotfleet.fleet.domain.events import GenerationFormed, HostJoined, HostNoticed, JobChanged, event_to_json
from spotfleet.model import JobState
from spotfleet.protocol.messages import (
    FleetStatus,
    GpuReading,
    HostStatus,
    JobStatus,
    PolicyStatus,
    SlowWorker,
    WorkerStatus,
)
from spotfleet.transport.client import LogChunk

HOSTILE = '</script><script src="https://collector.invalid/x.js"></script><img src=//collector.invalid/i onerror=x>'
STATES = ("up", "up", "up", "up", "up", "up", "up", "launching", "up", "draining")
ZONES = ("us-east-1a", "us-east-1b", "us-east-1c", "us-west-2a")
PERIOD_S = 2.0


@dataclass
class PageWorld:
    """Answers as GET /v1/live does, each PERIOD_S later than the one before."""

    hosts: int = 12
    changing: int = 0  # hosts whose state changes from one poll to the next
    hostile: str = ""  # in names and reasons
    polls: int = 0
    now: float = field(default_factory=time.time)
    cancelled: list[str] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)
    fails: Exception | None = None

    def __post_init__(self) -> None:
        self.series = JobSeries()
        begun = self.now - 3000
        steps = 0.0
        for n in range(1500):
            workers = 8 if n < 230 or 400 <= n < 630 or 800 <= n < 1030 or n >= 1200 else 6
            steps += 2 * workers * (0.78 + 0.03 * ((7 * n) % 11 - 5) / 5) * (n not in (630, 631, 632))
            self.series.sample(begun + 2 * n, int(steps), workers)
        self.steps = int(steps)
        for at, cause, workers, pause_s in ((460, "notice", 6, 0.31), (800, "join", 8, 0.19), (1260, "death", 6, 1.4),
                                            (1600, "join", 8, 0.2), (2060, "notice", 6, 0.28), (2400, "join", 8, 0.2)):
            why = f"{'lab-3/0/4 leaves' if cause != 'join' else 'lab-9 is ready'} ({cause})"
            self.series.marks.append(SeriesMark(begun + at, cause, int(at), workers, pause_s, 0, why))

    def poll(self, after: int | None, since: float) -> dict[str, Any]:
        if self.fails is not None:
            raise self.fails
        self.polls += 1
        self.now += PERIOD_S if after is not None else 0.0
        self.series.sample(self.now, self.steps + 12 * self.polls, 8)
        points, marks = self.series.since(since)
        events = self._events() if after is None else self._news()
        sweep = [[self.now - 2.0 * n, 0, 3 if n < 80 else 2] for n in range(200, -1, -1)]
        mark = SeriesMark(self.now - 158, "join", 2, 3, why="lab-8 is ready")
        return {"now": self.now, "status": to_json(self._status()), "last": 4 + self.polls,
                "events": [{"seq": n, **event_to_json(e)} for n, e in enumerate(events, 4 + self.polls)],
                "series": {"gpt-2": {"points": [[p.at, p.version, p.workers] for p in points],
                                     "marks": to_json(marks), "forgotten": 0},
                           "sweep-4": {"points": [p for p in sweep if p[0] > since],
                                       "marks": to_json([mark] if not since else []), "forgotten": 0}}}

    def log(self, job: str, rank: int, offset: int | None, wait_s: float) -> LogChunk:
        if offset is not None and offset > 70_000:
            time.sleep(0.05)
            return LogChunk(b"", offset, end=False)
        lines = "".join(f"step {n}  loss {3.2 - n / 90:.4f}  rank {rank}\n" for n in range(60))
        return LogChunk(f"{lines}{self.hostile}\n".encode(), 70_001, end=False)

    def cancel(self, job: str) -> None:
        self.cancelled.append(job)

    def drain(self, host: str) -> None:
        self.drained.append(host)

    def _events(self) -> list[Any]:
        return [HostJoined(self.now - 900, "lab-1", "a"), HostNoticed(self.now - 300, "lab-3", 120.0, "terminate"),
                GenerationFormed(self.now - 299, "gpt-2", 5, ("lab-1/0/1", "lab-2/0/1"), "notice",
                                 f"lab-3/0/4 leaves (notice) {self.hostile}")]

    def _news(self) -> list[Any]:
        return [HostNoticed(self.now, f"lab-{self.polls}", 120.0, "terminate"),
                JobChanged(self.now, "gpt-2", JobState.RUNNING, f"poll {self.polls}")] if self.polls % 2 else []

    def _status(self) -> FleetStatus:
        hosts = (HostStatus("lab-d-0", "dispatcher", "up", "aws/us-east-1a/t3.small/on-demand", 0, 20800, 20800,
                            "10.0.0.4", since_s=4000.0 + PERIOD_S * self.polls),
                 *(self._host(n) for n in range(self.hosts)))
        up = sum(h.state == "up" for h in hosts[1:])
        spent = 18_412_345 + 2000 * self.polls
        return FleetStatus(
            "lab", "degraded", f"{up} of {self.hosts} hosts are up; no room for p4d.24xlarge in us-east-1c", 4,
            self.hosts, self.hosts, hosts, self._jobs(), sum(h.price_micros_h for h in hosts),
            sum(h.on_demand_micros_h for h in hosts), 7200.0 + PERIOD_S * self.polls, 0.2, None, spent,
            PolicyStatus(self.hosts, 0, "", max_micros=250_000_000), 3, on_demand_spent_micros=int(2.9 * spent))

    def _host(self, n: int) -> HostStatus:
        state = STATES[n % len(STATES)]
        if self.changing and (n - self.polls * self.changing) % self.hosts < self.changing:
            state = "draining"
        gpus = tuple(GpuReading(g, 40 + (7 * n + (n + self.polls) // 5) % 60, 51_000 + 10 * n, 81_559, 50 + n % 25,
                                int(n == 4 and g == 1)) for g in range(2)) if state == "up" else ()
        why = {"launching": "importing torch", "draining": "interruption notice"}.get(state, "")
        if n == 4:
            why = "GPU 1: 1 uncorrected memory error"
        market = "on-demand" if n % 7 == 5 else "spot"
        return HostStatus(f"lab-{n}", "worker", state, f"aws/{ZONES[n % 4]}/p4d.24xlarge/{market}", 2,
                          9_800_000 if market == "spot" else 32_772_600, 32_772_600, f"10.0.1.{n % 250}",
                          ("gpt-2",) if state == "up" else (), 90.0 if state == "draining" else None,
                          1000.0 + PERIOD_S * self.polls, f"{why}{self.hostile if n == 1 else ''}", gpus)

    def _jobs(self) -> tuple[JobStatus, ...]:
        workers = tuple(WorkerStatus(f"lab-{n}/{s}/1", f"lab-{n}", 2 * n + s, "ready", 9000) for n in range(4)
                        for s in range(2))
        slow = (SlowWorker("lab-2/1/1", 5, 0.214, 0.151, 640),)
        return (JobStatus("warmup-1", "warmup", "succeeded", "rank 0's script has ended", version=1200, age_s=7000.0),
                JobStatus("gpt-2", "gpt", "running", "", 7, 8, self.steps + 12 * self.polls, 0.161, 12, 4, 16,
                          workers=workers, age_s=3100.0, slow=slow,
                          step_why="151.0 ms of computing, 8.2 ms waiting for rank 5"),
                JobStatus("sweep-4", "sweep", "running", "", 1, 3, min_workers=1, max_workers=3, age_s=600.0),
                JobStatus("eval-3", "eval", "queued", "waits for 8 workers: gpt-2 holds the hosts", min_workers=8,
                          max_workers=8, age_s=40.0))
