"""The emulated cloud under any order of requests, troubles and lost answers."""

from __future__ import annotations

import json
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spotfleet import model
from spotfleet.errors import NoCapacity, SpotfleetError, UsageError
from spotfleet.fleet.cost.billing import PriceBook, pieces, round_half_up
from spotfleet.fleet.domain.events import PriceChanged
from spotfleet.model import BillingRules, CloudState, Need, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.local import hosts
from spotfleet.providers.local.inprocess import InProcessProvider, ManualClock
from spotfleet.providers.local.market.book import HostOrder
from spotfleet.providers.local.market.market import LocalMarket
from spotfleet.providers.local.market.pools import LocalPool, MarketRules

FATES = st.lists(st.sampled_from(["", "before", "after"]), max_size=6)
NAMES = ("f-0", "f-1", "f-2")
POOLS = tuple(LocalPool(zone, "gpu", model.Market.SPOT, 3_600_000, 2, swing_permille=300, period_s=7)
              for zone in ("local-a", "local-b"))


def insist(act, tries: int = 10) -> None:
    """What every caller does: ask again until there is an answer."""
    for _ in range(tries):
        try:
            act()
            return
        except NoCapacity:
            raise
        except SpotfleetError:
            continue
    raise AssertionError("never answered")


@settings(max_examples=100)
@given(FATES, FATES, st.sampled_from([0.0, 0.5, 20.0]), st.integers(0, 2))
def test_whatever_answers_are_lost_a_request_makes_one_host_and_its_end_is_one_end(launches, ends, lag_s, duplicates):
    clock = ManualClock()
    cloud = InProcessProvider(clock=clock)
    cloud.faults.listing_lag_s, cloud.faults.duplicates = lag_s, duplicates
    cloud.faults.lost = {"launch": [f for f in launches if f], "terminate": [f for f in ends if f]}
    offer = cloud.offers(Need())[0]
    for name in NAMES:
        insist(lambda name=name: cloud.launch(LaunchRequest(name, "f", Role.WORKER, offer, Boot("any"))))
    assert sorted(cloud.living()) == list(NAMES)
    assert len(cloud.hosts("f")) == (0 if lag_s else 3 * (1 + duplicates))
    clock.advance(60)
    lines = cloud.hosts("f")
    assert {h.request_id for h in lines} == set(NAMES) and len(lines) == 3 * (1 + duplicates)
    for name in NAMES:
        insist(lambda name=name: cloud.terminate(name))
    clock.advance(60)
    assert cloud.living() == [] and {h.state for h in cloud.hosts("f")} == {CloudState.TERMINATED}
    assert [h.runs[0].ended_at - h.runs[0].started_at for h in cloud.hosts("f")] == [60.0] * len(lines)


