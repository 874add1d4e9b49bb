"""Several jobs on one fleet: the real daemon with agents that behave."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from spotfleet.codec import to_json
from spotfleet.dispatcher.jobs.validation import check
from spotfleet.errors import UsageError
from spotfleet.model import JobSpec
from spotfleet.protocol.messages import AgentOrders
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script


async def submit(stage: Stage, name: str, workers: tuple[int, int], **more: object) -> str:
    stage.world.scripts[name] = Script(steps=10_000, gang=bool(more.get("gang")))
    asked = JobSpec(name, argv=("train.py",), min_workers=workers[0], max_workers=workers[1], **more)
    return (await stage.call("POST", "/v1/jobs", {"spec": to_json(asked), "secrets": {}, "wait": True}))[1]["job"]


def test_of_two_waiting_jobs_the_one_with_the_higher_priority_starts_first(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        first = await submit(stage, "first", (2, 2))
        await stage.at_version(first, 2)

        async def waits(job: str) -> bool:
            return "2 of 2 held by first-1" in (await stage.job(job)).why

        for name, priority in (("usual", 0), ("urgent", 5)):
            job = await submit(stage, name, (2, 2), priority=priority)
            await stage.until(f"{job} names the job that it waits for", partial(waits, job))
        await stage.call("POST", f"/v1/jobs/{first}/cancel", {})
        running = await stage.at_version("urgent-3", 2)
        assert (running.priority, running.hosts) == (5, 2)
        assert (await stage.job("usual-2")).state == "queued"

    play(scene, spec(target=2))


def test_a_higher_priority_ends_a_restart_job_which_goes_on_after_it(play, monkeypatch):
    monkeypatch.setattr("spotfleet.dispatcher.jobs.job.PREEMPT_S", 0.5)

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        anew = await submit(stage, "anew", (2, 2), kind="restart", gang=True)
        await stage.stands(anew, "running")
        urgent = await submit(stage, "urgent", (1, 1), priority=5)
        await stage.at_version(urgent, 2)
        why = "preempted by urgent-2, which has priority 5 over 0 and needs 1 host"
        waiting = await stage.job(anew)
        assert (waiting.state, waiting.hosts) == ("queued", 0)
        assert waiting.why.startswith(f"{why}; needs 2 hosts, 1 free")
        said = [e["why"] for e in await stage.events("JobChanged") if e["job"] == anew and "preempted" in e["why"]]
        assert said == [f"{why}; its processes get 30 s to save"]
        await stage.stop_dispatcher()
        await stage.start_dispatcher()
        assert (await stage.job(anew)).state == "queued"
        await stage.call("POST", f"/v1/jobs/{urgent}/cancel", {})
        again = await stage.stands(anew, "running")
        assert (again.restarts, again.hosts) == (1, 2)

    play(scene, spec(target=2))


def test_no_process_of_a_job_starts_on_a_host_where_one_of_a_preempted_job_still_saves(play, monkeypatch):
    monkeypatch.setattr("spotfleet.dispatcher.jobs.job.PREEMPT_S", 0.5)

    async def scene(stage: Stage) -> None:
        hosts = await stage.up(2)
        anew = await submit(stage, "anew", (2, 2), kind="restart", gang=True)
        await stage.stands(anew, "running")
        saving, last = stage.agents[hosts[1]], stage.agents[hosts[1]].orders
        obey, lingers = saving.obey, True

        def obey_late(orders: AgentOrders) -> None:
            """The process takes its time after SIGTERM."""
            known = {o.worker for o in orders.workers}
            obey(replace(orders, workers=(*orders.workers, *(o for o in last.workers if o.worker not in known)))
                 if lingers else orders)

        monkeypatch.setattr(saving, "obey", obey_late)
        urgent = await submit(stage, "urgent", (2, 2), priority=5)
        await stage.until("one host is free", lambda: _names(stage, anew, f"waits for {last.workers[0].worker} to end"))
        await asyncio.sleep(1.0)  # four steps of the dispatcher
        assert [n for n in stage.world.started if n.startswith(f"{hosts[1]}/")] == [last.workers[0].worker]
        assert any(n.startswith(f"{hosts[0]}/") for n in stage.world.started[2:]), "the free host is used at once"
        lingers = False
        await stage.at_version(urgent, 2)

    play(scene, spec(target=2))


def test_a_higher_priority_gets_the_hosts_that_an_elastic_job_has_above_its_min(play, monkeypatch):
    monkeypatch.setattr("spotfleet.dispatcher.jobs.job.PREEMPT_S", 0.5)

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        elastic = await submit(stage, "elastic", (1, 2))
        await stage.at_version(elastic, 2)
        urgent = await submit(stage, "urgent", (1, 1), priority=5)
        await stage.at_version(urgent, 2)
        left = await stage.job(elastic)
        assert (left.state, left.world_size) == ("running", 1) and left.version > 2
        said = [e["why"] for e in await stage.events("JobChanged") if "gives hosts" in e["why"]]
        assert said == ["gives hosts to urgent-2, which has priority 5 over 0 and needs 1 host"]
        assert [e["cause"] for e in await stage.events("GenerationFormed") if e["job"] == elastic] == ["start", "drain"]
        too_much = await submit(stage, "more", (1, 1), priority=4)
        await stage.until("it waits", lambda: _names(stage, too_much, "1 of 2 held by elastic-1"))

    play(scene, spec(target=2))


async def _names(stage: Stage, job: str, words: str) -> bool:
    return words in (await stage.job(job)).why


@pytest.mark.parametrize("priority", [-1001, 1001])
def test_a_priority_out_of_range_is_refused(priority):
    with pytest.raises(UsageError, match=f"spec.priority: {priority} is not from -1000 to 1000"):
        check(JobSpec("j", argv=("train.py",), priority=priority), {})
