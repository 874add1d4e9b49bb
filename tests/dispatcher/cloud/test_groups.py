"""A dispatcher whose hosts come when jobs ask for them, in one group and in two; what its successor knows of them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from spotfleet.codec import to_json
from spotfleet.fleet.planner.groups import OutsideDemand, Wish
from spotfleet.model import FleetSpec, GroupSpec, JobSpec, Need, Nodes, all_nodes
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script

LONG = 10_000
SHORT_S = 0.3
NONE = Nodes(0, 2, 2, SHORT_S)
CPU = GroupSpec("cpu", NONE, (Need(instance_type="cpu.small"),))
GPU = GroupSpec("gpu", NONE, (Need(accelerator="EMU"),))


def grouped(*groups: GroupSpec) -> FleetSpec:
    return replace(spec(), groups=groups, nodes=all_nodes(g.nodes for g in groups),
                   any_of=tuple(need for g in groups for need in g.any_of))


async def status(stage: Stage) -> dict[str, Any]:
    return (await stage.call("GET", "/v1/status"))[1]


async def submit(stage: Stage, group: str, ok: bool = True, name: str = "train") -> Any:
    stage.world.scripts[name] = Script(steps=LONG)
    job = JobSpec(name, argv=("train.py",), group=group)
    return (await stage.call("POST", "/v1/jobs", {"spec": to_json(job), "secrets": {}, "wait": False}, ok=ok))[1]


def machines(stage: Stage) -> list[str]:
    return [host for host in stage.cloud.machines if stage.cloud.look(host)[0]]


def groups_of(stage: Stage) -> dict[str, str]:
    assert stage.daemon is not None and stage.daemon.dispatcher is not None
    return {h.request_id: h.group for h in stage.daemon.dispatcher.core.journal.state.hosts if h.group}


def test_a_job_brings_its_host_and_the_host_goes_once_it_is_idle(play):
    async def scene(stage: Stage) -> None:
        found = await status(stage)
        assert found["state"] == "up" and found["wanted"] == 0
        assert found["why"] == "no host is up and none is needed (no job needs a host)"
        job = await stage.submit(Script(steps=5), (1, 1), wait=False)
        await stage.stands(job, "succeeded")
        await stage.until("no host", lambda: not machines(stage))
        (launch,) = await stage.events("LaunchIntended")
        assert launch["why"].endswith(f": {job} asks for 1 worker")
        (drain,) = await stage.events("HostDraining")
        assert drain["why"].startswith("without work for ") and drain["why"].endswith(": no job needs a host")
        assert drain["at"] - (await stage.events("JobChanged"))[-1]["at"] >= SHORT_S

    play(scene, replace(spec(), nodes=NONE))


def test_a_job_gets_a_host_of_its_group_and_the_other_group_stays_empty(play):
    async def scene(stage: Stage) -> None:
        refused = await submit(stage, "", ok=False)
        assert "the groups have different machines, and the job names none of them: cpu, gpu" in refused["error"]
        assert "no group of this fleet's hosts" in (await submit(stage, "tpu", ok=False))["error"]
        job = (await submit(stage, "gpu"))["job"]
        await stage.at_version(job, 3)
        found = await status(stage)
        assert [(h["host"], h["group"], h["pool"].split("/")[2]) for h in found["hosts"] if h["role"] == "worker"] == [
            ("f-gpu-0", "gpu", "gpu.small")]
        assert [(g["group"], g["wanted"], g["why"]) for g in found["groups"]] == [
            ("cpu", 0, "no job needs a host"), ("gpu", 1, f"{job} asks for 1 worker")]

    play(scene, grouped(CPU, GPU))


def test_a_new_dispatcher_that_lost_the_ledger_keeps_the_groups(play):
    async def scene(stage: Stage) -> None:
        jobs = [(await submit(stage, group, name=group))["job"] for group in ("gpu", "cpu")]
        for job in jobs:
            await stage.at_version(job, 3)
        before = groups_of(stage)
        assert sorted(before.values()) == ["cpu", "gpu"]
        await stage.lose_dispatcher_machine()
        await stage.start_dispatcher()
        for job in jobs:
            await stage.at_version(job, 3)
        assert groups_of(stage) == before
        assert not await stage.events("HostDraining")

    same = (Need(instance_type="cpu.small"),)  # so that only their names tell the hosts of one from the other's
    play(scene, grouped(replace(CPU, any_of=same), replace(GPU, any_of=same)))


def test_a_range_changes_group_by_group_and_a_wish_brings_hosts(play):
    async def scene(stage: Stage) -> None:
        await stage.call("PUT", "/v1/nodes?group=cpu", to_json(Nodes(1, 1, 1)))
        assert (await stage.call("PUT", "/v1/nodes", to_json(Nodes(1, 1, 1)), ok=False))[0] == 400
        (host,) = await stage.up(1)
        assert groups_of(stage) == {host: "cpu"}
        assert stage.daemon is not None and stage.daemon.dispatcher is not None
        controller = stage.daemon.dispatcher.machines
        controller.wish(OutsideDemand({"gpu": Wish(9, "a test wants 9 hosts")}))
        await stage.up(3)
        why = [e["why"] for e in await stage.events("LaunchIntended") if e["group"] == "gpu"]
        assert len(why) == 2 and all(w.endswith(": a test wants 9 hosts, nodes.max is 2") for w in why)
        hosts = [h for h, group in groups_of(stage).items() if group == "gpu"]
        until = time.monotonic() + 2 * SHORT_S
        await stage.until("more than the idle time", lambda: time.monotonic() > until)
        controller.wish(OutsideDemand({"gpu": Wish(0, "")}, busy=frozenset(hosts[:1])))
        assert (await status(stage))["wanted"] == 3  # they were needed until now, so that none is idle
        await stage.up(2)
        until = time.monotonic() + 2 * SHORT_S
        await stage.until("more than the idle time", lambda: time.monotonic() > until)
        assert hosts[0] in groups_of(stage)  # it works
        controller.wish(OutsideDemand())
        await stage.up(1)

    play(scene, grouped(CPU, GPU))
