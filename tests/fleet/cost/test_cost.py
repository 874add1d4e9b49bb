"""The bill, with figures computed by hand. Prices are in micro-dollars an hour: 3600 are one a second."""

from __future__ import annotations

import csv
import io
import json
import re

from spotfleet.cli.commands import cost_table
from spotfleet.fleet.cost.billing import PriceBook, pieces
from spotfleet.fleet.cost.boots import BootLine, PoolBoots, boots_by_pool
from spotfleet.fleet.cost.groups import breakdown
from spotfleet.fleet.cost.meter import report
from spotfleet.fleet.cost.rows import csv_rows, to_json
from spotfleet.fleet.domain.events import (
    CheckpointKept,
    Event,
    FleetCreated,
    GenerationFormed,
    HostJoined,
    HostListed,
    JobChanged,
    JobProgress,
    JobResumed,
    JobSubmitted,
    LaunchIntended,
    PriceChanged,
    ScriptsRan,
)
from spotfleet.model import BillingRules, BootStages, CloudState, JobState, Market, Nodes, Offer, Role, Run
from spotfleet.words import exact_dollars

SECOND = 3600  # micro-dollars an hour: one micro-dollar a second
SPOT = Offer("fake", "r", "zone-a", "g5", Market.SPOT, 2, 10 * SECOND, 30 * SECOND)
FULL = Offer("fake", "r", "zone-a", "m6", Market.ON_DEMAND, 1, 7 * SECOND, 7 * SECOND)
EXACT = BillingRules(minimum_s=1)


def created(rules: BillingRules = EXACT) -> FleetCreated:
    return FleetCreated(0.0, "f", "fake", Nodes(), rules)


def host(name: str, *runs: Run, offer: Offer = SPOT, role: Role = Role.WORKER) -> list[Event]:
    return [LaunchIntended(0.0, name, role, offer, ""),
            HostListed(0.0, name, "i", CloudState.RUNNING, runs)]


def price(at: float, per_second: int, offer: Offer = SPOT) -> PriceChanged:
    return PriceChanged(at, offer.pool, per_second * SECOND, 30 * SECOND)


def formed(at: float, generation: int, *members: str, job: str = "j") -> GenerationFormed:
    return GenerationFormed(at, job, generation, members, "start", "")


def micros(rules: BillingRules, *runs: Run, prices: tuple[PriceChanged, ...] = (), now: float = 1e6) -> int:
    return report([created(rules), *host("f-0", *runs), *prices], now).micros


def test_each_begun_second_counts_in_full():
    assert micros(EXACT, Run(100.0, 110.0)) == 100
    assert micros(EXACT, Run(100.0, 110.001)) == 110
    assert micros(EXACT, Run(100.5, 101.25)) == 10


def test_a_second_costs_the_price_in_force_when_it_begins():
    change = price(105.0, 20)
    assert micros(EXACT, Run(100.0, 110.0), prices=(change,)) == 5 * 10 + 5 * 20
    assert micros(EXACT, Run(100.5, 110.5), prices=(change,)) == 5 * 10 + 5 * 20
    assert micros(EXACT, Run(100.0, 110.0), prices=(price(105.001, 20),)) == 6 * 10 + 4 * 20


def test_the_newest_price_before_a_run_counts_at_its_start():
    earlier = (price(50.0, 99), price(90.0, 4), price(105.0, 6), price(200.0, 50))
    assert micros(EXACT, Run(100.0, 110.0), prices=earlier) == 5 * 4 + 5 * 6


def test_prices_written_late_or_twice_give_the_same_bill():
    one, two = price(90.0, 4), price(105.0, 6)
    assert micros(EXACT, Run(100.0, 110.0), prices=(two, one, two, one)) == 5 * 4 + 5 * 6


def test_prices_of_other_pools_do_not_count():
    assert micros(EXACT, Run(100.0, 110.0), prices=(price(0.0, 99, FULL),)) == 100


def test_a_short_run_costs_the_minimum_at_its_last_price():
    minute = BillingRules(minimum_s=60)
    assert micros(minute, Run(100.0, 103.0)) == 600
    assert micros(minute, Run(100.0, 103.0), prices=(price(102.0, 20), price(104.0, 99))) == 60 * 20
    assert micros(minute, Run(100.0, 100.0)) == 600
    assert micros(minute, Run(100.0, 160.0), prices=(price(150.0, 20),)) == 50 * 10 + 10 * 20


