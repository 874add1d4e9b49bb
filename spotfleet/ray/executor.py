"""`ElasticExecutor` and `RayExecutor`, under the names of both generations of Horovod on Ray. See docs/ray.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from spotfleet.agent.processes.zygote import QUIET
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.protocol.ray_cluster import HEAD_AT
from spotfleet.ray.functions import by_value, check_sendable
from spotfleet.ray.installed import connected_ray
from spotfleet.ray.params import ElasticParams, RaySettings, check_count, create_settings
from spotfleet.ray.run import detached as detached_job
from spotfleet.ray.run.checkpoints import target_of
from spotfleet.ray.run.coordinator import RunStatus
from spotfleet.ray.run.elastic_job import ElasticJob, RunEnd, TrainingCall, pump
from spotfleet.ray.run.static_job import StaticJob

PROGRESS_S = 1.0
Callbacks = Sequence[Callable[[Any], Any]] | None


class ElasticExecutor:
    """Elastic training on a Ray cluster: workers that die, leave or come change the membership and end no run."""

    def __init__(self, settings: RaySettings | None = None, min_workers: int | None = None,
                 max_workers: int | None = None, use_gpu: bool = False, cpus_per_worker: float = 1,
                 gpus_per_worker: float | None = None, override_discovery: bool = True,
                 reset_limit: int | None = None, cooldown_range: tuple[float, float] | None = None,
                 elastic_timeout: float | None = None, detached: str = "", checkpoint_target: str = "",
                 checkpoint_every_s: float = 60.0) -> None:
        """`detached`: a name, under which the run outlives this driver; `attach` finds it again. `checkpoint_target`: a
        folder that all nodes have mounted, or a URL such as s3://BUCKET/RUN: a run begins with the newest checkpoint
        there, and goes back to it if all workers are lost."""
        self.settings = settings = settings or create_settings()
        least = min_workers if min_workers is not None else settings.min_num_proc
        self.params = ElasticParams(
            1 if least is None else least, max_workers if max_workers is not None else settings.max_num_proc,
            reset_limit if reset_limit is not None else settings.reset_limit, cooldown_range,
            elastic_timeout if elastic_timeout is not None else settings.elastic_timeout, override_discovery,
            checkpoint_target, checkpoint_every_s, cpus_per_worker, use_gpu, gpus_per_worker)
        target_of(checkpoint_target, checkpoint_every_s)  # refuses an impossible one
        if not override_discovery and settings.discovery is None:
            raise UsageError("override_discovery is False, and settings.discovery is not set",
                             hint="set settings.discovery, for instance to TestDiscovery(...), or leave it out")
        self.detached = detached
        self._local: ElasticJob | None = None
        self._remote: detached_job.DetachedRun | None = None

    create_settings = staticmethod(create_settings)

    @classmethod
    def attach(cls, name: str) -> ElasticExecutor:
        """Return the executor of a detached run that another driver has begun. Raises UsageError if there is none."""
        found = cls(detached=name)
        found._remote = detached_job.find(name)
        return found

    def start(self, executable_cls: type | None = None, executable_args: list | None = None,
              executable_kwargs: dict | None = None, extra_env_vars: dict[str, str] | None = None) -> None:
        """Ask Ray for the workers' actors, which get warm meanwhile."""
        if executable_cls is not None or executable_args or executable_kwargs:
            raise UsageError("an elastic executor keeps no object in its workers: start(executable_cls=...)",
                             hint="create the object inside the function that run() gets")
        ray = connected_ray()
        if self._local is not None or self._remote is not None:
            raise SpotfleetError("the executor was started already", hint="call shutdown() first")
        check_gpus(ray, self.params)
        discovery = None if self.params.override_discovery else self.settings.discovery
        made = self.params, environment(self.params, extra_env_vars), self.settings.verbose
        if self.detached:
            self._remote = detached_job.create(self.detached, *made, discovery)
        else:
            self._local = ElasticJob(*made, discovery)

    def run(self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None,
            callbacks: Callbacks = None) -> list[Any]:
        """Train with `fn(*args, **kwargs)` in all workers; return its values in the order of ranks.

        Each value that a worker logs by `ray_logger.log` is passed to each callback, here. A callback may call
        `resize`. An error that the function raises is raised here, with the worker's traceback as its cause. The value
        is None for a worker that was lost after training. Raises UsageError for a function that cannot be sent, and
        SpotfleetError where the run ends without a result: too few workers for `elastic_timeout`, more changes than
        `reset_limit`, losses in a row without a step, or a loss outside of `hvd.elastic.run`; also where
        `checkpoint_target` cannot be read.
        """
        ray, given, more = connected_ray(), tuple(args or ()), dict(kwargs or {})
        check_sendable(fn, given, more)
        with by_value(fn):
            if self._remote is not None:
                self._remote.begin(*(ray.cloudpickle.dumps(part) for part in (fn, given, more)))
            else:  # each worker that joins later gets the same object from the store
                self._job().begin(TrainingCall(*(ray.put(part) for part in (fn, given, more))))
        return self.result(callbacks)

    def result(self, callbacks: Callbacks = None) -> list[Any]:
        """Wait for the end of the run that is in progress, also of one that `attach` has found. Returns and raises as
        `run` does."""
        calls = list(callbacks or ())
        return (self._local_end(calls) if self._remote is None else self._remote_end(self._remote, calls)).get()

    def resize(self, min_workers: int | None = None, max_workers: int | None = None) -> None:
        """Change the limits while it trains. Workers join and leave at step boundaries; none repeats a step.

        Raises UsageError for a `max_workers` below the run's `min_workers`.
        """
        if self._remote is not None:
            self.params = self._remote.ask("resize", min_workers, max_workers)
        else:
            self.params = self._job().resize(min_workers, max_workers)

    def status(self) -> RunStatus:
        """Return the phase of the run, the reason for its wait, and its members."""
        if self._remote is not None:
            return self._remote.ask("standing")
        return self._job().standing()

    @property
    def changes(self) -> list[str]:
        """Each change of membership so far, in one line."""
        if self._remote is not None:
            return self._remote.ask("changes")
        return list(self._job().changes)

    def shutdown(self) -> None:
        """End all workers, and a detached run."""
        if self._remote is not None:
            self._remote.shutdown()
        elif self._local is not None:
            self._local.shutdown()
        self._local = self._remote = None

    def run_remote(self, *_: Any, **__: Any) -> None:
        raise UsageError("run_remote is not for an elastic executor: its workers change while it runs",
                         hint='use run(), or ElasticExecutor(..., detached="NAME") and result()')

    def execute_single(self, *_: Any, **__: Any) -> None:
        raise UsageError("execute_single is not for an elastic executor: its workers change while it runs",
                         hint="use run(), and hvd.rank() in the function")

    def _job(self) -> ElasticJob:
        if self._local is None:
            raise UsageError("the executor is not started", hint="call executor.start() first")
        return self._local

    def _local_end(self, callbacks: list[Callable[[Any], Any]]) -> RunEnd:
        job = self._job()
        pump(job, callbacks)
        return job.result()

    def _remote_end(self, remote: detached_job.DetachedRun, callbacks: list[Callable[[Any], Any]]) -> RunEnd:
        while True:
            progress: detached_job.RunProgress = remote.ask("progress", PROGRESS_S)
            for info in progress.logs:
                for callback in callbacks:
                    callback(info)
            if progress.end is not None:
                return progress.end


