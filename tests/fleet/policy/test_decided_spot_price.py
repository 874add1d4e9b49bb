"""`auto` where spot costs as much as on demand: it goes there, says why, and comes back when spot is cheaper."""

from __future__ import annotations

from dataclasses import replace

from spotfleet.fleet.domain.actions import Launch, Observed, Wait, Wanted
from spotfleet.fleet.domain.events import HostListed, PolicyDecided
from spotfleet.fleet.planner.plan import plan
from spotfleet.fleet.policy.decide import CHEAPER, DeadlineJob, decide
from spotfleet.fleet.policy.mix import apply_choice
from spotfleet.model import CloudState, Market, Need, Offer, Role, Run
from tests.fleet.policy.test_decide import BOOT_S, FULL, HOUR, OTHER, SPOT, Story, chosen, wants

DEAR, OTHER_DEAR = replace(SPOT, price_micros_h=3_000_000), replace(OTHER, price_micros_h=3_100_000)
BIG_FULL = replace(FULL, instance_type="p5", price_micros_h=900_000)  # another machine


def asked(*offers: Offer, **more):
    return wants(2, "auto", 0, offers=offers, **more)


def plans(scene, story: Story, now: float) -> list[str]:
    choice = decide(scene, story.state(), now)
    wanted = apply_choice(Wanted("f", Role.WORKER, scene.target), choice)
    actions = plan(wanted, story.state(), list(scene.offers), Observed(), now)
    return [a.offer.pool if isinstance(a, Launch) else a.why for a in actions if isinstance(a, Launch | Wait)]


def test_where_spot_costs_no_less_than_on_demand_all_hosts_are_on_demand_and_the_decision_says_why():
    choice = decide(asked(DEAR, FULL), Story().state(), 0.0)
    assert (choice.spot, choice.on_demand, choice.shun) == (0, 2, (SPOT.pool,))
    assert choice.why == ("spot costs no less than on demand: $3.0063/h of useful work, $3.00/h on demand, in "
                          "fake/zone-a/g5/spot")
    assert plans(asked(DEAR, FULL), Story(), 0.0) == [FULL.pool, FULL.pool]
    assert chosen(asked(replace(SPOT, price_micros_h=2_950_000), FULL), Story(), 0.0) == (2, 0)


def test_a_pool_whose_hosts_are_taken_so_soon_that_useful_work_costs_more_than_on_demand_is_left_alone():
    """Lives of two minutes waste more in boots than the price saves."""
    cheap, story = replace(SPOT, price_micros_h=2_000_000), Story()
    assert chosen(asked(cheap, FULL), story, 0.0) == (2, 0)
    for n in range(900):
        name = story.launch(200.0 * n)
        story.events.append(HostListed(200.0 * n + 130, name, f"i-{name}", CloudState.TERMINATED,
                                       (Run(200.0 * n, 200.0 * n + 120, taken=True),), ended_at=200.0 * n + 120))
    assert chosen(asked(cheap, FULL), story, 200_000.0) == (0, 2)


def test_no_host_goes_before_the_one_that_is_on_demand_in_its_place_works():
    story = Story().up(0.0).up(0.0)
    assert chosen(asked(DEAR, FULL), story, 10.0) == (2, 2)
    assert chosen(asked(DEAR, FULL), story.up(20.0, FULL), 20.0) == (1, 2)
    assert chosen(asked(DEAR, FULL), story.up(30.0, FULL), 30.0) == (0, 2)


def test_spot_is_taken_again_once_it_is_cheaper_by_enough_that_nobody_goes_to_and_fro():
    story = Story().up(0.0, FULL).up(0.0, FULL)
    story.events.append(PolicyDecided(1.0, 0, 2, "", "auto", (SPOT.pool,)))
    nearly, less = (replace(SPOT, price_micros_h=round(3_000_000 * part)) for part in (CHEAPER, CHEAPER - 0.003))
    assert chosen(asked(nearly, FULL), story, 10.0) == (0, 2)
    assert chosen(asked(less, FULL), story, 10.0) == (2, 2)  # on demand until spot hosts work
    assert chosen(asked(less, FULL), story.up(20.0).up(20.0), 20.0 + BOOT_S) == (2, 0)


def test_of_several_pools_the_dear_ones_alone_are_left_out():
    inputs = asked(SPOT, OTHER_DEAR, FULL)
    choice = decide(inputs, Story().state(), 0.0)
    assert (choice.spot, choice.on_demand, choice.shun) == (2, 0, (OTHER.pool,))
    assert choice.why == ("spot hosts are available; no more spot hosts at $3.1065/h of useful work, $3.00/h on "
                          "demand, in fake/zone-b/g5/spot")
    assert plans(inputs, Story(), 0.0) == [SPOT.pool, SPOT.pool]
    near = replace(inputs, offers=(replace(SPOT, price_micros_h=2_900_000), OTHER_DEAR, FULL))
    assert plans(near, Story(), 0.0) == [SPOT.pool, SPOT.pool], "pools of about one price share hosts, but not this one"


def test_on_demand_hosts_fill_in_where_the_pools_that_are_cheap_refuse():
    story, inputs = Story().up(0.0, OTHER).refused(1000.0), asked(SPOT, OTHER_DEAR, FULL)
    assert chosen(inputs, story, 1100.0) == (2, 1)
    story = Story().up(0.0).refused(1000.0)
    assert plans(inputs, story, 1001.0) == [
        "1 of 2 spot hosts missing: pool fake/zone-a/g5/spot refused, asked again at 00:16:55 UTC; "
        "fake/zone-b/g5/spot costs no less than on demand"]


def test_spot_hosts_at_any_price_stand_in_while_on_demand_ones_are_refused():
    story = Story().up(0.0, FULL).refused(1000.0, offer=FULL)
    choice = decide(asked(DEAR, FULL), story.state(), 1001.0)
    assert (choice.spot, choice.on_demand, choice.shun) == (1, 2, ())
    assert plans(asked(DEAR, FULL), story, 1001.0)[0] == SPOT.pool
    story.up(1200.0)
    assert chosen(asked(DEAR, FULL), story, 1300.0) == (1, 2)  # asked again, and spot until it works


def test_other_machines_and_unknown_prices_are_not_compared_with():
    for full in (BIG_FULL, replace(FULL, price_micros_h=0), replace(FULL, region="elsewhere")):
        assert chosen(asked(DEAR, full), Story(), 0.0) == (2, 0)
    assert chosen(asked(DEAR, replace(FULL, zone="zone-b")), Story(), 0.0) == (0, 2)  # its region sells it
    beyond = asked(DEAR, FULL, any_of=(Need(), Need(use_spot=False, max_micros_h=1)))
    assert chosen(beyond, Story(), 0.0) == (0, 2)


def test_the_base_and_the_other_policies_are_as_before():
    assert chosen(wants(2, "spot", 1, offers=(DEAR, FULL)), Story(), 0.0) == (1, 1)
    assert chosen(wants(3, "auto", 1, offers=(DEAR, FULL)), Story(), 0.0) == (0, 3)
    task = DeadlineJob("j", 100 * HOUR, HOUR)
    assert chosen(wants(2, "auto", 0, task, offers=(replace(DEAR, price_micros_h=2_999_999), FULL)), Story(), 0.0) == (
        2, 0)


def test_on_demand_markets_alone_have_nothing_to_compare():
    assert Market.SPOT not in {o.market for o in asked(FULL).taken}
    assert chosen(asked(FULL), Story(), 0.0) == (2, 2)  # no spot host on sale: asked for all the while
