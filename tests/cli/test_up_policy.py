"""`up` and `train` with a policy: what the plan says of markets and money, what is refused, what a live fleet takes."""

from __future__ import annotations

import re

import pytest

from spotfleet.api.lifecycle import up as up_module
from spotfleet.fleet.policy.lifetimes import BootTime, with_boots
from spotfleet.model import PolicySpec

FILE = "name: digits\nnodes: {min: 2, target: 3}\nresources: {instance_type: cpu.small}\n"


def plan_of(user, more: str) -> str:
    user.write("fleet.yaml", FILE + more)
    return user.ok("up fleet.yaml --plan").out


def test_the_plan_has_the_hosts_of_either_market_and_the_reason(user):
    said = plan_of(user, "on_demand_base: 1\n")
    hosts = [(int(n), market) for n, market in re.findall(r"^(\d) hosts? +\S+ +(\S+)", said, re.MULTILINE)]
    assert [market for n, market in hosts for _ in range(n)] == ["spot", "spot", "on-demand"]
    assert "\npolicy: on_demand_base: 1 of 3 hosts\n" in said
    assert re.search(r"\nof it spot \$0\.0\d+/h, on demand \$0\.1700/h\n", said)  # one host and the dispatcher


def test_a_file_without_a_policy_has_a_plan_without_one(user):
    said = plan_of(user, "")
    assert "policy" not in said and "max_" not in said and "of work" not in said


def test_the_plan_says_what_the_work_will_cost_on_spot_and_on_demand_and_that_a_policy_mixes(user):
    said = plan_of(user, "work: 100h\ndeadline: 140h\n")
    line = next(line for line in said.splitlines() if line.startswith("4d04h of work will cost about $1"))
    assert "$34.00 on demand, or between the two" in line  # 3 hosts and the dispatcher at $0.085 for 100 h
    assert "between" not in plan_of(user, "work: 100h\n")


def test_the_price_of_the_work_says_which_boot_is_in_it(user, monkeypatch):
    said = plan_of(user, "work: 100h\n")
    assert "\nin this a boot takes 3m00s, which is assumed: no boot of this fleet has been measured\n" in said
    slow = with_boots({"": BootTime(7200.0, 7)})
    monkeypatch.setattr(up_module, "measured_boots", lambda _folder, _spec, living: slow)
    measured = plan_of(user, "work: 100h\n")
    assert "\nin this a boot takes 2h00m, the median of 7 boots of this fleet\n" in measured
    assert work_line(measured)[0] > work_line(said)[0] and work_line(measured)[1] == work_line(said)[1]
    assert "a boot takes" not in plan_of(user, "work: 100h\nspot_policy: on-demand\n")


def work_line(said: str) -> tuple[float, float]:
    """What the plan says of 100 h of work: dollars on spot and on demand."""
    found = re.search(r"\n4d04h of work will cost about (?:\$([\d.]+) on spot hosts[^,]*, )?\$([\d.]+) on demand", said)
    assert found, said
    return float(found[1] or 0), float(found[2])


def test_hosts_that_are_on_demand_in_any_case_count_as_such_in_what_the_work_will_cost(user):
    spot, full = work_line(plan_of(user, "work: 100h\n"))
    mixed, same = work_line(plan_of(user, "work: 100h\non_demand_base: 1\n"))
    assert full == same == 34.0
    assert spot + 2 < mixed < full  # one of three at $0.085 an hour and not at less than half of that
    assert "on spot hosts beside 1 on demand, $34.00 on demand" in plan_of(user, "work: 100h\non_demand_base: 1\n")


@pytest.mark.parametrize("more", ["spot_policy: on-demand\n", "on_demand_base: 3\n"], ids=["policy", "base"])
def test_of_a_fleet_that_is_all_on_demand_no_price_on_spot_is_told(user, more):
    said = plan_of(user, "work: 100h\n" + more)
    assert work_line(said) == (0, 34.0)
    assert "spot hosts" not in said and "between" not in said


def test_the_plan_says_that_a_limit_ends_the_fleet_before_its_work_is_done(user):
    told = "max_cost is too little for it: about "
    assert re.search(told + r"[3-8] % of the work is done by then\n", plan_of(user, "work: 100h\nmax_cost: 1\n"))
    assert told + "50 %" in plan_of(user, "work: 100h\nmax_cost: 17\nspot_policy: on-demand\n")
    assert told not in plan_of(user, "work: 100h\nmax_cost: 33\n")


