"""Commits in loops over a value of the state, in a job that copies: what comes after each.

    for state.i in range(state.i, N):   it begins with the value that the state has
        ...                             work: a gradient, or weights that change
        state.commit()                  this iteration is complete, so the copy names the next one
        ...                             work again: then the commit stood within the iteration

A commit that stands within an iteration, or before its count (`state.i += 1`), cannot be resumed from: an error says so
when the function is called with it. The loops are found in the text of the script; without that, and in loops over
other things, the copy has the values of the commit.

Threads: the main thread, or an autograd thread while the main thread waits in backward().
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from spotfleet.errors import UsageError
from spotfleet.train.comm.script_lines import Loop, header_of, loop_around

HINT = "make state.commit() the last line of the loop's body, after all values have been counted"


@dataclass
class _Run:
    """A `for` loop over a value of the state, in one call of the function."""

    loop: Loop
    begins_there: bool  # with the value that the state had
    steps: set[int]  # differences between its values so far

    @property
    def step(self) -> int | None:
        return next(iter(self.steps)) if len(self.steps) == 1 else None


@dataclass(frozen=True)
class _Commit:
    """The newest commit, if it has completed an iteration."""

    loop: Loop
    line: str
    name: str
    value: int


class CommitPlaces:
    """Places of the script's commits in its loops."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._fresh: set[str] = set()  # values set since the last work
        self._weights: tuple[int, ...] = ()  # counters of changes, at the last look
        self._newest: _Commit | None = None
        self._last: set[str] = set()  # lines of commits after which an iteration has done nothing more
        self._within: set[str] = set()  # and of those after which it has
        self._again: tuple[str, int, int | None] | None = None  # name, completed and next value of a call's first loop
        self._called_with: dict[str, int] = {}

    def entered(self, state: Any) -> None:
        """Note that the function is called; UsageError if the copy that it begins with cannot be resumed from."""
        position = state._position
        if position.unfit:
            raise UsageError(f"the function cannot go on from its newest commit: {position.unfit}", hint=HINT)
        self._runs, self._fresh, self._newest = {}, set(), None
        self._weights = _weights(state)
        self._again, self._called_with = position.completed, state.whole_numbers()

    def value_set(self, state: Any, name: str, before: Any, value: Any, frame: FrameType) -> None:
        self._look(state)
        if not state._optimizers:
            self.worked(state)
        self._fresh.add(name)
        loop = header_of(frame, name, state) if type(value) is int else None
        if loop is None:
            self._runs.pop(name, None)
            return
        run = self._runs.get(name)
        if run is None or run.loop != loop:
            self._check_begin(state, name, before, value, loop)
            self._runs[name] = _Run(loop, before == value, set())
        elif type(before) is int:
            run.steps.add(value - before)
        if self._newest is not None and self._newest.loop == loop:
            self._last.update({self._newest.line} - self._within)
            self._newest = None

    def _check_begin(self, state: Any, name: str, before: Any, value: int, loop: Loop) -> None:
        """Raise UsageError for a loop that begins with another iteration than the one after the commit."""
        again = self._again
        if again is None or again[0] != name:
            return
        self._again = None
        others = {n: v for n, v in state.whole_numbers().items() if n != name}
        if value == again[2] or any(self._called_with.get(n) != v for n, v in others.items()) or again[2] is None:
            return
        if value == again[1] or before == again[2]:
            raise UsageError(f"the newest commit has completed the iteration state.{name} = {again[1]}, but the loop "
                             f"begins with {value} again: {loop.line}",
                             hint=f"let it go on from the state: for state.{name} in range(state.{name}, STEPS)")

    def worked(self, state: Any) -> None:
        """Note a gradient or a step."""
        self._fresh.clear()
        newest = self._newest
        if newest is None or not newest.loop.is_running():
            return
        self._newest = None
        self._last.discard(newest.line)
        self._within.add(newest.line)
        if (held := state._copy) is not None and held.version == state._version:
            position = self._unfit(held.position, newest.name, newest.value, newest.line)
            state.mark(copy=replace(held, position=position), position=position)

    def _unfit(self, position: Any, name: str, value: int, line: str) -> Any:
        return replace(position, completed=None, scalars={**position.scalars, name: value},
                       unfit=f"state.commit() stands between the steps of one iteration of state.{name} ({line})")

    def is_unclear(self, state: Any) -> bool:
        """Return whether the commit at hand may stand within an iteration. A planned change must not interrupt there,
        unless no commit stands anywhere else."""
        self._look(state)
        found = loop_around()
        return (found is not None and found.commit not in self._last and not found.is_last
                and (found.commit not in self._within or bool(self._last)) and self._name(state, found) is not None)

    def describe(self, state: Any, position: Any) -> Any:
        """Return the position to resume from after the commit at hand."""
        self._look(state)
        self._newest = None
        found = loop_around()
        if found is None:
            return position
        for name, line in found.set_later(state):
            if name not in self._fresh and name in state.whole_numbers():
                return replace(position, unfit=f"state.{name} is set after state.commit(), in the same iteration "
                                               f"({found.commit} and {line})")
        name = self._name(state, found)
        if name is None:
            return position
        run, value = self._runs[name], position.scalars[name]
        if found.commit in self._within:
            return self._unfit(position, name, value, found.commit)
        self._newest = _Commit(found.loop, found.commit, name, value)
        step = found.step() or run.step
        following = None if step is None else value + step
        if run.begins_there and following is None:
            return replace(position, unfit=f"the loop over state.{name} has completed {value}, and what comes next is "
                                           f"not known ({run.loop.line})")
        scalars = {**position.scalars, name: following if run.begins_there else value}
        return replace(position, scalars=scalars, completed=(name, value, following))

    def _name(self, state: Any, found: Any) -> str | None:
        """Return the value over which the loop around the commit runs, if its iteration has worked."""
        names: Iterable[str] = (n for n, r in self._runs.items() if r.loop == found.loop and n not in self._fresh)
        whole = state.whole_numbers()
        return next((n for n in names if n in whole), None)

    def _look(self, state: Any) -> None:
        """Find work by optimizers that report none."""
        now = _weights(state)
        if now != self._weights:
            self._weights = now
            self.worked(state)


def _weights(state: Any) -> tuple[int, ...]:
    return tuple([p._version for m in state._modules.values() for p in m.parameters()])
