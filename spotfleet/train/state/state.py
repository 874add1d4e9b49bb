"""Training state that survives changes of membership: tensors at a version, and the position that belongs to them.

    version k            optimizer steps applied to the tensors (in copy mode: commits made)
    position             scalars, state_dicts and hyper-parameters as they were when gradient k+1 began; it may be
                         one older than the version: then `replay` is 1, and that iteration runs again without its step
    round                iterations reduced; equals the version until a GradScaler skips a step

The contents of the state choose one of two modes, so every rank has the same:

- step mode, exactly one optimizer, which is a DistributedOptimizer: the tensors are never copied. `commit()` is free.
- copy mode, everything else: `commit()` agrees with all ranks by an allreduce of two flags and copies everything, and
  a planned change interrupts there. After a failure the newest copy that a survivor holds is restored.

Threads: the main thread; `round_begins` and `round_ended` also run on an autograd thread while the main thread waits.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spotfleet.errors import UsageError
from spotfleet.train import current
from spotfleet.train.optimizer_tag import handle_of, is_distributed
from spotfleet.train.state import hyper, rng
from spotfleet.train.state.buffers import Extras
from spotfleet.train.state.copies import Buffer, BufferPool, await_copies
from spotfleet.train.state.hyper import copied, params_of
from spotfleet.train.state.per_rank import PerRank


@dataclass(frozen=True)
class Position:
    """Position of training; everything in it is a copy."""

    version: int
    round: int
    world: int  # world size and rank that the hyper-parameters were set up for; 0 and -1: none yet
    rank: int
    scalars: dict[str, Any]
    stateful: dict[str, Any]
    hyper: dict[str, list[dict[str, Any]]]
    generators: dict[str, Any] = field(default_factory=dict)  # states after the last step, or after a later commit
    trained: tuple[bool, ...] = ()  # for each parameter of the state: does it require gradients?
    sampler: str = ""  # name of the sampler whose batch is being computed; empty: none known


@dataclass(frozen=True)
class Copy:
    """Copy of all of a state, independent of the live tensors."""

    version: int
    position: Position
    schema: Schema
    tensors: list[torch.Tensor]
    buffer: Buffer | None = None  # memory of the tensors, if it is a reused buffer


@dataclass(frozen=True)
class Schema:
    """Types and shapes of a state's tensors, from which a process without optimizer state can allocate them."""

    fixed: list[tuple[str, torch.dtype, tuple[int, ...]]]  # parameters and buffers
    optimizers: dict[str, list[dict[str, Any]]]  # per parameter: key -> (dtype, shape, on cpu) or [value]


