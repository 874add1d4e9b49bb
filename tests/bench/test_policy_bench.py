"""The worlds in which strategies are compared, with figures computed by hand; and that the bench tells what it used.

Prices are 1 and 3 dollars an hour, so that a cost in dollars is spot hours + 3 x hours on demand.
"""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spotfleet.fleet.domain.availability import observe
from spotfleet.fleet.policy import deadline
from spotfleet.fleet.policy.values import MarketTarget
from spotfleet.simulate.strategies import baselines
from spotfleet.simulate.values.trace import Trace

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
try:
    import policy_foresight as foresight
    import policy_goodput
    import policy_plot
    import policy_prices
    import policy_tables
    from policy_worlds import ASK_S, Piece, Task, alone, pieces, together
finally:
    sys.path.remove(str(BENCH))

H = 3600.0


def task(work_h: float, deadline_h: float, change_h: float = 0.5, hosts: int = 1, stall_h: float = 0.0) -> Task:
    return Task(work_h * H, deadline_h * H, change_h * H, stall_h * H, hosts, 1_000_000, 3_000_000)


def offered(*hours: float, first: int = 1, hosts: int = 1) -> Piece:
    """Spells of so many hours, spot hosts to be had in the first (`first`=1), not in the next; one more goes on."""
    at, some, changes = 0.0, bool(first), []
    for length in (*hours, 0.0):
        changes.append((at * H, hosts if some else 0))
        at, some = at + length, not some
    return Piece(tuple(changes), 1000 * H)


def dollars(outcome, of: Task) -> float:
    return round(outcome.micros(of) / 1e6, 6)


def test_on_demand_pays_for_its_changeover_and_the_work():
    job = task(10, 20)
    outcome = alone(offered(100), job, baselines.on_demand)
    assert (dollars(outcome, job), outcome.done_s / H, outcome.changes) == (3 * 10.5, 10.5, 1)
    assert outcome.cost_percent(job) == pytest.approx(105.0)


def test_greedy_takes_spot_waits_for_it_and_ends_on_demand():
    job = task(10, 16)
    outcome = alone(offered(4.5), job, baselines.greedy)  # 4 h of work; for the other 6 on demand from 9.5 h on
    assert (outcome.spot_s / H, outcome.on_demand_s / H, outcome.done_s / H) == pytest.approx((4.5, 6.5, 16.0))
    assert dollars(outcome, job) == 4.5 + 3 * 6.5


def test_greedy_takes_no_spot_host_once_there_is_no_time_for_two_changes():
    job = task(10, 10.9)
    assert dollars(alone(offered(100), job, baselines.greedy), job) == 3 * 10.5


def test_a_strategy_is_asked_again_when_it_wants_and_no_later():
    job = task(10, 10.5 + 30 / H)
    assert alone(offered(first=0), job, baselines.greedy).done_s == pytest.approx(job.deadline_s)


def test_a_changeover_is_paid_anew_for_each_host_and_replaces_one_that_is_pending():
    job = task(2, 10)
    outcome = alone(offered(0.25, 0.25, 10), job, baselines.greedy)
    assert (outcome.spot_s / H, outcome.useful_spot_s / H, outcome.changes) == (0.25 + 0.5 + 2, 2.0, 2)


def test_uniform_progress_works_on_demand_when_behind_and_goes_back_only_two_changeovers_ahead():
    job = task(10, 20)  # expected: half an hour of work each hour
    outcome = alone(offered(1.0, first=0), job, baselines.uniform_progress(job.work_s, job.deadline_s))
    # At 0 it is not behind; a moment later on demand, where it works from 0.5 h on. Two changeovers ahead:
    # t - 0.5 = (t + 1) / 2 at t = 2, with 1.5 h done. Then 0.5 h and 8.5 h of work on spot.
    assert (outcome.on_demand_s / H, outcome.spot_s / H) == pytest.approx((2.0, 9.0), abs=2.1 * ASK_S / H)
    assert not outcome.missed(job)


def test_uniform_progress_stays_on_demand_without_spot_unless_told_to_wait_when_ahead():
    job = task(10, 20)
    stays, waits = (alone(offered(first=0), job, baselines.uniform_progress(job.work_s, job.deadline_s, idle=idle))
                    for idle in (False, True))
    assert (stays.changes, stays.done_s / H) == pytest.approx((1, 10.5), abs=0.02)
    assert waits.changes > 3 and not waits.missed(job)


def test_a_gang_has_spot_only_while_all_its_hosts_have():
    piece = Piece(((0.0, 4), (H, 3), (2 * H, 5)), 9 * H)
    assert piece.lowest(4).changes == ((0.0, 1), (H, 0), (2 * H, 1))


def test_hosts_that_boot_are_paid_and_do_nothing():
    job = task(3, 100, hosts=2)
    outcome = together(offered(100, hosts=2), job, lambda m: MarketTarget(2, 0, ""))
    assert (outcome.spot_s / H, outcome.useful_spot_s / H, outcome.done_s / H) == pytest.approx((7.0, 6.0, 3.5))


