"""Jobs on a fleet that changes: the real daemon, a cloud in process, agents and workers that behave."""

from __future__ import annotations

import time

import pytest

from spotfleet.model import FleetSpec, Need, Nodes
from spotfleet.protocol.messages import Exit
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import FakeWorker, Script

LONG = 10_000  # steps: such a job does not end by itself


@pytest.fixture
def no_regular_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines are looked after when something has happened, and then at once; otherwise not while the test lasts."""
    monkeypatch.setattr("spotfleet.dispatcher.cloud.machines.TICK_S", 1000.0)


def grounds(stage: Stage, job: str) -> list[tuple[int, int]]:
    """(members, version at its beginning) of each generation of the job."""
    return [(len(members), version) for name, _, members, version in stage.world.history if name == job]


async def formed(stage: Stage, generations: int) -> bool:
    """Have so many generations been written down?"""
    return len(await stage.events("GenerationFormed")) >= generations


def test_a_job_trains_on_all_hosts_and_succeeds(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(steps=30))
        done = await stage.stands(job, "succeeded")
        assert (done.version, done.repeated, done.error) == (30, 0, "")
        assert grounds(stage, job) == [(2, 0)]
        kinds = [e["kind"] for e in await stage.events() if e.get("job") == job]
        assert kinds.index("JobSubmitted") < kinds.index("GenerationFormed") < kinds.index("JobResumed")
        assert [e["state"] for e in await stage.events("JobChanged")] == ["starting", "running", "succeeded"]
        await stage.until("nothing is held", lambda: not any(a.workers for a in stage.agents.values()))

    play(scene)


def test_a_notice_launches_the_replacement_at_once_and_the_noticed_host_leaves_when_it_is_there(play, no_regular_tick):
    async def scene(stage: Stage) -> None:
        first, second = await stage.up(2)
        job = await stage.submit(Script(steps=LONG))
        await stage.at_version(job, 10)
        stage.cloud.interrupt(second, 60.0)
        await stage.until("a replacement", lambda: len(stage.cloud.machines) == 3)
        replacement = next(h for h in stage.cloud.machines if h not in (first, second))
        await stage.until("the noticed host is given back", lambda: second not in stage.agents)

        status = await stage.at_version(job, 20)
        assert {w.host for w in status.workers if w.rank >= 0} == {first, replacement}
        await stage.until("its event", lambda: formed(stage, 2))
        causes = [(e["cause"], len(e["members"])) for e in await stage.events("GenerationFormed")]
        assert causes == [("start", 2), ("notice", 2)]
        assert {e["repeated"] for e in await stage.events("JobResumed")} == {0}
        assert stage.cloud.look(second)[0] is False  # long before the cloud would have taken it

    play(scene)


def test_a_host_that_is_gone_is_known_from_the_cloud_and_replaced(play):
    async def scene(stage: Stage) -> None:
        first, second = await stage.up(2)
        job = await stage.submit(Script(steps=LONG), (1, 2))
        before = (await stage.at_version(job, 10)).version
        stage.cloud.interrupt(second, None)
        await stage.until("going on alone", lambda: len(stage.world.history) > 1)
        assert stage.world.history[1][2] == (stage.world.history[0][2][0],)
        assert stage.world.history[1][3] >= before
        await stage.until("whole again", lambda: formed(stage, 3))
        assert grounds(stage, job)[-1][0] == 2
        causes = [e["cause"] for e in await stage.events("GenerationFormed")]
        assert causes == ["start", "death", "join"]
        assert first in {w.host for w in (await stage.job(job)).workers}

    play(scene)


def test_an_agent_that_restarts_has_lost_its_workers_and_gets_new_ones(play):
    async def scene(stage: Stage) -> None:
        _, second = await stage.up(2)
        job = await stage.submit(Script(steps=LONG))
        await stage.at_version(job, 5)
        old = stage.agents.pop(second)
        old.end()
        new = stage.start_agent(second)
        await stage.until("a worker under a new name", lambda: new.workers)
        assert not set(new.workers) & set(old.workers)
        await stage.until("both train", lambda: grounds(stage, job)[-1][0] == 2 and len(grounds(stage, job)) > 1)
        assert len(stage.cloud.machines) == 2  # the machine itself was there all the time

    play(scene)


def test_a_cut_of_a_second_changes_nothing(play):
    async def scene(stage: Stage) -> None:
        _, second = await stage.up(2)
        job = await stage.submit(Script(steps=LONG))
        await stage.at_version(job, 5)
        agent = stage.agents[second]
        agent.shut = True
        await stage.until("it is away", lambda: not agent.connected)
        cut_at = time.monotonic()
        await stage.until("a second", lambda: time.monotonic() - cut_at > 1.0)
        agent.shut = False
        await stage.until("it is back", lambda: agent.connected)
        await stage.at_version(job, (await stage.job(job)).version + 20)
        assert len(grounds(stage, job)) == 1

    play(scene)


def test_a_script_that_fails_on_every_worker_fails_the_job_at_once_with_rank_0s_traceback(play):
    def fails(worker: FakeWorker) -> str:
        return f"ValueError of rank {worker.assignment.rank}" if worker.assignment and worker.version > 2 else ""

    async def scene(stage: Stage) -> None:
        hosts = await stage.up(2)
        job = await stage.submit(Script(steps=LONG, fails=fails))
        failed = await stage.stands(job, "failed")
        assert failed.error == "ValueError of rank 0"
        assert "on every worker" in failed.why
        await stage.until("nothing is held", lambda: not any(a.workers for a in stage.agents.values()))
        assert list(stage.cloud.machines) == hosts  # no host was burnt for it

    play(scene)


def test_a_worker_that_crashes_alone_is_started_again_under_a_new_name(play):
    async def scene(stage: Stage) -> None:
        _, second = await stage.up(2)
        job = await stage.submit(Script(steps=LONG))
        await stage.at_version(job, 5)
        name = stage.kill_worker(second, Exit(-9))
        await stage.until("whole again", lambda: len(grounds(stage, job)) > 1 and grounds(stage, job)[-1][0] == 2)
        members = stage.world.history[-1][2]
        assert name not in members and any(m.startswith(f"{second}/0/") for m in members)
        await stage.at_version(job, (await stage.job(job)).version + 5)  # and it runs again

    play(scene)


def test_a_script_without_init_succeeds_when_every_worker_has_ended(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        done = await stage.stands(await stage.submit(Script(steps=20, calls_init=False)), "succeeded")
        assert (done.generation, done.version) == (0, 0)
        assert [w.exit for w in stage.world.workers.values()] == [Exit(0, done=True)] * 2

    play(scene)


def test_a_rank_0_that_is_lost_after_training_but_before_the_scripts_end_runs_it_again(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(steps=20, tail=100), (1, 2))
        first = await stage.until("its tail", lambda: next(
            (w for w in stage.world.workers.values() if w.tail_ticks > 2 and w.exit is None), None))
        stage.world.kill(first.name, Exit(-9))
        for script in stage.world.scripts.values():
            script.tail = 2
        done = await stage.stands(job, "succeeded")
        assert done.version == 20
        assert stage.world.history[-1][0] == job and len(stage.world.history) == 2
        assert first.name not in stage.world.history[-1][2]

    play(scene)


def test_a_cancelled_job_ends_when_its_workers_have(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(steps=LONG), secrets={"KEY": "hidden-value"})
        await stage.at_version(job, 5)
        assert (stage.home / "jobs" / job / "secrets.json").stat().st_mode & 0o777 == 0o600
        await stage.call("POST", f"/v1/jobs/{job}/cancel", {})
        cancelled = await stage.stands(job, "cancelled")
        assert "cancel" in cancelled.why
        assert not any(a.workers for a in stage.agents.values())
        assert not any("hidden-value" in p.read_text(errors="replace") for p in stage.home.rglob("*") if p.is_file())

    play(scene)


def test_two_jobs_share_the_fleet_and_a_third_waits_and_says_for_what(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        first = await stage.submit(Script(steps=LONG), (1, 1), "first")
        second = await stage.submit(Script(steps=LONG), (1, 1), "second")
        await stage.at_version(first, 5)
        await stage.at_version(second, 5)
        third = await stage.submit(Script(steps=5), (1, 1), "third", wait=False)
        await stage.stands(third, "queued")

        async def its_reason() -> bool:
            return "needs 1 host" in (await stage.job(third)).why

        await stage.until("its reason", its_reason)
        assert {w.host for s in (first, second) for w in (await stage.job(s)).workers} == set(stage.agents)
        await stage.call("POST", f"/v1/jobs/{first}/cancel", {})
        await stage.stands(third, "succeeded")

    play(scene)


def test_a_drained_host_is_replaced_and_given_back(play):
    async def scene(stage: Stage) -> None:
        first, second = await stage.up(2)
        job = await stage.submit(Script(steps=LONG))
        await stage.at_version(job, 5)
        await stage.call("POST", f"/v1/hosts/{first}/drain", {})
        await stage.until("it is given back", lambda: first not in stage.agents)
        status = await stage.at_version(job, 20)
        hosts = {w.host for w in status.workers if w.rank >= 0}
        assert second in hosts and first not in hosts and len(hosts) == 2
        assert {e["repeated"] for e in await stage.events("JobResumed")} == {0}

    play(scene)


def test_a_job_that_needs_more_than_the_fleet_can_have_is_refused_unless_it_may_wait(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        stage.world.scripts["big"] = Script()
        body = {"spec": {"name": "big", "argv": ["x.py"], "min_workers": 3, "max_workers": 3}, "wait": False}
        status, said = await stage.call("POST", "/v1/jobs", body, ok=False)
        assert (status, said["kind"]) == (409, "NoCapacity")
        assert "3 workers" in said["error"] and "--np" in said["hint"]
        on_hosts = {"name": "c", "run": "true", "per_host": True, "kind": "command", "gang": True,
                    "min_workers": 3, "max_workers": 3}
        status, said = await stage.call("POST", "/v1/jobs", {"spec": on_hosts, "wait": False}, ok=False)
        assert "3 hosts" in said["error"] and "lower --nodes," in said["hint"]
        assert (await stage.call("GET", "/v1/jobs"))[1] == {"jobs": []}
        job = (await stage.call("POST", "/v1/jobs", {**body, "wait": True}))[1]["job"]
        assert (await stage.stands(job, "queued")).state == "queued"

    play(scene)


def test_a_job_is_refused_while_the_cloud_has_nothing(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        for pool in list(stage.cloud.market.capacity):
            with stage.cloud.lock:
                stage.cloud.market.set_capacity(pool, 0, time.time())
        for host in list(stage.cloud.machines):
            stage.cloud.interrupt(host, None)

        async def waits() -> bool:
            return "refused" in (await stage.call("GET", "/v1/status"))[1]["why"]

        await stage.until("a refusal", waits)
        body = {"spec": {"name": "x", "argv": ["x.py"]}, "wait": False}
        status, said = await stage.call("POST", "/v1/jobs", body, ok=False)
        assert (status, said["kind"]) == (409, "NoCapacity")

    play(scene, spec(target=2))


def test_a_host_of_two_slots_holds_two_workers_with_local_ranks(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(steps=LONG), (3, 3))
        await stage.at_version(job, 5)
        members = stage.world.history[0][2]
        places = [stage.world.workers[m].assignment for m in members]
        assert [(p.rank, p.local_rank, p.local_size) for p in places if p] == [(0, 0, 2), (1, 1, 2), (2, 0, 1)]
        assert [m.split("/")[1] for m in members] == ["0", "1", "0"]
        assert members[0].split("/")[0] == members[1].split("/")[0] != members[2].split("/")[0]

    two_slots = FleetSpec("f", nodes=Nodes(2, 2, 2), any_of=(Need(instance_type="gpu.large"),))
    play(scene, two_slots)


def test_a_loss_is_known_before_the_next_regular_tick_although_the_listing_lags(play, no_regular_tick):
    async def scene(stage: Stage) -> None:
        first, second = await stage.up(2)
        job = await stage.submit(Script(steps=LONG), (1, 2))
        await stage.at_version(job, 5)
        stage.cloud.faults.listing_lag_s = 0.3
        stage.cloud.interrupt(second, None)
        await stage.until("its replacement", lambda: len(stage.cloud.machines) == 3)
        assert first in stage.agents

    play(scene)
