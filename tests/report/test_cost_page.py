"""What a page about money says, and that it says the same as the ledger, whatever the ledger holds."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotfleet.fleet.cost.groups import FleetLedgers
from spotfleet.fleet.cost.series import CostMark
from spotfleet.fleet.domain.events import FleetCreated, HistoryLost, HostListed, LaunchIntended
from spotfleet.model import BillingRules, CloudState, Market, Nodes, Offer, Role, Run
from spotfleet.report.cost import cost_page
from spotfleet.report.cost_view import interruptions, view
from spotfleet.report.html import SafeHtml, tag, text
from spotfleet.report.simulation import simulation_page
from spotfleet.words import money
from tests.support.report import sample_ledger, sample_simulation

AT = sample_ledger.BEGIN + 61 * sample_ledger.HOUR
VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """The elements of a page, which must be closed in the order in which they were opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.names, self.attributes, self.words = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, name, attributes):
        self.names.append(name)
        self.attributes += [(name, key, value) for key, value in attributes]
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, words):
        if self.open and self.open[-1] not in ("style", "title"):
            self.words.append(words)

    @property
    def said(self) -> str:
        return " ".join(" ".join(self.words).replace("\u00a0", " ").split())


def page(*books: FleetLedgers, since: float | None = None, until: float | None = None) -> Page:
    return Page(cost_page(view(books, AT, since, until)))


def test_the_first_sentences_tell_the_result():
    said = page(sample_ledger.books()).said
    assert "This fleet cost $604.75, 57 % less than on demand ($1,408.18)." in said
    assert "4 interruptions cost $0.0124 in repeated steps and pauses, < 0.1 % of the bill." in said


def test_an_interruption_that_cost_nothing_is_said_to_have_cost_nothing():
    spot = Offer("fake", "r", "a", "g5", Market.SPOT, 1, 36_000, 72_000)
    events = (LaunchIntended(0.0, "f-0", Role.WORKER, spot, ""),
              HostListed(3600.0, "f-0", "i", CloudState.TERMINATED, (Run(0.0, 3600.0, True),)))
    said = page(FleetLedgers("f", events, 7200.0)).said
    assert "1 interruption, which cost no job a step or a pause." in said
    assert "Cost report, 1 Jan 1970, 00:00 to 02:00 UTC (2 h)" in said


def test_the_page_claims_no_loss_of_jobs_whose_steps_nobody_counts():
    known = view((sample_ledger.books(),), AT, since=None, until=None)
    fleets = tuple(replace(f, report=replace(f.report, jobs=tuple(replace(j, useful_steps=0, micros_per_1000_steps=None)
                                                                  for j in f.report.jobs)))
                   for f in known.costs.fleets)
    said = Page(cost_page(replace(known, costs=replace(known.costs, fleets=fleets)))).said
    assert "of the bill, without the jobs whose steps nobody counts." in said
    jobs = said.partition("By job")[2].partition("What happened")[0]
    assert jobs.count("- - - -") == len(fleets[0].report.jobs) and "- - - -" not in page(sample_ledger.books()).said


def test_a_fleet_that_lives_has_cost_so_far():
    said = page(sample_ledger.books(down=False)).said
    assert "This fleet has cost $604.67 so far, 57 % less" in said and "still running" in said
    assert "so far" not in page(sample_ledger.books()).said


def test_many_fleets_are_one_page_with_a_table_of_them():
    shown = page(sample_ledger.books(), sample_ledger.books(fleet="second"))
    assert "These 2 fleets cost $1,209.50, 57 % less than on demand ($2,816.36)." in shown.said
    assert "By fleet What each fleet cost. By fleet fleet billed cost on demand saved vision-large" in shown.said


def test_an_empty_ledger_is_an_honest_page():
    shown = page(sample_ledger.nothing())
    assert "This fleet has cost nothing: none of its machines has run." in shown.said
    assert "svg" not in shown.names and "$" not in shown.said.partition("What the words mean")[0]
    assert "There is no fleet to report on." in page().said


def test_a_window_without_cost_says_that_it_is_one():
    shown = page(sample_ledger.books(), until=sample_ledger.BEGIN - 1)
    assert "This fleet has cost nothing in this time: none of its machines has run." in shown.said


def test_a_window_shows_its_own_money():
    cut = sample_ledger.BEGIN + 30 * sample_ledger.HOUR
    first, second = (view([sample_ledger.books()], AT, *window).costs.micros for window in ((None, cut), (cut, None)))
    assert f"This fleet cost {money(first)}, " in page(sample_ledger.books(), until=cut).said
    assert f"This fleet cost {money(second)}, " in page(sample_ledger.books(), since=cut).said
    assert first + second == view([sample_ledger.books()], AT).costs.micros


def test_what_cannot_be_known_is_said_and_not_made_up():
    strange = Offer("fake", "r", "a", "g7", Market.SPOT, 1, 36_000, 0)
    books = FleetLedgers("odd", (FleetCreated(0.0, "odd", "fake", Nodes(), BillingRules()),
                          LaunchIntended(0.0, "odd-0", Role.WORKER, strange, ""),
                          HostListed(0.0, "odd-0", "i", CloudState.RUNNING, (Run(0.0, 3600.0),)),
                          HistoryLost(1800.0, "ledger.db.corrupt", "")), 7200.0, missing="the dispatcher is away")
    said = page(books).said
    assert "the saving is unknown, as there is no on-demand price" in said
    assert "Not everything could be read: odd: the dispatcher is away" in said
    assert "Records of odd were lost at 1 Jan 1970, 00:30: machines and jobs that had ended before may be" in said
    assert "Disks, public addresses and traffic are not counted: the prices are not known." in said
    assert "No on-demand price is known for fake/a/g7/spot." in said
    assert "% less" not in said and "the same on demand" not in said


