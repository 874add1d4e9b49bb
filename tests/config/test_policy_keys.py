"""Keys of the fleet file about markets, deadlines and money."""

from __future__ import annotations

import pytest

from spotfleet.config.values import work
from spotfleet.model import PolicySpec
from tests.config.test_fleet_file import problems, spec


@pytest.mark.parametrize(("text", "expected"), [
    ("provider: local", PolicySpec()),
    ("spot_policy: auto\nnodes: 3\non_demand_base: 1", PolicySpec("auto", 1)),
    ("spot_policy: on-demand", PolicySpec("on-demand")),
    ("deadline: 60h\nwork: 48h", PolicySpec("auto", 0, 216_000.0, 172_800.0)),  # what a deadline needs
    ("deadline: 60h\nwork: 100000 steps", PolicySpec("auto", 0, 216_000.0, 0.0, 100_000)),
    ("work: 90m", PolicySpec(work_s=5400.0)),
    ("replace_slow: true", PolicySpec(replace_slow=True)),
    ("max_cost: 250\nmax_hourly_cost: 4.5", PolicySpec(max_micros=250_000_000, max_micros_h=4_500_000)),
], ids=["nothing", "auto", "on-demand", "hours", "steps", "work alone", "slow hosts", "money"])
def test_a_policy_is_what_the_keys_say(text, expected):
    assert spec(text).policy == expected


def test_a_limit_of_the_fleet_is_another_than_that_of_a_host():
    found = spec("max_hourly_cost: 9\nresources: {max_hourly_cost: 2}")
    assert (found.policy.max_micros_h, found.any_of[0].max_micros_h) == (9_000_000, 2_000_000)


@pytest.mark.parametrize(("text", "said"), [
    ("spot_policy: Auto", "1: spot_policy: expected spot or auto or on-demand, got 'Auto'; did you mean 'auto'?"),
    ("on_demand_base: 2", "1: on_demand_base: expected at most the target of 1 hosts, got 2"),
    ("on_demand_base: -1", "1: on_demand_base: expected a whole number of at least 0, got -1"),
    ("deadline: 60h", "1: deadline: needs `work`, or nobody knows what is to be done by then: work: 48h (at full "
                      'target), or work: "100000 steps"'),
    ("deadline: 40h\nwork: 48h", "1: deadline: of 40 h is impossible: the work takes 48 h at full target; allow more "
                                 "time, or raise nodes.target and lower `work`"),
    ("deadline: 60h\nwork: 48h\nspot_policy: spot", "3: spot_policy: is spot, but a deadline is kept by mixing both "
                                                    "markets; remove it, or write auto"),
    ("spot_policy: auto\nresources: {use_spot: false}", "1: spot_policy: is auto, but `use_spot: false` allows no spot "
                                                        "host; remove one of them"),
    ("work: 5", 'expected "48h" (at the full number of hosts) or "100000 steps", got 5'),
    ("deadline: 0h\nwork: 4h", '1: deadline: expected a duration above 0, such as "60h" from a job\'s submission on, '
                               "got '0h'"),
    ("deadline: 2026-12-01\nwork: 4h", '1: deadline: expected a duration such as "90s", "10m" or "2h", got 2026-12-01'),
    ("max_cost: 0", "1: max_cost: expected US dollars, above 0, got 0"),
    ("max_cost: $25", "1: max_cost: expected US dollars, above 0, got '$25'; write 25"),
    ("max_cost: 25 EUR", "1: max_cost: expected US dollars, above 0, got '25 EUR'"),
    ("max_hourly_cost: 0.5/h", "1: max_hourly_cost: expected US dollars per hour, above 0, got '0.5/h'; write 0.5"),
    ("max_cost: 1\nmax_hourly_cost: 90", "1: max_cost: $1.00 is spent within a minute at max_hourly_cost $90.00/h; "
                                         "raise it"),
    ("resources: {spot_policy: auto}", "1: resources.spot_policy: unknown key; it belongs to the top of the file"),
    ("max_budget: 3", "1: max_budget: unknown key; use `max_cost`"),
], ids=["word", "base", "negative", "no work", "impossible", "spot", "no spot", "no unit", "no time", "a day",
        "nothing", "dollars", "no dollars", "by the hour", "minute", "place", "other word"])
def test_what_does_not_fit_together_is_said_with_the_way_out(text, said):
    assert problems(text)[0].endswith(said)


def test_all_or_nothing_is_of_one_market():
    text = "provider: aws\nresources: {instance_type: g5.xlarge, region: us-east-1}\nnodes: 2\nall_or_nothing: true\n"
    assert spec(text + "spot_policy: on-demand").policy == PolicySpec("on-demand")
    for more in ("spot_policy: auto", "on_demand_base: 1", "deadline: 3h\nwork: 2h"):
        assert "launches all hosts in one pool, so they are of one market" in problems(text + more)[-1]


def test_on_aws_the_kind_of_host_is_named_before_markets_are_mixed():
    text = "provider: aws\nspot_policy: auto\n"
    assert problems(text + "resources: {region: us-east-1}")[0].endswith(
        "name `instance_type` or `accelerators`, so that on-demand hosts are of the same kind as spot ones")
    assert spec(text + "resources: {region: us-east-1, accelerators: A10G}").policy == PolicySpec("auto")


@pytest.mark.parametrize(("text", "expected"), [("48h", (172_800.0, 0)), ("1 step", (0.0, 1)), ("7steps", (0.0, 7))])
def test_work_is_time_at_full_target_or_steps(text, expected):
    assert work(text) == expected
