"""Coordinator as a detached actor: the run outlives the driver that began it.

The actor owns the workers' actors, so they live as long as it does: until `shutdown`, or until the node of the actor is
lost. Another driver finds it by its name (`ElasticExecutor.attach`).
"""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import Any

from spotfleet.errors import UsageError
from spotfleet.ray.installed import connected_ray
from spotfleet.ray.params import ElasticParams, HostSource
from spotfleet.ray.run.coordinator import RunStatus
from spotfleet.ray.run.elastic_job import ElasticJob, RunEnd, TrainingCall

NAMESPACE = "spotfleet"
CALLS = 8  # at a time: one may wait for logs, others ask for the state
MOST_LOGS = 10_000  # values that no driver has fetched; the oldest are dropped


@dataclass(frozen=True)
class RunProgress:
    """Logged values since the last call, the changes so far, and the run's end."""

    logs: list[Any]
    changes: list[str]
    end: RunEnd | None


class CoordinatorActor:
    """Host of an `ElasticJob` in an actor of its own."""

    def __init__(self, params: ElasticParams, env: dict[str, str], verbose: int, discovery: HostSource | None) -> None:
        self._job = ElasticJob(params, env, verbose, discovery)

    def begin(self, function: Any, args: Any, kwargs: Any) -> None:
        """Train. The objects of the driver end with it, so workers that join later get those of this actor."""
        ray = connected_ray()
        self._job.begin(TrainingCall(*(ray.put(part) for part in (function, args, kwargs))))

    def progress(self, wait_s: float) -> RunProgress:
        """Wait up to `wait_s` for something new."""
        logs: list[Any] = []
        if not self._job.ended.is_set() or not self._job.logs.empty():
            try:
                logs.append(self._job.logs.get(timeout=wait_s)[1])
                while True:
                    logs.append(self._job.logs.get_nowait()[1])
            except queue.Empty:
                pass
        over = self._job.ended.is_set() and self._job.logs.empty()
        return RunProgress(logs[-MOST_LOGS:], list(self._job.changes), self._job.result() if over else None)

    def resize(self, min_workers: int | None, max_workers: int | None) -> ElasticParams:
        return self._job.resize(min_workers, max_workers)

    def standing(self) -> RunStatus:
        return self._job.standing()

    def shutdown(self) -> None:
        self._job.shutdown()


def create(name: str, *args: Any) -> Any:
    """Start a detached coordinator and return its handle. UsageError if the name is in use."""
    ray = connected_ray()
    options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0,
               "max_concurrency": CALLS, "max_restarts": 0}
    try:
        return ray.remote(CoordinatorActor).options(**options).remote(*args)
    except ValueError as error:
        raise UsageError(f"an executor named {name!r} exists already",
                         hint=f"ElasticExecutor.attach({name!r}), or another name") from error


def find(name: str) -> Any:
    """Return the handle of a detached coordinator. UsageError if there is none."""
    ray = connected_ray()
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError as error:
        raise UsageError(f"no executor named {name!r} runs on this cluster",
                         hint='start one with ElasticExecutor(..., detached="NAME")') from error