def test_rows_and_bars_add_up_to_the_bill():
    found = view([sample_ledger.books()], AT)
    for groups in (found.by_fleet, found.by_pool, found.by_day, found.by_host):
        assert sum(g.micros for g in groups) == found.costs.micros
    shown = cost_page(found)
    bars = re.search(r'<table class="bars">(.*?)</table>', shown, re.S)[1]
    starts = [(float(x), float(w)) for x, w in re.findall(r'<rect x="([\d.]+)" y="0" width="([\d.]+)" height="10" '
                                                          r'class="band', bars)]
    assert len(starts) == 9
    assert starts[0][0] == 0 and starts[-1][0] + starts[-1][1] == pytest.approx(100, abs=0.02)
    ends = 0.0
    for (begin, _), micros in zip(starts, [m for name, m in found.costs.breakdown.parts() if name != "unknown"],
                                 strict=True):
        assert begin == pytest.approx(100 * ends / found.costs.micros, abs=0.45)
        ends += micros


@settings(deadline=None, max_examples=20)
@given(st.text(max_size=60), st.text(max_size=60))
def test_no_name_becomes_markup(fleet, other):
    """Of a fleet, a host, a pool: they come from files, clouds and other people."""
    offer = Offer("p" + other, "r", "z" + fleet, "t" + other, Market.SPOT, 1, 36_000_000, 72_000_000)
    plain = Offer("p", "r", "z", "t", Market.SPOT, 1, 36_000_000, 72_000_000)

    def shown(name: str, host: str, sold: Offer) -> Page:
        return page(FleetLedgers(name, (LaunchIntended(0.0, host, Role.WORKER, sold, ""),
                                 HostListed(0.0, host, "i", CloudState.TERMINATED, (Run(0.0, 3600.0, True),))), 7200.0))

    found, harmless = shown(fleet, other, offer), shown("f", "h", plain)
    assert found.names == harmless.names
    assert [a[:2] for a in found.attributes] == [a[:2] for a in harmless.attributes]


@pytest.mark.parametrize("made", [
    pytest.param(lambda: cost_page(view([sample_ledger.books(fleet=sample_ledger.HOSTILE)], AT)), id="cost"),
    pytest.param(lambda: simulation_page(sample_simulation.report()), id="simulation"),
])
def test_nothing_in_a_page_leads_out_of_it(made):
    whole = made()
    shown = Page(whole)
    assert not {"script", "img", "iframe", "object", "embed", "base", "form", "image", "use", "a"} & set(shown.names)
    ways = ("src", "href", "xlink:href", "action", "srcset", "style")
    leading = [(n, k, v) for n, k, v in shown.attributes if k in ways or k.startswith("on")]
    assert leading == [("link", "href", "data:,")]
    outside = [(k, v) for _, k, v in shown.attributes if "url(" in (v or "") and not v.startswith("url(#")]
    assert outside == []
    style = whole.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style and "@import" not in style
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in shown.attributes


def test_every_drawing_has_a_name_and_ids_are_unique():
    for whole in (cost_page(view([sample_ledger.books()], AT)), simulation_page(sample_simulation.report())):
        shown = Page(whole)
        ids = [v for _, k, v in shown.attributes if k == "id"]
        assert len(ids) == len(set(ids))
        named = [v.split() for n, k, v in shown.attributes if (n, k) == ("svg", "aria-labelledby")]
        assert len(named) == 8 and all(set(v) <= set(ids) for v in named)


def test_text_is_escaped_once_and_marks_that_turn_its_direction_are_shown():
    assert text("<b a='x'>&amp;") == "&lt;b a=&#x27;x&#x27;&gt;&amp;amp;"
    assert text(text("<")) == "&lt;" and isinstance(text("<"), SafeHtml)
    assert text("a\u202eb\x00c\ud800") == "a\ufffdb\ufffdc\ufffd"
    assert tag("p", "1 < 2", class_='"x"', aria_label="y", hidden=None) == \
        '<p class="&quot;x&quot;" aria-label="y">1 &lt; 2</p>'


def test_a_notice_and_the_loss_that_follows_are_one_interruption():
    def mark(at: float, kind: str, host: str = "f-0") -> CostMark:
        return CostMark(at, kind, host, "pool", "")

    assert interruptions([mark(0, "notice"), mark(120, "interruption")]) == (mark(0, "notice"),)
    assert interruptions([mark(0, "notice"), mark(5, "notice", "f-1"), mark(9, "job", "j")]) == (
        mark(0, "notice"), mark(5, "notice", "f-1"))
    again = [mark(0, "interruption"), mark(500, "notice"), mark(620, "interruption"), mark(5000, "interruption")]
    assert interruptions(again) == (again[0], again[1], again[3])


def test_a_simulation_tells_its_result_first():
    said = Page(simulation_page(sample_simulation.report())).said
    ours = sample_simulation.report().ours
    assert f"Our policy would have cost {money(ours.mean_micros)} on average, 42.0 % of on demand" in said
    assert "and would have been in time in every window." in said
    assert "cheaper than the cheapest other strategy that missed no more often, Uniform Progress" in said
    assert "1 launch" not in said and "2 launches that were refused are left out" in said


def test_a_simulation_without_a_window_is_an_honest_page():
    said = Page(simulation_page(sample_simulation.without_windows())).said
    assert "Nothing was simulated: the records hold no window of that length." in said
    assert "Disks are not counted" in said
