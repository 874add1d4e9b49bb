"""Iterations that are computed again: put right before their first gradient, or found to be others than the first time.

- Schedulers and values that code changes before the gradient (`scheduler.step()`, `state.seen += n`) would change
  twice: the position is taken after the change. Schedulers are put back at the gradient; no forward pass reads them.
- The forward pass may read a value. So a counter must begin with its value before the change, but a loop variable
  (`for state.i in range(state.i, N)`) with the present one. The gradient shows whether the choice was right: then each
  value equals that of the position.

      position: `tries`, values since the last step --> function called with the first one of each name
                        ^                                             |
                        '---- the first one is left out <-- differs --+-- equal --> training goes on

  The first guess is the value before a change at a place where a call of the function has changed it before its first
  gradient, too (`counted`). Only whole numbers are tried, which are equal on all ranks, so all ranks do the same. What
  still differs is put back at the gradient, and reported.
- Hyper-parameters that code changes before the gradient (`group["lr"] *= 0.9`) are put back there, too. At another
  world size they may have to be others: the function is called again with those that the last step left.
- A function that begins at its first iteration again, though the state names a later one, ends with an error.
- Random numbers that differ from those of the first time are reported: they were drawn before the loop or after a step.

Threads: the main thread, or an autograd thread while the main thread waits in backward().
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from spotfleet.errors import UsageError
from spotfleet.train.comm.script_lines import running_loops, where_set
from spotfleet.train.state import digest, hyper, rng
from spotfleet.train.state.hyper import PLAIN
from spotfleet.train.state.position import Position, Site

RUNTIME = "spotfleet.train.runtime"  # it calls the user's function
NOWHERE: Site = ()  # the gradient itself
DEPTH = 20  # the most nested calls of the script that identify a place


class Repeats:
    """Values of a state at the moments between which an iteration may change them."""

    def __init__(self) -> None:
        self._first: dict[str, Any] = {}  # plain values as the script built the state
        self._stateful: dict[str, Any] = {}  # state_dicts then, of objects that move with the loop
        self._at_step: dict[str, Any] = {}  # plain values at the end of the last step
        self._at_entry: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] | None = None
        self._drawn: tuple[Any, ...] = ()  # round, rank, world and generators at the newest first gradient
        self._changes: dict[str, dict[Site, Any]] = {}  # since the last step or the call: values before a change
        self._past: dict[str, dict[Site, Any]] = {}  # those of the newest iteration that has changed a value
        self._is_warned = False
        self._is_called = True  # no gradient has come since the function was called
        self._counted: tuple[tuple[str, Site], ...] = ()  # as in the position
        self._tries: tuple[tuple[str, Site, Any], ...] = ()
        self._moved: tuple[str, ...] = ()
        self._left: Any = None  # as in the position
        self._uncopied: tuple[int, Sequence[str]] = (-1, ())
        self.reported: tuple[str, ...] = ()  # values of this iteration that were put back, and may have been used

    def attached(self, state: Any) -> None:
        state._plain.note_groups()
        self._first = self._at_step = plain_values(state)
        self._stateful = {n: v.state_dict() for n, v in _loop_objects(state).items()}

    def step_ended(self, state: Any) -> None:
        self._at_step, self._changes = plain_values(state), {}

    def value_set(self, name: str, before: Any, value: Any) -> None:
        """Note that the script sets a value of the state. Outside of loops code runs once per call of the function."""
        if isinstance(before, PLAIN) and isinstance(value, PLAIN) and before != value:
            site, in_loop = site_of(sys._getframe(2))
            if in_loop:
                self._changes.setdefault(name, {}).setdefault(site, before)

    def entered(self, state: Any) -> None:
        """Note the values with which the function is called; UsageError if they cannot tell it where to go on."""
        position = state._position
        self._at_step, self._changes = plain_values(state), {}
        self._at_entry, self._is_called, self._counted, self._past = None, True, position.counted, {}
        for name, site, value in position.tries:
            self._past.setdefault(name, {}).update({site: value} if site else {})
        if position.moved is None:
            return  # not of a gradient: nothing has been computed yet
        if position.version > 0 and self._is_still(state):
            names = ", ".join(f"state.{n} ({where_set(n)})" for n in self._counters())
            raise UsageError(f"{state.version} steps are applied, but {names} is as at the start, so the function "
                             "would begin with its first batch again",
                             hint=("call record_batch() of the sampler after each step; " if any(
                                 e.last_used for e in state._samplers) else "") +
                             "let the loop go on from the state: for state.step in range(state.step, STEPS); put steps "
                             "that are undone into `with state.borrowed():`")
        if position.version > 0 and not self._is_warned and self.has_no_place(state):
            self._is_warned = True
            print(f"spotfleet: the function is called again with {state.version} steps applied, and the state has "
                  "nothing that tells its loop where to go on. A loop that counts by itself begins at its start: let "
                  "it go on from the state, for state.step in range(state.step, STEPS)", file=sys.stderr, flush=True)
        self._at_entry = (plain_values(state), {n: v.state_dict() for n, v in _schedulers(state).items()},
                          {n: hyper.capture(o, {}) for n, o in state._all_optimizers.items()})

    def _counters(self) -> list[str]:
        return [n for n, v in self._first.items() if type(v) is int and v == 0 and n != "seed"]

    def has_no_place(self, state: Any) -> bool:
        """Return whether the state has models, optimizers and schedulers alone."""
        return not (self._first.keys() - {"seed"} or _loop_objects(state) or state._generators
                    or len(state._scalars) > len(self._first))

    def _is_still(self, state: Any) -> bool:
        """Return whether no loop variable has moved since the state was built. Without one there is no telling."""
        return bool(self._counters()) and all(
            not differ(v, self._first.get(n)) for n, v in plain_values(state).items()) and all(
            not differ(v.state_dict(), self._stateful.get(n)) for n, v in _loop_objects(state).items())

    @property
    def is_again(self) -> bool:
        """Whether an iteration is computed again, and its first gradient has not come."""
        return self._at_entry is not None

    def first_gradient(self, state: Any, world: int, rank: int, tensors: Sequence[str] = ()) -> Position | None:
        """Put right what an iteration that is computed again has changed. Return None, or the position with which the
        function must be called again, since it was called with other values than it needs. `tensors` were others than
        the first time."""
        again, self._at_entry, self.reported = self._at_entry, None, ()
        position = state._position
        if again is None:
            moved = tuple(n for n, v in plain_values(state).items()
                          if n in self._changes or differ(v, self._at_step.get(n)))
            self._left = state._plain.left()
        else:
            moved, self._left = position.moved, position.left
            self._check_restart(state, again[0], world)
            if position.round > 0 or position.world == world:
                wrong = self._wrong(state, again[0], world)
                if (other := _next_try(position, wrong)) is not None:
                    return other
                wrong.update(self._changed_objects(state, world))
                self._report(state, wrong)
                state.__dict__.update(wrong)
            if (other := self._put_groups_back(state, again, world)) is not None:
                return other
            self._report_tensors(state, tensors)
        if self._is_called:
            self._is_called = False
            self._counted = tuple(dict.fromkeys(
                (*self._counted, *((n, site) for n, sites in self._changes.items() for site in sites))))
        self._past.update(self._changes)
        whole = state.whole_numbers()
        self._moved, self._tries = moved, tuple(
            t for n, v in plain_values(state).items() for t in self._tries_of(n, v, n in whole))
        self._compare_draws(state, world, rank, again is not None)
        return None

    def describe(self, position: Position) -> Position:
        """Return the position of the gradient at hand with what is known of its values."""
        return replace(position, moved=self._moved, counted=self._counted, tries=self._tries,
                       left=self._left)

    def _tries_of(self, name: str, now: Any, whole: bool) -> list[tuple[str, Site, Any]]:
        """Return values with which to call the function again, the likeliest first, and at the end the present one."""
        changes = self._past.get(name, {})
        guess = next((site for site in self._changes.get(name, {}) if (name, site) in self._counted), NOWHERE)
        others = [site for site in reversed(changes) if site != guess] if whole else []
        found = [(name, site, changes.get(site, now)) for site in (guess, *others)]
        return [*found, (name, NOWHERE, now)] if whole and changes else found

    def _wrong(self, state: Any, called: dict[str, Any], world: int) -> dict[str, Any]:
        """Return the values of the position that the iteration has not come to. Where nothing was applied yet, another
        world size may count by other amounts."""
        position, whole, wrong = state._position, state.whole_numbers(), {}
        recount = position.world != world and not state._replay
        tried = {n: (NOWHERE, called.get(n)) for n in position.moved}  # all, in earlier checkpoints
        tried.update((n, (site, v)) for n, site, v in reversed(position.tries))
        now_at = state.__dict__
        went_on = any(n in position.moved and not site and now_at[n] == self._first.get(n) != value
                      for n, (site, value) in tried.items())  # a loop that is shorter now, with the next one
        for name, (site, value) in tried.items():
            moved, changed, now = name in position.moved, self._changes.get(name, {}), now_at[name]
            expected = position.scalars[name] if value == called.get(name) else called.get(name)
            if not differ(now, expected) or now == self._first.get(name) != value or not (moved or changed):
                continue
            if recount and name in whole:
                right = (site in changed and (now > value) == (expected > value)) or (went_on and not (site or moved))
            else:
                right = recount and (site in changed or not moved)
            if not right:
                wrong[name] = expected
        return wrong

    def _changed_objects(self, state: Any, world: int) -> dict[str, Any]:
        """Return the values of the position for objects (lists, tensors, counters of the script) that are others now.
        Which code has changed them, and when, is not known. At another world size they may have to be others."""
        scalars = state._position.scalars
        if state._position.world != world and not state._replay:
            return {}
        held = {n: v for n, v in scalars.items() if not isinstance(v, PLAIN) and not state.per_rank.covers(n)}
        return {n: state.restored(n, v) for n, v in held.items()
                if digest.of_value(state.__dict__[n]) != digest.of_value(v)}

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

    def _report(self, state: Any, wrong: dict[str, Any]) -> None:
        """Report values that the forward pass may have used wrongly: whole numbers that no call has made right, and
        others whose change, in code that changes them now and then, has come as a surprise."""
        whole = state.whole_numbers()
        told = [n for n, v in wrong.items() if n in whole or (not state._replay and (not isinstance(v, PLAIN) or any(
            (n, site) not in self._counted for site in self._changes.get(n, {}))))]
        if told and not any(e.last_used for e in state._samplers):
            self.reported = tuple(told)
            names, at = ", ".join(f"state.{n}" for n in told), ", ".join(dict.fromkeys(map(where_set, told)))
            print(f"spotfleet: iteration {state._round} is computed again, but {names} was not what it was the first "
                  "time when its gradient began. It is put back, but the forward pass may have used another value. "
                  f"Change it after step(): {at}. See docs/commit.md, What your code must do", file=sys.stderr,
                  flush=True)

    def _report_tensors(self, state: Any, names: Sequence[str]) -> None:
        """Report tensors that no optimizer owns, where code has changed them before the gradient."""
        if names and not state._replay:
            tops = list(dict.fromkeys(n.partition(".")[0] for n in names))
            self.reported += tuple(names)
            print(f"spotfleet: iteration {state._round} is computed again, but {names[0]} was not what it was the "
                  "first time when its gradient began: code changes it before the gradient, and not in each iteration. "
                  f"It has its value again, but the forward pass may have used another. Change state.{tops[0]} "
                  f"({where_set(tops[0])}) after step(), or iterate with `for state.step in range(state.step, STEPS)`. "
                  "See docs/commit.md, What your code must do", file=sys.stderr, flush=True)

    def report_uncopied(self, round_: int, names: Sequence[str]) -> None:
        """Report tensors that cannot be put back for an iteration, once."""
        if names and self._uncopied != (round_, names):
            self._uncopied = (round_, names)
            print(f"spotfleet: iteration {round_} is computed again, which was the first one to change "
                  f"{', '.join(names[:3])}{', ...' if names[3:] else ''}: there is no copy yet, so where the change "
                  "depends on the earlier value it is made twice", file=sys.stderr, flush=True)

    def _put_groups_back(self, state: Any, again: tuple[dict[str, Any], dict[str, Any], dict[str, Any]],
                         world: int) -> Position | None:
        """Put schedulers and hyper-parameters back to those with which the function was called. Return None, or the
        position with which it must be called again, since it may set them by the world size."""
        position, (_, schedulers, groups) = state._position, again
        late = [n for n, s in _schedulers(state).items() if differ(s.state_dict(), schedulers[n])]
        for name in late:
            state._stateful[name].load_state_dict(schedulers[name])
        optimizers = state._all_optimizers
        changed = {(n, i, k) for n, held in groups.items()
                   for i, (group, now) in enumerate(zip(held, optimizers[n].param_groups, strict=False))
                   for k, v in group.items() if k != hyper.NAMES and digest.of_value(v) != digest.of_value(now.get(k))}
        if position.as_left or not changed:
            return None
        if position.world != world and not state._replay and not late:
            left = {(n, i, k): v for n, held in (position.left or {}).items() for (i, k), v in held.items()}
            return None if changed.isdisjoint(left) else replace(position, as_left=True, hyper={n: [
                {k: left[n, i, k] if (n, i, k) in changed & left.keys() else v for k, v in group.items()}
                for i, group in enumerate(held)] for n, held in position.hyper.items()})
        for name, held in groups.items():
            if len(held) == len(optimizers[name].param_groups):
                hyper.put_back(optimizers[name], held)
        return None

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


def _next_try(position: Position, wrong: Collection[str]) -> Position | None:
    """Return the position with the next values for the names in `wrong`; None if there are none left."""
    tries, failed = list(position.tries), []
    for name in wrong:
        own = [t for t in tries if t[0] == name]
        if len(own) > 1:
            tries.remove(own[0])
            failed.append(own[0][:2])
    if not failed:
        return None
    return replace(position, tries=tuple(tries), counted=tuple(c for c in position.counted if c not in failed))


def site_of(frame: FrameType | None) -> tuple[Site, bool]:
    """Return the place in the user's function at which `frame` is, the same in each process, and whether it is in a
    loop there."""
    found, in_loop = [], False
    while frame is not None and len(found) < DEPTH and frame.f_globals.get("__name__") != RUNTIME:
        code, at = frame.f_code, frame.f_lasti
        found.append((code.co_name, at))
        in_loop = in_loop or _is_in_loop(code, at)
        frame = frame.f_back
    return tuple(found), in_loop


class Head(NamedTuple):
    """The head of a loop that sets a value of the state first, as `for state.i in ...` does, in a frame that runs."""

    thread: int
    frame: int  # its id
    code: CodeType
    first: int  # offsets of the loop
    last: int


def head_of(frame: FrameType) -> Head | None:
    """Return the loop at whose head `frame` sets a value; None if it does not."""
    loop = _loop_headed(frame.f_code, frame.f_lasti)
    return Head(threading.get_ident(), id(frame), frame.f_code, *loop) if loop is not None else None


def is_running(head: Head | None) -> bool:
    """Return whether the loop goes on."""
    frame = sys._current_frames().get(head.thread) if head is not None else None
    while frame is not None and head is not None:
        if id(frame) == head.frame and frame.f_code is head.code and head.first < frame.f_lasti < head.last:
            return True
        frame = frame.f_back
    return False


@lru_cache(4096)
def _loop_headed(code: CodeType, at: int) -> tuple[int, int] | None:
    """Return the first and last offset of the `for` loop whose target, or first statement, is set at offset `at`."""
    for i in reversed([i for i in dis.get_instructions(code) if i.offset < at]):
        if i.opname == "FOR_ITER":
            return i.offset, i.argval
        if not i.opname.startswith(("LOAD_", "STORE_", "UNPACK_", "EXTENDED_ARG", "NOP", "CACHE")):
            return None
    return None


@lru_cache(4096)
def _is_in_loop(code: CodeType, at: int) -> bool:
    """Return whether `code` has a jump backwards over offset `at`."""
    jumps = {*dis.hasjrel, *dis.hasjabs}
    return any(i.opcode in jumps and i.argval <= at < i.offset for i in dis.get_instructions(code))


def plain_values(state: Any) -> dict[str, Any]:
    own = state.__dict__
    return {n: own[n] for n in state._scalars if isinstance(own[n], PLAIN)}


def _schedulers(state: Any) -> dict[str, Any]:
    return {n: v for n, v in state._stateful.items() if isinstance(v, (LRScheduler, ReduceLROnPlateau))}


def _loop_objects(state: Any) -> dict[str, Any]:
    """Return the objects whose state may tell a loop where to go on: samplers, and those of the script."""
    return {n: v for n, v in state._stateful.items()
            if not isinstance(v, (LRScheduler, ReduceLROnPlateau, torch.amp.GradScaler)) and not n.startswith("_")}


def differ(a: Any, b: Any) -> bool:
    try:
        return bool(a != b)
    except (RuntimeError, ValueError):  # tensors or arrays in it: taken for a change
        return True
