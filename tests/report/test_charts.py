"""That charts show what they are given: ticks, steps, stacks, and nothing outside the plot."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfleet.report.axes import Tick, TimeAxis, Unit, time_ticks, value_ticks
from spotfleet.report.charts import Band, Chart, ChartMark, Curve, SeriesStyle, stacked, thinned
from spotfleet.report.svg import CHARACTER, NARROW, WIDE, figure, frame
from spotfleet.words import (
    about,
    civil,
    clock,
    clock_utc,
    count,
    dollars,
    exact_dollars,
    hours,
    instant,
    money,
    percent,
    rate,
    span,
)

DAY = 86_400.0
values = st.floats(0, 1e12, allow_nan=False)
moments = st.floats(0, 4e9, allow_nan=False)


def drawn(chart: Chart) -> dict[str, list[str]]:
    """By class, the paths of the wide drawing."""
    wide = figure(chart).partition("</svg>")[0]
    found: dict[str, list[str]] = {}
    for element in re.findall(r"<path [^>]*>", wide):
        name, path = re.search(r'class="([^"]*)"', element)[1], re.search(r' d="([^"]*)"', element)[1]
        found.setdefault(name, []).append(path)
    return found


def corners(path: str) -> list[tuple[float, float]]:
    at, found = (0.0, 0.0), []
    for order, rest in re.findall(r"([MLHVZ]) ?([-\d. ]*)", path):
        numbers = [float(n) for n in rest.split()]
        if order in "ML":
            at = (numbers[0], numbers[1])
        elif order == "H":
            at = (numbers[0], at[1])
        elif order == "V":
            at = (at[0], numbers[0])
        found.append(at)
    return found


@given(st.lists(st.tuples(moments, values), min_size=1, max_size=30), st.booleans())
def test_whatever_is_drawn_lies_in_the_plot(points, steps):
    points = tuple(sorted(points))
    begin, bands = points[0][0], stacked([("a", SeriesStyle.SPOT, points, ""),
                                          ("b", SeriesStyle.ON_DEMAND, points, "")])
    chart = Chart("k", "t", "d", Unit.DOLLARS, begin, points[-1][0] + 1, (Curve("c", SeriesStyle.SPOT, points, steps),),
                  bands,
                  (ChartMark(begin, "m"),))
    f = frame(chart, WIDE, value_ticks(chart.most, chart.unit))
    paths = [p for name, found in drawn(chart).items() if name.startswith(("line", "band")) for p in found]
    assert paths
    for x, y in (corner for path in paths for corner in corners(path)):
        assert f.left - 0.01 <= x <= f.right + 0.01 and f.top - 0.01 <= y <= f.bottom + 0.01


@given(moments, st.floats(1, 4e7))
def test_words_at_the_edges_of_a_drawing_lie_in_it(begin, length):
    chart = Chart("k", "t", "d", Unit.HOSTS, begin, begin + length, (Curve("c", SeriesStyle.SPOT, ((begin, 3.0),)),))
    for drawing, width in zip(figure(chart).split("</svg>"), (WIDE, NARROW), strict=False):
        said = re.findall(r'<text x="([-\d.]+)" y="[-\d.]+" text-anchor="(\w+)">([^<]*)</text>', drawing)
        assert said
        for x, anchor, words in said:
            half = len(words) * CHARACTER / 2
            middle = float(x) - half if anchor == "end" else float(x)
            assert half <= middle <= width - half, words


def test_a_curve_goes_through_its_points_and_steps_hold_until_the_next():
    points = ((0.0, 0.0), (50.0, 100e6), (100.0, 50e6))
    chart = Chart("k", "t", "d", Unit.DOLLARS, 0.0, 100.0, (Curve("c", SeriesStyle.SPOT, points),))
    f = frame(chart, WIDE, value_ticks(chart.most, chart.unit))
    rounded = [(pytest.approx(f.x(at), abs=0.01), pytest.approx(f.y(v), abs=0.01)) for at, v in points]
    assert corners(drawn(chart)["line spot"][0]) == rounded
    assert (f.x(0), f.x(100), f.y(0), f.y(100e6)) == (f.left, f.right, f.bottom, f.top)
    stepped = Chart("k", "t", "d", Unit.DOLLARS, 0.0, 100.0, (Curve("c", SeriesStyle.SPOT, points, steps=True),))
    there = corners(drawn(stepped)["line spot"][0])
    assert [y for _, y in there] == pytest.approx([f.bottom, f.bottom, f.top, f.top, f.y(50e6), f.y(50e6)], abs=0.01)


def test_a_stack_adds_up_and_draws_nothing_where_there_is_nothing():
    spot, full = ((0.0, 4.0), (10.0, 2.0)), ((0.0, 0.0), (10.0, 2.0), (20.0, 0.0))
    lower, upper = stacked([("spot", SeriesStyle.SPOT, spot, ""), ("on demand", SeriesStyle.ON_DEMAND, full, "")])
    assert lower.points == ((0.0, 0.0, 4.0), (10.0, 0.0, 2.0), (20.0, 0.0, 2.0))
    assert upper.points == ((0.0, 4.0, 4.0), (10.0, 2.0, 4.0), (20.0, 2.0, 2.0))
    chart = Chart("k", "t", "d", Unit.HOSTS, 0.0, 30.0, bands=(lower, upper))
    f = frame(chart, WIDE, value_ticks(chart.most, chart.unit))
    (path,) = drawn(chart)["band ondemand"]
    xs, ys = zip(*corners(path), strict=True)
    assert (min(xs), max(xs)) == pytest.approx((f.x(10), f.x(20)), abs=0.01)
    assert (min(ys), max(ys)) == pytest.approx((f.y(4), f.y(2)), abs=0.01)
    assert "band ondemand" not in drawn(Chart("k", "t", "d", Unit.HOSTS, 0.0, 30.0, bands=(
        Band("none", SeriesStyle.ON_DEMAND, ((0.0, 1.0, 1.0),)),)))


def test_a_layer_is_drawn_along_its_upper_edge_and_back_along_its_lower():
    chart = Chart("k", "t", "d", Unit.HOSTS, 0.0, 20.0, bands=(
        Band("b", SeriesStyle.SPOT, ((0.0, 1.0, 3.0), (10.0, 2.0, 4.0))),))
    f = frame(chart, WIDE, value_ticks(chart.most, chart.unit))
    around = [(0, 1), (0, 3), (10, 3), (10, 4), (20, 4), (20, 2), (10, 2), (10, 1), (0, 1), (0, 1)]
    (path,) = drawn(chart)["band spot"]
    assert corners(path) == [(pytest.approx(f.x(at), abs=0.01), pytest.approx(f.y(v), abs=0.01)) for at, v in around]


def test_interruptions_of_one_moment_share_a_mark_with_all_their_words():
    marks = tuple(ChartMark(50.0 + i / 100, f"host {i}") for i in range(10))
    chart = Chart("k", "t", "d", Unit.HOSTS, 0.0, 100.0, marks=(*marks, ChartMark(90.0, "later")))
    assert len(drawn(chart)["mark"]) == 2
    assert "host 0; host 1; host 2; host 3; host 4; host 5; host 6; host 7; and 2 more" in figure(chart)


def test_both_sizes_are_drawn():
    whole = figure(Chart("k", "t", "d", Unit.HOSTS, 0.0, 100.0))
    assert [re.search(r"viewBox=\"0 0 (\d+)", part)[1] for part in whole.split("<svg ")[1:]] == [str(WIDE), str(NARROW)]


@given(st.lists(st.tuples(moments, values), max_size=3000), st.integers(8, 500))
def test_thinning_keeps_the_ends_and_every_extreme(points, most):
    points = tuple(sorted(points))
    kept = thinned(points, most)
    assert len(kept) <= max(len(points) if len(points) <= most else 0, most + 4)
    assert list(kept) == sorted(kept) and set(kept) <= set(points)
    if points:
        assert kept[0] == points[0] and kept[-1] == points[-1]
        assert (min(v for _, v in kept), max(v for _, v in kept)) == (
            min(v for _, v in points), max(v for _, v in points))


@given(st.floats(0, 1e13, allow_nan=False), st.sampled_from(Unit))
def test_value_ticks_begin_at_nothing_and_reach_over_all(most, unit):
    ticks = value_ticks(most, unit)
    assert ticks[0].at == 0 and ticks[-1].at >= most * (1 - 1e-9) and 2 <= len(ticks) <= 6
    assert len({t.label for t in ticks}) == len(ticks)


@given(moments, st.floats(0, 1e9, allow_nan=False), st.sampled_from([TimeAxis.UTC, TimeAxis.ELAPSED]),
       st.integers(4, 9))
def test_time_ticks_are_few_and_between_the_ends(begin, length, clock, most):
    ticks = time_ticks(begin, begin + length, clock, most)
    assert len(ticks) <= most + 1 and all(begin - 1e-3 <= t.at <= begin + length + 1e-3 for t in ticks)


def test_ticks_read_like_a_clock_and_a_calendar():
    noon = 1_793_880_000.0  # 5 November 2026, 12:00 UTC
    assert time_ticks(noon, noon + DAY, TimeAxis.UTC, 3) == [
        Tick(noon, "12:00", "5 Nov"), Tick(noon + DAY / 2, "00:00", "6 Nov"), Tick(noon + DAY, "12:00")]
    assert time_ticks(noon, noon + 3 * DAY, TimeAxis.UTC, 3)[0] == Tick(noon + DAY / 2, "6 Nov", "2026")
    elapsed = time_ticks(0, 60 * 3600, TimeAxis.ELAPSED, 9)
    assert [t.label for t in elapsed] == ["0 h", "12 h", "24 h", "36 h", "48 h", "60 h"]
    assert [t.label for t in value_ticks(12.3e6, Unit.DOLLARS)] == ["$0", "$5", "$10", "$15"]
    assert [t.label for t in value_ticks(40, Unit.DOLLARS)] == ["$0", "$0.00001", "$0.00002", "$0.00003", "$0.00004"]
    assert [t.label for t in value_ticks(1, Unit.HOSTS)] == ["0", "1"]


@pytest.mark.parametrize(("said", "expected"), [
    (money(0), "$0"), (money(12_340_000), "$12.34"), (money(1_234_567_890), "$1,234.57"), (money(12_345), "$0.0123"),
    (money(12), "$0.000012"), (money(-1_500_000), "-$1.50"), (money(4_000, 2), "< $0.01"), (money(0, 2), "$0.00"),
    (percent(1, 3), "33\u00a0%"), (percent(1, 30), "3.3\u00a0%"), (percent(1, 9999), "<\u00a00.1\u00a0%"),
    (percent(0, 3), "0\u00a0%"), (percent(1, 0), "0\u00a0%"),
    (span(0.6), "0.6 s"), (span(45), "45 s"), (span(90), "1 min 30 s"), (span(720), "12 min"),
    (span(11_220), "3 h 07 min"),
    (span(7200), "2 h"), (span(187_200), "2 d 4 h"), (span(172_800), "2 d"), (hours(216_000), "60 h"),
    (count(0, "host"), "no hosts"), (count(1, "host"), "1 host"), (count(1200, "host"), "1,200 hosts"),
    (dollars(1_234_567_890), "$1,234.5679"), (dollars(-24, 6), "-$0.000024"), (exact_dollars(-123), "-0.000123"),
    (rate(1_234_560), "$1.23456/h"), (rate(1_000_000), "$1.00/h"), (rate(500_000), "$0.50/h"),
    (about(119), "119 s"), (about(7199), "120 min"), (about(9000), "2.5 h"),
    (clock(60_847.9), "16:54"), (clock(60_847.9, seconds=True), "16:54:07"), (clock_utc(60_847.9), "16:54:07 UTC"),
    (instant(0), "1 Jan 1970, 00:00"), (instant(951_827_696), "29 Feb 2000, 12:34"),
], ids=lambda value: str(value).replace("\u00a0", "_"))
def test_figures_read_as_people_write_them(said, expected):
    assert said == expected


@given(st.integers(-10**6, 10**6))
def test_days_follow_each_other(number):
    (y, m, d), after = civil(number * DAY), civil((number + 1) * DAY)
    assert after in ((y, m, d + 1), (y, m + 1, 1), (y + 1, 1, 1))
    assert civil(number * DAY + DAY - 1) == (y, m, d)
