"""Coordinator as a detached actor: the run outlives the driver that began it.

    begin: record written --> trains --coordinator lost--> Ray places it anew --> record read --> trains from the newest
                                                                  |               checkpoint, with new workers
                                                                  '-- without checkpoint_target: the run has failed

The actor owns the workers' actors, so Ray ends them with it: at `shutdown`, and where its process or its node is lost.
It runs on Ray's head, the one node that no cloud takes back. Another driver finds it by its name
(`ElasticExecutor.attach`).

Threads: up to CALLS calls at a time; `_lock` guards the changes of the run.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.ray.installed import connected_ray
from spotfleet.ray.params import ElasticParams, HostSource
from spotfleet.ray.run.coordinator import RunStatus
from spotfleet.ray.run.elastic_job import ElasticJob, RunEnd
from spotfleet.ray.run.record import NAMESPACE, PackedCall, RecordStore, RunRecord, remove_all

CALLS = 8  # at a time: one may wait for logs, others ask for the state
MOST_LOGS = 10_000  # values that no driver has fetched; the oldest are dropped
MOST_BYTES = 64 << 20  # size of a function with its arguments, in the memory of Ray's control service
ON_THE_HEAD = {"node:__internal_head__": 0.001}  # Ray gives 1.0 of this resource to the head
RETRY_S = 0.5  # while the coordinator is placed anew


@dataclass(frozen=True)
class RunProgress:
    """Logged values since the last call, the changes so far, and the run's end."""

    logs: list[Any]
    changes: list[str]
    end: RunEnd | None


class CoordinatorActor:
    """Host of an `ElasticJob` in an actor of its own."""

    def __init__(self, name: str, token: str, params: ElasticParams, env: dict[str, str], verbose: int,
                 discovery: HostSource | None) -> None:
        os.environ.update(env)  # with the credentials for `checkpoint_target`
        self._name, self._params = name, params
        self._make = lambda: ElasticJob(params, env, verbose, discovery)
        self._records = RecordStore(name, token)
        self._record = self._records.read()  # that of a coordinator that was lost
        self._lock = threading.Lock()
        self._job: ElasticJob | None = None
        self._end: RunEnd | None = None  # while there is no job: that of the last run
        if self._record is None:
            self._job = self._make()
        elif self._record.end is not None:
            self._end = self._record.end
        else:
            self._go_on(self._record)

    def _go_on(self, record: RunRecord) -> None:
        """Train from the newest checkpoint, in place of a coordinator that was lost."""
        if not self._params.checkpoint_target:
            why = f"the coordinator of {self._name!r} was lost, and its workers with it; no checkpoint was kept"
            self._end = RunEnd(error=SpotfleetError(
                why, hint="start it again with a checkpoint_target: then it goes on from the newest checkpoint"))
            return
        job = self._make()
        job.resize(record.min_workers, record.max_workers)
        job.changes.append("the coordinator was lost with all workers, and has been placed anew")
        try:
            job.begin(record.call.owned_here())
        except SpotfleetError as error:  # the target cannot be read
            job.shutdown()
            self._end = RunEnd(error=error)
            return
        self._job = job
        self._keep_end(job)

    def begin(self, call: PackedCall) -> None:
        with self._lock:
            if self._record is not None and self._record.call.number == call.number:
                return  # it was sent again, since the first answer was lost
            self._job = self._job or self._make()
            self._job.begin(call.owned_here())
            self._record = RunRecord(call, self._params.min_workers, self._params.max_workers)
            self._records.write(self._record)
        self._keep_end(self._job)

    def _keep_end(self, job: ElasticJob) -> None:
        """Write the run's end down once there is one, so that it is not run again."""
        ended, record = job.ended, self._record

        def keep() -> None:
            ended.wait()
            with self._lock:
                if self._record is not None and record is not None and self._record.call == record.call:
                    self._record = replace(self._record, end=self._of_bounded_size(job.result()))
                    self._records.write(self._record)

        threading.Thread(target=keep, name="spotfleet-run-end", daemon=True).start()

    def _of_bounded_size(self, end: RunEnd) -> RunEnd:
        if len(connected_ray().cloudpickle.dumps(end)) <= MOST_BYTES:
            return end
        return RunEnd(error=SpotfleetError(
            f"{self._name!r} has ended, and its large results were lost with its coordinator",
            hint="write large results to files"))

    def progress(self, wait_s: float) -> RunProgress:
        """Wait up to `wait_s` for something new."""
        job = self._job
        if job is None:
            return RunProgress([], [], self._end)
        logs: list[Any] = []
        if not job.ended.is_set() or not job.logs.empty():
            try:
                logs.append(job.logs.get(timeout=wait_s)[1])
                while True:
                    logs.append(job.logs.get_nowait()[1])
            except queue.Empty:
                pass
        over = job.ended.is_set() and job.logs.empty()
        return RunProgress(logs[-MOST_LOGS:], list(job.changes), job.result() if over else None)

    def changes(self) -> list[str]:
        return list(self._job.changes) if self._job is not None else []

    def resize(self, min_workers: int | None, max_workers: int | None) -> ElasticParams:
        least = self._params.min_workers if min_workers is None else min_workers
        most = self._params.max_workers if max_workers is None else max_workers
        with self._lock:
            changed = replace(self._params, min_workers=least, max_workers=most)  # UsageError for impossible ones
            if self._job is not None:
                self._job.resize(min_workers, max_workers)
            self._params = changed
            if self._record is not None:
                self._record = replace(self._record, min_workers=least, max_workers=most)
                self._records.write(self._record)
        return changed

    def standing(self) -> RunStatus:
        job = self._job
        return job.standing() if job is not None else RunStatus("ended", str(self._end and self._end.error), 0, (), 0)

    def shutdown(self) -> None:
        with self._lock:
            self._record = None
        if self._job is not None:
            self._job.shutdown()


