"""Each acknowledged request is in force after a power cut of the dispatcher's machine, at the worst moment.

The disk forgets every name and content that was not synced. What agents send again by themselves (logs, outputs) is
not promised, see `docs/recovery.md`.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from spotfleet import bundle
from spotfleet.dispatcher.checkpoints.store import CheckpointStore
from spotfleet.dispatcher.disk import jobfile
from spotfleet.dispatcher.disk.bundles import BundleStore
from spotfleet.dispatcher.disk.damage import DamagedFiles
from spotfleet.dispatcher.lifecycle.shutdown import FleetShutdown
from spotfleet.fleet.ledger import Ledger
from spotfleet.model import HostState, Nodes
from tests.support.dispatcher.checkpoint_sets import file_of, files_of, read
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script
from tests.support.power_cut import ForgetfulDisk

LONG = 1_000_000


class AfterCut:
    """What a new process finds on the disk after a power cut."""

    def __init__(self, home: Path) -> None:
        self.home, self.damage = home, DamagedFiles(home)
        self.jobs = {job.record.job: job for job in jobfile.load_all(home, self.damage)}
        self.ledger = Ledger(home / "ledger.db")
        self.state = self.ledger.state()
        self.ledger.close()

    @property
    def down(self) -> str:
        shutdown = FleetShutdown(self.home)
        shutdown.load([], self.damage)
        return shutdown.why


class Cuts:
    """A fleet on a forgetful disk."""

    def __init__(self, stage: Stage, disk: ForgetfulDisk) -> None:
        self.stage, self.disk, self.number = stage, disk, 0

    async def after(self, method: str, path: str, body: object = None, data: bytes | None = None) -> AfterCut:
        """The disk right after the answer to a request."""
        await self.stage.call(method, path, body, data=data)
        self.number += 1
        return AfterCut(self.disk.cut(self.stage.home, self.stage.home.with_name(f"cut-{self.number}")))


def packed(folder: Path) -> tuple[str, dict[str, bytes]]:
    """A bundle: its digest, and its blobs."""
    (folder / "work").mkdir()
    (folder / "work" / "train.py").write_text("print('hello')\n")
    blobs: dict[str, bytes] = {}
    made = bundle.pack(bundle.scan(folder / "work"), lambda m: blobs.update({m.piece.sha256: m.blob}))
    text = bundle.dump(made.manifest)
    digest = hashlib.sha256(text).hexdigest()
    return digest, {**blobs, digest: text}


def test_every_acknowledged_request_is_in_force_after_a_power_cut(play, tmp_path, monkeypatch: pytest.MonkeyPatch):
    digest, blobs = packed(tmp_path)

    async def scene(stage: Stage) -> None:
        cuts = Cuts(stage, disk)
        hosts = await stage.up(2)
        for name, data in blobs.items():
            await stage.call("PUT", f"/v1/bundles/{name}", data=data)
        job = await stage.submit(Script(steps=LONG), (1, 1), bundle=digest, secrets={"KEY": "hidden-value"})
        after = AfterCut(disk.cut(stage.home, tmp_path / "submitted"))
        assert after.jobs[job].secrets["KEY"] == "hidden-value" and not after.jobs[job].secrets_lost
        BundleStore(after.home, after.damage).refuse_incomplete(digest)

        status = await stage.at_version(job, 3)
        worker = status.workers[0]
        after = AfterCut(disk.cut(stage.home, tmp_path / "formed"))
        assert after.jobs[job].record.groups[-1] == (status.generation, (worker.worker,))

        text = b"a checkpoint"
        query = f"generation={status.generation}&digest={hashlib.sha256(text).hexdigest()}"
        put = f"/v1/jobs/{job}/checkpoints/3?{query}"
        assert (await stage.call("PUT", put, data=text, token=stage.token(worker.host)))[0] == 200
        kept = CheckpointStore(disk.cut(stage.home, tmp_path / "kept") / "jobs" / job / "checkpoints", 2)
        assert kept.newest_version == 3 and kept.find(3).read_bytes() == text

        files = files_of(4, status.generation)
        for number, (name, data) in enumerate(files.items()):
            query = f"generation={status.generation}&digest={file_of(files, name).digest}&name={name}"
            put = f"/v1/jobs/{job}/checkpoints/4?{query}"
            assert (await stage.call("PUT", put, data=data, token=stage.token(worker.host)))[0] == 200
            kept = CheckpointStore(disk.cut(stage.home, tmp_path / f"file-{number}") / "jobs" / job / "checkpoints", 2)
            assert kept.parts.holds(file_of(files, name)) or kept.newest_version == 4
        assert kept.newest_version == 4 and read(kept.find(4)) == files

        other = next(host for host in hosts if host != worker.host)
        after = await cuts.after("POST", f"/v1/hosts/{other}/drain", {})
        assert after.state.host(other).state is HostState.DRAINING
        after = await cuts.after("PUT", "/v1/nodes", {"min": 1, "target": 1, "max": 2})
        assert after.state.nodes == Nodes(1, 1, 2)
        after = await cuts.after("PUT", "/v1/policy", {"spot_policy": "spot", "max_micros": 7_000_000})
        assert after.state.history.policy.max_micros == 7_000_000
        after = await cuts.after("POST", f"/v1/jobs/{job}/cancel", {})
        assert after.jobs[job].record.cancelled
        await stage.stands(job, "cancelled")
        ended = disk.cut(stage.home, tmp_path / "ended")
        assert not list(ended.rglob("secrets.json*"))
        assert AfterCut(ended).jobs[job].record.state.ended
        after = await cuts.after("POST", f"/v1/hosts/{worker.host}/revoke", {"why": "taken"})
        assert after.state.host(worker.host).revoked == "taken"
        after = await cuts.after("POST", "/v1/down", {})
        assert after.down == "asked by `spotfleet down`"
        assert (after.home / "begun").exists() and (after.home / "boots.json").read_text() == "1"

    with ForgetfulDisk(monkeypatch) as disk:
        play(scene, spec(2))


def test_a_drain_is_in_the_ledger_before_it_is_acknowledged(play):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        machines = stage.daemon._tasks[1]  # nothing else writes the drain
        machines.cancel()
        await asyncio.wait([machines])
        await stage.call("POST", f"/v1/hosts/{host}/drain", {})
        assert stage.daemon.dispatcher.core.journal.ledger.state().host(host).state is HostState.DRAINING

    play(scene, spec(1))


def test_a_job_trains_on_after_a_power_cut_right_after_its_submission(play, tmp_path, monkeypatch: pytest.MonkeyPatch):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(Script(steps=LONG), (1, 1))
        left = disk.cut(stage.home, tmp_path / "left")
        await stage.stop_dispatcher()
        stage.home = left
        await stage.start_dispatcher()
        await stage.at_version(job, 3)
        assert [e["job"] for e in await stage.events("JobSubmitted")] == [job]

    with ForgetfulDisk(monkeypatch) as disk:
        play(scene, spec(1))
