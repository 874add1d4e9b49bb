"""`DistributedOptimizer`: the user's own optimizer with gradients averaged over all ranks before each step.

The instance keeps its identity (schedulers, scalers and other references stay right); only its class becomes a
subclass made for it. `step()` finishes the reduction, runs the original step and then increments the version.
Nothing in `step()` after the reduction communicates, so a lost peer never leaves a half-applied step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from spotfleet.errors import UsageError
from spotfleet.train import runtime
from spotfleet.train.comm.script_lines import call_site
from spotfleet.train.gradients.optimizer_tag import (
    Distributed,
    ReducerHandle,
    handle_of,
    is_distributed,
    trained_params,
)
from spotfleet.train.gradients.reducer import Reducer
from spotfleet.train.resize import scaled

Average, Sum, Min, Max = "average", "sum", "min", "max"


@dataclass(frozen=True)
class Compressor:
    """Type in which float32 and float64 travel between ranks: `dtype`, or None for their own. Cost: see reducer.py."""

    dtype: torch.dtype | None = None


class Compression:
    none = Compressor()
    fp16 = Compressor(torch.float16)
    bf16 = Compressor(torch.bfloat16)


@dataclass(frozen=True)
class _Options:
    """Arguments of DistributedOptimizer that its reducer needs."""

    passes: int
    average: bool
    compression: Compressor
    predivide: float
    sparse_as_dense: bool


class _Distributed(Distributed):
    """The methods that a wrapped optimizer's class gets."""

    _spotfleet_options: _Options
    _spotfleet_skip: bool
    _spotfleet_stepping: bool
    _spotfleet_early: bool  # made before elastic.run

    def synchronize(self) -> None:
        """Wait until the gradients are reduced. Never needed (backward() itself waits) and harmless at any time."""
        _handle_in_use(self).reducer.finish_round()

    @contextmanager
    def skip_synchronize(self) -> Any:
        """Let `step()` inside this context assume that `synchronize()` has been called."""
        self._spotfleet_skip = True
        try:
            yield
        finally:
            self._spotfleet_skip = False

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes inside this context accumulate locally; the first pass outside reduces all of it."""
        return _handle_in_use(self).reducer.hold()

    def zero_grad(self, *args: Any, **options: Any) -> None:
        handle_of(self).reducer.settle()
        super().zero_grad(*args, **options)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)  # type: ignore[misc]
        _take_params(self, param_group["params"])
        handle_of(self).renew()


def _handle_in_use(optimizer: Any) -> ReducerHandle:
    handle = handle_of(optimizer)
    if handle.replaced:
        raise UsageError("this optimizer's parameters have been wrapped by a later DistributedOptimizer",
                         hint="step the later one, or make both from separate parameters")
    return handle


def _step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    loss, handle = None, _handle_in_use(self)
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    if not self._spotfleet_skip:
        self.synchronize()
    current = runtime.current()
    _check_state_has(self)
    self._opt_called = True  # torch's schedulers check it
    handle.reducer.reduced = False
    factor = current.step_factor(self)
    if current.step_begins(self):
        self._spotfleet_stepping = True
        try:
            with scaled(self, factor):
                _step_once(self, closure, loss)
        finally:
            self._spotfleet_stepping = False
        current.step_ended(self)
    return loss


def _step_once(optimizer: Any, closure: Callable[[], Any] | None, loss: Any) -> None:
    """Make the optimizer's own step; UsageError if that needs more of `closure` than the evaluation that gave `loss`.
    Those of torch.optim (LBFGS is refused) evaluate a closure once, before anything else."""
    own = super(type(optimizer), optimizer).step
    if closure is None or str(getattr(own, "__module__", "")).startswith("torch.optim."):
        own()
        return
    evaluated = _Evaluated(optimizer, loss, _marks_of(optimizer))
    own(evaluated)
    if evaluated.calls == 0:
        raise evaluated.refused("never")


@dataclass
class _Evaluated:
    """Closure that has been evaluated, for a step that calls it once and first."""

    optimizer: Any
    loss: Any
    marks: Any
    calls: int = 0

    def __call__(self) -> Any:
        self.calls += 1
        if self.calls > 1:
            raise self.refused("more than once")
        if _marks_of(self.optimizer) != self.marks:
            raise self.refused("after it has changed weights or gradients")
        return self.loss

    def refused(self, when: str) -> UsageError:
        name = type(self.optimizer).__name__
        return UsageError(f"{name}.step(closure) ({call_site()}): {name} evaluates its closure {when}, but "
                          "DistributedOptimizer evaluates it once, before the step, so that nothing in the step "
                          "communicates",
                          hint="compute the loss and its gradients in the loop (loss.backward()), and call step() "
                               "without a closure; put a gradient at other weights, as SAM needs it, into `with "
                               "state.borrowed():`. See docs/commit.md, Code that changes weights by itself")


@torch.no_grad()
def _marks_of(optimizer: Any) -> tuple[Any, ...]:
    """Return marks that differ once weights or gradients have changed. Norms show changes through `.data`."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [(id(p.grad), p.grad._version if p.grad is not None else 0) for p in params]
    norms = torch._foreach_norm([p.detach() for p in params])
    return [(p._version, p.data_ptr()) for p in params], grads, repr([n.item() for n in norms])  # repr: of NaN, too