class DetachedRun:
    """A detached coordinator, as drivers use it. Calls wait while it is placed anew."""

    def __init__(self, name: str, handle: Any) -> None:
        self._name, self._handle = name, handle

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of `CoordinatorActor`; SpotfleetError once that has ended."""
        ray = connected_ray()
        while True:
            try:
                return ray.get(getattr(self._handle, method).remote(*args))
            except ray.exceptions.ActorUnavailableError:
                time.sleep(RETRY_S)
            except ray.exceptions.ActorDiedError as error:
                raise SpotfleetError(f"the executor {self._name!r} has ended", hint="start it again; with the same "
                                     "checkpoint_target it goes on from the newest checkpoint") from error

    def begin(self, function: bytes, args: bytes, kwargs: bytes) -> None:
        call = PackedCall(secrets.token_hex(8), function, args, kwargs)
        if call.size > MOST_BYTES:
            raise UsageError(f"the function of the detached run {self._name!r} and its arguments have "
                             f"{call.size >> 20} MiB, and {MOST_BYTES >> 20} are allowed",
                             hint="pass the path of the data, and read it in the function")
        self.ask("begin", call)

    def shutdown(self) -> None:
        """End the run, its workers and the coordinator."""
        ray = connected_ray()
        try:
            ray.get(self._handle.shutdown.remote())
        except ray.exceptions.RayActorError:
            pass  # lost at this moment: Ray ends its workers
        ray.kill(self._handle, no_restart=True)
        remove_all(self._name)


def create(name: str, *args: Any) -> DetachedRun:
    """Start a detached coordinator. UsageError if the name is in use."""
    ray = connected_ray()
    options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0,
               "resources": ON_THE_HEAD, "max_concurrency": CALLS, "max_restarts": -1}
    try:
        return DetachedRun(name, ray.remote(CoordinatorActor).options(**options).remote(
            name, secrets.token_hex(8), *args))
    except ValueError as error:
        raise UsageError(f"an executor named {name!r} exists already",
                         hint=f"ElasticExecutor.attach({name!r}), or another name") from error


def find(name: str) -> DetachedRun:
    """Return a detached coordinator. UsageError if there is none."""
    ray = connected_ray()
    try:
        return DetachedRun(name, ray.get_actor(name, namespace=NAMESPACE))
    except ValueError as error:
        raise UsageError(f"no executor named {name!r} runs on this cluster",
                         hint='start one with ElasticExecutor(..., detached="NAME")') from error
