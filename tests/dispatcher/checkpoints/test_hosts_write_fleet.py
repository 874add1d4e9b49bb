"""Hosts that write checkpoints to the mounted target, with the whole dispatcher, agents and workers that behave."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from spotfleet.dispatcher.disk.records import lies_at_target
from spotfleet.model import CheckpointSpec
from spotfleet.storage.folder import PROBE, arriving_name
from tests.support.dispatcher.checkpoint_sets import files_of, read, sha, whole
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script
from tests.support.dispatcher.quarantine import member, target_folder

PIECES = (b"rank 0's", b"rank 1's")


def test_what_hosts_wrote_to_the_target_is_restored_also_by_hosts_that_do_not_see_it(play, tmp_path: Path):
    target = tmp_path / "target"
    target.mkdir()

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(Script(steps=10_000), (1, 1))
        status = await stage.at_version(job, 3)
        (agent,) = stage.agents.values()
        there = target_folder(stage)
        await stage.until("the probe", lambda: there.find(PROBE) is not None)
        assert not agent.orders.workers[0].mounted
        agent.probe = there.path(PROBE).read_text()
        await stage.until("the order to write there", lambda: agent.orders.workers[0].mounted)
        files = files_of(500, status.generation, PIECES, member(stage, job, status.generation))
        found = whole(files)
        for name, data in files.items():
            piece = replace(found, name=name, digest=sha(data))
            there.put(arriving_name(job, piece), [data])
            path = (f"/v1/jobs/{job}/checkpoints/500?generation={found.generation}&digest={piece.digest}&name={name}"
                    f"&at=target&grant={json.loads(files['manifest.json'])['grant']}")
            await stage.call("PUT", path, token=stage.token(agent.host), data=b"")
        store = stage.daemon.dispatcher.core.jobs[job].checkpoints
        await stage.until("the kept one", lambda: store.newest_version == 500)
        assert lies_at_target(store.newest) and read(there.path(f"jobs/{job}/checkpoints/500-1")) == files
        (kept,) = await stage.events("CheckpointKept")
        assert kept["url"].startswith("file://")
        before = len(stage.world.history)
        for host in list(stage.agents):
            stage.cloud.interrupt(host, None)
        await stage.until("a new generation", lambda: len(stage.world.history) > before)
        assert stage.world.history[before][3] == 500 and read(store.path(store.newest)) == files

    play(scene, spec(1, checkpoint=CheckpointSpec(target=str(target))))


def test_without_a_target_a_host_is_answered_to_send_the_file(play):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(Script(steps=10_000), (1, 1))
        await stage.at_version(job, 3)
        (host,) = stage.agents
        path = f"/v1/jobs/{job}/checkpoints/500?generation=1&digest={'0' * 64}&name=__0_0.distcp&at=target"
        status, _ = await stage.call("PUT", path, token=stage.token(host), data=b"", ok=False)
        assert status == 412

    play(scene, spec(1))
