"""Every file of a running dispatcher's home is in the table of `docs/recovery.md`."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.dispatcher.recovery.test_power_cut import packed
from tests.support.dispatcher.checkpoint_sets import file_of, files_of
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script
from tests.support.file_table import DISPATCHER, HOST, rows, unknown


def test_each_file_has_a_writer_a_cost_of_its_loss_and_an_effect_of_its_damage():
    for heading, known in ((DISPATCHER, "jobs/JOB/secrets.json"), (HOST, "life.json")):
        found = rows(heading)
        assert known in [name for row in found for name in row.names]
        assert all(len(row.names) >= 1 and row.writer and row.loss and row.damage for row in found)


def test_a_file_that_the_table_does_not_know_is_found(tmp_path: Path):
    for name in ("boots.json", "jobs/a-1/job.json", "jobs/a-1/notes.txt", "ledger.db.corrupt-20260101-000000-wal"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert unknown(tmp_path, DISPATCHER) == ["jobs/a-1/notes.txt"]


def test_the_table_has_every_file_of_a_dispatchers_home(play, tmp_path: Path):
    digest, blobs = packed(tmp_path)

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        for name, data in blobs.items():
            await stage.call("PUT", f"/v1/bundles/{name}", data=data)
        job = await stage.submit(Script(steps=1_000_000), (1, 1), bundle=digest, secrets={"KEY": "hidden-value"})
        status = await stage.at_version(job, 3)
        worker, text = status.workers[0], b"a checkpoint"
        token, name = stage.token(worker.host), worker.worker.replace("/", "%2F")
        query = f"generation={status.generation}&digest={hashlib.sha256(text).hexdigest()}"
        await stage.call("PUT", f"/v1/jobs/{job}/checkpoints/3?{query}", data=text, token=token)
        await stage.call("PUT", f"/v1/jobs/{job}/checkpoints/5?{query}&name=__0_0.distcp", data=text, token=token)
        files = files_of(4, status.generation)
        for file, data in files.items():
            its = file_of(files, file)
            asked = f"generation={status.generation}&digest={its.digest}&name={file}"
            await stage.call("PUT", f"/v1/jobs/{job}/checkpoints/4?{asked}", data=data, token=token)
        await stage.call("POST", f"/v1/jobs/{job}/logs/{name}?offset=0", data=b"hello\n", token=token)
        await stage.call("POST", "/v1/down", {})
        there = {p.name for p in stage.home.rglob("*") if p.is_file()}
        assert {"job.json", "secrets.json", "boots.json", "down.json", "begun", "ballast", "ledger.db", "rank-0.log",
                digest, f"3-{status.generation}.ckpt", f"3-{status.generation}.json", *files,
                f"__0_0.distcp-{hashlib.sha256(text).hexdigest()}"} <= there
        assert unknown(stage.home, DISPATCHER) == []

    play(scene, spec(1))
