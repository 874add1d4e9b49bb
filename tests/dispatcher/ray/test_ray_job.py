"""The job that holds hosts for Ray: its raylets on hosts that leave, its state, what the schedule may do with it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet.dispatcher.disk.jobfile import JobRecord
from spotfleet.dispatcher.hosts import Departure, HostView
from spotfleet.dispatcher.jobs.context import JobContext, RayView
from spotfleet.dispatcher.jobs.job import ManagedJob
from spotfleet.dispatcher.jobs.validation import check
from spotfleet.errors import UsageError
from spotfleet.fleet.domain.events import JobChanged, SetupFailed
from spotfleet.fleet.domain.state import Host
from spotfleet.model import CloudState, HostState, JobSpec, JobState, Market, Offer, Role
from spotfleet.protocol.messages import AgentReport, Exit, WorkerReport, WorkerState

OFFER = Offer("local", "r", "z", "t", Market.SPOT, 2, 1000, 3000)
SPEC = JobSpec("ray", run="raylet", kind="ray", per_host=True, min_workers=1, max_workers=4)
UP = RayView(True, "Ray runs on 2 hosts")
NOTICE = {"h1": Departure(60.0, "notice")}


class RayJob:
    """The job on two hosts, each with a raylet that runs."""

    def __init__(self, folder: Path) -> None:
        names = itertools.count(1)
        self.job = ManagedJob(folder, JobRecord("ray-1", SPEC, 0.0), {}, lambda s: f"{s[0]}/{s[1]}/{next(names)}")
        self.now = 100.0
        self.step(UP)
        for worker in self.job.workers.live():
            state = WorkerState(WorkerReport(worker.name, "ray-1"), 0, pid=7)
            self.job.receive(AgentReport(worker.host, "1", "127.0.0.1", 2, (state,)), self.now)
        self.step(UP)

    def step(self, ray: RayView, leaving: dict[str, Departure] | None = None,
             assigned: tuple[str, ...] = ("h1", "h2")) -> list:
        self.now += 0.5
        host = Host("", Role.WORKER, OFFER, HostState.UP, 0.0, 0.0, 0.0, cloud=CloudState.RUNNING)
        views = {n: HostView(replace(host, request_id=n), True, 2, (leaving or {}).get(n)) for n in ("h1", "h2")}
        given = tuple((n, 0) for n in assigned if views[n].usable)
        return self.job.step(JobContext(self.now, self.now, assigned, given, views, ray=ray))

    def wanted(self) -> set[str]:
        return set(self.job.orders())


@pytest.fixture
def ray_job(tmp_path: Path) -> RayJob:
    return RayJob(tmp_path)


def test_a_raylet_stays_on_a_host_that_leaves_for_as_long_as_it_is_kept(ray_job: RayJob):
    ray_job.step(replace(UP, kept=frozenset({"h1"})), NOTICE)
    assert ray_job.wanted() == {"h1", "h2"}
    ray_job.step(UP, NOTICE)
    assert ray_job.wanted() == {"h2"}


def test_the_same_holds_for_a_host_that_another_job_gets(ray_job: RayJob):
    ray_job.step(replace(UP, kept=frozenset({"h1"})), assigned=("h2",))
    assert ray_job.wanted() == {"h1", "h2"}
    ray_job.step(UP, assigned=("h2",))
    assert ray_job.wanted() == {"h2"}


def test_a_lost_head_is_an_event_and_the_reason_in_the_status_and_ends_no_raylet(ray_job: RayJob):
    assert (ray_job.job.state, ray_job.job.record.why) == (JobState.RUNNING, "Ray runs on 2 hosts")
    events = ray_job.step(RayView(False, "Ray: the head's processes ended with status 1", lost=True))
    assert [(e.state, e.why) for e in events if isinstance(e, JobChanged)] == [
        (JobState.RECOVERING, "Ray: the head's processes ended with status 1")]
    assert ray_job.wanted() == {"h1", "h2"}
    again = ray_job.step(UP)
    assert [e.state for e in again if isinstance(e, JobChanged)] == [JobState.RUNNING]


def test_a_host_with_another_ray_is_an_event_and_the_reason_in_the_status_and_others_go_on(ray_job: RayJob):
    why = "host h1 has Ray 2.59.0, and the head Ray 2.60.0: install the same on both"
    [name] = [w.name for w in ray_job.job.workers.live() if w.host == "h1"]
    failed = WorkerReport(name, "ray-1", error=why, setup_tries=1)
    ray_job.job.receive(AgentReport("h1", "1", "127.0.0.1", 2, (WorkerState(failed, 0, exit=Exit(1)),)), ray_job.now)
    events = ray_job.step(UP)
    assert [(e.host, e.why) for e in events if isinstance(e, SetupFailed)] == [("h1", why)]
    assert (ray_job.job.state, ray_job.job.record.why) == (JobState.RUNNING, f"Ray runs on 2 hosts; {why}")
    assert "h2" in ray_job.wanted()


@pytest.mark.parametrize(("wrong", "secrets", "said"), [
    ({}, {}, "secrets: a job of kind ray needs RAY_AUTH_TOKEN"),
    ({"per_host": False}, {"RAY_AUTH_TOKEN": "t"}, "one command on each host"),
    ({"gang": True}, {"RAY_AUTH_TOKEN": "t"}, "one command on each host"),
    ({"run": "", "argv": ("x.py",)}, {"RAY_AUTH_TOKEN": "t"}, "one command on each host"),
])
def test_a_cluster_without_authentication_or_of_another_form_is_refused(wrong, secrets, said):
    check(SPEC, {"RAY_AUTH_TOKEN": "t"})
    with pytest.raises(UsageError, match=said):
        check(replace(SPEC, **wrong), secrets)


def test_the_schedule_may_take_what_ray_can_spare_or_all_of_it(ray_job: RayJob):
    need = ray_job.job.need(0)
    assert (need.shrinks, need.yields, need.per_host) == (True, True, True)
