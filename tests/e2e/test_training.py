"""Training through interruptions, with everything real but the cloud. The cheaper tests each see one part only."""

from __future__ import annotations

import json
import os
import random

import pytest

from tests.support.e2e.e2e_stage import Stage, hosts, hosts_of, output, repeated, trains, wait_for

pytestmark = pytest.mark.processes


def test_a_notice_costs_no_step_and_a_kill_at_most_the_one_in_flight(stage: Stage):
    fleet = stage.fleet("story", least=2, target=3)
    job = stage.counting(fleet, 500, (2, 3), every=7)
    wait_for("three workers that train", lambda: trains(job, 3, step=10))

    noticed = hosts_of(job)[1]
    fleet.interrupt(noticed, 8.0)
    wait_for("a replacement", lambda: trains(job, 3, without=noticed))
    wait_for("the host's end", lambda: noticed not in [h.host for h in fleet.hosts()])
    killed = hosts_of(job)[0]
    fleet.interrupt(killed, None)
    wait_for("a replacement", lambda: trains(job, 3, without=killed))
    stage.hurry()
    job.wait(120)

    assert "counted -500.0 of -500" in output(job)
    assert repeated(fleet, job, "notice") == 0
    assert repeated(fleet, job, "death") <= 1
    assert len(hosts(fleet)) == 3
    fleet.down()
    assert stage.cloud.invoice("story").micros == fleet.cost().micros
    assert stage.cloud.truth() == []


# each cadence of commit() by itself: tests/train/data/test_counting.py; more trouble, and every bit: tests/attack
@pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="tests/attack shows more; `scripts/test --long`")
@pytest.mark.parametrize("every", [1, 1000])
def test_counting_is_right_after_trouble_at_random_moments(stage: Stage, every: int):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    fleet = stage.fleet("dice", least=1, target=2)
    job = stage.counting(fleet, 400, (1, 2), every)
    for notice_s in dice.sample([None, 6.0], 2):
        wait_for("two workers", lambda: trains(job, 2))
        step = job.status().version + dice.randrange(1, 15)
        wait_for(f"step {step}", lambda step=step: trains(job, 2, step=step))
        host = dice.choice(hosts_of(job))
        fleet.interrupt(host, notice_s)
        wait_for("going on with another", lambda host=host: trains(job, 2, without=host))
    stage.hurry()
    job.wait(120)
    assert "counted -400.0 of -400" in output(job)


def test_two_jobs_go_side_by_side_through_interruptions_and_a_third_waits_and_says_for_what(stage: Stage):
    fleet = stage.fleet("two", least=2, target=4)
    first = stage.counting(fleet, 400, (2, 2), name="first")
    second = stage.counting(fleet, 400, (2, 2), name="second")
    wait_for("both training", lambda: trains(first, 2, step=5) and trains(second, 2, step=5))
    assert set(hosts_of(first)).isdisjoint(hosts_of(second))

    third = stage.counting(fleet, 50, (2, 2), name="third", wait=True)
    wait_for("its place in the queue", lambda: third.status().why)
    assert third.status().state == "queued"
    assert "2" in third.status().why  # how many workers it wants

    noticed, killed = hosts_of(first)[1], hosts_of(second)[1]
    fleet.interrupt(noticed, 8.0)
    fleet.interrupt(killed, None)
    wait_for("the first on another host", lambda: trains(first, 2, without=noticed))
    wait_for("the second on another host", lambda: trains(second, 2, without=killed))
    stage.hurry()
    for job in (first, second, third):
        job.wait(120)
    assert "counted -400.0 of -400" in output(first)
    assert "counted -400.0 of -400" in output(second)
    assert "counted -50.0 of -50" in output(third)
    assert first.status().repeated == 0  # below its minimum it waits, with all it has learnt
    assert second.status().repeated <= 1


def test_results_come_home_with_down(stage: Stage):
    (stage.work / "writes.py").write_text(
        "import os, pathlib\nimport spotfleet.train as hvd\nhvd.init()\n"
        "pathlib.Path(os.environ['SPOTFLEET_OUTPUT'], f'rank{hvd.rank()}.txt').write_text('here')\n")
    stage.fleet("home", least=2, target=2)
    stage.cli("train", "writes.py", "--np", "2:2")
    stage.cli("down", "-y")
    outputs = (stage.home / "fleets" / "home" / "archive").glob("jobs/*/outputs/*/*")
    assert {p.name for p in outputs} == {"rank0.txt", "rank1.txt"}
    cost = json.loads(stage.cli("cost", "-o", "json").stdout)
    assert cost["micros"] == stage.cloud.invoice("home").micros