class ElasticRayExecutor(ElasticExecutor):
    """The names of Horovod's first generation: slots instead of workers."""

    def __init__(self, settings: RaySettings, use_gpu: bool = False, cpus_per_slot: float = 1,
                 gpus_per_slot: float | None = None, env_vars: dict[str, str] | None = None,
                 override_discovery: bool = True) -> None:
        super().__init__(settings, use_gpu=use_gpu, cpus_per_worker=cpus_per_slot, gpus_per_worker=gpus_per_slot,
                         override_discovery=override_discovery)
        self._env_vars = dict(env_vars or {})

    def start(self, executable_cls: type | None = None, executable_args: list | None = None,
              executable_kwargs: dict | None = None, extra_env_vars: dict[str, str] | None = None) -> None:
        super().start(executable_cls, executable_args, executable_kwargs, {**self._env_vars, **(extra_env_vars or {})})

    def run(self, worker_fn: Callable[..., Any], callbacks: Callbacks = None,  # type: ignore[override]
            args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None) -> list[Any]:
        return super().run(worker_fn, args, kwargs, callbacks)


class RayExecutor:
    """Static with `num_workers` (or hosts times workers per host), elastic with `min_workers`, as in Horovod."""

    def __init__(self, settings: RaySettings | None = None, num_workers: int | None = None,
                 num_hosts: int | None = None, num_workers_per_host: int = 1, cpus_per_worker: float = 1,
                 use_gpu: bool = False, gpus_per_worker: float | None = None, min_workers: int | None = None,
                 max_workers: int | None = None, reset_limit: int | None = None,
                 cooldown_range: tuple[float, float] | None = None, elastic_timeout: float | None = None,
                 override_discovery: bool = True, cpus_per_slot: float | None = None,
                 gpus_per_slot: float | None = None, num_slots: int | None = None) -> None:
        """`cpus_per_slot`, `gpus_per_slot` and `num_slots` are earlier names of the numbers per worker and host."""
        self.settings = settings or create_settings()
        cpus_per_worker = cpus_per_worker if cpus_per_slot is None else cpus_per_slot
        gpus_per_worker = gpus_per_worker if gpus_per_slot is None else gpus_per_slot
        num_workers_per_host = num_workers_per_host if num_slots is None else num_slots
        self.elastic: ElasticExecutor | None = None
        self._job_or_none: StaticJob | None = None
        if (num_workers is not None) + (num_hosts is not None) + (min_workers is not None) != 1:
            raise UsageError("RayExecutor needs one of num_workers, num_hosts and min_workers",
                             hint="num_workers=N for a fixed number, min_workers=N for an elastic one")
        if min_workers is not None:
            self.elastic = ElasticExecutor(self.settings, min_workers, max_workers, use_gpu, cpus_per_worker,
                                           gpus_per_worker, override_discovery, reset_limit, cooldown_range,
                                           elastic_timeout)
            return
        if max_workers is not None:
            raise UsageError("max_workers is for an elastic executor", hint="give min_workers in place of num_workers")
        count = num_workers if num_workers is not None else num_hosts
        check_count("num_workers" if num_workers is not None else "num_hosts", count)  # type: ignore[arg-type]
        check_count("num_workers_per_host", num_workers_per_host)
        total = count if num_workers is not None else count * num_workers_per_host  # type: ignore[operator]
        self.params = ElasticParams(total, total, cpus_per_worker=cpus_per_worker,  # type: ignore[arg-type]
                                    use_gpu=use_gpu, gpus_per_worker=gpus_per_worker)

    create_settings = staticmethod(create_settings)

    @property
    def num_workers(self) -> int:
        return self.elastic.params.min_workers if self.elastic is not None else self.params.min_workers

    def start(self, executable_cls: type | None = None, executable_args: list | None = None,
              executable_kwargs: dict | None = None, extra_env_vars: dict[str, str] | None = None) -> None:
        """Start all workers, and create `executable_cls(*args, **kwargs)` in each."""
        if self.elastic is not None:
            self.elastic.start(executable_cls, executable_args, executable_kwargs, extra_env_vars)
            return
        ray = connected_ray()
        if self._job_or_none is not None:
            raise SpotfleetError("the executor was started already", hint="call shutdown() first")
        check_gpus(ray, self.params)
        env = environment(self.params, extra_env_vars)
        self._job_or_none = StaticJob(self.params, env, self.settings.placement_timeout_s)
        with by_value(executable_cls):
            self._job.create(executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {}))

    def run(self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None,
            callbacks: Callbacks = None) -> list[Any]:
        """Call `fn(*args, **kwargs)` in all workers; return its values in the order of ranks."""
        if self.elastic is not None:
            return self.elastic.run(fn, args, kwargs, callbacks)
        return self._job.results(self.run_remote(fn, args, kwargs))

    def run_remote(self, fn: Callable[..., Any], args: Sequence[Any] | None = None,
                   kwargs: dict[str, Any] | None = None) -> list[Any]:
        """Call the function in all workers; return Ray's references to its values, in the order of ranks."""
        if self.elastic is not None:
            return self.elastic.run_remote()  # type: ignore[return-value]
        given, more = tuple(args or ()), dict(kwargs or {})
        check_sendable(fn, given, more)
        with by_value(fn):
            return self._job.call(connected_ray().put(fn), given, more)

    def execute(self, fn: Callable[[Any], Any], callbacks: Callbacks = None) -> list[Any]:
        """Call `fn(executable)` in all workers, with the object that `start` has created there."""
        if self.elastic is not None:
            return self.elastic.run(fn, (None,), None, callbacks)
        check_sendable(fn, (), {})
        with by_value(fn):
            return self._job.execute(fn)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call `fn(executable)` in rank 0's worker alone; return its value."""
        if self.elastic is not None:
            return self.elastic.execute_single()
        check_sendable(fn, (), {})
        with by_value(fn):
            return self._job.execute(fn, only=0)[0]

    def shutdown(self) -> None:
        if self.elastic is not None:
            self.elastic.shutdown()
        elif self._job_or_none is not None:
            self._job_or_none.shutdown()
            self._job_or_none = None

    @property
    def _job(self) -> StaticJob:
        if self._job_or_none is None:
            raise UsageError("the executor is not started", hint="call executor.start() first")
        return self._job_or_none


def environment(params: ElasticParams, more: dict[str, str] | None) -> dict[str, str]:
    """Return the variables that each actor sets before it imports torch."""
    threads = str(max(1, int(params.cpus_per_worker)))
    return {**QUIET, "OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", **(more or {})}


def check_gpus(ray: Any, params: ElasticParams) -> None:
    """Raise UsageError if GPUs are asked of a cluster that has none. On a fleet's own cluster a host with GPUs may come
    for the workers that wait."""
    if params.gpus and HEAD_AT not in os.environ and not ray.cluster_resources().get("GPU"):
        raise UsageError("use_gpu is set, and no node of the cluster has a GPU",
                         hint="leave use_gpu out, or add a node with GPUs")
