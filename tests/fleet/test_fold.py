"""What follows from a ledger's events."""

from __future__ import annotations

from dataclasses import replace

from spotfleet.fleet.domain.events import (
    ClockSetBack,
    FleetCreated,
    FleetDown,
    HostDraining,
    HostJoined,
    HostListed,
    HostNoticed,
    HostSilent,
    LaunchIntended,
    LaunchRefused,
    NodesChanged,
    PriceChanged,
    TakenOver,
    TerminateIntended,
    event_from_json,
    event_to_json,
)
from spotfleet.fleet.domain.state import FleetState, cooling_until, fold
from spotfleet.model import BillingRules, CloudState, HostState, Market, Nodes, Offer, Role, Run

OFFER = Offer("fake", "r", "zone-a", "g5", Market.SPOT, 1, 1_000_000, 3_000_000)
OTHER = Offer("fake", "r", "zone-b", "g5", Market.SPOT, 1, 1_000_000, 3_000_000)
RUNNING = (Run(1.0),)
STOPPED = (Run(1.0, 50.0, taken=True),)
BACK = (*STOPPED, Run(90.0))


def intend(n: int = 0, at: float = 0.0, offer: Offer = OFFER) -> LaunchIntended:
    return LaunchIntended(at, f"f-{n}", Role.WORKER, offer, "1 missing")


def listed(state: CloudState, runs: tuple[Run, ...], at: float = 2.0, **more) -> HostListed:
    return HostListed(at, "f-0", "i-0", state, runs, "10.0.0.1", 7000, **more)


UP = (intend(), listed(CloudState.RUNNING, RUNNING), HostJoined(5.0, "f-0", "one"))


def only(state: FleetState):
    (host,) = state.hosts
    return host


def test_a_host_is_launching_until_its_agent_joins():
    assert only(fold(UP[:2])).state is HostState.LAUNCHING
    host = only(fold(UP))
    assert (host.state, host.since, host.incarnation, host.address) == (HostState.UP, 5.0, "one", "10.0.0.1")


def test_a_drained_host_is_up_no_more_and_stays_so_when_its_agent_joins_again():
    state = fold([*UP, HostDraining(9.0, "f-0", "a notice"), HostJoined(11.0, "f-0", "two")])
    assert (only(state).state, only(state).since, only(state).why) == (HostState.DRAINING, 9.0, "a notice")


def test_a_host_is_gone_when_the_cloud_lists_its_end_and_is_remembered():
    state = fold([*UP, TerminateIntended(6.0, "f-0", "surplus"), listed(CloudState.TERMINATED, STOPPED, 60.0)])
    assert state.hosts == ()
    assert state.host("f-0").state is HostState.GONE
    assert state.host("f-0").runs == STOPPED


def test_a_stopped_host_that_comes_back_launches_until_its_new_agent_joins():
    stopped = [*UP, HostNoticed(40.0, "f-0", 10.0, "stop"), listed(CloudState.STOPPED, STOPPED, 51.0)]
    assert (only(fold(stopped)).state, only(fold(stopped)).notice_deadline) == (HostState.STOPPED, None)
    back = [*stopped, listed(CloudState.RUNNING, BACK, 91.0)]
    assert (only(fold(back)).state, only(fold(back)).since) == (HostState.LAUNCHING, 91.0)
    assert only(fold([*back, HostJoined(99.0, "f-0", "two")])).state is HostState.UP


def test_a_host_that_was_stopped_and_is_back_before_any_listing_showed_it_launches_too():
    noticed = [*UP, HostNoticed(40.0, "f-0", 10.0, "stop"), HostDraining(40.0, "f-0", "the cloud takes it")]
    back = only(fold([*noticed, listed(CloudState.RUNNING, BACK, 91.0)]))
    assert (back.state, back.since, back.notice_deadline, back.why) == (HostState.LAUNCHING, 91.0, None, "")
    assert only(fold([*noticed, listed(CloudState.RUNNING, RUNNING, 42.0)])).state is HostState.DRAINING


def test_a_host_whose_new_agent_is_heard_before_the_listing_shows_its_return_is_up():
    early = [*UP, listed(CloudState.STOPPED, STOPPED, 51.0), HostJoined(95.0, "f-0", "two")]
    assert only(fold([*early, listed(CloudState.RUNNING, BACK, 96.0)])).state is HostState.UP


def test_a_host_that_comes_back_after_its_end_was_asked_for_is_still_ending():
    state = fold([*UP, TerminateIntended(6.0, "f-0", "surplus"), listed(CloudState.STOPPED, STOPPED, 51.0),
                  listed(CloudState.RUNNING, BACK, 91.0)])
    assert only(state).state is HostState.DRAINING


def test_a_host_that_was_given_up_and_is_listed_again_must_join_again():
    given_up = [*UP, listed(CloudState.TERMINATED, STOPPED, 60.0, missing=True)]
    assert fold(given_up).host("f-0").state is HostState.GONE
    back = only(fold([*given_up, listed(CloudState.RUNNING, RUNNING, 70.0)]))
    assert (back.state, back.incarnation, back.missing_since) == (HostState.LAUNCHING, "", None)


def test_a_missing_host_keeps_its_state():
    host = only(fold([*UP, listed(CloudState.RUNNING, RUNNING, 60.0, missing=True)]))
    assert (host.state, host.missing_since) == (HostState.UP, 60.0)


def test_a_silence_ends_when_the_agent_joins():
    assert only(fold([*UP, HostSilent(9.0, "f-0")])).silent_since == 9.0
    assert only(fold([*UP, HostSilent(9.0, "f-0"), HostJoined(12.0, "f-0", "one")])).silent_since is None


