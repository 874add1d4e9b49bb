"""Iterations that are computed again: put right before their first gradient, or found to be others than the first time.

- Values and schedulers that code changes before the gradient (`scheduler.step()`, `state.seen += n`) would change
  twice: the position was taken after the first change. They are put back to the values with which the function was
  called again.
- A function that begins at its first iteration again, though the state names a later one, ends with an error.
- Random numbers that differ from those of the first time are reported: they were drawn before the loop or after a step.

Threads: the main thread, or an autograd thread while the main thread waits in backward().
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from spotfleet.errors import UsageError
from spotfleet.train.comm.script_lines import running_loops, where_set
from spotfleet.train.state import hyper, rng
from spotfleet.train.state.hyper import PLAIN, copied


class Repeats:
    """Values of a state at the moments between which an iteration may change them."""

    def __init__(self) -> None:
        self._first: dict[str, Any] = {}  # plain values as the script built the state
        self._stateful: dict[str, Any] = {}  # state_dicts then, of objects that move with the loop
        self._at_step: dict[str, Any] = {}  # plain values at the end of the last step
        self._at_entry: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] | None = None
        self._drawn: tuple[Any, ...] = ()  # round, rank, world and generators at the newest first gradient

    def attached(self, state: Any) -> None:
        self._first = self._at_step = plain_values(state)
        self._stateful = {n: v.state_dict() for n, v in _loop_objects(state).items()}

    def step_ended(self, state: Any) -> None:
        self._at_step = plain_values(state)

    def entered(self, state: Any) -> None:
        """Note the values with which the function is called; UsageError if they cannot tell it where to go on."""
        position = state._position
        self._at_step = plain_values(state)
        self._at_entry = None
        if position.moved is None:
            return  # not of a gradient: nothing has been computed yet
        if position.version > 0 and self._is_still(state):
            names = ", ".join(f"state.{n} ({where_set(n)})" for n in self._counters())
            raise UsageError(f"{state.version} steps are applied, but {names} is as at the start, so the function "
                             "would begin with its first batch again",
                             hint="let the loop go on from the state: for state.step in range(state.step, STEPS); put "
                                  "steps that are undone into `with state.borrowed():`")
        self._at_entry = (plain_values(state), {n: v.state_dict() for n, v in _schedulers(state).items()},
                          {n: hyper.capture(o, {}) for n, o in state._optimizers.items()})

    def _counters(self) -> list[str]:
        return [n for n, v in self._first.items() if type(v) is int and v == 0 and n != "seed"]

    def _is_still(self, state: Any) -> bool:
        """Return whether no loop variable has moved since the state was built. Without one there is no telling."""
        return bool(self._counters()) and all(
            not _differ(v, self._first.get(n)) for n, v in plain_values(state).items()) and all(
            not _differ(v.state_dict(), self._stateful.get(n)) for n, v in _loop_objects(state).items())

    def first_gradient(self, state: Any, world: int, rank: int) -> tuple[str, ...]:
        """Put right what an iteration that is computed again has changed. Return the names of values that change
        between a step and the gradient that follows."""
        again, self._at_entry = self._at_entry, None
        position = state._position
        if again is None:
            moved = tuple(n for n, v in plain_values(state).items() if _differ(v, self._at_step.get(n)))
        else:
            moved = position.moved
            self._check_restart(state, again[0], world)
            if position.round > 0 or position.world == world:
                self._put_back(state, again, moved)
        self._compare_draws(state, world, rank, again is not None)
        return moved

    def _check_restart(self, state: Any, values: dict[str, Any], world: int) -> None:
        """Raise UsageError for an iteration before the one that is to be computed again. All that is known of the
        script's numbers are their first values, and which loops run over them."""
        if any(e.last_used for e in state._samplers):
            return
        now, loops = state.__dict__, running_loops(state)
        went_on = [n for n, v in values.items() if type(v) is int and v != self._first.get(n)]
        restarted = [n for n in went_on if now[n] == self._first.get(n)]
        moved = [n for n in loops if type(values.get(n)) is int and now[n] != values[n]]
        early = [n for n in moved if now[n] < values[n] and (n in restarted or state._position.world == world)]
        if (restarted and restarted == went_on) or (early and early == moved):
            names = early or restarted
            was = ", ".join(f"state.{n} = {values[n]}" for n in names)
            at = ", ".join(dict.fromkeys(loops.get(n) or where_set(n) for n in names))
            raise UsageError(f"the function was called with {was} and has begun again with its first batch, which is "
                             f"applied already: {at}", hint="let the loop go on from the state: "
                                                            "for state.step in range(state.step, STEPS)")

    def _put_back(self, state: Any, again: tuple[dict[str, Any], dict[str, Any], dict[str, Any]],
                  moved: tuple[str, ...]) -> None:
        values, schedulers, groups = again
        for name in moved:
            now = state.__dict__[name]
            if name in values and _differ(now, values[name]) and now != self._first.get(name):
                state.__dict__[name] = copied(values[name])
        late = [n for n, s in _schedulers(state).items() if _differ(s.state_dict(), schedulers[n])]
        for name in late:
            state._stateful[name].load_state_dict(schedulers[name])
        for name, held in groups.items() if late else ():
            if len(held) == len(state._optimizers[name].param_groups):
                hyper.put_back(state._optimizers[name], held)

    def _compare_draws(self, state: Any, world: int, rank: int, again: bool) -> None:
        before, now = self._drawn, (state._round, rank, world, rng.marks(state._generators))
        self._drawn = now
        if not again or not before or before[0] != now[0]:
            return
        known = before[3] if before[:3] == now[:3] else {}  # the global ones are seeded for a rank
        known.update((n, mark) for n, mark in before[3].items() if n.startswith("state."))
        differing = [n for n, mark in now[3].items() if n in known and not rng.same(known[n], mark)]
        if differing:
            print(f"spotfleet: iteration {state._round} is computed again, but has drawn other random numbers than "
                  f"the first time ({', '.join(differing)}): code draws before its loop, or after a step, as where a "
                  "batch is drawn one iteration ahead. Draw in the loop what an iteration uses, and call "
                  "state.commit() after other draws. See docs/commit.md, Random numbers", file=sys.stderr, flush=True)


def plain_values(state: Any) -> dict[str, Any]:
    own = state.__dict__
    return {n: own[n] for n in state._scalars if isinstance(own[n], PLAIN)}


def _schedulers(state: Any) -> dict[str, Any]:
    return {n: v for n, v in state._stateful.items() if isinstance(v, (LRScheduler, ReduceLROnPlateau))}


def _loop_objects(state: Any) -> dict[str, Any]:
    """Return the objects whose state may tell a loop where to go on: samplers, and those of the script."""
    return {n: v for n, v in state._stateful.items()
            if not isinstance(v, (LRScheduler, ReduceLROnPlateau, torch.amp.GradScaler)) and not n.startswith("_")}


def _differ(a: Any, b: Any) -> bool:
    try:
        return bool(a != b)
    except (RuntimeError, ValueError):  # tensors or arrays in it: taken for a change
        return True
