"""A dispatcher in the place of a lost one: which jobs it takes over from the agents, and what it leaves alone."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import replace

import pytest

from spotfleet.dispatcher.disk import jobfile
from spotfleet.model import CheckpointSpec
from spotfleet.protocol.messages import AgentOrders, AgentReport, Exit, dump, load
from spotfleet.providers import DISPATCHER_TAG
from spotfleet.transport import certs
from tests.dispatcher.recovery.test_damaged_files import refuse_records
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script

LONG = Script(steps=100_000)


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotfleet.dispatcher.cloud.endpoint_tag.ANNOUNCE_AFTER_S", 0.1)
    monkeypatch.setattr("spotfleet.dispatcher.cloud.endpoint_tag.LOOK_S", 0.1)
    monkeypatch.setattr("spotfleet.dispatcher.checkpoints.backup.KEEP_S", 0.1)
    monkeypatch.setattr("spotfleet.dispatcher.daemon.CLOSE_S", 0.05)  # a lost machine says no good-bye


def pids(stage: Stage) -> dict[str, list[str]]:
    return {host: list(agent.workers) for host, agent in stage.agents.items()}


def test_a_new_machine_takes_over_hosts_and_job_and_training_does_not_notice(play):
    async def scene(stage: Stage) -> None:
        hosts = await stage.up(2)
        job = await stage.submit(LONG, secrets={"KEY": "s3cr3t-value"})
        before = await stage.at_version(job, 20)
        workers, formed = pids(stage), len(stage.world.history)
        await stage.lose_dispatcher_machine()
        lost_at = max(w.version for w in stage.world.workers.values())
        await stage.start_dispatcher()
        after = await stage.at_version(job, lost_at + 20)
        assert (after.generation, after.world_size, after.repeated) == (before.generation, 2, 0)
        assert (pids(stage), len(stage.world.history), sorted(await stage.up(2))) == (workers, formed, sorted(hosts))
        assert stage.daemon.dispatcher.core.jobs[job].secrets["KEY"] == "s3cr3t-value"
        assert after.age_s >= before.age_s
        taken = await stage.events("TakenOver")
        assert [(e["host"], e["restored"]) for e in taken] == [("f-d-1", False)]
        assert "s3cr3t-value" not in str(await stage.events())

    play(scene)


def test_a_new_machine_orders_nothing_until_each_connected_agent_has_answered(play, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spotfleet.dispatcher.dispatcher.SETTLE_S", 600.0)

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(LONG)
        await stage.at_version(job, 5)
        await stage.lose_dispatcher_machine()
        late = stage.agents["f-1"]
        late.holds_back, late.tell = True, ()
        await stage.start_dispatcher()
        await stage.until("both were asked", lambda: all(agent.tell for agent in stage.agents.values()))
        dispatcher = stage.daemon.dispatcher
        await stage.until("the first's answer", lambda: not dispatcher.takeover.adoption.awaits_answer("f-0"))
        dispatcher.step()
        assert not dispatcher.core.settled
        late.holds_back = False
        await stage.at_version(job, 20)
        assert dispatcher.core.settled

    play(scene)


def test_a_taken_over_job_survives_deaths_and_another_loss_and_ends_as_it_should(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(steps=100_000))
        await stage.at_version(job, 5)
        before = list(stage.world.started)
        for _ in range(2):
            await stage.lose_dispatcher_machine()
            await stage.start_dispatcher()
            status = await stage.at_version(job, max(w.version for w in stage.world.workers.values()) + 5)
        stage.kill_worker(next(iter(stage.agents)), Exit(-9))
        await stage.until("another generation", lambda: stage.world.history[-1][1] > status.generation)
        stage.world.scripts["train"].steps = 1  # enough
        await stage.stands(job, "succeeded")
        assert [n for n in stage.world.started if n not in before] == ["f-0/0/d2-1"]  # a name that was never used

    play(scene)


def test_of_a_job_that_hosts_brought_checkpoints_of_ordered_generations_alone_are_taken(play):
    data = b"state"

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(LONG, (1, 1))
        await stage.at_version(job, 5)
        await stage.lose_dispatcher_machine()
        await stage.start_dispatcher()
        status = await stage.at_version(job, max(w.version for w in stage.world.workers.values()) + 5)
        for generation, expected in ((status.generation, 200), (status.generation + 1, 409)):
            digest = hashlib.sha256(data).hexdigest()
            path = f"/v1/jobs/{job}/checkpoints/{1000 * generation}?generation={generation}&digest={digest}"
            answer = await stage.call("PUT", path, token=stage.token("f-0"), data=data, ok=False)
            assert answer[0] == expected, answer
        (lost,) = await stage.until("the event", lambda: stage.events("CheckpointLost"))
        assert "no dispatcher of this fleet has ordered its generation" in lost["why"]

    play(scene, spec(1))


def test_a_host_that_cannot_be_told_is_said_and_told_later_and_once(play, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spotfleet.dispatcher.cloud.endpoint_tag.AGAIN_S", 0.5)

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(LONG, (1, 1))
        await stage.at_version(job, 5)
        await stage.lose_dispatcher_machine()
        stage.cloud.faults.lose("tag", "before", 1)
        stage.agents["f-0"].shut = True
        tag, asked = stage.cloud.tag, []
        monkeypatch.setattr(stage.cloud, "tag", lambda host, tags: (asked.append(host), tag(host, tags)))
        await stage.start_dispatcher()

        async def said() -> bool:
            why = (await stage.call("GET", "/v1/status"))[1]["why"]
            return "f-0 cannot be told where this dispatcher is: local cloud: tag was not answered" in why

        await stage.until("why", said)
        await stage.until("all is well", lambda: not stage.daemon.dispatcher.endpoint_tagger.why)
        await asyncio.sleep(0.3)  # a span in which nothing may happen
        assert asked == ["f-0", "f-0"]
        assert stage.cloud.tags("f-0")[DISPATCHER_TAG] == stage.url
        stage.agents["f-0"].shut = False
        await stage.at_version(job, 5)

    play(scene, spec(1))


def test_a_host_that_another_dispatcher_has_told_otherwise_is_told_again(play, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spotfleet.dispatcher.cloud.endpoint_tag.ANEW_S", 0.3)

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        stage.agents["f-0"].shut = True
        await stage.lose_dispatcher_machine()
        await stage.start_dispatcher()
        await stage.until("its place", lambda: stage.cloud.tags("f-0").get(DISPATCHER_TAG) == stage.url)
        stage.cloud.tag("f-0", {DISPATCHER_TAG: "https://127.0.0.1:1"})
        await stage.until("its place again", lambda: stage.cloud.tags("f-0").get(DISPATCHER_TAG) == stage.url)

    play(scene, spec(1))


def test_hosts_that_know_the_dispatcher_are_not_tagged(play, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spotfleet.dispatcher.cloud.endpoint_tag.ANNOUNCE_AFTER_S", 60.0)

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        await stage.stop_dispatcher()
        await stage.start_dispatcher()
        await stage.up(2)
        await stage.until("their agents", lambda: all(agent.connected for agent in stage.agents.values()))
        endpoint_tagger = stage.daemon.dispatcher.endpoint_tagger
        await stage.until("that they are heard", lambda: endpoint_tagger._due(time.monotonic() + 1000.0) == [])
        assert [stage.cloud.tags(host) for host in stage.agents] == [{}, {}]

    play(scene)


def test_the_agent_of_a_host_that_ended_under_the_last_dispatcher_is_turned_away(play):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        await stage.stop_dispatcher()
        stage.cloud.interrupt("f-0", None)
        await stage.lose_dispatcher_machine()
        await stage.start_dispatcher()
        headers = {"Authorization": f"Bearer {stage.token('f-0')}"}
        tls = certs.client_context(stage.ca)
        async with stage.http.ws_connect(stage.url + "/v1/agent", headers=headers, ssl=tls) as ws:
            await ws.send_str(dump(AgentReport("f-0", "zombie", "127.0.0.1", 1)))
            assert "f-0 has ended" in load(AgentOrders, (await ws.receive()).data).refuse

    play(scene, spec(1))


def test_two_jobs_come_back_in_their_order_each_with_its_hosts(play):
    async def scene(stage: Stage) -> None:
        await stage.up(3)
        first = await stage.submit(LONG, (1, 1), "one")
        second = await stage.submit(LONG, (2, 2), "two")
        await stage.at_version(first, 5)
        await stage.at_version(second, 5)
        workers = pids(stage)
        await stage.lose_dispatcher_machine()
        await stage.start_dispatcher()
        for job in (first, second):
            await stage.at_version(job, max(w.version for w in stage.world.workers.values()))
        assert pids(stage) == workers
        assert list(stage.daemon.dispatcher.core.jobs) == [first, second]
        third = await stage.submit(LONG, (1, 1), "three")
        assert int(third.rpartition("-")[2]) > 2

    play(scene, spec(3))


def test_a_late_agent_finds_its_worker_still_a_member(play, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spotfleet.dispatcher.dispatcher.SETTLE_S", 0.6)

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(LONG)
        before = await stage.at_version(job, 10)
        workers, late = pids(stage), next(iter(stage.agents))
        stage.agents[late].shut = True
        await stage.lose_dispatcher_machine()
        await stage.start_dispatcher()
        await stage.until("the job", lambda: job in stage.daemon.dispatcher.core.jobs)
        stage.agents[late].shut = False
        after = await stage.at_version(job, max(w.version for w in stage.world.workers.values()) + 10)
        assert (after.generation, pids(stage)) == (before.generation, workers)

    play(scene)


def test_a_job_that_only_late_agents_hold_is_taken_over_as_they_come(play, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spotfleet.dispatcher.dispatcher.SETTLE_S", 0.5)

    async def scene(stage: Stage) -> None:
        await stage.up(3)
        held = await stage.submit(LONG, (2, 2), "held")
        before = await stage.at_version(held, 10)
        late = [stage.agents[w.host] for w in before.workers]
        workers = [list(agent.workers) for agent in late]
        for agent in late:
            agent.shut = True
        await stage.lose_dispatcher_machine()
        await stage.start_dispatcher()
        await stage.until("settled", lambda: stage.daemon.dispatcher.core.settled)
        other = await stage.submit(LONG, (1, 3), "other")  # would like to have all hosts
        await stage.until("its first worker", lambda: stage.daemon.dispatcher.core.jobs[other].held())
        with monkeypatch.context() as full:
            refused = refuse_records(full)
            late[0].shut = False
            await stage.until("two attempts", lambda: sum(path.parent.name == held for path in refused) > 1)
            assert held not in stage.daemon.dispatcher.core.jobs
        await stage.until("the job", lambda: held in stage.daemon.dispatcher.core.jobs)
        await asyncio.sleep(0.6)  # some steps of the schedule
        assert set(stage.daemon.dispatcher.desk.allocation.held[held]) == {agent.host for agent in late}
        late[1].shut = False
        after = await stage.at_version(held, max(w.version for w in stage.world.workers.values()) + 5)
        assert (after.generation, [agent.workers for agent in late]) == (before.generation, workers)

    play(scene, spec(3))


def test_the_bundle_comes_back_from_a_host_that_has_it(play):
    data = b"a working directory"
    digest = hashlib.sha256(data).hexdigest()

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        await stage.call("PUT", f"/v1/bundles/{digest}", data=data)
        job = await stage.submit(LONG, bundle=digest)
        await stage.at_version(job, 5)
        next(iter(stage.agents.values())).bundles[digest] = data
        await stage.lose_dispatcher_machine()
        await stage.start_dispatcher()
        await stage.until("the bundle", lambda: (stage.home / "bundles" / digest).exists())
        assert (await stage.call("GET", f"/v1/bundles/{digest}"))[1] == data
        host = next(iter(stage.agents))
        other = hashlib.sha256(b"other").hexdigest()
        refused = await stage.call("PUT", f"/v1/bundles/{other}", data=b"other", token=stage.token(host), ok=False)
        assert refused[0] == 403

    play(scene)


def test_a_bundle_that_nobody_has_is_said_and_training_goes_on(play):
    data = b"a working directory"
    digest = hashlib.sha256(data).hexdigest()

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        await stage.call("PUT", f"/v1/bundles/{digest}", data=data)
        job = await stage.submit(LONG, bundle=digest)
        await stage.at_version(job, 5)
        await stage.lose_dispatcher_machine()
        await stage.start_dispatcher()
        await stage.at_version(job, max(w.version for w in stage.world.workers.values()) + 5)
        assert f"working directory of {job} is lost" in (await stage.call("GET", "/v1/status"))[1]["why"]

    play(scene)


def test_a_restarted_process_adopts_a_higher_generation_than_its_disk_knows(play):
    """The disk is behind, as after a copy of it was put back."""

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(LONG)
        await stage.at_version(job, 5)
        path = stage.home / "jobs" / job
        old, _ = jobfile.load(path)
        first = stage.world.history[-1][1]
        stage.kill_worker(next(iter(stage.agents)), Exit(-9))
        await stage.until("the next generation", lambda: stage.world.history[-1][1] > first)
        before = await stage.at_version(job, max(w.version for w in stage.world.workers.values()) + 5)
        workers, formed = pids(stage), len(stage.world.history)
        await stage.stop_dispatcher()
        jobfile.save(path, replace(old, hosts=()))
        await stage.start_dispatcher()
        after = await stage.at_version(job, max(w.version for w in stage.world.workers.values()) + 20)
        assert (after.generation, pids(stage), len(stage.world.history)) == (before.generation, workers, formed)
        await stage.until("the end of questions", lambda: all(a.tell == () for a in stage.agents.values()))

    play(scene)


def test_a_fleet_that_is_taken_over_is_not_idle_since_before_that(play, tmp_path):
    """Its jobs may be held by agents that are late."""
    (tmp_path / "target").mkdir()

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        await stage.stands(await stage.submit(Script(steps=3), (1, 1)), "succeeded")
        backup, journal = stage.daemon.dispatcher.backup, stage.daemon.dispatcher.core.journal
        await journal.flush()
        await stage.until("a copy", lambda: backup.copied_to >= journal.after(0)[-1][0])
        await asyncio.sleep(1.0)
        await stage.lose_dispatcher_machine()
        await stage.start_dispatcher()
        taken = (await stage.events("TakenOver"))[0]
        assert taken["restored"]
        idle_s = stage.daemon.dispatcher.core.clock.idle_s(time.monotonic(), working=False)
        assert idle_s <= time.time() - taken["at"] + 0.9  # not the second before

    play(scene, spec(1, checkpoint=CheckpointSpec(target=str(tmp_path / "target"))))


def test_what_hosts_send_to_a_dispatcher_that_does_not_know_its_workers_yet_is_not_refused_for_good(play):
    """An agent drops a checkpoint that is refused, and a log without a rank is missing in that rank's."""

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(LONG)
        worker = (await stage.at_version(job, 5)).workers[0]
        for agent in stage.agents.values():
            agent.shut = True
        await stage.stop_dispatcher()
        await stage.start_dispatcher()
        data, token = b"state 600", stage.token(worker.host)
        digest = hashlib.sha256(data).hexdigest()
        checkpoint, log = f"/v1/jobs/{job}/checkpoints/600?generation=1&digest={digest}", f"/v1/jobs/{job}/logs/"
        log += f"{worker.worker.replace('/', '%2F')}?offset=0"
        for method, path in (("PUT", checkpoint), ("POST", log)):
            assert (await stage._call(method, path, None, token, data))[0] == 503
        for agent in stage.agents.values():
            agent.shut = False
        await stage.call("PUT", checkpoint, token=token, data=data)
        await stage.call("POST", log, token=token, data=data)
        assert (await stage.call("GET", f"/v1/jobs/{job}/logs?rank={worker.rank}&offset=0"))[1] == data

    play(scene)


def test_nothing_is_launched_ended_or_declared_dead_while_a_new_machine_waits_for_reports(play):
    async def scene(stage: Stage) -> None:
        hosts = await stage.up(2)
        job = await stage.submit(LONG)
        await stage.at_version(job, 5)
        for agent in stage.agents.values():
            agent.shut = True
        await stage.lose_dispatcher_machine()
        await stage.start_dispatcher()
        await asyncio.sleep(1.0)  # a span in which nothing may happen, not a wait for something
        kinds = {e["kind"] for e in await stage.events()}
        assert not kinds & {"TerminateIntended", "HostDraining", "HostSilent", "JobChanged"}
        assert sorted(h for h in stage.cloud.living() if h != stage.boot.host) == sorted(hosts)
        assert (await stage.call("GET", "/v1/jobs"))[1]["jobs"] == []
        for agent in stage.agents.values():
            agent.shut = False
        await stage.at_version(job, 5)

    play(scene)