def test_a_run_that_the_cloud_ends_early_is_free_where_the_rules_say_so():
    free = BillingRules(minimum_s=60, free_if_taken_within_s=300)
    assert micros(free, Run(100.0, 400.0, taken=True)) == 0
    assert micros(free, Run(100.0, 401.0, taken=True)) == 3010
    assert micros(free, Run(100.0, 400.0)) == 3000
    assert micros(BillingRules(60), Run(100.0, 103.0, taken=True)) == 600


def test_seconds_that_were_free_still_count_in_the_comparison():
    bill = report([created(BillingRules(60, 300)), *host("f-0", Run(0.0, 100.0, taken=True))], 1e6)
    assert (bill.micros, bill.on_demand_micros, bill.savings_percent) == (0, 3000, 100.0)


def test_each_host_is_rounded_once_half_up():
    third = Offer("fake", "r", "zone-a", "g5", Market.SPOT, 2, 1200, 3600)  # a third of a micro-dollar a second
    runs = Run(0.0, 1.0), Run(10.0, 11.0), Run(20.0, 21.0), Run(30.0, 31.0), Run(40.0, 41.0)
    bill = report([created(), *host("f-0", *runs, offer=third)], 1e6)
    assert [line.micros for line in bill.lines] == [0, 1, 0, 0, 1]
    assert bill.micros == 2
    half = Offer("fake", "r", "zone-a", "g5", Market.SPOT, 2, 1800, 3600)
    assert report([created(), *host("f-0", Run(0.0, 1.0), offer=half)], 1e6).micros == 1


def test_a_stopped_host_costs_nothing_between_its_runs():
    bill = report([created(), *host("f-0", Run(0.0, 10.0, taken=True), Run(1000.0, 1005.0))], 1e6)
    assert [(line.seconds, line.micros, line.taken) for line in bill.lines] == [(10, 100, True), (5, 50, False)]


def test_a_running_host_counts_up_to_now():
    events = [created(), *host("f-0", Run(100.0))]
    assert [report(events, now).micros for now in (99.0, 100.0, 101.0, 110.5)] == [10, 10, 10, 110]
    assert report(events, 110.5).lines[0].ended_at is None


def test_the_same_events_always_give_the_same_bill_and_later_ones_never_change_an_ended_run():
    events = [created(), *host("f-0", Run(100.0, 110.0)), price(90.0, 4)]
    later = [*events, price(111.0, 900), PriceChanged(5_000.0, SPOT.pool, 1, 1)]
    assert report(events, 200.0).lines == report(events, 9e9).lines == report(later, 9e9).lines


def test_what_was_saved_is_not_known_where_one_on_demand_price_is_not():
    strange = Offer("fake", "r", "zone-a", "g7", Market.SPOT, 2, 36_000, 0)
    bill = report([created(), *host("f-0", Run(0.0, 100.0), offer=strange), *host("f-1", Run(0.0, 100.0))], 1e6)
    assert (bill.unpriced, bill.savings_percent, to_json(bill)["savings_percent"]) == ((strange.pool,), 0.0, None)
    said = cost_table.report(bill, []).splitlines()
    assert [line.split()[-1] for line in said[1:4]] == ["unknown", "$0.003000", "unknown"]
    assert said[5] == f"the saving is unknown: {strange.pool} has no known on-demand price"


def test_savings_are_against_the_same_seconds_on_demand():
    events = [created(), *host("f-0", Run(0.0, 100.0)), *host("f-d-0", Run(0.0, 100.0), offer=FULL,
                                                              role=Role.DISPATCHER)]
    bill = report(events, 1e6)
    assert (bill.micros, bill.on_demand_micros, bill.dispatcher_micros) == (1700, 3700, 700)
    assert round(bill.savings_percent, 3) == 54.054


def test_a_run_is_lost_to_the_boot_until_its_agent_joins():
    joined = [HostJoined(120.0, "f-0", "a"), HostJoined(150.0, "f-0", "b"), HostJoined(1030.0, "f-0", "c")]
    once = [created(), *host("f-0", Run(100.0, 200.0), Run(1000.0, 1100.0)), *joined]
    assert report(once, 1e6).boot_micros == 20 * 10 + 30 * 10
    never = [created(), *host("f-0", Run(100.0, 200.0))]
    assert report(never, 1e6).boot_micros == 1000


OTHER = Offer("fake", "r", "zone-b", "g5", Market.SPOT, 2, 20 * SECOND, 30 * SECOND)
PARTS = BootStages(35.0, 5.0, 6.0, 20.0, 4.0)


