"""Reports of the Ray head as they reach the dispatcher's loop. No Ray, no process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from spotfleet.dispatcher.ray import cluster
from spotfleet.dispatcher.ray.cluster import RayCluster
from spotfleet.protocol.ray_cluster import RayReport, RayRequest, RayState


def test_a_step_follows_each_change_and_another_once_a_lasting_demand_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cluster, "CONFIRM_S", 0.0)
    monkeypatch.setattr(cluster, "AFTER_S", 0.001)

    async def play() -> list[int]:
        steps: list[RayState | None] = []
        core = SimpleNamespace(ray_state=None, step_soon=lambda: steps.append(core.ray_state))
        ray = object.__new__(RayCluster)
        ray._core, ray._wanted, ray._head = core, SimpleNamespace(job="ray-1"), SimpleNamespace(problem="")
        counts = []
        for state in (RayState(True), RayState(True), RayState(True, pending=(RayRequest({"CPU": 1.0}),))):
            ray._head.report = RayReport(state)
            ray._reported()
            counts.append(len(steps))
            await asyncio.sleep(0.01)
            counts.append(len(steps))
        return counts

    assert asyncio.run(play()) == [1, 2, 2, 2, 3, 4]
