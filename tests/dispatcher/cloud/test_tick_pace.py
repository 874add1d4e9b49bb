"""How often the cloud's listing is read: seldom while nothing changes, and at once when something is to be done."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfleet.dispatcher.cloud.machines import LOSS_TICK_S, QUIET_TICK_S, TICK_S, pause_s
from spotfleet.fleet.domain.host import Host
from spotfleet.model import CloudState, HostState, Market, Offer, ResizeSpec, Role
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script

POOL = Offer("fake", "r", "zone-a", "g5", Market.SPOT, 1, 1_000_000, 3_000_000, "A10G")
UP = Host("f-0", Role.WORKER, POOL, HostState.UP, 0.0, 0.0, 0.0, provider_id="i-0", cloud=CloudState.RUNNING)


@pytest.mark.parametrize(("hosts", "lost", "settled", "pause"), [
    ([UP, UP], False, True, QUIET_TICK_S),
    ([], False, True, QUIET_TICK_S),
    ([replace(UP, state=HostState.LAUNCHING)], False, True, QUIET_TICK_S),
    ([replace(UP, state=HostState.STOPPED, cloud=CloudState.STOPPED)], False, True, QUIET_TICK_S),
    ([UP, replace(UP, state=HostState.LAUNCHING, provider_id="", cloud=None)], False, True, TICK_S),
    ([UP, replace(UP, state=HostState.LAUNCHING, cloud=CloudState.PENDING)], False, True, TICK_S),
    ([replace(UP, state=HostState.DRAINING)], False, True, TICK_S),
    ([replace(UP, terminate_at=1.0)], False, True, TICK_S),
    ([replace(UP, silent_since=1.0)], False, True, TICK_S),
    ([replace(UP, missing_since=1.0)], False, True, TICK_S),
    ([UP], True, True, TICK_S),
    ([UP], False, False, TICK_S),
], ids=["up", "no host", "it boots", "stopped", "not listed", "pending", "draining", "ending", "silent", "missing",
        "just lost", "after a restart"])
def test_a_cloud_that_limits_requests_is_asked_often_only_while_something_changes(hosts, lost, settled, pause):
    assert pause_s(hosts, lost=lost, limited=True, settled=settled) == pause
    assert pause_s(hosts, lost=lost, limited=False, settled=settled) == (LOSS_TICK_S if lost else TICK_S)


def test_after_a_refusal_the_next_pool_is_tried_in_a_second():
    assert pause_s([UP], lost=False, limited=True, settled=True, refused=True) == TICK_S


def test_a_refused_launch_is_tried_elsewhere_without_a_regular_tick(play, monkeypatch):
    monkeypatch.setattr("spotfleet.dispatcher.cloud.machines.QUIET_TICK_S", 1000.0)
    monkeypatch.setattr("spotfleet.dispatcher.cloud.machines.TICK_S", 0.02)

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        stage.daemon.dispatcher.machines._limited = True
        with stage.cloud.lock:
            for offer in stage.cloud.offers(spec(1).any_of[0])[:-1]:
                stage.cloud.market.refuse(offer.pool, "pool", stage.cloud.clock())
        await stage.call("PUT", "/v1/nodes", {"min": 1, "target": 2, "max": 2})
        await stage.up(2)
        assert await stage.events("LaunchRefused")

    play(scene, spec(1))


def test_another_number_of_hosts_is_acted_on_without_a_regular_tick(play, monkeypatch):
    monkeypatch.setattr("spotfleet.dispatcher.cloud.machines.TICK_S", 1000.0)

    async def scene(stage: Stage) -> None:
        hosts = await stage.up(2)
        await stage.submit(Script(steps=100_000), (1, 2), resize=ResizeSpec(growth=((0, 1), (5, 2))))
        await stage.until("the host without work has ended", lambda: not all(stage.cloud.look(h)[0] for h in hosts))

    play(scene, spec(2))