def two_pools() -> list[Event]:
    """A host that boots twice, one in another pool, and one that never joins there."""
    return [created(), *host("f-0", Run(105.0, 200.0, True), Run(300.0)), *host("f-1", Run(100.0), offer=OTHER),
            *host("f-2", Run(100.0, 140.0), offer=OTHER), HostJoined(135.0, "f-0", "a", PARTS),
            HostJoined(160.0, "f-1", "b"), HostJoined(310.0, "f-0", "c"),
            JobResumed(170.0, "j", 1, 1, 0, 0.0, first_steps={"f-0": 170.0, "f-1": 170.0})]


def test_each_boot_has_its_instants_its_parts_and_its_cost():
    found = report(two_pools(), 400.0)
    spot = "spot"
    assert found.boots == (
        BootLine("f-1", OTHER.pool, spot, 0.0, 100.0, 160.0, 170.0, None, 60, 1200),
        BootLine("f-2", OTHER.pool, spot, 0.0, 100.0, None, None, None, 40, 800),
        BootLine("f-0", SPOT.pool, spot, 0.0, 105.0, 135.0, 170.0, PARTS, 30, 300),
        BootLine("f-0", SPOT.pool, spot, None, 300.0, 310.0, None, None, 10, 100))
    assert boots_by_pool(found.boots) == (PoolBoots(OTHER.pool, 2, 1, 100, 2000, 160.0),
                                          PoolBoots(SPOT.pool, 2, 2, 40, 400, 72.5))
    assert (found.boot_micros, breakdown(found).boot) == (2400, 2400)


def test_the_cost_of_boots_is_told_in_all_and_where_there_are_several_pools_by_pool():
    text = cost_table.report(report(two_pools(), 400.0), [])
    assert "4 boots of hosts cost $0.002400 until their agents joined; half of them took 2m15s or less" in text
    [head, first, second] = [line.split() for line in text.partition("boots in")[2].splitlines()[:3]]
    assert (head, first, second) == (["boots", "median", "cost"], [OTHER.pool, "2", "2m40s", "$0.002000"],
                                     [SPOT.pool, "2", "1m12s", "$0.000400"])
    alone = cost_table.report(report([created(), *host("f-0", Run(0.0))], 10.0), [])
    assert re.search(r"(?m)^1 boot of hosts cost \S+ until their agents joined$", alone)
    assert "boots in" not in alone


def test_boots_are_in_the_json_with_their_dollars():
    data = json.loads(json.dumps(to_json(report(two_pools(), 400.0))))
    assert data["boots"][2] == {
        "host": "f-0", "pool": SPOT.pool, "market": "spot", "asked_at": 0.0, "running_at": 105.0, "joined_at": 135.0,
        "first_step_at": 170.0, "stages": {"whole_s": 35.0, "machine_s": 5.0, "system_s": 6.0, "setup_s": 20.0,
                                           "agent_s": 4.0},
        "seconds": 30, "micros": 300, "dollars": "0.000300", "took_s": 135.0}
    assert [(row["pool"], row["boots"], row["dollars"]) for row in data["boots_by_pool"]] == [
        (OTHER.pool, 2, "0.002000"), (SPOT.pool, 2, "0.000400")]


def test_the_dispatchers_boot_is_no_loss_of_workers():
    events = [created(), *host("f-d-0", Run(0.0, 100.0), offer=FULL, role=Role.DISPATCHER)]
    assert report(events, 1e6).boot_micros == 0


def test_a_job_pays_for_the_hosts_of_its_generations_and_the_rest_is_idle():
    events = [created(), *host("f-0", Run(0.0, 100.0)), *host("f-1", Run(0.0, 100.0)),
              JobSubmitted(5.0, "j", "digits", "train", 1, 2),
              formed(10.0, 1, "f-0/0/a", "f-0/1/a", "f-1/0/a", "f-1/1/a"),
              formed(40.0, 2, "f-1/0/a", "f-1/1/a"),
              JobChanged(90.0, "j", JobState.SUCCEEDED, "", 2000)]
    (job,), bill = report(events, 1e6).jobs, report(events, 1e6)
    assert job.micros == (40 - 10) * 10 + (90 - 10) * 10
    assert job.on_demand_micros == 3 * job.micros
    assert bill.idle_micros == 2000 - job.micros
    assert (job.name, job.useful_steps, job.micros_per_1000_steps) == ("digits", 2000, 550)
    assert (bill.useful_steps, bill.micros_per_1000_steps) == (2000, 1000)