def test_the_plan_says_what_it_may_cost(user):
    said = plan_of(user, "max_cost: 20\nmax_hourly_cost: 0.5\n")
    assert "it shuts down cleanly before $20.00 are spent (max_cost)" in said
    assert "before $0.4960 are spent" in plan_of(user, "max_cost: 0.496\n")
    assert "never more hosts than fit in $0.5000/h (max_hourly_cost)" in said


def test_the_plan_launches_no_more_hosts_than_the_limit_has_room_for_and_says_so(user):
    said = plan_of(user, "max_hourly_cost: 0.16\n")  # the dispatcher, and two spot hosts
    assert sum(int(n) for n in re.findall(r"^(\d) hosts? ", said, re.MULTILINE)) == 2
    assert "problem: 1 of 3 hosts missing: max_hourly_cost leaves $0.0" in said  # prices move


def test_the_plan_says_when_a_deadline_hangs_on_spot_as_the_limit_has_no_room_for_all_hosts_on_demand(user):
    said = plan_of(user, "work: 10h\ndeadline: 20h\nmax_hourly_cost: 0.339\n")
    assert ("\nthe deadline is certain only while spot hosts are available: 3 hosts on demand and the dispatcher cost "
            "$0.3400/h, more than max_hourly_cost\n") in said
    assert "is sure only" not in plan_of(user, "work: 10h\ndeadline: 20h\nmax_hourly_cost: 0.34\n")


@pytest.mark.parametrize(("more", "words"), [
    ("max_hourly_cost: 0.10\n", "max_hourly_cost: $0.1000/h is less than 2 x the cheapest offer, $0.0"),
    ("max_cost: 0.005\n", "max_cost: $0.000000 of $0.005000 are spent, and a clean shutdown takes up to"),
    ("deadline: 10h\nwork: 599m59s\n", "deadline: impossible: "),
], ids=["max_hourly_cost", "max_cost", "deadline"])
def test_what_nothing_on_sale_can_keep_is_refused_before_anything_is_made(user, more, words):
    user.write("fleet.yaml", FILE + more)
    said = user.fails("up fleet.yaml -y", code=2)
    assert f"error: {words}" in said.err and "\nhint: " in said.err
    assert user.cloud.living() == []


def test_a_fleet_that_is_up_takes_another_policy_over_and_a_deadline_with_the_next_job(up):
    up.write("fleet.yaml", FILE + "spot_policy: auto\nmax_cost: 20\n")
    said = up.ok("up fleet.yaml -y")
    assert "fleet digits on local: up already, its policy is to change" in said.err
    assert "the policy is changed" in said.err
    assert up.dispatcher.policy == PolicySpec("auto", max_micros=20_000_000)
    up.write("fleet.yaml", FILE + "spot_policy: auto\nmax_cost: 20\nwork: 3h\n")
    said = up.ok("up fleet.yaml -y")
    assert "changed for the next job: work" in said.err and "the policy is changed" not in said.err


@pytest.mark.parametrize(("options", "words"), [
    ("--deadline soon", "--deadline: expected a duration"),
    ("--deadline 3h", "a deadline needs the work"),
    ("--deadline 0h --work 2h", "--deadline: expected a duration above 0"),
    ("--deadline 3h --work 5", "--work: expected \"48h\" (at the full number of hosts) or \"100000 steps\", got '5'"),
], ids=["no duration", "no work", "no time", "no unit"])
def test_train_says_what_is_wrong_with_a_deadline(up, options, words):
    up.write("train.py", "")
    assert f"error: {words}" in up.fails(f"train train.py {options}", code=2).err


def test_train_hands_deadline_and_work_on(up):
    up.write("train.py", "")
    up.ok("train train.py -d --deadline 3h --work 2h")
    up.ok("train train.py -d --deadline 3h --work 700steps")
    specs = [job.spec for job in up.dispatcher.jobs.values()]
    assert [(s.deadline_s, s.work_s, s.work_steps) for s in specs] == [(10_800.0, 7200.0, 0), (10_800.0, 0.0, 700)]
