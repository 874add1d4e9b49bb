"""Coordinator of one elastic trial, in the trial's own process: its workers are actors beside it.

    sizes.py: size --> begin the job, or resize it        results --> mailbox.py --> Tune
    cleanup: the job ends with its workers, and the trial leaves

Tune's own thread calls `next`, `save` and `close`; `_follow` is a thread of its own.
"""

from __future__ import annotations

import base64
import importlib
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from spotfleet.ray.executor import check_gpus, environment
from spotfleet.ray.installed import connected_ray
from spotfleet.ray.params import ElasticParams
from spotfleet.ray.run.elastic_job import ElasticJob, TrainingCall
from spotfleet.ray.tune.mailbox import Mailbox, TrialReport
from spotfleet.ray.tune.sizes import SizesClient, TrialClaim
from spotfleet.ray.tune.space import TrialSpace
from spotfleet.ray.tune.worker import TrialPlace, train_in_trial

FOLLOW_S = 1.0  # the longest wait for a new size
SAVE_LIMIT_S = 600.0  # for the function to come to its next report, and to write a checkpoint
INLINE_BYTES = 64 << 10  # below Ray's own limit (max_direct_call_object_size)
MICRO = 1e-6


@dataclass(frozen=True)
class ElasticPlan:
    """What `elastic` got, as the trials' processes receive it."""

    function: bytes  # by cloudpickle
    name: str
    space: TrialSpace
    cpus_per_worker: float
    use_gpu: bool
    gpus_per_worker: float | None
    atoms: int
    worker_micros_h: int | None  # price of one worker's place, in micro-dollars
    env: dict[str, str]


class TrialRun:
    """Training of one trial, from its first atoms to the end of its workers."""

    def __init__(self, plan: ElasticPlan, config: dict[str, Any], given: dict[str, Any], place: TrialPlace) -> None:
        self._plan, self._config, self._given, self._place = plan, config, given, place
        self._space = plan.space.of(config)
        self.checkpoint: Any = None  # the one to begin from: of `restore`, or the newest that was reported
        self._mailbox = Mailbox(place.storage.current_checkpoint_index + 1, self._newest, self._rank_0)
        params = ElasticParams(self._space.min_workers, self._space.max_workers, pace=self._space.pace,
                               cpus_per_worker=plan.cpus_per_worker, use_gpu=plan.use_gpu,
                               gpus_per_worker=plan.gpus_per_worker)
        check_gpus(connected_ray(), params)
        self._params = params
        self._sizes = SizesClient()
        self._claim = TrialClaim(place.trial_id, params.min_workers, params.max_workers, 0, plan.atoms,
                                 params.cpus_per_worker, params.gpus, uuid.uuid4().hex, name=place.trial_name)
        self._earlier_s = 0.0
        self._job: ElasticJob | None = None
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="spotfleet-trial-size", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def next(self, iteration: int) -> TrialReport | None:
        """Return the next result, the trial's `iteration`-th; None after the function's end. Raises its error."""
        workers = self._space.growth.get(iteration, 0)
        if workers:
            self._sizes.wish(self._place.trial_id, workers)
        found = self._mailbox.next(self._ended)
        if found is not None:
            if found.checkpoint:
                self.checkpoint = self._at(found.checkpoint)
            return replace(found, metrics={**found.metrics, **self.usage()})
        if self._failure is not None:
            raise self._failure
        assert self._job is not None
        self._job.result().get()
        return None

    def save(self) -> Any:
        """Return the checkpoint of the newest result, or of the next one if the function writes it when asked."""
        if self._mailbox.saves and (path := self._mailbox.save(self._ended, SAVE_LIMIT_S)):
            self.checkpoint = self._at(path)
        return self.checkpoint

    def usage(self) -> dict[str, Any]:
        """Return the number of workers that train, and the cost of the trial so far."""
        job = self._job
        worker_s = self._earlier_s + (job.worker_s() if job is not None else 0.0)
        found: dict[str, Any] = {"workers": len(job.standing().members) if job is not None else 0,
                                 "worker_s": round(worker_s, 3)}
        price = self._plan.worker_micros_h
        return found if price is None else {**found, "cost_usd": round(MICRO * price * worker_s / 3600, 6)}

    def close(self) -> None:
        """End the workers, and give the atoms back."""
        self._stop.set()
        self._mailbox.close()
        if self._job is not None:
            self._job.shutdown()
        if self._thread.is_alive():
            self._thread.join()  # it may have begun the job meanwhile
            if self._job is not None:
                self._job.shutdown()
        self._sizes.leave(self._current_claim())

    # The thread

    def _follow(self) -> None:
        known = 0
        try:
            self._earlier_s = self._sizes.spent_s(self._place.trial_id)
            while not self._stop.is_set():
                size = self._sizes.claim(self._current_claim(), known, FOLLOW_S)
                if self._stop.is_set() or not size:
                    continue  # it waits for its first atoms, or another actor has forgotten it and will learn of it
                if self._job is None:
                    self._begin(size)
                elif size != known:
                    self._job.resize(None, size)
                known = size
                self._claim = replace(self._claim, holds=size)
        except Exception as error:  # noqa: BLE001 - `next` raises it
            self._failure = error
            self._mailbox.wake()

    def _begin(self, size: int) -> None:
        ray, plan = connected_ray(), self._plan
        params = replace(self._params, max_workers=size)
        job = ElasticJob(params, environment(params, plan.env), on_log=self._mailbox.receive)
        args = plan.function, self._config, self._given, self._place
        job.begin(trial_call(args, importlib.import_module("ray.cloudpickle").dumps, ray.put))
        self._job = job

    def _current_claim(self) -> TrialClaim:
        if self._job is None:
            return self._claim
        return replace(self._claim, worker_s=self._job.worker_s(), nodes=self._job.places())

    def _ended(self) -> bool:
        return self._failure is not None or (self._job is not None and self._job.ended.is_set())

    def _rank_0(self) -> str:
        members = self._job.standing().members if self._job is not None else ()
        return members[0] if members else ""

    def _newest(self) -> str:
        """Return the checkpoint to begin from, as text: also for workers that replace others that were all lost."""
        if self.checkpoint is None:
            return ""
        return base64.b64encode(importlib.import_module("ray.cloudpickle").dumps(self.checkpoint)).decode()

    def _at(self, path: str) -> Any:
        tune = importlib.import_module("ray.tune")
        return tune.Checkpoint(path=path, filesystem=self._place.storage.storage_filesystem)


