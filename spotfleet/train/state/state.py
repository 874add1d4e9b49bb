"""Training state that survives changes of membership: tensors at a version, and the position that belongs to them.

    version k            optimizer steps applied to the tensors (in copy mode: commits made)
    position             scalars, state_dicts and hyper-parameters as they were when gradient k+1 began; it may be
                         one older than the version: then `replay` is 1, and that iteration runs again without its step
    round                iterations, each from the end of one step to the end of the next; it equals the version. Some
                         reduce several times, as where code accumulates gradients without no_sync()

The contents of the state choose one of two modes, so every rank has the same:

- step mode, exactly one optimizer, which is a DistributedOptimizer: the tensors are never copied. `commit()` is free.
- copy mode, everything else: `commit()` agrees with all ranks by an allreduce of two flags and copies everything, and
  a planned change interrupts there. After a failure the newest copy that a survivor holds is restored.

Threads: the main thread; `round_begins` and `round_ended` also run on an autograd thread while the main thread waits.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from spotfleet.errors import UsageError
from spotfleet.train import current
from spotfleet.train.gradients.optimizer_tag import handle_of, is_distributed
from spotfleet.train.script.beginnings import Beginnings
from spotfleet.train.script.commits import CommitPlaces
from spotfleet.train.state import hyper, rng
from spotfleet.train.state.buffers import Extras, overwrite
from spotfleet.train.state.copies import BufferPool, await_copies
from spotfleet.train.state.hyper import copied, params_of
from spotfleet.train.state.plain import PlainValues, copied_value, is_plain, restored
from spotfleet.train.state.position import Copy, PerRank, Position
from spotfleet.train.state.repeats import Repeats, differ, head_of, is_running, site_of
from spotfleet.train.state.tensors import LiveTensors
from spotfleet.train.state.weights import STEPLESS, StateLoan, StateMarks, WeightMarks


class State(LiveTensors):
    """Named values that survive changes of membership; see TorchState."""

    per_rank: PerRank

    def __init__(self, *, per_rank: Iterable[str] = (), **values: Any) -> None:
        self.__dict__.update(per_rank=PerRank(per_rank, values), _digest_task=None)
        self.__dict__.update(_names=tuple(values), _callbacks=[], _modules={}, _optimizers={}, _stateful={},
                             _generators={})
        for name, value in values.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(f"state: {name!r} is a name of the State itself", hint="choose another keyword")
            self._register(name, value)
            self.__dict__[name] = value
        self.__dict__["_all_optimizers"] = hyper.with_inner(self._optimizers)
        tracked = frozenset([*self._modules, *self._optimizers, *self._stateful, *self._generators])
        self.__dict__.update(
            _tracked=tracked, _scalars=tuple(n for n in values if n not in tracked), _generator_states={},
            _version=0, _round=0, _held=False, _damaged=False, _finished=False, _replay=0, _replaying=False,
            _computed=-1, _position=None, _final=None, _copy=None, _extras=None, _uncommitted=0, _owned=0, _made_in=0,
            _pool=BufferPool(), _open=False, _rounds=0, _marks=WeightMarks(), _touches=StateMarks(), _moved=0,
            _plain=PlainValues(self._all_optimizers, self._modules), _repeats=Repeats(), _tensor_copies={}, _live={},
            _call_again=False, _copies=False, _loan=None, _commits=CommitPlaces(), _beginnings=Beginnings(),
            _head=None, _sources={},
        )

    def _register(self, name: str, value: Any) -> None:
        if isinstance(value, torch.nn.Module):
            self._modules[name] = value
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizers[name] = value
        elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            self._stateful[name] = value
        elif rng.is_generator(value):
            self._generators[name] = value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._tracked and value is not self.__dict__[name]:
            raise UsageError(f"state.{name} cannot be replaced while it is tracked",
                             hint=f"load into it: state.{name}.load_state_dict(...), or seed it anew")
        before, self.__dict__[name] = self.__dict__.get(name), value
        if self._extras is not None:
            self._note_place(name, value, sys._getframe(1))
            if name in self._scalars:
                self._repeats.value_set(name, before, value)
                if not self.step_mode:
                    self._commits.value_set(self, name, before, value, sys._getframe(1))

    def _note_place(self, name: str, value: Any, frame: FrameType) -> None:
        """Note that the script sets a value: at the head of a loop, or before its loop."""
        head = head_of(frame)
        if head is not None:
            is_again = self._repeats.is_again and _is(self._position.scalars.get(name), value)
            self._extras.loop_begins(self._round, self._position.moments if is_again else None)
            self.__dict__["_head"] = head
        elif self._extras.awaits_gradient and not site_of(frame)[1]:
            self._extras.values_set(self._round)

    # Called by a script

    def commit(self) -> None:
        """Mark this point as one to resume from. Free in step mode; see the module's docstring for copy mode."""
        if self.step_mode:
            self.keep_generators()
            current.runtime().restart_draws()
        else:
            current.runtime().commit_copy(self)

    def check_host_updates(self) -> None:
        """Leave the function here, on all ranks at once, if a change waits: for long stretches without a gradient."""
        current.runtime().check_change()

    def restore(self) -> None:
        """Go back: in copy mode to the last commit, in step mode to where the current iteration began."""
        self.drop_gradients()
        if self._copy is not None and not self.step_mode:
            self.install(self._copy)
        elif self._position is not None:
            self.rewind(self._position)

    def save(self) -> None:
        """Copy the state in copy mode, without a check for changes (Horovod's name); changes interrupt elsewhere."""
        if not self.step_mode:
            place = current.runtime().place
            self.keep_copy(place.size, place.rank, commits=True)

    def sync(self) -> None:
        """Bring all ranks of the generation to the newest state; `elastic.run` calls it."""
        if self._position is None:
            raise UsageError("state.sync() is called before elastic.run, which calls it",
                             hint="leave it out, or call it in the function decorated with @hvd.elastic.run")
        current.runtime().sync(self)

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Call these, in order, whenever the world size or a rank has changed and the state is in place."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self.reset()
        for callback in self._callbacks:
            callback()

    def reset(self) -> None:
        """Prepare for a new world size or rank. For subclasses; called before the reset callbacks."""

    @contextmanager
    def borrowed(self, restore: bool = True) -> Iterator[None]:
        """Use the weights for something else inside this context: a second gradient at other weights, noise, averaged
        weights for an evaluation, steps of a search for a learning rate.

        The parameters are copied, and written back at the end. With `restore=False` they are written back only when an
        exception ends the context, a change of membership for instance. Steps made inside are undone, too, with all
        that they changed. Outside of this context the weights are copied at each step, once such code has been seen.
        """
        if self._loan is not None:
            raise UsageError("state.borrowed() is entered inside another", hint="use one around both")
        loan = StateLoan(self)
        self.mark(loan=loan)
        self._marks.borrows += 1
        try:
            yield
            if restore:
                self._put_back(loan)
        except BaseException:
            self._put_back(loan)
            raise
        finally:
            self._marks.borrows -= 1
            self.mark(loan=None)

    def _put_back(self, loan: StateLoan) -> None:
        loan.put_back(self)
        await_copies()  # a checkpoint may copy from the loan
        self._marks.returned(self._trained, loan.marks, loan.has_steps)
        self._touches.returned(self._optimizer_states, loan.touches, loan.has_steps)

    @property
    def is_replay(self) -> bool:
        """Whether this iteration has been applied before, so that its `step()` does nothing: for code that counts or
        logs. It is computed again because a collective after the step failed."""
        return self._replay > 0

    # Called by the runtime

    @property
    def step_mode(self) -> bool:
        optimizers = list(self._optimizers.values())
        return len(optimizers) == 1 and is_distributed(optimizers[0]) and not self._copies

    @property
    def _trained(self) -> list[torch.Tensor]:
        return [p for o in self._optimizers.values() for p in params_of(o)]

    @property
    def _optimizer_states(self) -> list[Any]:
        return [o.state for o in self.owners().values()]

    @property
    def has_moved(self) -> bool:
        """Whether code of the script has changed weights or optimizer state, which belong to no version therefore."""
        began = self._version > 0 or self._open
        return self.step_mode and began and any(marks.have_moved(live) for marks, live in self._marked)

    @property
    def _marked(self) -> tuple[tuple[Any, list[Any]], ...]:
        return (self._marks, self._trained), (self._touches, self._optimizer_states)

    def _lost(self) -> int:
        """Return whether weights (1) or optimizer state (2) have moved and cannot be put back."""
        return next((n for n, (marks, live) in enumerate(self._marked, 1) if self.has_moved
                     and marks.have_moved(live) and not marks.can_put_back(live)), 0)

    def put_changes_back(self) -> int:
        """Restore weights and optimizer state that code of the script has changed; return what of them belongs to no
        version still."""
        lost = self._lost()
        for marks, live in self._marked if self.has_moved else ():
            if marks.have_moved(live) and marks.can_put_back(live):
                marks.put_back(live)
        return lost

    @property
    def version(self) -> int:
        return self._version

    @property
    def reported_version(self) -> int:
        """The version for reports. -1: only half received, so unusable. 0: as built by the script."""
        return -1 if self._damaged else self._version if self._held else 0

    def attach(self, world: int, rank: int) -> None:
        """Capture the first position; `world` and `rank` are those that the script has read."""
        owned = {id(p) for o in self._optimizers.values() for p in params_of(o)}
        seen, buffers, loose, untrained = set(owned), {}, [], set()
        parts = {id(part): part for module in self._modules.values() for part in module.modules()}
        places = {id(b): (part._buffers, key) for part in reversed(parts.values()) for key, b in part._buffers.items()
                  if b is not None}
        for module in self._modules.values():
            buffers.update({id(b): b for b in module.buffers()})
            if not any(id(p) in owned for p in module.parameters()):
                untrained.update(id(b) for b in module.buffers())
            loose.append([p for p in module.parameters() if id(p) not in seen])
            seen.update(id(p) for p in loose[-1])
        by_name = dict(self._named())
        self.__dict__.update(_extras=Extras(list(buffers.values()), loose, untrained, places), _by_name=by_name,
                             _params=[t for t in by_name.values() if isinstance(t, torch.nn.Parameter)],
                             _param_names={id(t): n for n, t in by_name.items()},
                             _samplers=[v for v in self._stateful.values() if hasattr(v, "round_begins")])
        tracked = {id(self.__dict__[n]): n for n in self._tracked}
        self.__dict__["_live"] = {**self._param_names, **tracked}  # these are kept, so that their ids stay theirs
        self.keep_generators()
        self.__dict__["_position"] = self.capture(world, rank)
        self._keep_sources()
        self._repeats.attached(self)
        self._plain.attached()
        self.enter()

    def enter(self) -> None:
        """Begin the iteration of the position held, as the user's function is called."""
        if self.step_mode:
            self._extras.entered(self._round)
            self._marks.entered(self._trained)
            at = self._position
            self._touches.entered(self._optimizer_states, None if at.moved is None else at.touched)
            self._repeats.entered(self)
        else:
            self._commits.entered(self)
        self._beginnings.entered(self)

    def whole_numbers(self) -> dict[str, int]:
        """Return the plain whole numbers here, without those that may differ by rank."""
        own = self.__dict__
        return {n: own[n] for n in self._scalars if type(own[n]) is int and not self.per_rank.covers(n)}

    def keep_generators(self) -> None:
        """Keep the states of the user's generators as those at which the next iteration begins."""
        self.__dict__["_generator_states"] = {n: rng.state_of(g) for n, g in self._generators.items()}

    def capture(self, world: int, rank: int) -> Position:
        return Position(
            self._version, self._round, world, rank,
            {n: self._copied(n) for n in self._scalars},
            {n: copy.deepcopy(v.state_dict()) for n, v in self._stateful.items()},
            {n: hyper.capture(o, self._param_names) for n, o in self._all_optimizers.items()},
            self._generator_states, tuple([p.requires_grad for p in self._params]), current.runtime().sampler_of(self),
        )

    def _copied(self, name: str) -> Any:
        """Return a copy of a value of the script; that of a tensor is made when it has changed."""
        value = self.__dict__[name]
        if not isinstance(value, torch.Tensor):
            return copied_value(name, value, self._live)
        held, version, made = self._tensor_copies.get(name, (None, -1, None))
        if held is not value or version != value._version:
            made = value.detach().clone()
            self._tensor_copies[name] = (value, value._version, made)
        return made

    def restored(self, name: str, value: Any) -> Any:
        """Return a copy of a `value` of the position, if possible in the object that it was copied from."""
        source = self._sources.get(name)
        return restored(value, source) if source is self.__dict__.get(name) else copied(value)

    def _keep_sources(self) -> None:
        """Keep the objects that the values of the position are copies of. One that the script has put in their place
        since is not written to, since it may be another one's, such as a part of its data."""
        own = self.__dict__
        own["_sources"] = {n: own[n] for n in self._scalars if not isinstance(own[n], hyper.PLAIN)}

    def fit_groups(self, position: Position) -> None:
        """Adopt the parameter groups of `position`, and train the same parameters."""
        for p, trained in zip(self._params, position.trained, strict=False):
            p.requires_grad_(trained)
        for name, groups in position.hyper.items():
            optimizer = self._all_optimizers[name]
            hyper.fit(optimizer, groups, self._by_name)
            if is_distributed(optimizer) and not handle_of(optimizer).is_current():
                handle_of(optimizer).renew()
        self.refresh_groups()

    def refresh_groups(self) -> None:
        """Leave parameters that were added to an optimizer to it."""
        own, owned = self.__dict__, sum(len(g["params"]) for o in self._optimizers.values() for g in o.param_groups)
        if own["_owned"] != owned:
            own["_owned"] = owned
            self._extras.leave_to_optimizers({id(p) for o in self._optimizers.values() for p in params_of(o)})

    def rewind(self, position: Position) -> None:
        """Go to `position`, which belongs to the present tensors or to those of one step before."""
        own = self.__dict__
        for name, value in position.scalars.items():
            own[name] = self.restored(name, value)
        own.update((name, value) for name, _, value in reversed(position.tries))
        for name, value in position.stateful.items():
            self._stateful[name].load_state_dict(copy.deepcopy(value))
            if isinstance(self._stateful[name], torch.amp.GradScaler):  # its stages are in no state_dict
                getattr(self._stateful[name], "_per_optimizer_states", {}).clear()
        self.fit_groups(position)
        applied = self._version > position.version
        for name, groups in position.hyper.items():
            hyper.put_back(self._all_optimizers[name], groups, self._plain.stepped(name) if applied else ())
        for name, held in position.generators.items():
            rng.set_state(self._generators[name], held)
        self.keep_generators()
        self.put_back(position.round)
        own.update(_position=position, _round=position.round, _replaying=False, _open=False, _rounds=0,
                   _replay=max(0, self._version - position.version))
        own["_call_again"] = False
        self._keep_sources()
        if self._replay and position.sampler:
            self._stateful[position.sampler].repeat_step(position.world, position.rounds)

    def put_back(self, round_: int) -> None:
        """Restore the buffers as before the forward pass of `round_`."""
        missing = self._extras.put_back(round_)
        self._repeats.report_uncopied(round_, [self._param_names.get(id(t), "") for t in missing])

    def drop_gradients(self) -> None:
        for module in self._modules.values():
            for p in module.parameters():
                p.grad = None

    def round_begins(self, world: int, rank: int) -> bool:
        """Take note of a gradient that will be reduced. Return whether it is the first one of an iteration.

        Then the position is captured: loop variables name the batch being computed. But with `_call_again` the function
        must be called again, from a position with other values.
        """
        own = self.__dict__
        for sampler in self._samplers:
            sampler.round_begins()
        own["_rounds"] += 1
        if self._open:
            if self._version == 0 and self._rounds >= STEPLESS:
                self._marks.stepless(self._trained, self._rounds - 1)
            return False
        own["_open"] = True
        self._beginnings.gradient_begins(self)
        self.refresh_groups()
        again = self._position.moments if self._repeats.is_again and self._is_the_same() else None
        wrong = self._extras.settle(self._round, is_running(self._head), again)
        self._marks.first_gradient(self._trained)
        self._touches.first_gradient(self._optimizer_states)
        other = self._repeats.first_gradient(self, world, rank, [self._param_names.get(id(t), "") for t in wrong])
        if other is not None:
            own.update(_position=other, _call_again=True)
        elif self._replay and not self._replaying:
            own["_replaying"] = True  # the position is already this iteration's
        else:
            own.update(_replay=0, _replaying=False)
            position = self._beginnings.describe(self, self.capture(world, rank), self._position)
            own["_position"] = replace(self._repeats.describe(position), touched=self._touches.touched,
                                       moments=self._extras.moments)
            self._keep_sources()
        return True

    def _is_the_same(self) -> bool:
        """Return whether the whole numbers that an iteration changes are those of the position."""
        scalars, numbers = self._position.scalars, self.whole_numbers()
        return all(_is(scalars[n], numbers[n]) for n in self._position.moved if n in numbers)

    def keep_applied(self) -> None:
        """Keep values and objects of the script as the step just applied has found them: code may have changed them
        since the gradient, and a replay would derive them from gradients of the newer weights."""
        own, held = self.__dict__, self._position.scalars
        found: dict[str, Any] = {n: self._copied(n) for n in self._scalars
                 if not self.per_rank.covers(n) and not (is_plain(own[n]) and _is_equal(held.get(n), own[n]))}
        found = {n: v for n, v in found.items() if v is not held.get(n)}  # the same copy: an unchanged tensor
        for name, value in self._stateful.items():
            is_ours = name.startswith("_") or hasattr(value, "round_begins") or isinstance(value, torch.amp.GradScaler)
            if not is_ours and not self.per_rank.covers(name):
                now = value.state_dict()
                if differ(now, self._position.stateful.get(name)):
                    found[name] = copy.deepcopy(now)
        if found and self._loan is None:
            own["_position"] = replace(self._position, applied=found)

    def put_applied(self) -> None:
        """Give values and objects of the script what the step of the iteration that is replayed has found."""
        for name, value in (self._position.applied or {}).items():
            if name not in self._stateful:
                self.__dict__[name] = self.restored(name, value)
            elif differ(self._stateful[name].state_dict(), value):  # a loader that runs cannot be loaded into
                self._stateful[name].load_state_dict(copy.deepcopy(value))

    def step_ended(self) -> None:
        """End the iteration: its step has been applied, or was before. The next one begins."""
        own = self.__dict__
        if self._rounds > 1:
            own["_position"] = replace(self._position, rounds=self._rounds)
        own.update(_round=self._round + 1, _open=False, _rounds=0)
        self.keep_generators()
        self._extras.begin(self._round)
        self._marks.step_ended(self._trained)
        self._touches.step_ended(self._optimizer_states)
        self._repeats.step_ended(self)

    @property
    def _draws(self) -> tuple[int, ...]:
        """The numbers that identify the present part of the iteration in a seed of random numbers."""
        return (self._round, self._rounds) if self.step_mode else (self._version, self._uncommitted, 0)

    def finish(self) -> None:
        """Keep the values with which the function returned here, apart: other ranks may not have returned."""
        if self.step_mode and self._version == 0:
            self._marks.stepless(self._trained, self._rounds)
        self.keep_generators()
        self.mark(finished=True, moved=self._lost(),
                  final=self.capture(self._position.world, self._position.rank))

    @torch.no_grad()
    def install(self, held: Copy) -> None:
        """Take over everything from the copy `held`."""
        self.fit_groups(held.position)
        self.allocate_tensors(held.schema)
        if held.buffer is not None:
            held.buffer.wait()
        for tensor, value in zip(self.tensors(), held.tensors, strict=True):
            overwrite(tensor, value)
        self._extras.rebase()
        self.mark(version=held.version, held=True, damaged=False, moved=0, uncommitted=0)
        self.rewind(held.position)

    def keep_copy(self, world: int, rank: int, commits: bool = False) -> None:
        """Copy everything, in copy mode, as the point to return to; its hyper-parameters are for `world` and `rank`.

        `commits`: the script does this, in a loop perhaps.
        """
        own = self.__dict__
        self.keep_generators()
        held, position = self._position, self.capture(world, rank)
        own["_position"] = self._beginnings.describe(self, self._commits.describe(self, position), held) if commits \
            else replace(position, completed=held.completed, unfit=held.unfit, still=held.still)
        self._keep_sources()
        live, last = self.tensors(), self._copy
        buffer = self._pool.take(live)
        held = Copy(self._version, self._position, self.schema(), buffer.fill(live), buffer)
        await_copies()  # these optimizers step without a call of it
        own.update(_copy=held, _uncommitted=0)
        if last is not None:
            self._pool.release(last.buffer)

    def mark(self, **fields: Any) -> None:
        """Set bookkeeping fields (without their underscore)."""
        self.__dict__.update({f"_{k}": v for k, v in fields.items()})


def _is_equal(held: Any, value: Any) -> bool:
    return type(held) is type(value) and bool(held == value)


def _is(held: Any, value: Any) -> bool:
    return isinstance(value, int) and held == value


class ObjectState(State):
    """A state of plain values, and of objects with `state_dict` and `load_state_dict`."""


class TorchState(State):
    """State of models, optimizers, schedulers, samplers and plain values, all by keyword.

    Only values named here survive. `seed` (default 0), if given, also seeds the random numbers of each iteration.
    `per_rank` names values, or parts such as "model.center", that differ by rank on purpose; all others must be equal
    on ranks of the same version, see divergence.py.
    """

    def __init__(self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, *,
                 per_rank: Iterable[str] = (), **values: Any) -> None:
        named = {n: v for n, v in (("model", model), ("optimizer", optimizer)) if v is not None}
        super().__init__(per_rank=per_rank, **named, **values)