class MarketMachine(RuleBasedStateMachine):
    """Anything may happen to three hosts in two pools."""

    def __init__(self) -> None:
        super().__init__()
        rules = MarketRules(POOLS, BillingRules(minimum_s=5, free_if_taken_within_s=3), boot_s=2.0, reclaim_s=10.0)
        self.market = LocalMarket(rules, 1_800_000_000.0)
        self.now = 1_800_000_000.0
        self.billed: dict[str, int] = {}
        self.ended: dict[str, tuple] = {}

    @rule(seconds=st.floats(0.001, 40))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(name=st.sampled_from(NAMES), pool=st.sampled_from(POOLS), behavior=st.sampled_from(["terminate", "stop"]))
    def launch(self, name, pool, behavior):
        known, room = name in self.market.hosts, self.room(pool.name)
        try:
            self.market.launch(HostOrder(name, "f", Role.WORKER, pool.name, behavior), self.now)
            assert known or room > 0
        except NoCapacity:
            assert not known and room <= 0
        except UsageError:
            assert known and self.market.hosts[name].order.pool != pool.name

    def room(self, pool: str) -> int:
        self.market.advance(self.now)
        return self.market.free(pool)

    @rule(name=st.sampled_from(NAMES))
    def terminate(self, name):
        self.market.terminate(name, self.now)
        assert name not in self.market.hosts or self.market.hosts[name].state is CloudState.TERMINATED

    @rule(name=st.sampled_from(NAMES), notice_s=st.none() | st.floats(0, 20))
    def interrupt(self, name, notice_s):
        try:
            self.market.interrupt(name, notice_s, self.now)
        except UsageError:
            assert name not in self.market.hosts or self.market.hosts[name].state in (
                CloudState.STOPPED, CloudState.TERMINATED)

    @rule(name=st.sampled_from(NAMES))
    def withdraw(self, name):
        self.market.advance(self.now)
        if name in self.market.hosts and self.market.hosts[name].notice:
            self.market.withdraw_notice(name, self.now)

    @rule(pool=st.sampled_from(POOLS), micros_h=st.integers(0, 10**7))
    def set_price(self, pool, micros_h):
        self.market.set_price(pool.name, micros_h, self.now)

    @rule(pool=st.sampled_from(POOLS), hosts=st.integers(0, 3))
    def set_capacity(self, pool, hosts):
        self.market.set_capacity(pool.name, hosts, self.now)

    @rule()
    def restart_from_its_file(self):
        self.market = LocalMarket.from_json(json.loads(json.dumps(self.market.to_json())))

    @invariant()
    def runs_follow_each_other_and_fit_the_state(self):
        for line in self.market.listing("f", self.now):
            ends = [r.ended_at for r in line.runs]
            assert (None in ends) == (line.state is CloudState.RUNNING) and None not in ends[:-1]
            flat = [t for r in line.runs for t in (r.started_at, r.ended_at) if t is not None]
            assert flat == sorted(flat)

    @invariant()
    def an_ended_host_stays_as_it_is(self):
        for line in self.market.listing("f", self.now):
            if line.request_id in self.ended:
                assert (line.state, line.runs) == self.ended[line.request_id]
            if line.state is CloudState.TERMINATED:
                self.ended[line.request_id] = (line.state, line.runs)

    @invariant()
    def a_bill_is_what_the_ledgers_own_arithmetic_says(self):
        """Two independent readings of BillingRules, over what a ledger can know."""
        invoice = self.market.invoice(self.now)
        points = self.market.prices([p.name for p in POOLS], 0.0, self.now)
        book = PriceBook(PriceChanged(p.at, p.pool, p.micros_h, p.micros_h) for p in points)
        for host in self.market.hosts.values():
            parts = sum(piece.parts for run in host.runs for piece in pieces(
                run, book.history(host.offer, run.started_at), self.market.rules.billing, invoice.at))
            assert invoice.hosts[host.order.request_id] == round_half_up(parts)

    @precondition(lambda self: self.market.hosts)
    @invariant()
    def nothing_waits_past_its_time(self):
        self.market.advance(self.now)
        due = self.market.next_due()
        assert due is None or due > self.market.now


MarketMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_in_any_order_of_events = MarketMachine.TestCase


def test_homes_have_addresses_of_their_own_and_so_have_their_hosts(tmp_path):
    here = [hosts.address_of(tmp_path / "a", i) for i in range(300)]
    there = [hosts.address_of(tmp_path / "b", i) for i in range(300)]
    assert len(set(here)) == 300 and not set(here) & set(there)
    assert all(a.startswith("127.") and not a.endswith((".0", ".255")) for a in here)


def test_where_only_one_address_exists_ports_tell_hosts_apart(tmp_path, monkeypatch):
    class OneAddress(hosts.socket):
        def bind(self, place):
            if place[0] != "127.0.0.1":
                raise OSError("Cannot assign requested address")
            super().bind(place)

    monkeypatch.setattr(hosts, "socket", OneAddress)
    assert hosts.address_of(tmp_path, 5) == "127.0.0.1"


def test_a_process_that_keeps_dying_waits_twice_as_long_each_time_up_to_five_seconds():
    assert [hosts.backoff_s(n) for n in (1, 2, 3, 4, 5, 6, 100)] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_importing_the_provider_is_cheap():
    code = "import sys, spotfleet.providers.local; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"aiohttp", "pydantic", "http.client", "http.server", "asyncio", "ssl",
                         "spotfleet.providers.local.market.market"}