def test_jobs_share_a_host_by_the_slots_they_hold():
    events = [created(), *host("f-0", Run(0.0, 100.0)),
              formed(0.0, 1, "f-0/0/a", job="one"), formed(50.0, 1, "f-0/1/a", job="two")]
    bill = report(events, 100.0)
    assert {j.job: j.micros for j in bill.jobs} == {"one": 500, "two": 250}
    assert bill.idle_micros == 250


def test_a_job_that_still_counts_slots_given_to_another_never_makes_idle_negative():
    events = [created(), *host("f-0", Run(0.0, 90.0)), formed(0.0, 1, "f-0/0/a", "f-0/1/a", job="one"),
              formed(0.0, 1, "f-0/1/b", job="two")]
    bill = report(events, 90.0)
    assert {j.job: j.micros for j in bill.jobs} == {"one": 600, "two": 300}
    assert bill.idle_micros == 0


def test_what_a_minimum_adds_to_a_short_run_is_nobodys_work():
    events = [created(BillingRules(60)), *host("f-0", Run(0.0, 20.0)), formed(0.0, 1, "f-0/0/a", "f-0/1/a")]
    bill = report(events, 1e6)
    assert (bill.micros, bill.jobs[0].micros, bill.idle_micros) == (600, 200, 400)


def test_repeated_steps_and_pauses_cost_the_slots_of_their_generation():
    events = [created(), *host("f-0", Run(0.0, 100.0)), *host("f-1", Run(0.0, 100.0)),
              formed(0.0, 1, "f-0/0/a", "f-0/1/a", "f-1/0/a"), JobProgress(20.0, "j", 40, 0.5),
              formed(30.0, 2, "f-0/0/a", "f-0/1/a", "f-1/0/a"), JobResumed(31.0, "j", 2, 60, 1, 0.25),
              JobProgress(60.0, "j", 120, 0.5), JobResumed(61.0, "j", 3, 120, 7, 9.0)]
    (job,) = report(events, 100.0).jobs
    # 10 a second for f-0 and 5 for half of f-1: 1 step of 0.5 s is 7.5; generation 3 was never formed
    assert (job.repeated_steps, job.repeated_micros, job.pause_micros) == (8, 8, 4)
    assert report(events, 100.0).repeated_micros == 8


def test_steps_that_survivors_make_again_are_billed_in_the_pause_alone():
    """A job that commits each 40th step: survivors make 30 again up to the first commit, which ends the pause."""
    events = [created(), *host("f-0", Run(0.0, 100.0)), formed(0.0, 1, "f-0/0/a", "f-0/1/a"),
              JobProgress(20.0, "j", 40, 0.5), formed(30.0, 2, "f-0/0/a", "f-0/1/a"),
              JobResumed(31.0, "j", 2, 60, 30, 0.25, recomputed=1, lost=0),
              JobResumed(41.0, "j", 2, 60, 3, 0.0, lost=1)]
    (job,) = report(events, 100.0).jobs
    assert (job.repeated_steps, job.repeated_micros, job.pause_micros) == (33, 5, 3)  # at 10 a second


def ran(at: float, since: float, *workers: str, known: bool = False) -> ScriptsRan:
    return ScriptsRan(at, "j", workers, since, "the script without hvd.init()", known)


def test_hosts_whose_scripts_run_outside_training_are_work_of_unknown_kind_and_not_idle():
    events = [created(), *host("f-0", Run(0.0, 100.0)), *host("f-1", Run(0.0, 100.0)),
              ran(70.0, 20.0, "f-0/0/a", "f-0/1/a", "f-1/0/a"),  # written once it was sure
              ran(80.0, 80.0, "f-1/0/a"), JobChanged(90.0, "j", JobState.SUCCEEDED, "")]
    bill = report(events, 100.0)
    # 10 a second for each host; f-0 from 20 to 80, half of f-1 from 20 to 90
    assert (bill.jobs[0].micros, bill.jobs[0].unknown_micros, bill.unknown_micros) == (950, 950, 950)
    assert (bill.micros, bill.idle_micros) == (2000, 1050)
    assert (breakdown(bill).unknown, breakdown(bill).useful) == (950, 0)


def test_a_generation_that_never_trained_is_work_of_unknown_kind_from_its_scripts_begin():
    events = [created(), *host("f-0", Run(0.0, 100.0)), formed(30.0, 1, "f-0/0/a", "f-0/1/a"),
              ran(50.0, 20.0, "f-0/0/a", "f-0/1/a")]
    (job,) = report(events, 100.0).jobs
    assert (job.micros, job.unknown_micros) == (800, 800)