class State:
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
        tracked = frozenset([*self._modules, *self._optimizers, *self._stateful, *self._generators])
        self.__dict__.update(
            _tracked=tracked, _scalars=tuple(n for n in values if n not in tracked), _generator_states={},
            _version=0, _round=0, _held=False, _damaged=False, _finished=False, _replay=0, _replaying=False,
            _computed=-1, _position=None, _final=None, _copy=None, _extras=None, _uncommitted=0, _mark=None, _owned=0,
            _made_in=0, _pool=BufferPool(),
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
        self.__dict__[name] = value

    # Called by a script

    def commit(self) -> None:
        """Mark this point as one to resume from. Free in step mode; see the module's docstring for copy mode."""
        if self.step_mode:
            self.keep_generators()
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
            self.keep_copy(place.size, place.rank)

    def sync(self) -> None:
        """Bring all ranks of the generation to the newest state; `elastic.run` calls it."""
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

    # Called by the runtime

    @property
    def step_mode(self) -> bool:
        optimizers = list(self._optimizers.values())
        return len(optimizers) == 1 and is_distributed(optimizers[0])

    @property
    def version(self) -> int:
        return self._version

    @property
    def reported_version(self) -> int:
        """The version for reports. -1: only half received, so unusable. 0: as built by the script."""
        return -1 if self._damaged else self._version if self._held else 0

    def attach(self, world: int, rank: int) -> None:
        """Hook forward passes and capture the first position; `world` and `rank` are those that the script has read."""
        seen = {id(p) for o in self._optimizers.values() for p in params_of(o)}
        buffers, loose = {}, []
        for module in self._modules.values():
            module.register_forward_pre_hook(_on_forward)
            buffers.update({id(b): b for b in module.buffers()})
            loose.append([p for p in module.parameters() if id(p) not in seen])
            seen.update(id(p) for p in loose[-1])
        by_name = dict(self._named())
        self.__dict__.update(_extras=Extras(list(buffers.values()), loose), _by_name=by_name,
                             _params=[t for t in by_name.values() if isinstance(t, torch.nn.Parameter)],
                             _param_names={id(t): n for n, t in by_name.items()},
                             _samplers=[v for v in self._stateful.values() if hasattr(v, "iteration_begins")])
        self.keep_generators()
        self.__dict__["_position"] = self.capture(world, rank)

    def keep_generators(self) -> None:
        """Keep the states of the user's generators as those at which the next iteration begins."""
        self.__dict__["_generator_states"] = {n: rng.state_of(g) for n, g in self._generators.items()}

    def capture(self, world: int, rank: int) -> Position:
        return Position(
            self._version, self._round, world, rank,
            {n: copied(self.__dict__[n]) for n in self._scalars},
            {n: copy.deepcopy(v.state_dict()) for n, v in self._stateful.items()},
            {n: hyper.capture(o, self._param_names) for n, o in self._optimizers.items()},
            self._generator_states, tuple([p.requires_grad for p in self._params]), current.runtime().sampler_of(self),
        )

    def fit_groups(self, position: Position) -> None:
        """Adopt the parameter groups of `position`, and train the same parameters."""
        for p, trained in zip(self._params, position.trained, strict=False):
            p.requires_grad_(trained)
        for name, groups in position.hyper.items():
            optimizer = self._optimizers[name]
            hyper.fit(optimizer, groups, self._by_name)
            if is_distributed(optimizer) and not handle_of(optimizer).is_current():
                handle_of(optimizer).renew()
        self.refresh_groups()

    def refresh_groups(self) -> None:
        """Adapt, before a forward pass, to parameters that were added to an optimizer or now require gradients."""
        own, owned = self.__dict__, sum(len(g["params"]) for o in self._optimizers.values() for g in o.param_groups)
        if own["_owned"] != owned:
            own["_owned"] = owned
            self._extras.leave_to_optimizers({id(p) for o in self._optimizers.values() for p in params_of(o)})
        for optimizer in self._optimizers.values():
            if is_distributed(optimizer) and handle_of(optimizer).has_new_params():
                handle_of(optimizer).renew()

    def rewind(self, position: Position) -> None:
        """Go to `position`, which belongs to the present tensors or to those of one step before."""
        own = self.__dict__
        for name, value in position.scalars.items():
            own[name] = copied(value)
        for name, value in position.stateful.items():
            self._stateful[name].load_state_dict(copy.deepcopy(value))
        self.fit_groups(position)
        for name, groups in position.hyper.items():
            hyper.put_back(self._optimizers[name], groups)
        for name, held in position.generators.items():
            rng.set_state(self._generators[name], held)
        self.keep_generators()
        self.put_back(position.round)
        own.update(_position=position, _round=position.round, _replaying=False, _mark=None,
                   _replay=max(0, self._version - position.version))
        if self._replay and position.sampler:
            self._stateful[position.sampler].repeat_step(position.world)

    def put_back(self, round_: int) -> None:
        """Restore the buffers as before the forward pass of `round_`."""
        self._extras.put_back(round_)

    def drop_gradients(self) -> None:
        for module in self._modules.values():
            for p in module.parameters():
                p.grad = None

    def round_begins(self, world: int, rank: int) -> None:
        """Capture the position at the first gradient of an iteration: loop variables name the batch being computed."""
        own = self.__dict__
        if self._replay and not self._replaying:
            own["_replaying"] = True  # the position is already this iteration's
            return
        own.update(_replay=0, _replaying=False)
        for sampler in self._samplers:
            sampler.iteration_begins()
        own["_position"] = self.capture(world, rank)

    def finish(self) -> None:
        """Keep the values with which the function returned here, apart: other ranks may not have returned."""
        self.keep_generators()
        self.mark(finished=True, final=self.capture(self._position.world, self._position.rank))

    def round_ended(self) -> None:
        self.__dict__["_round"] += 1

    def tensors(self) -> list[torch.Tensor]:
        """Return the live tensors in the order of `schema()`."""
        found = [t for _, t in self._fixed()]
        for optimizer in self._optimizers.values():
            for p in params_of(optimizer):
                found.extend(v for _, v in sorted(optimizer.state.get(p, {}).items()) if isinstance(v, torch.Tensor))
        return found

    def move_memory(self) -> None:
        """Move the live tensors to other memory, since an operation may still write to where they are."""
        held = [v for o in self._optimizers.values() for p in params_of(o) for v in o.state.get(p, {}).values()]
        for tensor in [*(t for _, t in self._named()), *(v for v in held if isinstance(v, torch.Tensor))]:
            tensor.data = tensor.data.clone()

    def shared(self) -> list[bool]:
        """Return, for each of `tensors()`, whether it is the same on all ranks, as only a distributed optimizer changes
        it."""
        owners = [o for o in self._optimizers.values() if is_distributed(o)]
        others = {id(p) for o in self._optimizers.values() if o not in owners for p in params_of(o)}
        reduced = {id(p) for o in owners for p in params_of(o)} - others
        found = [id(t) in reduced for _, t in self._named()]
        for optimizer in self._optimizers.values():
            for p in params_of(optimizer):
                found += [id(p) in reduced for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
        return found

    @property
    def has_averages(self) -> bool:
        """Whether there are parameters that no optimizer owns. They may also be frozen weights."""
        return self._extras.has_loose

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        """Return parameters and buffers, each once, with a name that is the same on all ranks."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for name, module in self._modules.items():
            for key, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
                found.setdefault(id(tensor), (f"{name}.{key}", tensor))
        for name, optimizer in self._optimizers.items():
            for i, p in enumerate(params_of(optimizer)):
                found.setdefault(id(p), (f"{name}.{i}", p))
        return list(found.values())

    def _fixed(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor.data) for name, tensor in self._named()]

    def schema(self) -> Schema:
        optimizers = {}
        for name, optimizer in self._optimizers.items():
            optimizers[name] = [
                {k: (v.dtype, tuple(v.shape), v.device.type == "cpu") if isinstance(v, torch.Tensor)
                 else [copy.deepcopy(v)] for k, v in sorted(optimizer.state.get(p, {}).items())}
                for p in params_of(optimizer)
            ]
        return Schema([(n, t.dtype, tuple(t.shape)) for n, t in self._fixed()], optimizers)

    def allocate_tensors(self, schema: Schema) -> None:
        """Allocate optimizer state as in `schema`; UsageError when this process built another model."""
        own = [(n, t.dtype, tuple(t.shape)) for n, t in self._fixed()]
        differing = next((pair for pair in zip(own, schema.fixed, strict=False) if pair[0] != pair[1]), None)
        if differing or len(own) != len(schema.fixed) or set(schema.optimizers) != set(self._optimizers):
            what = (f"here {differing[0]}, there {differing[1]}" if differing
                    else f"here {len(own)} tensors, there {len(schema.fixed)}")
            raise UsageError(f"the state to be taken over does not fit the model built here: {what}",
                             hint="build the same model and optimizer on every rank, independent of rank and size")
        for name, per_param in schema.optimizers.items():
            optimizer = self._optimizers[name]
            params = params_of(optimizer)
            if len(params) != len(per_param):
                raise UsageError(f"state.{name}: {len(params)} parameters here, {len(per_param)} there",
                                 hint="give the optimizer the same parameters on every rank")
            for p, entries in zip(params, per_param, strict=True):
                held = optimizer.state[p]
                held.clear()
                for key, entry in entries.items():
                    held[key] = entry[0] if isinstance(entry, list) else torch.empty(
                        entry[1], dtype=entry[0], device="cpu" if entry[2] else p.device)
                if not entries:
                    del optimizer.state[p]

    @torch.no_grad()
    def install(self, held: Copy) -> None:
        """Take over everything from the copy `held`."""
        self.fit_groups(held.position)
        self.allocate_tensors(held.schema)
        if held.buffer is not None:
            held.buffer.wait()
        for tensor, value in zip(self.tensors(), held.tensors, strict=True):
            tensor.copy_(value)
        self._extras.rebase()
        self.mark(version=held.version, held=True, damaged=False, uncommitted=0)
        self.rewind(held.position)

    def keep_copy(self, world: int, rank: int) -> None:
        """Copy everything, in copy mode, as the point to return to; its hyper-parameters are for `world` and `rank`."""
        own = self.__dict__
        self.keep_generators()
        own["_position"] = self.capture(world, rank)
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


def _on_forward(module: torch.nn.Module, inputs: Any) -> None:
    if torch.is_grad_enabled() and module.training:  # not an evaluation
        current.runtime().forward_begins()


_on_forward._torchdynamo_disable = True  # type: ignore[attr-defined]  # a compiler must not trace into it


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
