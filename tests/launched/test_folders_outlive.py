"""Copies of checkpoint folders at the real dispatcher: who may send one, what is kept, and the loss of its machine."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet import bundle
from spotfleet.codec import to_json
from spotfleet.dispatcher.checkpoints import backup
from spotfleet.dispatcher.checkpoints.ledger_restore import lock, sealed_name
from spotfleet.model import CheckpointSpec, JobSpec
from spotfleet.storage.folder import FolderStore, fleet_store
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script

pytestmark = pytest.mark.processes  # it waits for daemons and for a target's copies


class Folder:
    """A checkpoint folder as its host packs it."""

    def __init__(self, place: Path, text: str) -> None:
        place.mkdir()
        (place / "last.pt").write_text(text)
        self.blobs: dict[str, bytes] = {}
        packed = bundle.pack(bundle.scan(place), lambda made: self.blobs.update({made.piece.sha256: made.blob}))
        self.manifest = bundle.dump(packed.manifest)
        self.digest = hashlib.sha256(self.manifest).hexdigest()

    async def send(self, stage: Stage, job: str, worker: str, generation: int) -> tuple[int, object]:
        token, path = stage.token(worker.partition("/")[0]), f"/v1/jobs/{job}/folder/{worker.replace('/', '%2F')}"
        offer = f"{path}?generation={generation}"
        status, answer = await stage.call("POST", offer, data=self.manifest, token=token, ok=False)
        if status != 200 or not answer["missing"]:
            return status, answer
        for digest in answer["missing"]:
            await stage.call("PUT", f"/v1/bundles/{digest}", data=self.blobs[digest], token=token)
        return await stage.call("POST", offer, data=self.manifest, token=token, ok=False)


def test_the_newest_folder_of_rank_0_outlives_all_hosts_and_the_dispatchers_machine(play, tmp_path, monkeypatch):
    monkeypatch.setattr(backup, "KEEP_S", 0.1)
    target = tmp_path / "target"
    target.mkdir()
    folders = [Folder(tmp_path / str(n), f"step {n}") for n in range(3)]

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        stage.world.scripts["train"] = Script(gang=True)
        asked = JobSpec("train", argv=("x.py",), min_workers=2, max_workers=2, kind="restart", gang=True)
        job = (await stage.call("POST", "/v1/jobs", {"spec": to_json(asked), "secrets": {}}))[1]["job"]
        status = await stage.stands(job, "running")
        leader, other = (next(w.worker for w in status.workers if w.rank == rank) for rank in (0, 1))
        assert (await folders[0].send(stage, job, other, status.generation))[0] == 409
        assert (await folders[0].send(stage, job, leader, status.generation + 1))[0] == 409
        for folder in folders:
            assert await folder.send(stage, job, leader, status.generation) == (200, {"missing": []})
        bundles = stage.home / "bundles"
        assert (bundles / folders[2].digest).exists() and not (bundles / folders[0].digest).exists()
        assert (await stage.job(job)).folder_age_s is not None

        there = fleet_store(str(target), stage.boot.fleet, stage.boot.ca)
        await stage.until("the copy", lambda: all(f"bundles/{digest}" in there.names("bundles")
                                                  for digest in (folders[2].digest, *folders[2].blobs)))
        await stage.until("the copy of the record", lambda: folders[2].digest.encode() in _record(stage, there, job))
        await stage.lose_dispatcher_machine()
        for agent in list(stage.agents):
            with stage.cloud.lock:
                stage.cloud.market.interrupt(agent, None, stage.cloud.clock(), action="terminate")
        await stage.start_dispatcher()

        async def starts_with_it() -> bool:
            starts = [w.order.gang for w in stage.world.workers.values() if w.order.gang is not None]
            return any(gang.saved == folders[2].digest and gang.restarts for gang in starts)

        await stage.until("a start with the newest folder", starts_with_it, 90)

    play(scene, replace(spec(2), checkpoint=CheckpointSpec(target=str(target))))


def _record(stage: Stage, target: FolderStore, job: str) -> bytes:
    """The job's record at the target; nothing while there is none."""
    found = target.find(sealed_name(job))
    return lock(stage.boot.fleet_secret).decrypt(found.read_bytes()) if found is not None else b""
