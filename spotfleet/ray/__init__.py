"""Elastic training on a Ray cluster: workers are Ray actors, and the runtime in them is the same as on a fleet.

    executor.py         ElasticExecutor and RayExecutor: the names of both generations of Horovod on Ray
    params.py           their parameters, checked; logger.py, discovery.py: Horovod's helpers
    run/elastic_job.py  loop of one elastic run, in the driver or in a detached actor (detached.py, record.py)
    run/static_job.py   fixed number of workers, which keep their processes over many calls
    run/coordinator.py  Membership with its workers' reports; line.py: the TCP server that they connect to. No Ray
    run/checkpoints.py  target of a run's checkpoints, and the newest one there
    run/staffing.py     which actors to ask for and to end. Pure
    run/pool.py         actors: requests for them, their ends and results; actors.py is the code that runs in them
    installed.py        Ray itself: installed, connected, of the same version on each node
    drains.py           private parts of Ray: nodes that drain
    functions.py        functions as they are sent to the workers

Ray is imported in functions only, so that this package can be imported without it.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    **dict.fromkeys(["ElasticExecutor", "ElasticRayExecutor", "RayExecutor"], "executor"),
    **dict.fromkeys(["ElasticParams", "RaySettings", "create_settings"], "params"),
    "TestDiscovery": "discovery",
    "ray_logger": "logger",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    value = module if name == "ray_logger" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
