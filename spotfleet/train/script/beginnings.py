"""Loaders and loops that begin anew where training stands in the middle of an epoch, which only they knew.

    state.epoch = 3:  step  step  step --loss--> function called: state.epoch = 3, the loader's first batch

A position counts the steps (in copy mode: commits after steps) since anything in the state last said where the loop
stands (`still`). If there were some, a DataLoader that begins before the next gradient would train its first batches
again. A commit at an epoch's end has none: the next epoch is done again as a whole. In step mode so would the steps of
a `for` loop, or those one after the other in a loop over the state, which the first gradient of a call finds. A `while`
loop may go by the loss, and begins anew with each of its iterations.

Threads: the main thread, or an autograd thread while the main thread waits in backward().
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from spotfleet.errors import UsageError
from spotfleet.train.comm.script_lines import call_site, loop_around, running_loops


class Beginnings:
    """Loaders' beginnings in a call of the user's function, up to its first gradient."""

    def __init__(self) -> None:
        self.waits_for: Any = None  # position of the first gradient to come, if a loader must not begin before it

    def entered(self, state: Any) -> None:
        position = state._position
        self.waits_for = position if position.still > 0 and not state._samplers else None

    def describe(self, state: Any, position: Any, before: Any) -> Any:
        """Return `position` with the number of steps since one that was at another place."""
        place = _place(state, position)
        if place is None or before is None or place != _place(state, before):
            return position
        if state._loan is not None and state._loan.has_steps:
            return replace(position, still=-1)  # these steps are undone, so the next one is the first
        return replace(position, still=before.still + (position.version > before.version))

    def gradient_begins(self, state: Any) -> None:
        """Raise UsageError for the first gradient of a call in a loop that has begun again in its middle."""
        position, self.waits_for = self.waits_for, None
        if position is None or _place(state, state) != _place(state, position) or state._repeats.has_no_place(state):
            return
        around, loops = loop_around(), running_loops(state)
        if around is None or not around.is_for or "version" in loops or any(
                isinstance(position.scalars.get(n), float) for n in loops):
            return
        raise UsageError(f"the function was called again, and {around.loop.line} has begun with its first step, but "
                         f"training stands {position.still} or more steps behind that, and the state "
                         f"({_numbers(position)}) does not name the step",
                         hint="let the state name each step: for state.batch in range(state.batch, BATCHES), with "
                              "state.batch = 0 at the end of an epoch")

    def loader_begins(self, state: Any) -> None:
        """Raise UsageError for a loader that begins in the middle of its epoch."""
        position = self.waits_for
        if position is None or _place(state, state) != _place(state, position) or "version" in running_loops(state):
            return
        raise UsageError(f"a loader begins anew at {call_site()}, but training stands {position.still} or more steps "
                         f"behind its first batch, and the state ({_numbers(position)}) does not name the batch",
                         hint="draw from hvd.elastic.ElasticSampler, kept in the state, with record_batch() after each "
                              "step; or let the state name the batch: for state.batch in range(state.batch, BATCHES)")


def _numbers(position: Any) -> str:
    numbers = [f"state.{n} = {v}" for n, v in position.scalars.items() if type(v) is int and n != "seed"]
    return ", ".join(numbers) or "without a number"


def _place(state: Any, position: Any) -> dict[str, Any] | None:
    """Return the values that may name a batch, in a position or the state itself; None if that cannot be compared."""
    live = position is state
    values = {n: state.__dict__[n] for n in state._scalars} if live else position.scalars
    objects = {n: v for n, v in state._stateful.items()
               if not isinstance(v, LRScheduler | ReduceLROnPlateau) and type(v).__name__ != "GradScaler"
               and not n.startswith("_")}
    if objects or not all(isinstance(v, bool | int | float | str | None) for v in values.values()):
        return None
    return {n: v for n, v in values.items() if not isinstance(v, float) and not state.per_rank.covers(n)}


def watch_loaders(begins: Callable[[], None]) -> None:
    """Call `begins` whenever a DataLoader begins. A repeated call does nothing."""
    loader: Any = DataLoader
    iterate = loader.__iter__
    if hasattr(iterate, "__wrapped__"):
        return

    @functools.wraps(iterate)
    def __iter__(self: Any) -> Any:
        begins()
        return iterate(self)

    loader.__iter__ = __iter__
