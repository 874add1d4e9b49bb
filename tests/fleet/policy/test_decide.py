"""What the policy decides: how many hosts of either market, from what the ledger has seen. Pure, no clock moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given as given_any
from hypothesis import settings
from hypothesis import strategies as st

from spotfleet.fleet.domain.availability import AvailabilityHistory, AvailabilityPeriod
from spotfleet.fleet.domain.events import Event, FleetCreated, HostJoined, LaunchIntended, LaunchRefused, PolicyDecided
from spotfleet.fleet.domain.state import FleetState, fold
from spotfleet.fleet.policy.decide import DeadlineJob, PolicyInput, decide, is_plain, likely_s, refused_since
from spotfleet.fleet.policy.values import MarketTarget
from spotfleet.model import BillingRules, HostState, Market, Need, Nodes, Offer, PolicySpec, Role

SPOT = Offer("fake", "r", "zone-a", "g5", Market.SPOT, 1, 1_000_000, 3_000_000, "A10G")
OTHER = replace(SPOT, zone="zone-b")
FULL = replace(SPOT, market=Market.ON_DEMAND, price_micros_h=3_000_000)
BOOT_S = 100.0
HOUR = 3600.0


def wants(target: int, spot_policy: str = "auto", base: int = 0, *tasks: DeadlineJob, **more) -> PolicyInput:
    more = {"any_of": (Need(),), "offers": (SPOT, FULL), **more}
    return PolicyInput(PolicySpec(spot_policy, base), target=target, tasks=tasks, **more)


class Story:
    """Builds a ledger: `at` moves forward, hosts launch and join."""

    def __init__(self) -> None:
        self.events: list[Event] = [FleetCreated(0.0, "f", "fake", Nodes(1, 3, 3), BillingRules())]
        self.n = 0

    def launch(self, at: float, offer: Offer = SPOT) -> str:
        name = f"f-{self.n}"
        self.n += 1
        self.events.append(LaunchIntended(at, name, Role.WORKER, offer, ""))
        return name

    def up(self, at: float, offer: Offer = SPOT, boot_s: float = BOOT_S) -> Story:
        """A host that has been up since `at`."""
        self.events.append(HostJoined(at, self.launch(at - boot_s, offer), "1"))
        return self

    def refused(self, *at: float, offer: Offer = SPOT) -> Story:
        for then in at:
            self.events.append(LaunchRefused(then, self.launch(then, offer), "pool", "full"))
        return self

    def state(self) -> FleetState:
        return fold(self.events)


def chosen(inputs: PolicyInput, story: Story, now: float) -> tuple[int, int]:
    choice = decide(inputs, story.state(), now)
    return choice.spot, choice.on_demand


# ---- spot, base, on demand


@pytest.mark.parametrize(("policy", "base", "expected"), [
    ("spot", 0, (3, 0)), ("spot", 1, (2, 1)), ("spot", 9, (0, 3)), ("on-demand", 0, (0, 3)), ("auto", 0, (3, 0)),
    ("auto", 2, (1, 2))])
def test_a_new_fleet_is_divided_as_the_file_says(policy, base, expected):
    assert chosen(wants(3, policy, base), Story(), now=0.0) == expected


def test_a_fleet_whose_file_says_nothing_of_policies_has_nothing_to_decide():
    assert is_plain(wants(3, "spot"), FleetState())
    assert not is_plain(wants(3, "auto"), FleetState())
    assert not is_plain(wants(3, "spot", 1), FleetState())
    assert not is_plain(wants(3, "spot", 0, DeadlineJob("j", HOUR, HOUR)), FleetState())


def test_a_fleet_that_was_told_to_have_spot_hosts_again_keeps_on_demand_ones_until_those_work():
    story = Story().up(0.0, FULL).up(0.0, FULL)
    assert not is_plain(wants(2, "spot"), story.state())
    assert chosen(wants(2, "spot"), story, now=10.0) == (2, 2)
    assert chosen(wants(2, "spot"), story.up(50.0), now=60.0) == (2, 1)
    assert chosen(wants(2, "spot"), story.up(50.0), now=60.0) == (2, 0)


def test_a_fleet_that_was_told_to_be_on_demand_keeps_spot_hosts_until_the_others_work():
    story = Story().up(0.0).up(0.0)
    assert chosen(wants(2, "on-demand"), story, now=10.0) == (2, 2)
    assert chosen(wants(2, "on-demand"), story.up(50.0, FULL), now=60.0) == (1, 2)


def test_a_fleet_that_may_have_no_spot_host_is_on_demand_whatever_its_policy():
    inputs = wants(2, "auto", any_of=(Need(use_spot=False),))
    assert decide(inputs, FleetState(), 0.0) == MarketTarget(0, 2, "the needs allow no spot host", "on-demand")


# ---- auto


def test_on_demand_hosts_fill_in_after_spot_was_refused_for_as_long_as_a_boot_takes():
    story = Story().up(0.0).refused(1000.0)  # the boot that was seen took 100 s
    assert chosen(wants(2), story, now=1099.0) == (2, 0)
    assert decide(wants(2), story.state(), now=1100.0) == MarketTarget(
        2, 1, "spot is refused for 100 s and likely to be for 100 s more, a boot takes 100 s: 1 on demand fill in",
        "auto")


def test_nobody_waits_where_spot_was_away_for_hours_before():
    story = Story().up(0.0).refused(1000.0).up(1000.0 + 5 * HOUR).refused(30_000.0)
    assert chosen(wants(3), story, now=30_000.0) == (3, 1)


def test_spot_that_came_back_soon_each_time_is_likely_to_do_so_again():
    memory = AvailabilityHistory(tuple(AvailabilityPeriod(n % 2 == 0, 100.0 * n, 100.0 * n + 20.0) for n in range(31)))
    assert likely_s(memory, 0.0) < 20.0
    assert likely_s(memory, 19.0) < 20.0
    assert likely_s(memory, 21.0) == 21.0  # none of those of before lasted so long: as long again


def test_a_pool_that_has_not_refused_is_asked_before_anything_fills_in():
    story = Story().up(0.0).refused(1000.0)
    inputs = wants(3, offers=(SPOT, OTHER, FULL))
    assert chosen(inputs, story, now=5000.0) == (3, 0)
    assert chosen(inputs, story.refused(5000.0, offer=OTHER), now=5099.0) == (3, 0)
    assert chosen(inputs, story, now=5100.0) == (3, 2)
    assert refused_since(inputs, story.state()) == 5000.0


def test_on_demand_hosts_fill_in_at_once_where_no_spot_host_is_on_sale_at_the_price():
    inputs = wants(2, any_of=(Need(max_micros_h=500_000),))
    assert chosen(inputs, Story(), now=0.0) == (2, 2)
    assert chosen(replace(inputs, offers=None), Story(), now=0.0) == (2, 0)  # nobody has looked yet


def test_on_demand_hosts_go_one_by_one_as_spot_hosts_have_been_up_for_a_boot():
    story = Story().up(0.0, FULL).up(0.0, FULL)
    story.launch(1000.0)
    assert chosen(wants(2), story, now=1001.0) == (2, 2)
    story.up(2000.0)
    assert chosen(wants(2), story, now=2099.0) == (2, 2)
    assert chosen(wants(2), story, now=2100.0) == (2, 1)
    assert chosen(wants(2), story.up(2200.0), now=2300.0) == (2, 0)


def test_a_spot_host_that_boots_for_ever_is_filled_in_for():
    story = Story().up(0.0)
    story.launch(1000.0)
    assert chosen(wants(2), story, now=1200.0) == (2, 0)
    assert chosen(wants(2), story, now=1201.0) == (2, 1)


def test_where_boots_take_seconds_a_spot_host_has_half_a_minute():
    story = Story().up(0.0, boot_s=1.0)
    story.launch(1000.0)
    assert chosen(wants(2), story, now=1030.0) == (2, 0)
    assert chosen(wants(2), story, now=1031.0) == (2, 1)


# ---- deadlines


def test_a_deadline_that_is_far_waits_for_spot_and_one_that_is_near_does_not():
    far, near = DeadlineJob("j", 100 * HOUR, 20 * HOUR), DeadlineJob("j", 10 * HOUR + 60.0, 20 * HOUR)
    story = Story().up(0.0).refused(1.0)
    assert chosen(wants(2, "auto", 0, far), story, now=100_000.0) == (2, 0)
    choice = decide(wants(2, "auto", 0, near), story.state(), 100_000.0)
    assert (choice.on_demand, choice.rule) == (2, "deadline") and choice.why.startswith("j: ")


def test_of_several_jobs_the_one_with_the_least_slack_decides_with_all_that_is_due_before():
    """Each alone could wait; both together, on one host, could not."""
    one, two = DeadlineJob("one", 10 * HOUR, 5 * HOUR), DeadlineJob("two", 10.1 * HOUR, 5.0 * HOUR)
    assert chosen(wants(1, "auto", 0, one), Story(), now=0.0) == (1, 0)
    choice = decide(wants(1, "auto", 0, two, one), Story().refused(0.0).state(), 0.0)
    assert choice.on_demand == 1 and choice.why.startswith("two: ")


def test_a_job_counts_with_the_hosts_that_it_can_use():
    """On four hosts it could wait; on the two that it has place for, it cannot. As it may be on any two, all are to be
    on demand in the end, two first."""
    story = Story().up(0.0).up(0.0).up(0.0).up(0.0)
    assert chosen(wants(4, "auto", 0, DeadlineJob("j", 10 * HOUR, 18 * HOUR)), story, now=10.0) == (4, 0)
    tight = decide(wants(4, "auto", 0, DeadlineJob("j", 9 * HOUR, 18 * HOUR, hosts=2)), story.state(), 10.0)
    assert (tight.spot, tight.on_demand) == (4, 2) and tight.why.startswith("j, on 2 of 4 hosts: ")
    story.up(150.0, FULL).up(150.0, FULL)
    assert chosen(wants(4, "auto", 0, DeadlineJob("j", 9 * HOUR, 18 * HOUR, hosts=2)), story, now=160.0) == (2, 4)


def test_a_job_that_needs_few_hosts_has_none_bought_for_it_while_so_many_are_there():
    story = Story().up(0.0).up(0.0).up(0.0).refused(1.0)
    task = DeadlineJob("j", 9 * HOUR + 200.0, 18 * HOUR, hosts=2)
    assert chosen(wants(4, "auto", 0, task), story, now=10.0) == (4, 0)
    assert chosen(wants(4, "auto", 0, task), Story().up(0.0).refused(1.0), now=10.0) == (4, 1)


@pytest.mark.parametrize(("busy", "others"), [(2, ()), (0, (DeadlineJob("later", 90 * HOUR, HOUR, 4, held=2),)),
                                              (0, (DeadlineJob("unknown", 1 * HOUR, float("inf"), 4, held=2),))],
                         ids=["no-deadline", "later-deadline", "unknown-work"])
def test_hosts_that_other_jobs_keep_are_not_counted_on(busy, others):
    story = Story().up(0.0).up(0.0).up(0.0).up(0.0)
    task = DeadlineJob("j", 9 * HOUR, 18 * HOUR, 4, held=2)
    assert chosen(wants(4, "auto", 0, replace(task, held=4)), story, now=10.0) == (4, 0)
    assert chosen(wants(4, "auto", 0, task, *others, busy=busy), story, now=10.0) == (4, 2)


def test_hosts_of_a_job_that_is_due_before_come_free_in_time():
    story = Story().up(0.0).up(0.0).up(0.0).up(0.0)
    tasks = DeadlineJob("soon", 20 * HOUR, 2 * HOUR, 4, held=2), DeadlineJob("j", 30 * HOUR, 50 * HOUR, 4, held=2)
    assert chosen(wants(4, "auto", 0, *tasks), story, now=10.0) == (4, 0)


def test_a_job_that_waits_for_a_host_buys_none_for_those_that_have_it():
    story = Story().up(0.0).up(0.0)
    assert chosen(wants(2, "auto", 0, DeadlineJob("j", 10 * HOUR, 5 * HOUR, 2), busy=2), story, now=10.0) == (2, 0)


def test_a_job_that_takes_more_work_than_was_said_loses_no_host_for_it():
    story = Story().up(0.0).up(0.0)
    assert chosen(wants(2, "auto", 0, DeadlineJob("j", HOUR, -5.0)), story, now=10.0) == (2, 0)


def test_a_job_whose_work_nobody_knows_yet_is_treated_as_any_other():
    story = Story().up(0.0).refused(1000.0)
    assert chosen(wants(2, "spot", 0, DeadlineJob("j", HOUR, float("inf"))), story, now=1100.0) == (2, 1)


def test_the_base_is_on_demand_whatever_the_deadline_leaves():
    assert chosen(wants(3, "auto", 1, DeadlineJob("j", 100 * HOUR, HOUR)), Story(), now=0.0) == (2, 1)


# ---- whatever happens


offers = st.sampled_from([None, (), (SPOT, FULL), (SPOT, OTHER, FULL), (FULL,)])
happens = st.lists(st.tuples(st.sampled_from(["up", "full", "refused", "launch"]), st.floats(1.0, 5000.0)), max_size=12)


@settings(max_examples=300, deadline=None)
@given_any(st.sampled_from(["spot", "auto", "on-demand"]), st.integers(0, 4), st.integers(0, 3), happens, offers,
           st.none() | st.tuples(st.floats(-HOUR, 50 * HOUR), st.floats(-HOUR, 50 * HOUR)), st.floats(0.0, 5000.0))
def test_whatever_happened_no_market_gets_more_than_the_target_and_together_they_reach_it(
        policy, target, base, story_of, on_sale, due, later):
    story, now = Story(), BOOT_S
    for what, after in story_of:
        now += after
        match what:
            case "up":
                story.up(now)
            case "full":
                story.up(now, FULL)
            case "refused":
                story.refused(now)
            case "launch":
                story.launch(now)
    tasks = (DeadlineJob("j", *due),) if due else ()
    state = story.state()
    choice = decide(wants(target, policy, base, *tasks, offers=on_sale), state, now + later)
    assert 0 <= choice.spot <= target and 0 <= choice.on_demand <= target
    assert choice.spot + choice.on_demand >= target or due
    ready = [h for h in state.hosts if h.counts and h.state is HostState.UP]
    stays = sum(min(n, sum(h.offer.market is m for h in ready))
                for m, n in ((Market.SPOT, choice.spot), (Market.ON_DEMAND, choice.on_demand)))
    assert stays >= min(target, len(ready)) or due, "a host that works goes before the one that relieves it works"


def test_what_was_decided_survives_in_the_ledger():
    story = Story()
    story.events.append(PolicyDecided(1.0, 2, 1, "why", "auto"))
    assert story.state().history.decided == PolicyDecided(1.0, 2, 1, "why", "auto")
