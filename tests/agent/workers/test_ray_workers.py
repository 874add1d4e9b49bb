"""Raylets of hosts whose versions differ from the head's. No process is started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.agent.files.setup import SetupError, Setups
from spotfleet.agent.workers import worker
from spotfleet.agent.workers.versions import python_version
from spotfleet.agent.workers.worker import AgentWorker
from spotfleet.model import JobSpec
from spotfleet.protocol.messages import SlotOrder, WorkerLaunch, WorkerOrders
from spotfleet.protocol.ray_cluster import VERSIONS

SPEC = JobSpec("ray", run="raylet", kind="ray", per_host=True)


def set_up(setups: Setups, folder: Path, versions: str, spec: JobSpec = SPEC) -> dict[str, str]:
    """Set a job up for its worker; return the environment of its process."""
    found = object.__new__(AgentWorker)
    found._order = SlotOrder("h1/0/1", "ray-1", 0, 0, WorkerOrders())
    found._folder, found._processes, found._set_why = folder, None, lambda why: None
    found._host = SimpleNamespace(setups=setups, bundles=SimpleNamespace(folder=lambda job: folder),
                                  address=lambda: "127.0.0.1", socket=lambda: "")
    launch = WorkerLaunch("ray-1", spec, {VERSIONS: versions})
    return asyncio.run(found._set_up(SimpleNamespace(launch=launch, source=folder), None))


def test_a_raylet_of_another_version_does_not_start_and_each_try_is_counted(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker, "ray_version", lambda: "2.59.0")
    setups, here = Setups(None), python_version()
    for tries in (1, 2):
        with pytest.raises(SetupError, match=r"host h1 has Ray 2\.59\.0, and the head Ray 2\.60\.0") as refused:
            set_up(setups, tmp_path, f"2.60.0 {here}")
        assert refused.value.tries == tries and not refused.value.sure
    assert set_up(setups, tmp_path, f"2.59.0 {here}")[VERSIONS] == f"2.59.0 {here}"
    assert set_up(setups, tmp_path, f"2.60.0 {here}", JobSpec("other", run="true"))
