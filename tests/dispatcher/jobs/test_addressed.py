"""What the dispatcher makes of the addresses that hosts advertise: the real daemon with agents that behave."""

from __future__ import annotations

import pytest

from spotfleet.dispatcher.daemon import DispatcherDaemon
from spotfleet.errors import UsageError
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script


def test_a_host_at_an_address_that_means_nothing_to_others_gets_no_work_and_says_why(play):
    async def scene(stage: Stage) -> None:
        hosts = await stage.up(2)
        stage.agents[hosts[0]].address = "fe80::7"
        stage.agents[hosts[0]].changed.set()

        async def told() -> bool:
            shown = {h["host"]: h["why"] for h in (await stage.call("GET", "/v1/status"))[1]["hosts"]}
            return "it advertises fe80::7, which means nothing beyond one link" in shown[hosts[0]]

        await stage.until("it is told", told)
        job = await stage.submit(Script(steps=10_000), (1, 2))
        status = await stage.at_version(job, 5)
        assert [w.host for w in status.workers] == [hosts[1]]
        stage.agents[hosts[0]].address = "127.0.0.7"
        stage.agents[hosts[0]].changed.set()
        await stage.until("both train", lambda: both(stage, job))

    async def both(stage: Stage, job: str) -> bool:
        return (await stage.job(job)).world_size == 2

    play(scene, spec(2))


def test_a_dispatcher_that_was_given_another_machines_address_says_so(play):
    async def scene(stage: Stage) -> None:
        await stage.stop_dispatcher()
        daemon = DispatcherDaemon(stage.boot, stage.home, stage.cloud)
        try:
            with pytest.raises(UsageError) as refusal:
                await daemon.start("192.0.2.1", 0)  # for documentation
        finally:
            await daemon.stop()
        assert str(refusal.value) == "cannot listen on 192.0.2.1: no interface of this machine has that address"
        assert "`address`" in refusal.value.hint

    play(scene, spec(0))
