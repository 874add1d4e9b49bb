"""The elastic training runtime: `import spotfleet.train as hvd`. Names are Horovod's where it has one.

Needs torch and the standard library; nothing is imported before the first name is used.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    **dict.fromkeys(["init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank",
                     "cross_size"], "process"),
    **dict.fromkeys(["DistributedOptimizer", "Average", "Sum", "Min", "Max", "Compression"],
                    "spotfleet.train.gradients.optimizer"),
    **dict.fromkeys(["allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce",
                     "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "synchronize",
                     "poll"], "reductions"),
    **dict.fromkeys(["allgather", "allgather_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
                     "broadcast_object", "allgather_object", "broadcast_parameters", "broadcast_optimizer_state",
                     "barrier"], "collectives"),
    **dict.fromkeys(["mpi_built", "mpi_enabled", "mpi_threads_supported", "gloo_built", "gloo_enabled", "nccl_built",
                     "ddl_built", "ccl_built", "cuda_built", "rocm_built"], "features"),
    **dict.fromkeys(["CommBroken", "MembershipChanged", "HorovodInternalError", "HostsUpdatedInterrupt"],
                    "spotfleet.worker.errors"),
    "elastic": "",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = _MODULES[name]
    module = importlib.import_module(place if "." in place else f"{__name__}.{place or name}")
    value = getattr(module, name) if place else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