def test_a_change_of_membership_stalls_all():
    job = task(3, 100, hosts=2, stall_h=0.25)
    falls = Piece(((0.0, 2), (2 * H, 1)), 100 * H)  # 1.25 h of two, a stall, then 3.5 h of one
    outcome = together(falls, job, lambda m: MarketTarget(2, 0, ""))
    assert (outcome.done_s / H, outcome.changes) == pytest.approx((2 + 0.25 + 3.5, 2))


def test_hosts_on_demand_beside_enough_spot_hosts_are_paid_and_look_on():
    job = task(3, 100, hosts=2)
    outcome = together(offered(100, hosts=2), job, lambda m: MarketTarget(2, 1, ""))
    figures = (outcome.useful_spot_s / H, outcome.useful_on_demand_s, outcome.on_demand_s / H)
    assert figures == pytest.approx((6, 0, 3.5))


def test_foresight_takes_the_runs_that_pay_and_as_few_stretches_on_demand_as_have_room():
    job = task(10, 16)
    plan = foresight.alone(offered(4.5, 2, 0.6, 4, first=0), job)
    # Both runs, 2 and 4 h, do 5 h of work. The other 5 take 5.5 h on demand in one stretch; there are 4.5 h before
    # and 4.9 h after them, so two stretches, 6 h.
    assert (plan.spot_s / H, plan.on_demand_s / H, plan.spot_changes, plan.on_demand_changes) == (6.0, 6.0, 2, 2)


def test_foresight_on_spot_alone_takes_the_longest_runs():
    job = task(5, 30)
    plan = foresight.alone(offered(1, 1, 3, 1, 4), job)
    assert (plan.spot_s / H, plan.on_demand_s, plan.spot_changes) == (6.0, 0.0, 2)


def test_no_plan_meets_a_deadline_that_is_too_near():
    assert foresight.alone(offered(100), task(10, 10.2)).micros(task(10, 10.2)) == float("inf")


def cheapest_by_trying(spot: list[bool], work_h: int) -> float:
    """Dollars of the best of all plans that decide each hour anew, a changeover taking one."""
    best = {("", 0): 0}
    for some in spot:
        nexts: dict[tuple[str, int], int] = {}
        for (host, done), paid in best.items():
            for wanted, price in (("", 0), ("spot", 1), ("demand", 3)):
                if (wanted == "spot" and not some) or (done == work_h and wanted):
                    continue
                key = (wanted, done + (wanted == host and wanted != ""))
                nexts[key] = min(nexts.get(key, 10**6), paid + price)
        best = nexts
    return min((paid for (_, done), paid in best.items() if done == work_h), default=float("inf"))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=9), st.integers(0, 1), st.integers(3, 12), st.integers(1, 12))
def test_foresight_is_the_best_of_all_plans(spells, first, work_h, slack_h):
    job = task(work_h, work_h + slack_h, change_h=1.0)
    spot = [(k + first) % 2 == 1 for k, length in enumerate([*spells, 50]) for _ in range(length)]
    by_trying = cheapest_by_trying(spot[:work_h + slack_h], work_h)
    assert dollars(foresight.alone(offered(*spells, first=first), job), job) == by_trying


SPELLS = st.lists(st.floats(0.2, 15.0), min_size=0, max_size=9)
STRATEGIES = {
    "ours": lambda job: deadline.choose,
    "on-demand": lambda job: baselines.on_demand,
    "greedy": lambda job: baselines.greedy,
    "uniform-progress": lambda job: baselines.uniform_progress(job.work_s, job.deadline_s),
    "uniform-progress-waits": lambda job: baselines.uniform_progress(job.work_s, job.deadline_s, idle=True),
}


@pytest.mark.parametrize("name", STRATEGIES)
@settings(max_examples=40, deadline=None)
@given(SPELLS, st.integers(0, 1), st.floats(1.0, 20.0), st.sampled_from([0.05, 0.2]))
@example([0.99999, 1.0], 0, 1.1, 0.05)  # 36 ms of slack are left after the loss
def test_no_strategy_is_late_or_cheaper_than_foresight(name, spells, first, slack_h, change_h):
    job, piece = task(24, 24 + slack_h, change_h), offered(*spells, first=first)
    outcome = alone(piece, job, STRATEGIES[name](job), observe)
    best = foresight.alone(piece, job).cost_percent(job)
    assert not outcome.missed(job)
    assert foresight.alone_bound_percent(piece, job) - 1e-6 <= best <= outcome.cost_percent(job) + 1e-6


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 4)), min_size=1, max_size=12),
       st.sampled_from([15.0, 180.0]))
def test_no_mix_of_hosts_is_late_or_cheaper_than_the_fluid_bound(spells, stall_s):
    changes, at = [], 0.0
    for quarters, hosts in spells:
        changes.append((at, hosts))
        at += quarters * 900.0
    piece, job = Piece(tuple(changes), 1000 * H), Task(24 * H, 30 * H, 180.0, stall_s, 4)
    for choose in (deadline.choose, policy_tables.elastic_hybrid(job)):
        outcome = together(piece, job, choose, observe)
        assert not outcome.missed(job)
        assert foresight.fluid_micros(piece, job) <= outcome.micros(job) + 1e-3


