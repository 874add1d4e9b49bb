"""Cost of the trials of Ray Tune on a fleet's cluster, with figures computed by hand."""

from __future__ import annotations

import random

from spotfleet.cli.commands import cost_table
from spotfleet.fleet.cost.meter import report
from spotfleet.fleet.cost.rows import to_json
from spotfleet.fleet.domain.events import Event, JobChanged, JobSubmitted, ScriptsRan, TrialHeld
from spotfleet.model import JobState, Run
from tests.fleet.cost.test_cost import created, host

HALF, ALL = 500_000, 1_000_000


def cluster(*hosts: str, since: float = 100.0, until: float = 200.0, job: str = "ray-1") -> list[Event]:
    """Hosts of two slots for 10 micro-dollars a second, each with a raylet for all of the time."""
    events: list[Event] = [created()]
    for name in hosts:
        events += host(name, Run(since, until))
    return [*events, JobSubmitted(since, job, "ray", "raylet", 1, 4, job_kind="ray"),
            ScriptsRan(since, job, tuple(f"{name}/0/1" for name in hosts), since, "the command")]


def held(at: float, trial: str, job: str = "ray-1", **hosts: int) -> TrialHeld:
    return TrialHeld(at, job, trial, f"train_{trial}", len(hosts), {f"f-{name[1:]}": part
                                                                  for name, part in hosts.items()})


def costs(*events: Event, now: float = 1e6) -> dict[str, int]:
    return {line.trial: line.micros for line in report(events, now).trials}


def test_a_ray_cluster_holds_all_slots_of_its_hosts():
    [job] = report(cluster("f-0"), 1e6).jobs
    assert job.micros == 1000 and job.no_trial_micros is None


def test_a_trial_costs_its_parts_of_the_hosts_until_its_next_line():
    events = [*cluster("f-0", "f-1"), held(110.0, "a", h0=HALF), held(130.0, "a", h0=HALF, h1=ALL),
              held(150.0, "a")]
    found = report(events, 1e6)
    [line] = found.trials
    assert (line.job, line.name, line.micros) == ("ray-1", "train_a", 20 * 5 + 20 * 5 + 20 * 10)
    assert line.slot_s == 20 * 1 + 20 * 1 + 20 * 2
    [job] = found.jobs
    assert (job.micros, job.no_trial_micros) == (2000, 2000 - line.micros)


def test_trials_that_ask_for_more_than_a_host_share_it():
    events = [*cluster("f-0"), held(100.0, "a", h0=HALF), held(100.0, "b", h0=ALL)]
    assert costs(*events) == {"a": 333, "b": 666}


def test_a_trial_whose_end_is_not_known_costs_nothing_after_its_jobs():
    events = [*cluster("f-0"), held(150.0, "a", h0=ALL), JobChanged(180.0, "ray-1", JobState.SUCCEEDED, "")]
    assert costs(*events) == {"a": 300}


def test_a_trial_on_a_host_that_its_job_does_not_hold_costs_nothing():
    assert costs(*cluster("f-0"), held(100.0, "a", h7=ALL), held(100.0, "b", "ray-2", h0=ALL)) == {}


def test_trials_never_cost_more_than_their_cluster_in_any_window():
    for seed in range(60):
        draw = random.Random(seed)
        events = cluster("f-0", "f-1", "f-2")
        for _ in range(20):
            hosts = {f"h{n}": draw.randint(1, ALL) for n in range(3) if draw.random() < 0.5}
            events.append(held(draw.uniform(90, 210), draw.choice("abcd"), **hosts))
        cut = draw.uniform(100, 200)
        whole, first, last = report(events, 1e6), report(events, 1e6, None, cut), report(events, 1e6, cut)
        for found in (whole, first, last):
            for job in found.jobs:
                of = sum(line.micros for line in found.trials if line.job == job.job)
                assert 0 <= of <= job.micros and job.no_trial_micros in (None, job.micros - of)
        # One micro-dollar a trial may fall on the other side of a cut.
        parts = sum(line.micros for found in (first, last) for line in found.trials)
        assert abs(parts - sum(line.micros for line in whole.trials)) <= 4


def test_trials_are_in_the_json_and_in_the_table_with_what_no_trial_has_used():
    found = report([*cluster("f-0"), held(100.0, "a", h0=HALF), held(100.0, "b", h0=ALL), held(136.0, "a")], 1e6)
    data = to_json(found)
    assert [(t["trial"], t["micros"], t["dollars"]) for t in data["trials"]] == [
        ("a", 120, "0.000120"), ("b", 880, "0.000880")]
    assert data["jobs"][0]["no_trial_dollars"] == "0.000000"
    text = cost_table.report(found, ())
    lines = [line.split() for line in text.splitlines()]
    assert ["train_b", "0.049", "$0.000880"] in lines and ["all", "of", "ray-1", "$0.001000"] in lines
    assert ["in", "no", "trial", "$0.000000"] in lines
