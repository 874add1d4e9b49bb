"""Checkpoints of runs on a Ray cluster, with all workers killed at once."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from spotfleet.errors import SpotfleetError
from spotfleet.ray import ElasticExecutor
from spotfleet.ray.run.checkpoints import newest, target_of
from tests.ray.conftest import eventually
from tests.ray.test_elastic_executor import Run, steps

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def kept(folder: Path) -> int:
    found = newest(target_of(str(folder), 1.0))
    return found.version if found is not None else 0


def begins(folder: Path, run: Run, before: set[int], workers: int) -> list[int]:
    """Return the first step of each new process, once there are as many of them."""
    def first() -> list[int]:
        assert run.error is None, run.error
        return [rows[0][1] for pid, rows in steps(folder).items() if pid not in before and rows]

    return eventually(lambda: (found := first()) and len(found) == workers and found)


def kill_coordinator(cluster) -> None:
    found = [p for p in psutil.process_iter() if p.status() != psutil.STATUS_ZOMBIE
             and " ".join(p.cmdline()).startswith("ray::CoordinatorActor")
             and p.environ()["RAY_TMPDIR"] == os.environ["RAY_TMPDIR"]]
    assert len(found) == 1 and found[0].pid in [p.pid for p in cluster.workers_of(cluster.head)]
    found[0].kill()


def test_a_detached_run_whose_coordinator_is_lost_goes_on_from_its_newest_checkpoint(cluster, shut_down, tmp_path):
    """Without a checkpoint it ends with an error, which attach finds, too."""
    from ray.experimental import internal_kv

    target = tmp_path / "kept"
    executor = shut_down(ElasticExecutor(min_workers=2, max_workers=2, cpus_per_worker=0.5, detached="kept",
                                         checkpoint_target=str(target), checkpoint_every_s=0.5))
    executor.start()
    run = Run(executor, tmp_path)
    run.trains_on(2)
    executor.resize(max_workers=1, min_workers=1)
    run.trains_on(1)
    version = kept(target)
    eventually(lambda: kept(target) > version)
    before, version = set(steps(tmp_path)), kept(target)
    kill_coordinator(cluster)
    assert begins(tmp_path, run, before, 1)[0] >= version
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in before))
    assert "placed anew" in executor.changes[0] and "begins with the checkpoint" in executor.changes[1]
    assert [rank for rank, _ in run.ends()] == [0]

    kill_coordinator(cluster)  # a run that has ended is not run again
    before = set(steps(tmp_path))
    assert [rank for rank, _ in ElasticExecutor.attach("kept").result()] == [0] and set(steps(tmp_path)) == before
    executor.shutdown()
    assert internal_kv._internal_kv_list("run/", namespace="spotfleet") == []

    (tmp_path / "stop").unlink()
    executor = shut_down(ElasticExecutor(min_workers=1, max_workers=1, cpus_per_worker=0.5, detached="kept"))
    executor.start()
    run = Run(executor, tmp_path)
    run.trains_on(1)
    kill_coordinator(cluster)
    with pytest.raises(SpotfleetError, match=r"coordinator of 'kept' was lost, .* no checkpoint was kept") as lost:
        ElasticExecutor.attach("kept").result()
    assert "checkpoint_target" in lost.value.hint
    with pytest.raises(SpotfleetError, match="no checkpoint was kept"):
        run.ends()


def test_a_run_whose_workers_are_all_lost_goes_on_from_its_newest_checkpoint(cluster, shut_down, tmp_path):
    """And so does one whose driver was lost: the same call again, here with another number of workers."""
    target = tmp_path / "kept"

    def begin(workers: int) -> tuple[Any, Run]:
        executor = shut_down(ElasticExecutor(min_workers=workers, max_workers=workers, cpus_per_worker=0.5,
                                             checkpoint_target=str(target), checkpoint_every_s=0.5))
        executor.start()
        return executor, Run(executor, tmp_path)

    executor, run = begin(2)
    run.trains_on(2)
    eventually(lambda: kept(target) >= 20)
    before, version = set(steps(tmp_path)), kept(target)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    first, other = begins(tmp_path, run, before, 2)
    assert version <= first == other <= max(r[1] for p in before for r in steps(tmp_path)[p])
    eventually(lambda: kept(target) > first + 20)

    executor.shutdown()
    with pytest.raises(SpotfleetError, match="shut down while it trained"):
        run.ends()
    (tmp_path / "stop").unlink()
    before, version = set(steps(tmp_path)), kept(target)
    executor, run = begin(1)
    assert begins(tmp_path, run, before, 1)[0] >= version
    assert executor.changes[0].startswith("begins with the checkpoint of version ")
    assert len(run.ends()) == 1
    assert len([f for f in target.iterdir() if (f / ".metadata").exists()]) in (1, 2)
    # Each killed worker leaves one.
    for folder in Path(tempfile.gettempdir()).glob("spotfleet-ray-*"):
        assert [f.name for f in folder.iterdir()] == ["lock"]
        shutil.rmtree(folder)
