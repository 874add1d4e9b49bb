"""A fleet that ends: its hosts stay while results arrive; the end of results that never arrive is recorded."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import tarfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spotfleet.dispatcher.checkpoints import archive
from spotfleet.dispatcher.cloud.machines import HostController
from spotfleet.dispatcher.disk.damage import DamagedFiles
from spotfleet.dispatcher.lifecycle import lifetime, unsent
from spotfleet.dispatcher.lifecycle.shutdown import FETCH_S, FleetShutdown
from spotfleet.dispatcher.lifecycle.unsent import ASKED, BY_ITSELF, DISCARD, LIMITED, Patience
from spotfleet.errors import DiskFull
from spotfleet.fleet.domain.actions import Wanted
from spotfleet.fleet.domain.state import FleetState
from spotfleet.fleet.ledger import read_events
from spotfleet.model import CheckpointSpec
from spotfleet.protocol.messages import NOT_COLLECTED, Unsent
from tests.support.dispatcher.fake_fleet import FakeAgent, Stage, spec
from tests.support.dispatcher.fake_workers import Script

FULL = "train-1: its output waits: the dispatcher's disk is full"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotfleet.dispatcher.cloud.machines.TICK_S", 0.1)


async def holding(stage: Stage) -> FakeAgent:
    """The agent of a host whose job has succeeded and whose output does not arrive."""
    (host,) = await stage.up(1)
    job = await stage.submit(Script(steps=20), (1, 1))
    await stage.stands(job, "succeeded")
    agent = stage.agents[host]
    agent.why, agent.unsent = FULL, (Unsent(job, "output", 22_000_000, 1000, f"{host}/0/1"),)

    async def known() -> bool:
        return bool((await status(stage))["unsent"])

    await stage.until("the dispatcher knows of it", known)
    return agent


def end_by_itself(stage: Stage) -> None:
    """As autostop does."""
    stage.daemon.dispatcher.shutdown.begin("idle", by_ourselves=True, at=time.time())


async def status(stage: Stage) -> dict[str, Any]:
    return (await stage.call("GET", "/v1/status"))[1]


async def down(stage: Stage) -> bool:
    return (await status(stage))["state"] == "down"


async def draining(stage: Stage) -> bool:
    return [h["state"] for h in (await status(stage))["hosts"] if h["role"] == "worker"] == ["draining"]


async def not_collected(stage: Stage) -> dict[str, Any] | None:
    with tarfile.open(fileobj=io.BytesIO((await stage.call("GET", "/v1/archive"))[1])) as tar:
        return json.load(tar.extractfile(NOT_COLLECTED)) if NOT_COLLECTED in tar.getnames() else None


def test_down_keeps_a_host_until_its_results_have_arrived(play):

    async def scene(stage: Stage) -> None:
        agent = await holding(stage)
        await stage.call("POST", "/v1/down", {})
        await stage.until("it drains", lambda: draining(stage))
        seen = stage.daemon.dispatcher.machines  # several ticks pass
        for _ in range(3):
            before, _ = seen.tick_s, stage.daemon.dispatcher.core.tick_soon()
            await stage.until("a tick", lambda before=before: seen.tick_s != before)
        found = await status(stage)
        (held,) = found["unsent"]
        assert (held["host"], held["kind"], held["bytes"], held["why"]) == (agent.host, "output", 22_000_000, FULL)
        assert 3500 < held["stays_s"] <= 3600 and await draining(stage)
        assert "still holds 22.0 MB of the output of train-1" in found["why"]
        agent.unsent = ()
        await stage.until("down", lambda: down(stage))
        assert await stage.events("ResultsLost") == [] and await not_collected(stage) is None

    play(scene, spec(1))


def test_a_restarted_dispatcher_waits_for_agents_of_draining_hosts_that_are_slow_to_return(play, monkeypatch):
    monkeypatch.setattr("spotfleet.dispatcher.cloud.machines.Wanted", partial(Wanted, drain_timeout_s=0.1))
    monkeypatch.setattr("spotfleet.dispatcher.dispatcher.SETTLE_S", 0.2)

    async def scene(stage: Stage) -> None:
        agent = await holding(stage)
        await stage.call("POST", "/v1/down", {})
        await stage.until("it drains", lambda: draining(stage))
        agent.shut = True
        await stage.stop_dispatcher()
        await stage.start_dispatcher()
        core = stage.daemon.dispatcher.core
        await stage.until("it has settled", lambda: core.settled)
        for _ in range(3):
            core.tick_soon()
            await stage.until("a tick", lambda: not core.tick_due.is_set())
        assert await draining(stage)
        agent.shut = False

        async def known() -> bool:
            return bool((await status(stage))["unsent"])

        await stage.until("it is back", known)
        agent.unsent = ()
        await stage.until("down", lambda: down(stage))
        assert await stage.events("ResultsLost") == []

    play(scene, spec(1))


def test_discard_ends_the_host_and_records_what_is_lost_with_it(play, monkeypatch):
    monkeypatch.setattr(unsent, "DISCARD", Patience(0.2, 0.2))

    async def scene(stage: Stage) -> None:
        agent = await holding(stage)
        await stage.call("POST", "/v1/down", {})
        await stage.until("it drains", lambda: draining(stage))
        await stage.call("POST", "/v1/down", {"discard": True})
        await stage.until("down", lambda: down(stage))
        (event,) = await stage.events("ResultsLost")
        assert (event["job"], event["host"], event["what"], event["bytes"], event["why"], event["kept_at"]) == (
            "train-1", agent.host, "output", 22_000_000, FULL, "")
        kinds = [e["kind"] for e in await stage.events()]
        assert kinds.index("ResultsLost") < kinds.index("TerminateIntended") < kinds.index("FleetDown")
        missing = await not_collected(stage)
        assert [e["bytes"] for e in missing["lost"]] == [22_000_000]
        remark = f"not collected: 22.0 MB of the output of train-1 (lost with {agent.host})"
        assert remark in (await status(stage))["why"]
        assert (await stage.call("POST", "/v1/down", {"discard": "yes"}, ok=False))[0] == 400

    play(scene, spec(1))


def test_down_ends_although_the_host_that_holds_results_is_dead_and_records_them(play):
    async def scene(stage: Stage) -> None:
        agent = await holding(stage)
        await stage.call("POST", "/v1/down", {})
        await stage.until("it drains", lambda: draining(stage))
        with stage.cloud.lock:
            stage.cloud.market.interrupt(agent.host, None, stage.cloud.clock(), action="terminate")
        await stage.until("down", lambda: down(stage))
        assert [e["host"] for e in await stage.events("ResultsLost")] == [agent.host]
        kinds = [e["kind"] for e in await stage.events()]
        assert kinds.index("ResultsLost") < kinds.index("FleetDown")

    play(scene, spec(1))


def test_down_ends_although_the_agent_that_holds_results_is_silent(play, monkeypatch):
    monkeypatch.setattr(unsent, "DRAIN_S", 0.5)

    async def scene(stage: Stage) -> None:
        agent = await holding(stage)
        agent.shut = True
        await stage.call("POST", "/v1/down", {})
        await stage.until("down", lambda: down(stage))
        assert [e["host"] for e in await stage.events("ResultsLost")] == [agent.host]

    play(scene, spec(1))


def test_a_fleet_that_ends_by_itself_asks_the_target_first_and_names_the_copy(play, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(unsent, "TARGET_S", 0.1)
    (tmp_path / "target").mkdir()

    async def scene(stage: Stage) -> None:
        agent = await holding(stage)
        assert agent.orders is not None and not agent.orders.to_target
        end_by_itself(stage)
        await stage.until("it is ordered to", lambda: agent.orders and agent.orders.to_target)
        agent.unsent = tuple(replace(u, stored=True) for u in agent.unsent)
        await stage.until("its own machine ends", lambda: not stage.cloud.look(stage.boot.host)[0])
        archive = stage.home.parent / "archive"
        (lost,) = [e for e in read_events(archive / "ledger.db") if type(e).__name__ == "ResultsLost"]
        assert (lost.bytes, lost.kept_at) == (22_000_000, str(tmp_path / "target"))
        assert json.loads((archive / NOT_COLLECTED).read_text())["lost"][0]["kept_at"] == str(tmp_path / "target")

    play(scene, spec(1, checkpoint=CheckpointSpec(target=str(tmp_path / "target"))))


def test_a_host_of_a_fleet_that_ends_by_itself_stays_for_a_limited_time(play, monkeypatch):
    monkeypatch.setattr(unsent, "BY_ITSELF", Patience(0.5))

    async def scene(stage: Stage) -> None:
        agent = await holding(stage)
        end_by_itself(stage)
        await stage.until("its own machine ends", lambda: not stage.cloud.look(stage.boot.host)[0])
        (lost,) = [e for e in read_events(stage.home.parent / "archive" / "ledger.db")
                   if type(e).__name__ == "ResultsLost"]
        assert (lost.host, lost.kept_at) == (agent.host, "")

    play(scene, spec(1))


def test_max_lifetime_gives_less_time_also_to_a_fleet_that_goes_down_already(play, monkeypatch):
    monkeypatch.setattr(unsent, "LIMITED", Patience(0.2, 0.2))

    async def scene(stage: Stage) -> None:
        await holding(stage)
        await stage.call("POST", "/v1/down", {})
        await stage.until("it drains", lambda: draining(stage))
        monkeypatch.setattr(lifetime, "is_too_old", lambda *_: True)
        await stage.until("down", lambda: down(stage))
        assert len(await stage.events("ResultsLost")) == 1

    play(scene, spec(1))


def restarted(home: Path) -> FleetShutdown:
    found = FleetShutdown(home)
    found.load([], DamagedFiles(home))
    return found


def test_the_decision_says_how_long_hosts_stay_also_after_a_restart(tmp_path: Path):
    shutdown = FleetShutdown(tmp_path)
    assert shutdown.patience is unsent.STAYS
    assert shutdown.begin("asked", by_ourselves=False, at=5.0) and shutdown.patience is ASKED
    assert not shutdown.begin("asked", by_ourselves=False, at=6.0, discard=True)
    assert restarted(tmp_path).patience is DISCARD and shutdown.decision.at == 5.0
    for folder, more, expected in (("a", {}, BY_ITSELF), ("b", {"limited": True}, LIMITED)):
        other = FleetShutdown(tmp_path / folder)
        other.begin("by itself", by_ourselves=True, at=5.0, **more)
        assert other.patience is expected
        other.limit()
        assert restarted(tmp_path / folder).patience is LIMITED


def test_the_wait_for_the_laptop_begins_once_the_last_host_has_sent_its_results(tmp_path: Path):
    shutdown = FleetShutdown(tmp_path, keep_s=86_400.0)
    shutdown.begin("asked", by_ourselves=False, at=1000.0)
    shutdown.note_sending(5000.0)
    assert not shutdown.must_end(5000.0 + FETCH_S - 1) and shutdown.must_end(5000.0 + FETCH_S)
    assert not shutdown.must_end(5000.0 + FETCH_S, incomplete=True)  # a person comes back to a `down` that has stopped
    assert shutdown.must_end(5000.0 + 86_400.0, incomplete=True)
    hosts_end_themselves = spec(1, orphan_after_s=60.0)
    assert not lifetime.may_power_off(hosts_end_themselves, shutdown.last_at, 1, 5000.0 + lifetime.LAST_RESORT_S - 1)


def ended_fleet(tmp_path: Path, now: list[float]) -> HostController:
    """The controller of a fleet whose end was decided at 1000, whose hosts have ended, and whose disk is full."""
    shutdown = FleetShutdown(tmp_path)
    shutdown.begin("idle", by_ourselves=True, at=1000.0)
    ledger = SimpleNamespace(state=FleetState)
    journal = SimpleNamespace(state=FleetState(), full=DiskFull("full"), ledger=ledger)
    core = SimpleNamespace(journal=journal, jobs={}, home=tmp_path, archive_folder=tmp_path / "archive",
                           unix=lambda: now[0], record_losses=lambda: None)
    controller = object.__new__(HostController)
    controller.__dict__.update(_shutdown=shutdown, _core=core, _ended_at=0.0, _archive_error="", _provider=None,
                               stays=True)
    return controller


def test_an_archive_that_cannot_be_written_is_tried_again_also_after_hosts_have_sent_for_long(tmp_path: Path,
                                                                                              monkeypatch):
    now = [5000.0]
    controller = ended_fleet(tmp_path, now)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archive, "write_folder", refuse)
    gives_up = []
    for now[0] in (5000.0, 5000.0 + FETCH_S - 1, 5000.0 + FETCH_S):
        asyncio.run(controller._finish())
        gives_up.append(asyncio.run(controller._archive()))
    assert gives_up == [False, False, True]
    listed = json.loads((tmp_path / "archive" / NOT_COLLECTED).read_text())  # what a later `down` reports
    assert "No space left" in listed["incomplete"]


def test_the_waits_of_a_shutdown_last_as_long_where_the_time_was_wrong(tmp_path: Path):
    shutdown = FleetShutdown(tmp_path, keep_s=50.0, unix=lambda: 1020.0)
    shutdown.move(5.0)
    assert shutdown.decision is None
    shutdown.begin("idle", by_ourselves=True, at=1000.0)
    shutdown.note_sending(1010.0)
    with shutdown.reading():
        pass
    shutdown.move(72_000.0)
    assert (shutdown.last_at, shutdown.must_end(73_069.0), shutdown.must_end(73_070.0)) == (73_010.0, False, True)
    again = FleetShutdown(tmp_path)
    again.load([], DamagedFiles(tmp_path))
    assert again.decision == shutdown.decision and shutdown.decision.at == 73_000.0


def test_an_older_dispatchers_decision_is_readable(tmp_path: Path):
    (tmp_path / "down.json").write_text(json.dumps({"why": "asked", "at": time.time(), "by_ourselves": False}))
    assert restarted(tmp_path).patience is ASKED
