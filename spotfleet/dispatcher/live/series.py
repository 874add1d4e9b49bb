"""Progress of one job over time, in bounded memory: points for its charts, and a mark for each interruption. Pure.

A point has the number of steps applied by then, so the speed between two points is exact, pauses included. When there
are too many points, every second one is dropped: the newest part of a long series is fine, the oldest coarse.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spotfleet.fleet.domain.events import Event, GenerationFormed, JobChanged, JobProgress, JobResumed

MOST_POINTS = 600
MOST_MARKS = 200
START = "start"  # cause of a job's first generation, which interrupts nothing


@dataclass(frozen=True)
class SeriesPoint:
    at: float  # Unix
    version: int  # optimizer steps applied by then
    workers: int


@dataclass(frozen=True)
class SeriesMark:
    """A change of the job's workers, or its end."""

    at: float
    cause: str  # as in GenerationFormed, or the state in which the job has ended
    generation: int = 0
    workers: int = 0
    pause_s: float | None = None  # None: no step was made since
    repeated: int = 0
    why: str = ""


class JobSeries:
    """Points and marks of one job, oldest first."""

    def __init__(self) -> None:
        self.points: list[SeriesPoint] = []
        self.marks: list[SeriesMark] = []
        self.forgotten = 0  # marks that were dropped, the oldest
        self._workers = 0

    def take(self, event: Event) -> None:
        """Add an event of the job."""
        match event:
            case GenerationFormed():
                self._workers = len(event.members)
                if event.cause != START:
                    self._mark(SeriesMark(event.at, event.cause, event.generation, self._workers, why=event.why))
            case JobResumed():
                self._resume(event)
            case JobProgress():
                self.sample(event.at, event.version, self._workers)
            case JobChanged(state=state) if state.ended:
                self._mark(SeriesMark(event.at, state.value, why=event.why))

    def sample(self, at: float, version: int, workers: int) -> None:
        """Add a measurement. One that repeats the two before it replaces the newer of them."""
        if self.points and at <= self.points[-1].at:
            return
        point = SeriesPoint(at, version, workers)
        if len(self.points) > 1 and all(replace(p, at=at) == point for p in self.points[-2:]):
            self.points[-1] = point
            return
        self.points.append(point)
        if len(self.points) > MOST_POINTS:
            self.points = [*self.points[:-1:2], self.points[-1]]

    def since(self, at: float) -> tuple[list[SeriesPoint], list[SeriesMark]]:
        """Return what came or changed after `at`. A mark changes once its pause is known: the last ones are repeated.
        """
        return ([p for p in self.points if p.at > at],
                [m for n, m in enumerate(self.marks, 1) if m.at > at or n == len(self.marks)])

    def _mark(self, mark: SeriesMark) -> None:
        self.marks.append(mark)
        self.forgotten += max(0, len(self.marks) - MOST_MARKS)
        del self.marks[:-MOST_MARKS]

    def _resume(self, event: JobResumed) -> None:
        for n, mark in enumerate(self.marks):
            if mark.generation == event.generation:
                self.marks[n] = replace(mark, pause_s=event.pause_s, repeated=event.repeated)
