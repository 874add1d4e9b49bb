"""The pages in a real browser, which the pure tests cannot show: that nothing is asked for, that every chart has a
shape, that no word runs out of its place, on wide and narrow screens, in light and dark.

By hand: `apt-get install chromium`, then `pytest tests/report/test_in_chromium.py`. Without one it is skipped.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfleet.report.cost import cost_page
from spotfleet.report.cost_view import view
from spotfleet.report.simulation import simulation_page
from tests.support.report import browser, sample_ledger, sample_simulation

pytestmark = [
    pytest.mark.skipif(browser.found() is None, reason="no Chromium here (Debian: apt-get install chromium)"),
    pytest.mark.timeout(120),
]
CHARTS = """[...document.querySelectorAll("svg.chart")].filter(s => s.getBoundingClientRect().width > 0).map(s => ({
    name: s.querySelector("title").textContent,
    shapes: [...s.querySelectorAll("path.line, path.band")].map(p => p.getBBox()).filter(b => b.width > 20).length,
    wider: [...s.querySelectorAll("text")].map(t => t.getBBox()).filter(b =>
        b.x < 0 || b.x + b.width > s.viewBox.baseVal.width + .5
        || b.y + b.height > s.viewBox.baseVal.height + .5).length,
    crossing: [...s.querySelectorAll("g")].flatMap(g => {
        const boxes = [...g.querySelectorAll(":scope > text")].map(t => t.getBoundingClientRect());
        return boxes.filter((a, i) => boxes.some((b, k) => k > i && a.left < b.right && b.left < a.right
                                                           && a.top < b.bottom - 2 && b.top < a.bottom - 2));
    }).length,
}))"""
OVERFLOW = """[...document.querySelectorAll("main *:not(svg *)")].filter(e => !e.closest(".scroll")
    && e.tagName != "CAPTION" && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1
    ).map(e => e.tagName + " " + e.className)"""
COLOURS = """["body", "h1"].map(q => getComputedStyle(document.querySelector(q))).flatMap(
    s => [s.backgroundColor, s.color])"""
THEIRS = ("clients2.google.com", "update.googleapis.com", "accounts.google.com")  # Chromium asks these for itself


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    at = sample_ledger.BEGIN + 61 * sample_ledger.HOUR
    texts = {
        "cost": cost_page(view([sample_ledger.books(fleet=sample_ledger.HOSTILE)], at)),
        "many": cost_page(view([sample_ledger.books(), sample_ledger.books(down=False, fleet="second")], at)),
        "empty": cost_page(view([sample_ledger.nothing()], at)),
        "simulation": simulation_page(sample_simulation.report()),
        "curious": '<img src="https://collector.invalid/seen"><p>not one of ours, and with no policy</p>',
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator[browser.Browser]:
    with browser.Browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


SIZES = pytest.mark.parametrize("width", [1280, 400])
CHARTS_OF = {"cost": ["Spend over time", "Hosts over time", "Prices in aws/us-east-1b/g5.12xlarge/spot",
                      "Prices in aws/us-east-1a/g5.12xlarge/spot"],
             "simulation": ["Cost of each window", "Hosts in one window", "Money spent in this window",
                            "Work done in this window"]}


@SIZES
@pytest.mark.parametrize("name", ["cost", "simulation"])
def test_every_chart_has_a_shape_and_no_words_outside_or_on_each_other(chromium, pages, name, width):
    chromium.open(pages[name], width=width)
    charts = chromium.run(CHARTS)
    assert [c["name"] for c in charts] == CHARTS_OF[name]
    assert all(c["shapes"] for c in charts), charts
    assert [c["name"] for c in charts if c["wider"] or c["crossing"]] == []


@SIZES
@pytest.mark.parametrize("name", ["cost", "many", "empty", "simulation"])
def test_nothing_is_wider_than_the_screen_but_tables_that_can_be_moved(chromium, pages, name, width):
    chromium.open(pages[name], width=width)
    assert chromium.run(OVERFLOW) == []


@pytest.mark.parametrize("name", ["cost", "many", "empty", "simulation"])
def test_a_page_asks_nobody_for_anything_and_breaks_no_rule_of_its_own(chromium, pages, name):
    del chromium.requests[:], chromium.complaints[:]
    chromium.open(pages[name], width=1280)
    assert chromium.requests == [pages[name].as_uri()]
    assert chromium.complaints == []
    assert chromium.run("document.scripts.length") == 0


def test_a_request_would_have_been_seen(chromium, pages):
    del chromium.requests[:]
    chromium.open(pages["curious"], width=1280)
    assert chromium.requests == [pages["curious"].as_uri(), "https://collector.invalid/seen"]


def test_the_browsers_own_log_of_the_net_knows_no_request_either(tmp_path, pages):
    def asked(*names: str) -> list[str]:
        folder = tmp_path / names[-1]
        folder.mkdir()
        with browser.Browser(folder) as found:
            for name in names:
                found.open(pages[name], width=1280)
        return [url for url in browser.requests_on_the_net(folder) if url.split("/")[2] not in THEIRS]

    assert asked("cost", "simulation") == []
    assert asked("cost", "curious") == ["https://collector.invalid/seen"]


def test_light_and_dark_are_different_and_both_look_like_something(chromium, pages, tmp_path):
    shown = {}
    for dark in (False, True):
        chromium.open(pages["cost"], width=1280, dark=dark)
        ground, _, _, ink = chromium.run(COLOURS)
        data = chromium.screenshot(tmp_path / f"{dark}.png")
        shown[dark] = (ground, ink)
        width, height = struct.unpack(">II", data[16:24])
        assert width == 1280 and 3000 < height < 12_000
        assert len(data) > 150_000 and len(_pixels(data)) > 5_000_000
    assert shown[False] == ("rgb(255, 255, 255)", "rgb(26, 29, 33)")
    assert shown[True] == ("rgb(21, 24, 28)", "rgb(236, 239, 242)")


def _pixels(png: bytes) -> bytes:
    """What a PNG holds, unpacked: damaged ones raise."""
    at, data = 8, b""
    while at < len(png):
        (length,) = struct.unpack(">I", png[at:at + 4])
        if png[at + 4:at + 8] == b"IDAT":
            data += png[at + 8:at + 8 + length]
        at += 12 + length
    return zlib.decompress(data)