_step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it once more, and step hooks would run twice
_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler would shadow it on the instance


def _check_state_has(optimizer: Any) -> None:
    """Refuse a step in the user's function of an optimizer that is not in its state, and that a newcomer would have as
    the script built it. One that is made in the function for weights of its own is the script's affair."""
    current = runtime.current()
    state = current.state
    if state is None or not current.is_inside or not state._optimizers:
        return
    if any(o is optimizer for o in state._all_optimizers.values()):
        return
    held = {id(p) for p in state._params}
    inside = [id(p) in held for group in optimizer.param_groups for p in group["params"]]
    if optimizer._spotfleet_early or any(inside):
        kind, names = type(optimizer).__name__, " and ".join(f"state.{n}" for n in state._optimizers)
        what = "this optimizer is" if all(inside) else "this optimizer and the model that it trains are"
        raise UsageError(f"{kind}.step() ({call_site()}): {what} not in the state, which has {names}, so a change of "
                         "membership would lose what it has trained",
                         hint="give all optimizers that step in the function to the state, and their models: "
                              "TorchState(model, optimizer, head=head, head_optimizer=head_optimizer)")


def _make_reducer(optimizer: Any) -> Reducer:
    options, current = optimizer._spotfleet_options, runtime.current()
    made = Reducer(trained_params(optimizer), options.passes, options.average, lambda: runtime.current().group,
                   functools.partial(_on_round, optimizer), functools.partial(_on_reduced, optimizer), current.weight,
                   options.compression.dtype, options.predivide, options.sparse_as_dense,
                   functools.partial(trained_params, optimizer))
    made.scalars = functools.partial(_scalars, optimizer)
    return made


def _scalars(optimizer: Any) -> dict[str, int]:
    """Return the whole numbers of the state that `optimizer` belongs to, if any; they are alike on all ranks."""
    state = runtime.current().state
    mine = state is not None and any(o is optimizer for o in state._optimizers.values())
    return state.whole_numbers() if mine else {}


def _on_round(optimizer: Any, reducer: Reducer) -> None:
    current = runtime.current()
    if any(is_distributed(o) and handle_of(o).replaced for o in _in_state()):
        raise _state_has_another()
    current.round_begins(optimizer)


def _on_reduced(optimizer: Any, reducer: Reducer, change: bool, save: bool) -> None:
    runtime.current().round_ended(optimizer, change, save)


def _in_state() -> list[Any]:
    state = runtime.current().state
    return list(state._optimizers.values()) if state is not None else []


def _state_has_another() -> UsageError:
    return UsageError("DistributedOptimizer: these parameters belong to an optimizer in the state, so a change of "
                      "membership would restore that one",
                      hint="make one distributed optimizer before TorchState(...), give that to it, and change its "
                           "groups later (add_param_group, learning rates)")


