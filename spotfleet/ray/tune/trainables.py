"""`elastic` and Horovod's `DistributedTrainableCreator`: functions that train, as trainables of Ray Tune."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any

from spotfleet.errors import UsageError
from spotfleet.ray.functions import by_value, check_sendable
from spotfleet.ray.installed import load_tune
from spotfleet.ray.params import check_count, check_resources
from spotfleet.ray.tune.space import TrialSpace
from spotfleet.ray.tune.trial import ElasticPlan, trainable

# No CPU: a hundredth of one would take a worker's place on a node with a single CPU.
COORDINATOR = {"memory": 200 << 20}
PRICE_ENV = "SPOTFLEET_WORKER_USD_H"


def elastic(fn: Callable[..., Any], min_workers: int = 1, max_workers: int = 1, cpus_per_worker: float = 1,
            use_gpu: bool = False, *, gpus_per_worker: float | None = None, atoms: int | None = None,
            worker_usd_h: float | None = None, coordinator: dict[str, float] | None = None,
            env: dict[str, str] | None = None) -> type:
    """Return a trainable for `tune.Tuner`: `fn(config)` trains in each of a trial's workers, with `hvd.elastic.run`.

    A trial begins with `min_workers`, and is resized while it trains (`spotfleet.ray.tune.resize`, `GrowBest`, a
    "growth" in its config), up to `max_workers`. All trials together have at most `atoms` workers; None: as many as the
    cluster's nodes have room for. Trials without room wait for their turn. `worker_usd_h`, or the variable
    SPOTFLEET_WORKER_USD_H, is the price of one worker's place; with it each result has `cost_usd`. `coordinator`
    are the resources of each trial's own process. Raises UsageError for arguments out of range and for a function that
    cannot be sent to the workers.
    """
    load_tune()
    space = TrialSpace(min_workers, max_workers)
    check_resources(cpus_per_worker, use_gpu, gpus_per_worker)
    if atoms is not None:
        check_count("atoms", atoms)
        if atoms < min_workers:
            raise UsageError(f"atoms is {atoms} and min_workers is {min_workers}: no trial could begin",
                             hint="set atoms to the number of workers that all trials may have together")
    check_sendable(fn, (), {})
    _check_config(fn)
    with by_value(fn):
        function = importlib.import_module("ray.cloudpickle").dumps(fn)
    name = getattr(fn, "__name__", type(fn).__name__)
    plan = ElasticPlan(function, name, space, cpus_per_worker, use_gpu, gpus_per_worker, atoms or 0,
                     _price(worker_usd_h), dict(env or {}))
    return trainable(plan, dict(coordinator or COORDINATOR))


def DistributedTrainableCreator(
        func: Callable[..., Any], use_gpu: bool = False, num_hosts: int | None = None, num_slots: int | None = None,
        num_cpus_per_slot: float = 1, num_gpus_per_slot: float | None = None, num_workers: int | None = None,
        num_workers_per_host: int | None = None, num_cpus_per_worker: float | None = None, timeout_s: float = 30.0,
        replicate_pem: bool = False) -> type:
    """Return `func(config)` as a trainable with a fixed number of workers: hosts times slots, or `num_workers`.

    The names of both generations of Horovod. Ray places the workers and connects to its nodes itself, so `timeout_s`
    and `replicate_pem` are accepted and not used.
    """
    if num_workers is not None and num_hosts is not None:
        raise UsageError("DistributedTrainableCreator needs one of num_workers and num_hosts",
                         hint="num_workers=N, or num_hosts=N and num_slots=M")
    hosts, slots = num_hosts if num_hosts is not None else 1, num_slots or num_workers_per_host or 1
    check_count("num_hosts", hosts)
    workers = num_workers if num_workers is not None else hosts * slots
    check_count("num_workers", workers)
    cpus = num_cpus_per_slot if num_cpus_per_worker is None else num_cpus_per_worker
    return elastic(func, workers, workers, cpus, use_gpu, gpus_per_worker=num_gpus_per_slot)


def _check_config(fn: Callable[..., Any]) -> None:
    try:
        inspect.signature(fn).bind_partial({})
    except TypeError as error:
        raise UsageError(f"{fn!r} takes no argument", hint="def train(config): ...") from error


def _price(usd_h: float | None) -> int | None:
    """Return the price of one worker's place in micro-dollars an hour; None: unknown."""
    text = os.environ.get(PRICE_ENV, "") if usd_h is None else str(usd_h)
    if not text:
        return None
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if price < 0:
        name = PRICE_ENV if usd_h is None else "worker_usd_h"
        raise UsageError(f"{name} is {text!r}", hint="set it to dollars an hour, such as 0.35")
    return round(1e6 * price)
