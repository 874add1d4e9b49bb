"""What `max_cost` is held against is what `spotfleet cost` shows: disks, addresses and lost dispatchers included."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from spotfleet.dispatcher.cloud.dispatcher_cost import LOOK_S, DispatcherCost
from spotfleet.errors import SpotfleetError
from spotfleet.fleet import reconcile
from spotfleet.fleet.cost.meter import Meter
from spotfleet.fleet.domain.actions import Observed, Wanted
from spotfleet.fleet.domain.events import Event, FleetCreated, PriceChanged, TakenOver
from spotfleet.fleet.memory_ledger import MemoryLedger
from spotfleet.model import BillingRules, CloudState, Need, Nodes, PolicySpec, Rates, Role
from spotfleet.providers import Boot
from spotfleet.providers.local.inprocess import InProcessProvider
from spotfleet.providers.local.market.pools import default_rules
from tests.support.dispatcher.fake_fleet import Stage, spec

HOUR = 3600.0
RATES = Rates(80_003, 5_003, 20_000, 20_000, "test", "2026-01-01")
RULES = replace(default_rules(), rates=RATES, disk_gib=30, addresses=1, listed_after_end_s=30 * 86400.0)
WORKERS = Wanted("f", Role.WORKER, 2, (Need(instance_type="gpu.small"),))
OWN = Wanted("f", Role.DISPATCHER, 1, (Need(instance_type="cpu.small", use_spot=False),))


class Books:
    """A cloud with two ledgers of a fleet: the dispatcher's own, and the laptop's of the dispatchers."""

    def __init__(self) -> None:
        self.cloud = InProcessProvider(rules=RULES)
        self.ledger, self.laptop = MemoryLedger(), MemoryLedger()
        for ledger in (self.laptop, self.ledger):
            reconcile.create(ledger, self.cloud, "f", Nodes(2, 2, 2), self.now)

    @property
    def now(self) -> float:
        return self.cloud.clock()

    def tick(self, *bills: DispatcherCost, hours: float = 0.0, own: int = 1, workers: int = 2) -> None:
        self.cloud.clock.advance(hours * HOUR)
        hands = ((replace(OWN, hosts=own), self.laptop), (replace(WORKERS, hosts=workers), self.ledger))
        for wanted, ledger in hands:
            joined = {h.request_id: "1" for h in ledger.state().hosts if h.cloud is CloudState.RUNNING}
            reconcile.tick(wanted, ledger, self.cloud, lambda name, offer: Boot("x"), Observed(joined), self.now)
        for bill in bills:
            bill.refresh(self.cloud, self.now, self.now)

    def differs(self, bill: DispatcherCost) -> int:
        """Micro-dollars by which the figure of the limit is above that of `spotfleet cost`."""
        shown = Meter([*self.ledger.rows, *self.laptop.rows], self.now).report()
        assert shown.disk_micros and shown.address_micros and shown.dispatcher_micros
        return Meter([*self.ledger.rows, *bill.events(self.ledger.rows)], self.now).micros() - shown.micros


def test_the_limit_is_held_against_what_cost_shows_to_the_micro_dollar():
    books, bill = Books(), DispatcherCost("f", "f-d-0")
    books.tick()
    for hours in (0.0, 0.01, 3.0, 0.5, 40.0):
        books.tick(bill, hours=hours)
        assert books.differs(bill) == 0
    books.cloud.clock.advance(7 * HOUR)  # it goes on between two looks
    assert books.differs(bill) == 0
    books.cloud.interrupt(books.ledger.state().hosts[0].request_id, 1.0)
    for hours in (0.1, 0.1):
        books.tick(bill, hours=hours)
    assert books.differs(bill) == 0


def test_a_dispatcher_that_was_lost_counts_as_long_as_the_cloud_still_lists_it():
    books = Books()
    for hours in (0.0, 0.0, 9.0):
        books.tick(hours=hours)
    books.cloud.interrupt("f-d-0", None)
    for hours in (0.5, 0.1, 0.1):
        books.tick(hours=hours)
    bill = DispatcherCost("f", books.laptop.state().hosts[0].request_id)
    books.ledger.append(TakenOver(books.now, "f-d-1", True, ""))
    books.tick(bill, hours=2.0)
    assert bill.own is not None and bill.own.request_id == "f-d-1" and books.differs(bill) == 0


def test_one_that_no_listing_shows_counts_like_this_one_until_its_last_word():
    books, bill = Books(), DispatcherCost("f", "f-d-0")
    books.tick(bill)
    began = bill.own.runs[0].started_at
    ledger: list[Event] = [FleetCreated(began - 30 * HOUR, "f", "local", Nodes(), BillingRules()),
                           replace(bill.state.rates["local/local"], at=began - 30 * HOUR),
                           PriceChanged(began - 10 * HOUR, "p", 1, 1), PriceChanged(began + 1.0, "p", 2, 2)]
    base = Meter([*ledger, *bill.events(ledger)], began + 60.0).micros()
    lost = TakenOver(began + 2.0, "f-d-0", True, "")
    own_h = (Meter([*ledger, *bill.events(ledger)], began + 10 * HOUR).micros() - Meter(ledger, began).micros()) / 10
    more = Meter([*ledger, lost, *bill.events([*ledger, lost])], began + 60.0).micros() - base
    assert more == pytest.approx(20 * own_h, rel=1e-3)
    forgotten = TakenOver(began + 2.0, "f-d-0", False, "")  # no part of the ledger came back: nobody knows
    assert bill.events([*ledger, forgotten]) == bill.events(ledger)


def test_a_cloud_that_does_not_answer_is_asked_again_soon_and_one_that_does_seldom():
    books, bill = Books(), DispatcherCost("f", "f-d-0")
    books.tick()
    books.cloud.hosts = lambda fleet: (_ for _ in ()).throw(SpotfleetError("no answer"))  # type: ignore[assignment]
    bill.refresh(books.cloud, 100.0, books.now)
    assert bill.own is None and not bill.due(101.0) and bill.due(115.0)
    del books.cloud.hosts
    bill.refresh(books.cloud, 115.0, books.now)
    assert bill.own is not None and not bill.due(115.0 + LOOK_S - 1) and bill.due(115.0 + LOOK_S)


def test_a_dispatcher_counts_its_disk_and_its_address_also_between_two_counts(play, monkeypatch):
    monkeypatch.setattr("spotfleet.providers.local.inprocess.default_rules", lambda: RULES)

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        dispatcher = stage.daemon.dispatcher
        policy, laptop = dispatcher.policy, MemoryLedger()
        reconcile.record_listing(OWN, laptop, stage.cloud, stage.cloud.clock())  # type: ignore[arg-type]

        async def counted() -> bool:
            return policy._counted is not None and dispatcher.dispatcher_cost.own is not None

        await stage.until("a count", counted)
        await policy._count_ledger()
        counted_at, micros = policy._counted
        at = dispatcher.core.unix() - (time.monotonic() - counted_at)
        events = [e for _, e in dispatcher.core.journal.ledger.events()]
        assert micros == Meter([*events, *laptop.rows], at).micros()
        machines = (await stage.call("GET", "/v1/status"))[1]["burn_micros_h"]
        beside = 3 * (30 * RATES.disk_micros_gib_month / 730 + RATES.address_micros_h)
        assert policy.spent(counted_at + HOUR) - micros == pytest.approx(machines + beside, rel=0.01)

    play(scene, spec(policy=PolicySpec(max_micros=10**9)))
