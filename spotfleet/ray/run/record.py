"""Record of a detached run in Ray's control service, which a coordinator that is placed anew reads.

`begin` writes it, a resize and the run's end write it again, and `shutdown` removes it. It lives as long as the
cluster's head.
"""

from __future__ import annotations

import importlib
import pickle
from dataclasses import dataclass
from typing import Any

from spotfleet.ray.installed import connected_ray
from spotfleet.ray.run.elastic_job import RunEnd, TrainingCall

NAMESPACE = "spotfleet"


class SentValue:
    """A pickled value. To the process that receives it, it is the value itself."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return connected_ray().cloudpickle.loads, (self._data,)


@dataclass(frozen=True)
class PackedCall:
    """A user's function with its arguments, each pickled by the driver. Objects of Ray would be lost with it."""

    number: str  # one for each call to `run`: the same call sent again begins nothing
    function: bytes
    args: bytes
    kwargs: bytes

    @property
    def size(self) -> int:
        return len(self.function) + len(self.args) + len(self.kwargs)

    def owned_here(self) -> TrainingCall:
        """Put the parts into Ray's store, with this process as their owner."""
        ray = connected_ray()
        return TrainingCall(*(ray.put(SentValue(part)) for part in (self.function, self.args, self.kwargs)))


@dataclass(frozen=True)
class RunRecord:
    """Facts that a coordinator needs to go on with a run, or to return its end."""

    call: PackedCall
    min_workers: int
    max_workers: int | None
    end: RunEnd | None = None


class RecordStore:
    """The record of one executor. `token` differs for each executor of the same name."""

    def __init__(self, name: str, token: str) -> None:
        self._store = importlib.import_module("ray.experimental.internal_kv")
        self._key = f"{_prefix(name)}{token}"

    def write(self, record: RunRecord) -> None:
        data = connected_ray().cloudpickle.dumps(record)
        self._store._internal_kv_put(self._key, data, overwrite=True, namespace=NAMESPACE)

    def read(self) -> RunRecord | None:
        found = self._store._internal_kv_get(self._key, namespace=NAMESPACE)
        return pickle.loads(found) if found else None


def remove_all(name: str) -> None:
    """Remove the records of all executors of this name."""
    store = importlib.import_module("ray.experimental.internal_kv")
    store._internal_kv_del(_prefix(name), del_by_prefix=True, namespace=NAMESPACE)


def _prefix(name: str) -> str:
    return f"run/{name.encode().hex()}/"
