"""How a fleet ends by itself or by `down`, and how a dispatcher that was killed goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from spotfleet.dispatcher.checkpoints import archive as archive_module
from spotfleet.dispatcher.checkpoints.archive import Content
from spotfleet.dispatcher.disk import jobfile
from spotfleet.dispatcher.disk.jobfile import JobRecord
from spotfleet.dispatcher.lifecycle.shutdown import FETCH_S, FleetShutdown
from spotfleet.fleet.domain.events import FleetDown
from spotfleet.fleet.ledger import read_events
from spotfleet.model import Autostop, FleetSpec, JobSpec, JobState
from spotfleet.protocol.messages import JOB_KEY, Exit
from spotfleet.providers.plugin import traits_of
from tests.support.dispatcher import fake_fleet
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script

LONG = 10_000


async def ended(stage: Stage) -> None:
    """Nothing of the fleet runs any more, the dispatcher's own machine included."""
    await stage.until("the workers' machines end", lambda: not any(map(running(stage), stage.cloud.machines)))
    await stage.until("its own machine ends", lambda: not running(stage)(stage.boot.host))


def running(stage: Stage):
    return lambda host: stage.cloud.look(host)[0]


def test_train_down_brings_results_to_the_archive_and_ends_every_machine_without_the_laptop(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(steps=20), down=True)
        await ended(stage)
        archive = stage.home.parent / "archive"
        events = read_events(archive / "ledger.db")
        assert isinstance(events[-1], FleetDown) and job in events[-1].why
        assert [e.state.value for e in events if type(e).__name__ == "JobChanged"][-1] == "succeeded"
        assert not (archive / "jobs" / job / "secrets.json").exists()

    play(scene)


def test_an_idle_fleet_ends_by_itself(play):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(Script(steps=20), (1, 1))
        await stage.stands(job, "succeeded")
        await ended(stage)
        assert "autostop" in read_events(stage.home.parent / "archive" / "ledger.db")[-1].why

    play(scene, spec(1, autostop=Autostop(idle_s=2.0)))


def test_max_lifetime_ends_a_fleet_whose_job_still_runs(play):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(Script(steps=LONG), (1, 1))
        await ended(stage)
        status = await stage.job(job)
        assert status.state == "cancelled" and "max_lifetime" in status.why

    play(scene, spec(1, max_lifetime_s=4.0))


def test_down_ends_the_hosts_and_waits_for_the_laptop_with_the_results(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(steps=LONG))
        await stage.at_version(job, 5)
        await stage.call("POST", "/v1/down", {})

        async def down() -> bool:
            return (await stage.call("GET", "/v1/status"))[1]["state"] == "down"

        await stage.until("down", down)
        assert not any(map(running(stage), stage.cloud.machines))
        assert running(stage)(stage.boot.host)  # it still holds the results
        assert (await stage.job(job)).state == "cancelled"
        refused = await stage.call("POST", "/v1/jobs", {"spec": {"name": "x", "run": "true"}}, ok=False)
        assert refused[0] == 409

    play(scene)


def test_a_dispatcher_that_is_restarted_when_all_is_down_writes_neither_a_birth_nor_a_second_end(play):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        await stage.call("POST", "/v1/down", {})

        async def noted() -> bool:
            return bool(await stage.events("FleetDown"))

        await stage.until("its end is in the ledger", noted)
        before = await stage.events()
        await stage.stop_dispatcher()
        await stage.start_dispatcher()
        tick = stage.daemon.dispatcher.machines
        await stage.until("it has looked at its machines again", lambda: tick.own is not None)
        assert [e["kind"] for e in await stage.events()] == [e["kind"] for e in before]

    play(scene, spec(1))


def test_a_dispatcher_does_not_end_itself_while_its_results_are_fetched(tmp_path: Path):
    shutdown, late = FleetShutdown(tmp_path), time.time() + FETCH_S + 1
    shutdown.begin("asked", by_ourselves=False, at=time.time())
    with shutdown.reading():
        assert not shutdown.must_end(late)
    assert not shutdown.must_end(time.time() + FETCH_S - 10)
    assert shutdown.must_end(late + 1)