def DistributedOptimizer(optimizer: Any, named_parameters: Iterable[tuple[str, Any]] | None = None,
                         compression: Any = Compression.none, backward_passes_per_step: int = 1,
                         op: str = Average, gradient_predivide_factor: float = 1.0, num_groups: int = 0,
                         groups: Any = None, sparse_as_dense: bool = False) -> Any:
    """Return `optimizer` itself, which from now on steps with gradients averaged (or summed) over all ranks.

    Gradients of `backward_passes_per_step` passes are added, not divided, as in Horovod. `named_parameters`, if
    given, must have unique names and cover all parameters. `gradient_predivide_factor` f: gradients are divided by f
    before the sum and by (world size / f) after it, instead of by the world size before it. `num_groups` and `groups`
    are accepted and change nothing: gradients always travel in buckets. Sparse gradients are refused unless
    `sparse_as_dense`. A distributed optimizer with some of the same parameters is replaced, and refuses to step.
    """
    _check(optimizer, named_parameters, compression, backward_passes_per_step, op)
    _check_grouping(gradient_predivide_factor, op, num_groups, groups)
    _take_params(optimizer, [p for group in optimizer.param_groups for p in group["params"]])
    optimizer.__dict__.pop("step", None)  # a scheduler's wrapper around the class's own step
    original = type(optimizer)
    optimizer.__class__ = type(original.__name__, (_Distributed, original), {"step": _step})
    optimizer._spotfleet_options = _Options(backward_passes_per_step, op == Average, compression,
                                            float(gradient_predivide_factor), sparse_as_dense)
    optimizer._spotfleet_skip = optimizer._spotfleet_stepping = False
    optimizer._spotfleet_early = runtime.current().state is None
    optimizer._spotfleet = ReducerHandle(optimizer, functools.partial(_make_reducer, optimizer))
    runtime.current().optimizers.append(optimizer)
    for name, inner in vars(optimizer).items():
        if isinstance(inner, torch.optim.Optimizer):
            inner.register_step_pre_hook(functools.partial(_inner_steps, optimizer, name))
    return optimizer


def _inner_steps(optimizer: Any, name: str, inner: Any, args: Any, options: Any) -> None:
    """Refuse a step of an optimizer inside the state's that no `step()` of that one makes: nothing would count it."""
    state = runtime.current().state
    if state is None or not state.step_mode or optimizer._spotfleet_stepping:
        return
    if any(o is optimizer for o in _in_state()):
        raise UsageError(f"{type(optimizer).__name__}.{name}.step() ({call_site()}) was called outside of "
                         f"{type(optimizer).__name__}.step(), so no version would count the step: it would be in no "
                         "checkpoint, and no loss of a worker would find it",
                         hint="give the inner optimizer to DistributedOptimizer and the state: "
                              f"hvd.DistributedOptimizer(optimizer.{name}), TorchState(model, optimizer.{name})")


def _take_params(optimizer: Any, params: Any) -> None:
    """Let other distributed optimizers that have some of `params` give way; UsageError if the state holds one."""
    current = runtime.current()
    wanted = {id(p) for p in ([params] if isinstance(params, torch.Tensor) else params)}
    for other in list(current.optimizers):
        if other is not optimizer and any(id(p) in wanted for g in other.param_groups for p in g["params"]):
            if any(o is other for o in _in_state()):
                raise _state_has_another()
            handle_of(other).replace()
            current.optimizers.remove(other)


def _check_grouping(predivide: float, op: str, num_groups: int, groups: Any) -> None:
    if not predivide > 0:
        raise UsageError(f"DistributedOptimizer: gradient_predivide_factor is {predivide}", hint="use a number above 0")
    if predivide != 1.0 and op != Average:
        raise UsageError("DistributedOptimizer: gradient_predivide_factor needs op=Average",
                         hint="leave it out, or use op=Average")
    if num_groups < 0 or (isinstance(groups, int) and groups < 0):
        raise UsageError("DistributedOptimizer: the number of groups is negative", hint="use 0 or more")


def check_compression(what: str, compression: Any) -> None:
    if not isinstance(compression, Compressor):
        raise UsageError(f"{what}: unknown compression {compression!r}",
                         hint="use Compression.none, Compression.fp16 or Compression.bf16")


def _check(optimizer: Any, named_parameters: Any, compression: Any, passes: int, op: str) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"DistributedOptimizer: expected a torch optimizer, got {type(optimizer).__name__}",
                         hint="pass the optimizer itself, such as torch.optim.AdamW(model.parameters())")
    if is_distributed(optimizer):
        raise UsageError("DistributedOptimizer: this optimizer is distributed already", hint="wrap it once")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("DistributedOptimizer: LBFGS evaluates the model several times inside one step(), so a lost "
                         "peer could leave half a step applied", hint="use another optimizer, such as AdamW")
    if passes < 1:
        raise UsageError(f"DistributedOptimizer: backward_passes_per_step is {passes}", hint="use 1 or more")
    if op not in (Average, Sum):
        raise UsageError(f"DistributedOptimizer: op {op!r} is not for gradients", hint="use Average or Sum")
    check_compression("DistributedOptimizer", compression)
    if named_parameters is not None:
        named = list(named_parameters)
        if len({name for name, _ in named}) < len(named):
            raise UsageError("DistributedOptimizer: named_parameters holds a name twice",
                             hint="join the names of several models with a prefix")
        known = {id(p) for _, p in named}
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            raise UsageError("DistributedOptimizer: named_parameters lacks parameters of the optimizer",
                             hint="pass model.named_parameters() of every model, or leave it out")
