"""Worker's side of an elastic trial: results and checkpoints on their way to Ray Tune.

The function that trains calls `report` and `get_checkpoint` of this module, or those of `ray.tune`: the latter find a
`TrialSession` in the place of Ray's own, a private part of Ray which tests/ray try with each version.
"""

from __future__ import annotations

import base64
import importlib
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.ray import logger

ANSWER_S = 60.0
_session: TrialSession | None = None


@dataclass(frozen=True)
class TrialPlace:
    """Names of a trial, and its folder on the experiment's storage (Ray's StorageContext)."""

    trial_id: str
    trial_name: str
    experiment_name: str
    storage: Any


class TrialSession:
    """Connection of one worker to its trial, with the attributes that `ray.tune` reads in a worker."""

    world_rank = None  # tells Ray that this is no worker of Ray Train
    trial_resources = None

    def __init__(self, place: TrialPlace) -> None:
        self.place = place
        self.trial_id, self.trial_name, self.experiment_name = place.trial_id, place.trial_name, place.experiment_name
        self.run_id = place.trial_id
        self.trial_dir = place.storage.trial_working_directory

    @property
    def loaded_checkpoint(self) -> Any:
        """The checkpoint to begin from, or None."""
        found = logger.send({"tune": "restore"}, ANSWER_S)
        return _cloudpickle().loads(base64.b64decode(found)) if found else None

    def report(self, metrics: dict[str, Any], checkpoint: Any = None) -> None:
        if not isinstance(metrics, dict):
            raise UsageError(f"report({metrics!r}): not a dict", hint='tune.report({"loss": 0.1})')
        if _rank() != 0:
            return
        if checkpoint is None:
            self._send(metrics, "", saves=False)
            return
        if not callable(checkpoint):
            if not hasattr(checkpoint, "filesystem"):
                raise UsageError(f"report(checkpoint={checkpoint!r}): neither a Checkpoint nor a function",
                                 hint="tune.Checkpoint.from_directory(folder), or a function that writes a folder")
            index = logger.send({"tune": "index"}, ANSWER_S)
            self._send(metrics, self._persist(checkpoint, index), saves=False)
            return
        answer = self._send(metrics, "", saves=True)
        if answer["save"] is not None:
            with tempfile.TemporaryDirectory() as folder:
                checkpoint(folder)
                if not any(Path(folder).iterdir()):
                    raise SpotfleetError("the function that report() got as `checkpoint` has written no file",
                                         hint="write the model into the folder that it is called with")
                made = importlib.import_module("ray.tune").Checkpoint.from_directory(folder)
                logger.send({"tune": "saved", "checkpoint": self._persist(made, answer["save"])}, ANSWER_S)

    def _send(self, metrics: dict[str, Any], checkpoint: str, saves: bool) -> Any:
        return logger.send({"tune": "report", "metrics": metrics, "checkpoint": checkpoint, "saves": saves}, ANSWER_S)

    def _persist(self, checkpoint: Any, index: int) -> str:
        """Copy a checkpoint to the experiment's storage; return its path there."""
        self.place.storage.current_checkpoint_index = index
        path: str = self.place.storage.persist_current_checkpoint(checkpoint).path
        return path


def report(metrics: dict[str, Any], *, checkpoint: Any = None) -> None:
    """Pass a result of rank 0 to Ray Tune; does nothing on the other ranks. Returns once Tune has decided on it.

    `checkpoint` is a `ray.tune.Checkpoint`, which is written each time, or a function: it is called with a folder, and
    only when Tune asks for a checkpoint (PBT copies the trial, or the trial is paused).
    """
    _current().report(metrics, checkpoint)


def get_checkpoint() -> Any:
    """Return the `ray.tune.Checkpoint` from which the function should go on, or None."""
    return _current().loaded_checkpoint


def train_in_trial(function: bytes, config: dict[str, Any], given: dict[str, Any], place: TrialPlace) -> Any:
    """Run the function in a worker of a trial."""
    global _session
    _session = TrialSession(place)
    importlib.import_module("ray.train._internal.session")._session = _session
    train: Callable[..., Any] = _cloudpickle().loads(function)
    return train(config, **given)


def _current() -> TrialSession:
    if _session is None:
        raise UsageError("this process is no worker of a trial",
                         hint="call it in the function that spotfleet.ray.tune.elastic() got")
    return _session


def _rank() -> int:
    train = sys.modules.get("spotfleet.train")
    if train is None or not train.is_initialized():
        raise UsageError("tune.report() before hvd.init()", hint="call hvd.init() first in the function")
    rank: int = train.rank()
    return rank


def _cloudpickle() -> Any:
    return importlib.import_module("ray.cloudpickle")
