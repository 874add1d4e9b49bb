"""Ray Tune over elastic trials: each trial's workers join and leave while it trains. See docs/ray.md.

    trainables.py   elastic and DistributedTrainableCreator: functions as trainables of Tune
    trial.py        coordinator of one trial, in the trial's process
    mailbox.py      results between the trial's workers and Tune
    worker.py       worker's side: report and get_checkpoint
    sizes.py        how many workers each trial may have: pure rules, and the actor that holds them
    grow.py         GrowBest: free atoms go to the best trials
    hypersched.py   HyperSched: the best trial by a deadline. Pure
    space.py        keys of a search space that `elastic` reads. Pure
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    **dict.fromkeys(["elastic", "DistributedTrainableCreator"], "trainables"),
    **dict.fromkeys(["report", "get_checkpoint"], "worker"),
    **dict.fromkeys(["resize", "SizesClient"], "sizes"),
    "GrowBest": "grow",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
