"""A job's growth schedule or its script's wish sets how many hosts there are, and when later ones are paid for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from spotfleet.dispatcher.cloud.group_sizes import target
from spotfleet.dispatcher.jobs.sizing import Sizing
from spotfleet.dispatcher.jobs.validation import check
from spotfleet.dispatcher.jobs.workers import JobWorkers
from spotfleet.errors import UsageError
from spotfleet.fleet.domain.events import JobResized
from spotfleet.fleet.planner.size import hosts_wanted
from spotfleet.membership import Formed, Phase
from spotfleet.model import JobSpec, Need, Nodes, ResizeSpec
from spotfleet.protocol.messages import Stage as WorkerStage
from spotfleet.protocol.messages import WorkerReport
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import FakeWorker, Script

LONG = 10_000
GROWTH = ResizeSpec(growth=((0, 1), (5, 2), (9, 4)))


# ---- the number of hosts


@pytest.mark.parametrize(("asked", "held", "hosts"), [
    ([None], (), 6),  # as many as there are
    ([2], (), 2),
    ([2, 3], (), 5),
    ([2, None], (), 6),
    ([20], (), 6),  # never more than the target
    ([0], (), 1),  # nor less than min
    ([2], (4,), 4),  # those that are let go of slowly
    ([2], (20,), 8),
])
def test_hosts_are_those_that_jobs_ask_for_between_min_and_target(asked, held, hosts):
    assert hosts_wanted(Nodes(1, 6, 8), 1, asked, held) == hosts


@pytest.mark.parametrize(("workers", "hosts"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_a_host_has_room_for_several_workers(workers, hosts):
    assert hosts_wanted(Nodes(1, 6, 8), 4, [workers]) == hosts


def test_without_a_job_the_next_ones_first_entry_counts():
    assert [target(Nodes(1, 4, 4), 1, [], resize) for resize in (GROWTH, ResizeSpec())] == [1, 4]


# ---- one job


def sizing(asked: int = 0, size: int = 0, least: int = 1, resize: ResizeSpec = GROWTH) -> Sizing:
    return Sizing("j", JobSpec("j", min_workers=least, max_workers=4, resize=resize), asked, size)


@pytest.mark.parametrize(("asked", "wish"), [(0, 1), (1, 1), (2, 2), (4, 4), (9, 4)])
def test_the_first_entry_counts_until_rank_0_has_spoken_and_then_what_it_said(asked, wish):
    assert sizing(asked).target == wish


def test_a_wish_is_never_below_min():
    assert sizing(asked=1, least=3, resize=ResizeSpec()).target == 3


@pytest.mark.parametrize(("found", "why"), [
    (sizing(), "growth: 1 of 4 workers; 2 from epoch 5"),
    (sizing(2), "growth: 2 of 4 workers; 4 from epoch 9"),
    (sizing(4), ""),
    (sizing(3, resize=ResizeSpec()), "the script asks for 3 of 4 workers"),
    (sizing(resize=ResizeSpec()), ""),
])
def test_why_there_are_fewer_workers_than_there_could_be(found, why):
    assert found.why == why


def test_a_script_with_a_policy_of_its_own_and_no_wish_is_not_kept_to_the_first_entry_of_the_fleet_files():
    one, workers, first = sizing(), JobWorkers("j"), "h1/0/1"
    membership = one.membership()
    membership.adopt(1, (first,))
    workers.add(first, 0)
    one.update(membership, workers)
    assert (one.target, one.asked_of_fleet()) == (1, 1)  # it has not said anything
    report = workers.all[first].report = WorkerReport(first, "j", WorkerStage.READY, generation=1)
    one.update(membership, workers)
    assert (one.target, one.asked_of_fleet()) == (1, 1)  # nor yet, in init()
    workers.all[first].report = replace(report, resumed=1)
    one.update(membership, workers)
    assert (one.target, one.asked_of_fleet(), one.why) == (4, None, "")


def test_a_wish_stays_where_rank_0_passes_the_last_barrier_once_more_and_has_none():
    one, workers, first = sizing(asked=4), JobWorkers("j"), "h1/0/1"
    membership = one.membership()
    membership.adopt(2, (first,))
    workers.add(first, 0).report = WorkerReport(first, "j", WorkerStage.READY, generation=2, resumed=1)
    one.update(membership, workers)
    assert one.target == 4


def test_hosts_stay_for_workers_that_leave_one_by_one():
    one = sizing(resize=ResizeSpec(max_leave=1))
    membership = one.membership()
    membership.adopt(1, ("a", "b", "c", "d"))
    membership.phase = Phase.RUNNING
    assert [one.held(membership, room) for room in (1, 3, 4)] == [3, 3, 0]
    assert sizing(resize=ResizeSpec()).held(membership, 1) == 0


def resized(policy: str, *sizes: int, before: int = 0) -> list:
    one, events = sizing(size=before, resize=ResizeSpec(policy)), []
    for generation, size in enumerate(sizes, start=1):
        members = tuple(f"h{i}/0/1" for i in range(size))
        events += one.formed(Formed(generation, members, "join", "", 0), JobWorkers("j"), at=float(generation))
    return events


def test_each_change_of_size_is_an_event_and_the_beginning_is_none():
    assert resized("scale-lr", 2, 2, 3, 1) == [JobResized(3.0, "j", 3, 2, 3, "scale-lr", ""),
                                               JobResized(4.0, "j", 4, 3, 1, "scale-lr", "")]
    assert resized("scale-lr", 2, before=3) == [JobResized(1.0, "j", 1, 3, 2, "scale-lr", "")]
    assert resized("none", 2, 3) == []


@pytest.mark.parametrize(("resize", "field"), [
    (ResizeSpec("keep"), "policy"),
    (ResizeSpec(growth=((0, 5),)), "growth: 5 workers from epoch 0"),
    (ResizeSpec(growth=((1, 2),)), "growth"),
    (ResizeSpec(growth=((0, 2), (0, 3))), "growth"),
    (ResizeSpec(max_join=-1), "max_join"),
    (ResizeSpec(warmup_steps=-1), "warmup_steps"),
    (ResizeSpec(every_s=-1.0), "every_s"),
])
def test_a_job_with_an_impossible_policy_is_refused(resize, field):
    job = JobSpec("j", argv=("x.py",), max_workers=4)
    check(job, {})
    with pytest.raises(UsageError, match=f"spec.resize.{field}"):
        check(replace(job, resize=resize), {})


# ---- a whole fleet


def by_version(worker: FakeWorker) -> int:
    """Growth by steps: an epoch has 20 in this script."""
    return 1 if worker.version < 20 else 2 if worker.version < 40 else 4


def sizes(stage: Stage) -> list[tuple[int, int]]:
    return [(len(members), version) for _, _, members, version in stage.world.history]


def test_hosts_are_launched_when_their_epoch_has_come_and_not_before(play):
    async def scene(stage: Stage) -> None:
        await stage.up(1)  # one of the four in the fleet file, as its growth begins with one
        assert len(stage.cloud.machines) == 1
        job = await stage.submit(Script(steps=LONG, wants=by_version, resize="done"), (1, 4), resize=GROWTH)
        await stage.until("four workers", lambda: sizes(stage)[-1:] and sizes(stage)[-1][0] == 4)
        grown = sizes(stage)
        assert [size for size, _ in grown] == sorted(size for size, _ in grown)
        assert all(version >= {1: 0, 2: 20, 3: 40, 4: 40}[size] for size, version in grown)
        await stage.until("its event", lambda: resizes(stage, 4))
        events = await stage.events("JobResized")
        assert (events[0]["from_size"], events[0]["detail"]) == (1, "done")
        assert {e["repeated"] for e in await stage.events("JobResumed")} == {0}
        status = await stage.job(job)
        assert status.why == f"generation {status.generation} on 4 workers"

    async def resizes(stage: Stage, to: int) -> bool:
        return any(e["to_size"] == to for e in await stage.events("JobResized"))

    play(scene, spec(target=4, resize=GROWTH))


def test_before_there_is_a_host_its_room_is_known_from_what_is_offered(play):
    async def scene(stage: Stage) -> None:
        await stage.up(1)  # it has room for both workers
        assert len(stage.cloud.machines) == 1

    large = (Need(instance_type="gpu.large"),)
    play(scene, replace(spec(target=2, resize=ResizeSpec(growth=((0, 2),))), any_of=large))


def test_hosts_that_a_job_does_not_ask_for_are_given_back_and_status_says_why(play):
    async def scene(stage: Stage) -> None:
        await stage.up(3)
        job = await stage.submit(Script(steps=LONG, wants=lambda worker: 1), (1, 3),
                                 resize=ResizeSpec(growth=((0, 1), (5, 3))))
        await stage.up(1)
        status = await stage.at_version(job, 5)
        assert status.world_size == 1 and status.why.endswith("; growth: 1 of 3 workers; 3 from epoch 5")
        fleet = (await stage.call("GET", "/v1/status"))[1]
        assert (fleet["state"], fleet["target"]) == ("up", 3)
        assert "1 host is up (target 3: jobs need no more now)" in fleet["why"]

    play(scene, spec(target=3))


def test_a_restarted_dispatcher_knows_what_the_job_asked_for(play):
    growth = ResizeSpec(growth=((0, 1), (5, 2), (9, 3)))

    async def scene(stage: Stage) -> None:
        job = await stage.submit(Script(steps=LONG, wants=lambda worker: 2), (1, 3), resize=growth)
        await stage.until("two workers", lambda: sizes(stage)[-1:] and sizes(stage)[-1][0] == 2)
        await stage.stop_dispatcher()
        machines = len(stage.cloud.machines)
        assert json.loads((stage.home / "jobs" / job / "job.json").read_text())["asked"] == 2
        await stage.start_dispatcher()
        before = (await stage.at_version(job, 1)).version
        status = await stage.at_version(job, before + 10)
        assert status.world_size == 2 and len(stage.cloud.machines) == machines

    play(scene, spec(target=3))


def test_a_job_that_asks_for_less_lets_go_of_one_host_at_a_time(play):
    async def scene(stage: Stage) -> None:
        await stage.up(4)
        wish = {"workers": 4}
        await stage.submit(Script(steps=LONG, wants=lambda worker: wish["workers"]), (1, 4),
                           resize=ResizeSpec(max_leave=1))
        await stage.until("four workers", lambda: sizes(stage)[-1:] and sizes(stage)[-1][0] == 4)
        wish["workers"] = 1
        await stage.until("one worker", lambda: sizes(stage)[-1][0] == 1)
        assert [size for size, _ in sizes(stage)][-4:] == [4, 3, 2, 1]
        await stage.up(1)

    play(scene, spec(target=4))