def test_a_dispatcher_on_a_machine_that_takes_the_results_with_it_waits_a_day_for_somebody_to_fetch_them(tmp_path):
    kept = traits_of(FleetSpec("f", provider="aws")).keeps_results_s
    assert (kept, traits_of(FleetSpec("f")).keeps_results_s) == (86_400.0, 0.0)
    shutdown = FleetShutdown(tmp_path, kept)
    shutdown.begin("idle for 60 s (autostop)", by_ourselves=True, at=1000.0)
    assert [shutdown.must_end(1000.0 + at) for at in (0.0, FETCH_S, kept - 1, kept)] == [False, False, False, True]
    assert shutdown.why == ("idle for 60 s (autostop); its results wait on its dispatcher for 24 h: `spotfleet down` "
                           "copies them here")
    with shutdown.reading():
        assert not shutdown.must_end(1000.0 + kept)


def test_an_archive_that_cannot_be_made_whole_never_looks_whole(play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(archive_module, "members",
                        lambda home: iter([("jobs/a/log", Content([Path(home, "vanished")]))]))

    async def scene(stage: Stage) -> None:
        with pytest.raises(aiohttp.ClientError):
            await stage.call("GET", "/v1/archive")
        ledger, target = stage.daemon.dispatcher.core.journal.ledger, tmp_path / "left"
        archive_module.write_folder(stage.home, ledger, target)
        assert "jobs/a/log" in (target / "not-collected.json").read_text()
        assert not (target / "jobs/a/log").exists()

    play(scene)


def test_what_a_killed_dispatcher_had_decided_but_not_written_to_its_ledger_is_written_by_the_next(play):
    async def scene(stage: Stage) -> None:
        await stage.stop_dispatcher()
        folder = stage.home / "jobs" / "late-1"
        jobfile.save_secrets(folder, {"KEY": "hidden-value"})
        jobfile.save(folder, JobRecord("late-1", JobSpec("late", run="echo hidden-value"), 1000.0, JobState.FAILED,
                                       "it broke", ended_at=2000.0, version=7))

        async def told() -> list[dict[str, Any]]:
            return [e for e in await stage.events() if e["kind"].startswith("Job")]

        async def written() -> bool:
            return len(await told()) >= 2

        for _ in range(2):
            await stage.start_dispatcher()
            await stage.until("two events", written)
            found = await told()
            assert [(e["kind"], e["at"]) for e in found] == [("JobSubmitted", 1000.0), ("JobChanged", 2000.0)]
            assert (found[1]["state"], found[1]["why"], found[1]["version"]) == ("failed", "it broke", 7)
            await stage.stop_dispatcher()
        assert not (folder / "secrets.json").exists()

    play(scene, spec(0, 0))


def test_steps_repeated_before_a_restart_are_not_counted_again_after_it(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(steps=LONG), (1, 2))
        before = await stage.at_version(job, 3)
        first, second = (w.worker for w in before.workers)
        for worker in stage.world.workers.values():
            worker.repeated = 7

        def change(lost: str) -> None:
            stage.world.kill(lost, Exit(-9))

        async def resumed(after: int) -> list[int]:
            found = [e for e in await stage.events("JobResumed") if e["generation"] > after]
            return [e["repeated"] for e in found]

        change(second)
        assert 7 in await stage.until("counted once", lambda: resumed(before.generation))
        await stage.stop_dispatcher()
        await stage.start_dispatcher()
        again = await stage.at_version(job, before.version + 20)
        others = [w.worker for w in again.workers if w.worker != first]
        assert stage.world.workers[first].exit is None
        if others:
            change(others[0])
        assert not any(await stage.until("another generation", lambda: resumed(again.generation)))
        assert (await stage.job(job)).repeated == 7

    play(scene)


def test_a_restarted_dispatcher_finds_the_job_training_and_changes_nothing(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(steps=LONG))
        before = await stage.at_version(job, 10)
        orders = {h: a.orders for h, a in stage.agents.items()}
        await stage.stop_dispatcher()
        workers = dict(stage.world.workers)
        await stage.until("training goes on alone",
                          lambda: all(w.version > before.version + 20 for w in workers.values()))
        await stage.start_dispatcher()
        after = await stage.at_version(job, before.version + 20)
        await stage.at_version(job, after.version + 20)
        assert stage.world.workers == workers and all(w.exit is None for w in workers.values())
        assert (after.generation, len(stage.world.history)) == (before.generation, 1)
        assert {h: [o.worker for o in a.orders.workers] for h, a in stage.agents.items()} == {
            h: [o.worker for o in said.workers] for h, said in orders.items()}
        assert len(stage.cloud.machines) == 2

    play(scene)


def test_a_host_that_was_lost_while_the_dispatcher_was_down_is_replaced_and_names_are_new(play):
    async def scene(stage: Stage) -> None:
        first, second = await stage.up(2)
        job = await stage.submit(Script(steps=LONG))
        version = (await stage.at_version(job, 10)).version
        names = set(stage.world.workers)
        await stage.stop_dispatcher()
        stage.cloud.interrupt(second, None)
        await stage.until("its end", lambda: second not in stage.agents)
        await stage.start_dispatcher()
        await stage.until("a new generation", lambda: len(stage.world.history) > 1)
        _, generation, members, at = stage.world.history[-1]
        assert generation > 1 and at >= version
        assert members[0].startswith(f"{first}/") and members[0] in names  # the survivor, with its state and its rank
        assert members[1] not in names
        assert (await stage.at_version(job, version + 10)).state == "running"

    play(scene)


def test_a_job_in_the_queue_survives_a_restart_with_its_secrets(play):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        first = await stage.submit(Script(steps=LONG), (1, 1), "first")
        await stage.at_version(first, 3)
        queued = await stage.submit(Script(steps=5), (1, 1), "second", secrets={"KEY": "value"})
        await stage.stop_dispatcher()
        await stage.start_dispatcher()
        await stage.at_version(first, 4)
        assert (await stage.job(queued)).state == "queued"
        await stage.call("POST", f"/v1/jobs/{first}/cancel", {})
        await stage.until("it is started", lambda: any(w.order.job == queued for w in stage.world.workers.values()))
        launch = await stage.call("GET", f"/v1/jobs/{queued}/launch", token=stage.token(host), ok=False)
        assert launch[0] == 403 or (launch[1]["secrets"].keys(), launch[1]["secrets"]["KEY"]) == (
            {"KEY", JOB_KEY}, "value")
        await stage.stands(queued, "succeeded")

    play(scene, spec(1))


def test_no_workers_name_is_given_again_after_a_restart(play):
    async def scene(stage: Stage) -> None:
        first, _ = await stage.up(2)
        job = await stage.submit(Script(steps=LONG))
        await stage.at_version(job, 5)
        given = {stage.daemon.dispatcher.desk.names.next((first, 0)) for _ in range(20)}
        await stage.stop_dispatcher()
        await stage.start_dispatcher()
        assert given.isdisjoint(stage.daemon.dispatcher.desk.names.next((first, 0)) for _ in range(20))
        await stage.at_version(job, 6)
        stage.kill_worker(first, Exit(-9))
        await stage.until("whole again", lambda: len(stage.world.history) > 1 and len(stage.world.history[-1][2]) == 2)
        assert len(stage.world.started) == len(set(stage.world.started)) == 3
        assert stage.world.started[2].split("/")[0] == first

    play(scene)


class OwnMachines(fake_fleet.Cloud):
    """Machines that exist: see `providers.ExistingMachines`."""

    looks = 0  # one in each tick

    def machines(self) -> list[str]:
        return []

    def install_key(self, fleet: str, public_key: str) -> dict[str, str]:
        return {}

    def remove_fleet(self, fleet: str) -> dict[str, str]:
        return {}

    def problems(self) -> list[str]:
        self.looks += 1
        return ["n7: it does not answer"]


def test_on_a_machine_of_ones_own_the_results_of_a_fleet_that_ended_by_itself_wait_to_be_fetched(play, monkeypatch):
    monkeypatch.setattr(fake_fleet, "Cloud", OwnMachines)

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        assert "n7: it does not answer" in (await stage.call("GET", "/v1/status"))[1]["why"]

        async def said() -> bool:
            status = (await stage.call("GET", "/v1/status"))[1]
            return status["state"] == "down" and "`spotfleet down` copies them here" in status["why"]

        await stage.until("the end", said)
        seen = stage.cloud.looks
        await stage.until("ticks in which it would end itself elsewhere", lambda: stage.cloud.looks >= seen + 3)
        assert stage.cloud.look(stage.boot.host)[0] and not (stage.home.parent / "archive").exists()
        assert (await stage.call("GET", "/v1/archive"))[0] == 200

    play(scene, spec(1, autostop=Autostop(idle_s=2.0)))