def test_scripts_that_enter_training_after_all_are_training_from_then_on():
    events = [created(), *host("f-0", Run(0.0, 100.0)), formed(30.0, 1, "f-0/0/a", "f-0/1/a"),
              ran(50.0, 20.0, "f-0/0/a", "f-0/1/a"), ran(60.0, 60.0, "f-0/0/a", "f-0/1/a", known=True),
              formed(80.0, 2, "f-0/0/a", "f-0/1/b")]
    bill = report(events, 100.0)
    assert (bill.jobs[0].micros, bill.jobs[0].unknown_micros, breakdown(bill).useful) == (800, 400, 400)


def test_training_before_such_a_line_stays_training():
    events = [created(), *host("f-0", Run(0.0, 100.0)), formed(10.0, 1, "f-0/0/a", "f-0/1/a"),
              formed(40.0, 2, "f-0/0/a", "f-0/1/b"), ran(50.0, 5.0, "f-0/0/a", "f-0/1/b")]
    bill = report(events, 100.0)
    assert (bill.jobs[0].micros, bill.jobs[0].unknown_micros, bill.micros) == (900, 600, 1000)


def test_useful_steps_are_the_highest_version_a_job_reached():
    events = [created(), JobProgress(1.0, "j", 40, 0.5), JobProgress(2.0, "j", 30, 0.5),
              CheckpointKept(3.0, "j", 35, 1, "d", 1), JobProgress(1.0, "k", 5, 0.5)]
    bill = report(events, 9.0)
    assert [(j.job, j.useful_steps) for j in bill.jobs] == [("j", 40), ("k", 5)]
    assert bill.useful_steps == 45


def test_nothing_happened_costs_nothing():
    bill = report([], 0.0)
    assert (bill.micros, bill.savings_percent, bill.micros_per_1000_steps) == (0, 0.0, None)


def test_the_listing_that_was_written_last_counts():
    events = [created(), *host("f-0", Run(0.0)), HostListed(9.0, "f-0", "i", CloudState.TERMINATED, (Run(0.0, 7.0),))]
    assert report(events, 1e6).micros == 70


def test_two_ledgers_of_one_fleet_make_one_bill():
    laptop = [created(), *host("f-d-0", Run(0.0, 10.0), offer=FULL, role=Role.DISPATCHER)]
    dispatcher = [created(), *host("f-0", Run(0.0, 10.0)), price(0.0, 11)]
    assert report([*laptop, *dispatcher], 1e6).micros == report([*dispatcher, *laptop], 1e6).micros == 180


def test_pieces_cut_a_run_where_its_price_changes():
    book = PriceBook([price(105.5, 20)])
    bill = pieces(Run(100.0, 110.0), book.history(SPOT, 100.0), EXACT, 1e6)
    assert [(p.begin, p.end, p.micros_h // SECOND) for p in bill] == [(0, 6, 10), (6, 10, 20)]


def test_dollars_are_exact_decimal_strings():
    assert [exact_dollars(m) for m in (0, 1, 1_234_567, -5, 10**12 + 1)] == [
        "0.000000", "0.000001", "1.234567", "-0.000005", "1000000.000001"]


def test_a_report_travels_as_json_and_csv():
    events = [created(), *host("f-0", Run(0.0, 100.5, taken=True)), *host("f-1", Run(50.0)), formed(0.0, 1, "f-0/0/a")]
    bill = report(events, 100.0)
    data = json.loads(json.dumps(to_json(bill)))
    assert (data["micros"], data["dollars"], data["savings_percent"]) == (1510, "0.001510", 66.67)
    assert data["lines"][0] == {
        "host": "f-0", "role": "worker", "pool": SPOT.pool, "market": "spot", "started_at": 0.0, "ended_at": 100.5,
        "taken": True, "seconds": 101, "micros": 1010, "on_demand_micros": 3030, "dollars": "0.001010",
        "on_demand_dollars": "0.003030", "group": ""}
    assert data["jobs"][0]["dollars_per_1000_steps"] is None
    text = io.StringIO()
    csv.writer(text).writerows(csv_rows(bill))
    rows = list(csv.DictReader(io.StringIO(text.getvalue())))
    assert [(r["host"], r["ended_at"], r["dollars"]) for r in rows] == [
        ("f-0", "100.500", "0.001010"), ("f-1", "", "0.000500")]