def test_pieces_lie_wholly_in_the_record_and_begin_with_what_was_in_force():
    trace = Trace("t", 10 * H, ((0.0, 1), (5 * H, 1), (6 * H, 0)))
    assert list(pieces(trace, 5 * H, 4 * H)) == [Piece(((0.0, 1),), 5 * H), Piece(((0.0, 1), (2 * H, 0)), 5 * H)]


# ---- the tables


def test_goodput_counts_boots_losses_and_work_done_again():
    trace = Trace("t", 3600.0, ((0.0, 2), (1800.0, 1)))
    system = policy_goodput.System("s", loss_s=100.0, join_s=10.0, checkpoint_s=600.0)
    found = policy_goodput.goodput_of(trace, system, boot_s=180.0)
    # Two hosts from 190 s to 1800: 1610 s, of which 1610 mod 600 = 410 are lost; then one for 1700 s.
    assert found == policy_goodput.Goodput(2 * 1200.0 + 1700.0, 2 * 410.0, 2 * 1800.0 + 1800.0, 5400.0, 7200.0)


def test_a_gang_does_nothing_with_a_host_less_and_the_ideal_uses_all():
    trace = Trace("t", 3600.0, ((0.0, 2), (1800.0, 1)))
    gang = policy_goodput.System("g", 0.0, 0.0, gang=True)
    assert policy_goodput.goodput_of(trace, gang, boot_s=0.0).useful_s == 3600.0
    ideal = policy_goodput.goodput_of(trace, policy_goodput.SYSTEMS[-1])
    assert policy_goodput.summary([ideal]) == (0.75, 1.0, 0.0, 0.3)


def test_the_bill_is_the_integral_and_holding_the_launch_price_is_not():
    trace = Trace("t", 20 * 24 * H, prices=((0.0, 1_000_000), (84 * H, 3_000_000)), on_demand_micros_h=4_000_000)
    assert policy_prices.integral(trace, 0, 168 * 3600) == Fraction(84 * 1_000_000 + 84 * 3_000_000)
    first, *_ = policy_prices.bill_cell(trace, 168)
    assert first == pytest.approx((0.0, 50.0, 50.0))


# ---- the command


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCH / "policy.py"), *args, "--jobs", "1"], capture_output=True,
                          text=True)


def test_the_bench_says_what_it_used_and_why_not_the_rest(tmp_path):
    probes = {"metadata": {"gap_seconds": 1800}, "data": [1, 1, 1, 0] * 40}
    (tmp_path / "one.json").write_text(json.dumps(probes))
    (tmp_path / "four.json").write_text(json.dumps(probes | {"data": [4, 4, 0, 2] * 40}))
    (tmp_path / "other.json").write_text('{"no": "trace"}')
    found = bench(str(tmp_path), "--only", "B1,B2", "-o", "json")
    said = json.loads(found.stdout)
    b1, b2 = said["tables"]
    assert found.returncode == 0 and list(said["unread"]) == ["other.json"]
    assert (b1["used"], b1["skipped"]) == (["one.json"], {"four.json": "of more than one host"})
    assert (b2["used"], b2["skipped"]) == (["four.json"], {"one.json": "of one host"})
    assert [row[0] for row in b1["rows"]][:3] == ["cost %, mean of windows", "spotfleet", "on demand"]
    assert {row[-1] for row in b1["rows"][1:]} == {"0"}  # misses


def test_a_record_is_of_use_to_every_deadline_or_to_none(tmp_path):
    for name, hours in (("long", 70), ("short", 69)):
        probes = {"metadata": {"gap_seconds": 3600}, "data": [1, 1, 1, 0] * hours}
        (tmp_path / f"{name}.json").write_text(json.dumps(probes | {"data": probes["data"][:hours]}))
    found = bench(str(tmp_path), "--only", "B1", "-o", "json")
    table, = json.loads(found.stdout, parse_constant=pytest.fail)["tables"]
    assert (table["used"], table["skipped"]) == (["long.json"], {"short.json": "shorter than 70 h"})
    assert all(float(cell) > 0 for row in table["rows"][1:] for cell in row[1:-1])


@pytest.mark.parametrize(("panels", "laid_out"), [(1, (1, 1, 1)), (3, (3, 1, 3)), (4, (4, 1, 4)), (6, (4, 2, 6)),
                                                  (157, (4, 40, 157)), (1000, (4, 100, 400))])
def test_panels_are_laid_in_rows_within_what_a_picture_can_hold(panels: int, laid_out: tuple[int, int, int]):
    assert policy_plot.laid_out(panels) == laid_out
    across, down, _ = laid_out
    assert max(across * 5.2, down * 4.2) * 60 < 65536


@pytest.mark.parametrize("content", [None, "no trace"], ids=["empty", "unreadable"])
def test_a_folder_without_traces_is_an_error_with_a_hint(tmp_path, content):
    if content:
        (tmp_path / "a.txt").write_text(content)
    found = bench(str(tmp_path))
    assert (found.returncode, found.stdout) == (2, "")
    assert "hint: " in found.stderr and "Traceback" not in found.stderr
