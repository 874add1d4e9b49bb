"""Scripts of the fleet's Ray clusters as the dispatcher shows them. No Ray, no process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.dispatcher.checkpoints import archive, archive_files
from spotfleet.dispatcher.core import NotFound
from spotfleet.dispatcher.disk.logs import JobLogs
from spotfleet.dispatcher.ray.cluster import RayCluster
from spotfleet.dispatcher.ray.drivers import DriverDesk
from spotfleet.model import JobState
from spotfleet.protocol.ray_cluster import LOST


def job(home: Path, name: str, state: JobState, at: float) -> SimpleNamespace:
    """A cluster's job with a script that printed its name."""
    folder = home / "jobs" / name / "drivers" / "d1"
    folder.mkdir(parents=True)
    (folder / "command").write_text("python train.py")
    JobLogs(folder.parent / "logs").append("d1", -1, 0, f"of {name}\n".encode())
    return SimpleNamespace(id=name, folder=home / "jobs" / name, state=state, spec=SimpleNamespace(kind="ray"),
                           record=SimpleNamespace(submitted_at=at))


def desks(*jobs: SimpleNamespace) -> tuple[RayCluster, DriverDesk]:
    """The dispatcher's view of these jobs' clusters and scripts."""
    ray = object.__new__(RayCluster)
    ray._core = SimpleNamespace(jobs={j.id: j for j in jobs})
    return ray, DriverDesk(ray._core)


def test_output_of_a_cluster_that_has_ended_is_shown_and_in_the_archive(tmp_path: Path):
    ray, desk = desks(job(tmp_path, "ray-9", JobState.CANCELLED, 2.0), job(tmp_path, "ray-1", JobState.CANCELLED, 1.0))
    assert ray.last() == "ray-9"
    assert desk.read(desk.find("ray-9", "d1"), 0) == (b"of ray-9\n", 9, False)
    assert desk.read(desk.find("ray-9", "d1"), 9) == (b"", 9, True)
    [shown] = desk.status("ray-9")
    assert (shown.driver, shown.state, shown.exit_status) == ("d1", "failed", LOST), "it ended with the cluster"
    kept = {name: b"".join(content.read(0, content.size())) for name, content in archive.members(tmp_path)}
    assert kept == {"jobs/ray-1/logs/d1.log": b"of ray-1\n", "jobs/ray-9/logs/d1.log": b"of ray-9\n"}
    sent = archive_files._content_of(tmp_path / "jobs" / "ray-1", "logs", ["d1.log"], {})
    assert b"".join(sent.read(0, sent.size())) == b"of ray-1\n"
    with pytest.raises(NotFound, match="no submitted script 'd2'"):
        desk.find("ray-9", "d2")


def test_the_cluster_that_runs_comes_before_one_that_has_ended(tmp_path: Path):
    ray, desk = desks(job(tmp_path, "ray-1", JobState.RUNNING, 1.0), job(tmp_path, "ray-9", JobState.FAILED, 2.0))
    assert ray.last() == "ray-1"
    assert desk.status("ray-1")[0].state == "running"
    assert desk.read(desk.find("ray-1", "d1"), 9) == (b"", 9, False), "it may print more"