def test_a_rebalance_hint_sets_no_deadline():
    host = only(fold([*UP, HostNoticed(9.0, "f-0", 0.0, "terminate", "rebalance")]))
    assert (host.hint, host.notice_deadline) == ("the cloud hints that it may take it (rebalance)", None)
    assert only(fold([*UP, HostNoticed(9.0, "f-0", 30.0, "terminate")])).notice_deadline == 39.0


def test_refusals_in_a_row_cool_a_scope_for_ever_longer_up_to_ten_minutes():
    events, waits = [], []
    for n in range(8):
        at = 1000.0 * n
        events += [intend(n, at), LaunchRefused(at, f"f-{n}", "pool", "no room")]
        waits.append(cooling_until(fold(events), OFFER) - at)
    assert waits == [15, 30, 60, 120, 240, 480, 600, 600]
    assert cooling_until(fold(events), OTHER) == 0
    assert fold(events).hosts == ()


def test_a_quota_cools_for_a_short_time_while_an_ending_host_may_still_count_and_longer_after_that():
    offer, events, waits = replace(OFFER, quota="All G"), [], []
    for n in range(23):
        at = 15.0 * n
        events += [intend(n, at, offer), LaunchRefused(at, f"f-{n}", "quota", "used up")]
        waits.append(cooling_until(fold(events), offer) - at)
    assert waits == [15] * 21 + [30, 60]
    assert cooling_until(fold(events), replace(OFFER, quota="All P", zone="elsewhere")) == 0


def test_a_wide_refusal_cools_every_pool_in_its_scope():
    state = fold([intend(), LaunchRefused(0.0, "f-0", "type", "no room")])
    assert cooling_until(state, OTHER) == 15


def test_a_launch_that_succeeds_after_a_refusal_ends_the_cooldown():
    refused = [intend(1), LaunchRefused(0.0, "f-1", "pool", "no room")]
    assert cooling_until(fold([*refused, intend(0, 20.0), listed(CloudState.PENDING, ())]), OFFER) == 0
    same_tick = [intend(0, 0.0), *refused, listed(CloudState.PENDING, ())]
    assert cooling_until(fold(same_tick), OFFER) == 15


def test_a_host_that_the_cloud_has_listed_cannot_be_refused_any_more():
    assert only(fold([*UP, LaunchRefused(9.0, "f-0", "pool", "no room")])).state is HostState.UP


def test_a_loss_marks_its_pool():
    assert fold([*UP, HostNoticed(9.0, "f-0", 30.0, "terminate")]).reclaimed_at == {OFFER.pool: 9.0}
    assert fold([*UP, listed(CloudState.TERMINATED, STOPPED, 60.0)]).reclaimed_at == {OFFER.pool: 50.0}


def test_numbers_of_requests_only_grow():
    assert fold([intend(4), intend(2)]).launches == 5
    assert fold([intend(4), LaunchRefused(0.0, "f-4", "pool", "no room")]).launches == 5


def test_asking_again_under_one_id_adds_no_host():
    host = only(fold([intend(0, 1.0), intend(0, 8.0)]))
    assert (host.launched_at, host.asked_at, host.asks) == (1.0, 8.0, 2)


def test_the_newest_price_of_a_pool_wins_whatever_the_order_of_writing():
    new, old = PriceChanged(9.0, "p", 5, 10), PriceChanged(3.0, "p", 4, 10)
    assert fold([new, old]).prices == fold([old, new]).prices == {"p": new}
    assert fold([new, old]).priced_from == fold([old, new]).priced_from == {"p": 3.0}


def test_a_fleet_that_goes_down_and_up_again_is_up():
    created = FleetCreated(0.0, "f", "fake", Nodes(1, 2, 3), BillingRules())
    down = fold([created, NodesChanged(1.0, Nodes(1, 3, 3), "asked"), FleetDown(2.0, "asked")])
    assert (down.nodes.target, down.down) == (3, FleetDown(2.0, "asked"))
    assert fold([created, FleetDown(2.0, "asked"), created]).down is None


def test_a_clock_that_was_set_back_leaves_everything_as_old_as_it_is():
    refused = (intend(1, at=1000.0), LaunchRefused(1000.0, "f-1", "pool", "full"))
    before = fold([intend(at=990.0), *refused])
    after = fold([intend(at=990.0), *refused, ClockSetBack(400.0, 600.0)])
    assert only(after) == replace(only(before), since=390.0, launched_at=390.0, asked_at=390.0)
    assert cooling_until(after, OFFER) == cooling_until(before, OFFER) - 600.0
    assert (before.clock, after.clock) == (1000.0, 400.0)
    fleet = (FleetCreated(900.0, "f", "fake", Nodes(), BillingRules()), TakenOver(950.0, "f-d-1", True, ""))
    moved = fold([*fleet, ClockSetBack(400.0, 600.0)])
    assert (moved.created, moved.taken_over) == (replace(fleet[0], at=300.0), replace(fleet[1], at=350.0))


def test_events_about_unknown_hosts_change_no_host():
    strange = [HostJoined(1.0, "x", "y"), HostSilent(1.0, "x"), HostDraining(1.0, "x", ""),
               TerminateIntended(1.0, "x", ""), HostNoticed(1.0, "x", 1.0, "stop"),
               LaunchRefused(1.0, "x", "pool", ""), HostListed(1.0, "x", "i", CloudState.RUNNING, RUNNING)]
    assert fold(strange) == FleetState(clock=1.0)


def test_every_event_survives_the_trip_through_json():
    events = [*UP, HostSilent(1.0, "f-0"), ClockSetBack(1.0, 90.0), listed(CloudState.STOPPED, BACK, missing=True),
              FleetCreated(0.0, "f", "fake", Nodes(), BillingRules(60, 300))]
    assert [event_from_json(event_to_json(e)) for e in events] == events
