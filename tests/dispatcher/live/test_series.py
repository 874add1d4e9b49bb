"""A job's series: exact speeds in bounded memory, and a mark for each interruption."""

from __future__ import annotations

from spotfleet.dispatcher.live.series import MOST_MARKS, MOST_POINTS, JobSeries, SeriesMark, SeriesPoint
from spotfleet.fleet.domain.events import GenerationFormed, JobChanged, JobProgress, JobResumed
from spotfleet.model import JobState


def formed(at: float, generation: int, workers: int, cause: str) -> GenerationFormed:
    return GenerationFormed(at, "j", generation, tuple(f"h/{n}/1" for n in range(workers)), cause, "because")


def test_each_interruption_is_marked_with_its_cause_size_and_pause():
    series = JobSeries()
    for event in (formed(0, 1, 4, "start"), JobProgress(10, "j", 100, 0.1), formed(12, 2, 3, "death"),
                  JobResumed(13, "j", 2, 118, 2, 0.75), JobChanged(60, "j", JobState.SUCCEEDED, "done", 500)):
        series.take(event)
    assert series.points == [SeriesPoint(10, 100, 4)]
    assert series.marks == [SeriesMark(12, "death", 2, 3, 0.75, 2, "because"), SeriesMark(60, "succeeded", why="done")]


def test_a_long_series_is_bounded_and_keeps_its_newest_part_fine_and_the_steps_exact():
    series = JobSeries()
    for n in range(6_000):
        series.sample(2.0 * n, 7 * n, 4)
        assert series.points[-1].at == 2.0 * n
    points = series.points
    assert len(points) <= MOST_POINTS and points[-1] == SeriesPoint(11_998.0, 41_993, 4)
    assert all(p.version == 3.5 * p.at for p in points)
    assert points[-1].at - points[-2].at == 2.0 and points[1].at - points[0].at > 10


def test_marks_are_bounded_and_those_that_were_dropped_counted():
    series = JobSeries()
    for n in range(MOST_MARKS + 5):
        series.take(formed(n, n + 2, 2, "notice"))
    assert (len(series.marks), series.forgotten, series.marks[0].at) == (MOST_MARKS, 5, 5)


def test_a_job_that_waits_takes_no_more_points():
    series = JobSeries()
    for n in range(1000):
        series.sample(n, 50, 0)
    assert series.points == [SeriesPoint(0, 50, 0), SeriesPoint(999, 50, 0)]


def test_news_are_what_came_later_and_the_last_mark_whose_pause_may_be_new():
    series = JobSeries()
    series.take(formed(1, 2, 2, "notice"))
    series.sample(2, 10, 2)
    series.take(formed(3, 3, 1, "death"))
    series.sample(4, 20, 1)
    points, marks = series.since(3.5)
    assert points == [SeriesPoint(4, 20, 1)] and [m.generation for m in marks] == [3]