def trial_call(args: tuple[Any, ...], pickled: Callable[[Any], bytes], put: Callable[[Any], Any]) -> TrainingCall:
    """Return the call of a trial's workers; large arguments are put into Ray's object store.

    Small ones come with each call: a raylet asks every node that has had a copy of an object, and waits for 10 s for a
    lost one, which would delay the trial whose only worker was there.
    """
    return TrainingCall(train_in_trial, args if len(pickled(args)) <= INLINE_BYTES else put(args), {})


def trainable(plan: ElasticPlan, coordinator: dict[str, float]) -> type:
    """Return the class of Ray Tune's that runs these trials."""
    tune = importlib.import_module("ray.tune")
    functions = importlib.import_module("ray.tune.trainable.function_trainable")
    results = importlib.import_module("ray.tune.result")
    outcome: Callable[..., Any] = importlib.import_module("ray.train._internal.checkpoint_manager")._TrainingResult

    class ElasticTrial(functions.FunctionTrainable):  # type: ignore[name-defined, misc]
        """One trial. As a function's: its checkpoints lie on the experiment's storage already."""

        _name = plan.name

        @classmethod
        def default_resource_request(cls, config: dict[str, Any]) -> Any:
            return tune.PlacementGroupFactory([coordinator])

        def setup(self, config: dict[str, Any], **given: Any) -> None:
            place = TrialPlace(self.trial_id, self.trial_name, self._storage.experiment_dir_name, self._storage)
            self._run = TrialRun(plan, config, given, place)
            self._began = False
            self._metrics: dict[str, Any] = {}

        def step(self) -> dict[str, Any]:
            if not self._began:
                self._began = True
                self._run.start()
            found = self._run.next(self.iteration + 1)
            if found is None:
                return {results.RESULT_DUPLICATE: True, "done": True}
            self._metrics = dict(found.metrics)
            if found.checkpoint:
                self._metrics[results.SHOULD_CHECKPOINT] = True
            return self._metrics

        def save_checkpoint(self, checkpoint_dir: str = "") -> Any:
            return outcome(checkpoint=self._run.save() if self._began else self._run.checkpoint,
                           metrics=dict(self._metrics))

        def load_checkpoint(self, checkpoint: Any) -> None:
            self._run.checkpoint = checkpoint.checkpoint

        def cleanup(self) -> None:
            self._run.close()

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            self._run.close()
            self.setup(new_config)
            return True
    ElasticTrial.__name__ = ElasticTrial.__qualname__ = plan.name
    return ElasticTrial
