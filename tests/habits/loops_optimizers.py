"""Optimizers and schedulers of each kind."""
# ruff: noqa: B020  `for state.i in range(state.i, ...)` is how a loop starts where training stands

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler as schedulers

from tests.habits.kit import STEPS, Kit, Result, batch, habit, net, result
from tests.habits.shapes import NEVER, SGD, Adam, AdamW, simple, steps

# ---- optimizers

def _optimizer(name: str, make: Any) -> None:
    def loop(kit: Kit) -> Result:
        return simple(kit, net(), make)

    loop.__doc__ = name
    habit("optimizers")(loop)


_optimizer("Adam with amsgrad", lambda p: Adam(p, lr=0.01, amsgrad=True))
_optimizer("AdamW with weight decay", lambda p: AdamW(p, lr=0.01, weight_decay=0.1))
_optimizer("AdamW, fused", lambda p: AdamW(p, lr=0.01, fused=True))
_optimizer("AdamW, foreach", lambda p: AdamW(p, lr=0.01, foreach=True))
_optimizer("SGD with Nesterov and weight decay",
           lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01))
_optimizer("RAdam with a scaled rate", lambda p: torch.optim.RAdam(p, lr=0.01 * 2))
_optimizer("NAdam", lambda p: torch.optim.NAdam(p, lr=0.01))
_optimizer("RMSprop, centred, with momentum", lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5))
_optimizer("Adagrad", lambda p: torch.optim.Adagrad(p, lr=0.1))
_optimizer("Adadelta", lambda p: torch.optim.Adadelta(p))
_optimizer("Adamax", lambda p: torch.optim.Adamax(p, lr=0.01))
_optimizer("Rprop", lambda p: torch.optim.Rprop(p, lr=0.01))
_optimizer("ASGD", lambda p: torch.optim.ASGD(p, lr=0.1))
_optimizer("Adafactor", lambda p: torch.optim.Adafactor(p, lr=0.05))


@habit("optimizers")
def parameter_groups(kit: Kit) -> Result:
    """Parameter groups with rates of their own."""
    model = net()

    def make(_: Any) -> Any:
        return SGD([{"params": model[0].parameters(), "lr": 0.01},
                    {"params": model[2].parameters(), "lr": 0.1, "momentum": 0.9}], lr=0.05)

    return simple(kit, model, make)


@habit("optimizers", "refused", "LBFGS")
def lbfgs(kit: Kit) -> Result:
    """LBFGS."""
    return simple(kit, net(), lambda p: torch.optim.LBFGS(p))


class Counting(torch.optim.Optimizer):
    """Schedule-free SGD in short: a count in the group decides the rate."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "total": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                z.sub_(p.grad, alpha=group["lr"])
                p.lerp_(z, 1 / (group["k"] + 1))
            group["k"] += 1
            group["total"] += group["lr"]


@habit("optimizers")
def counter_in_the_group(kit: Kit) -> Result:
    """An optimizer that counts in its param_groups (schedule-free, Prodigy)."""
    return simple(kit, net(), lambda p: Counting(p, 0.1), after=lambda i: kit.allreduce(torch.ones(1)))


class Remembering(torch.optim.SGD):
    """An optimizer with a count as an attribute, and one in its state under a name."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        held = self.state["all"]
        held["sum"] = held.get("sum", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 / (self.count + held["sum"])
        super().step()


@habit("optimizers")
def counter_in_an_attribute(kit: Kit) -> Result:
    """An optimizer that counts in an attribute and under a name in its state."""
    return simple(kit, net(), lambda p: Remembering(p, 0.1), after=lambda i: kit.allreduce(torch.ones(1)))


class Lookahead(torch.optim.Optimizer):
    """Slow weights around another optimizer, which has a state of its own."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.norms = inner, []
        super().__init__([{"params": g["params"]} for g in inner.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        self.norms.append(float(sum(p.grad.norm() for p in params)))
        torch.nn.utils.clip_grad_norm_(params, sorted(self.norms)[len(self.norms) // 2])
        self.inner.step()
        for p in params:
            slow = self.state[p].setdefault("slow", p.clone())
            if len(self.norms) % 3 == 0:
                p.copy_(slow.lerp_(p, 0.5))


@habit("optimizers")
def optimizer_around_another(kit: Kit) -> Result:
    """An optimizer around another one with momentum (Lookahead), and a list as attribute (AutoClip)."""
    return simple(kit, net(), lambda p: Lookahead(SGD(p, lr=0.1, momentum=0.9)),
                  after=lambda i: kit.allreduce(torch.ones(1)))


def _restarted(kit: Kit, restart: Any, where: str) -> Result:
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def change(i: int) -> None:
        for held in opt.state.values() if i % 2 else ():
            restart(held)
        kit.allreduce(torch.ones(1))

    kit.run(lambda state: steps(kit, state, model, opt, **{where: change}))(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("optimizers")
def momentum_halved(kit: Kit) -> Result:
    """Momentum halved by hand after every other step, then a metric."""
    return _restarted(kit, lambda held: held["momentum_buffer"].mul_(0.5), "after")


@habit("optimizers")
def optimizer_restarted(kit: Kit) -> Result:
    """Momentum set anew by hand at the top of every other iteration."""
    return _restarted(kit, lambda held: held.update(momentum_buffer=held["momentum_buffer"] * 0.1), "top")


@habit("optimizers", "refused", "not in the state, which has state.optimizer",
       "both optimizers and their models in the state")
def second_optimizer_forgotten(kit: Kit) -> Result:
    """A second wrapped optimizer that steps in the function and is not in the state."""
    model, head = net(), torch.nn.Linear(1, 1)
    opt, other = kit.optimizer(SGD(model.parameters(), lr=0.1)), kit.optimizer(SGD(head.parameters(), lr=0.1))

    def loss(i: int) -> torch.Tensor:
        x, y = batch(i)
        return torch.nn.functional.mse_loss(head(model(x)), y)

    kit.run(lambda state: steps(kit, state, model, opt, loss=loss, after=lambda i: other.step()))(
        kit.state(model, opt, i=0))
    return result(model, opt)


def _gan(kit: Kit, loop: Callable[[Any, Callable[[int, int], None]], None]) -> Result:
    """Run `loop(state, step)`; `step(i, of)` trains one network of two, or the other."""
    one, two = net(seed=1), net(seed=2)
    first, second = kit.optimizer(SGD(one.parameters(), lr=0.1)), kit.optimizer(Adam(two.parameters(), lr=0.01))

    def step(i: int, of: int) -> None:
        x, _ = batch(i)
        if of == 0:
            kit.point("forward", i)
            first.zero_grad()
            (one(x) - two(x).detach()).pow(2).mean().backward()
            first.step()
            kit.point("reduced", i)
        else:
            second.zero_grad()
            (two(x) + one(x).detach()).pow(2).mean().backward()
            second.step()
            kit.point("stepped", i)

    kit.run(lambda state: loop(state, step))(kit.state(one, first, other=two, second=second, i=0))
    return result(one, two, first, second)


@habit("optimizers")
def gan(kit: Kit) -> Result:
    """Two optimizers that step in turn (a GAN), committed once per iteration."""

    def loop(state: Any, step: Callable[[int, int], None]) -> None:
        while state.i < STEPS:
            step(state.i, 0)
            step(state.i, 1)
            state.i += 1
            state.commit()

    return _gan(kit, loop)


@habit("optimizers")
def gan_over_the_state(kit: Kit) -> Result:
    """The same in `for state.i in range(state.i, N)`, with `state.commit()` at the end of the body."""

    def loop(state: Any, step: Callable[[int, int], None]) -> None:
        for state.i in range(state.i, STEPS):
            step(state.i, 0)
            step(state.i, 1)
            state.commit()

    return _gan(kit, loop)


@habit("optimizers", "refused", "between the steps of one iteration", "`state.commit()` as the last line of the body")
def gan_committed_within(kit: Kit) -> Result:
    """The same with the commit between the two steps."""

    def loop(state: Any, step: Callable[[int, int], None]) -> None:
        for state.i in range(state.i, STEPS):
            step(state.i, 0)
            state.commit()
            step(state.i, 1)

    return _gan(kit, loop)


@habit("optimizers", "refused", "is set after state.commit", "count first, then commit")
def gan_counted_late(kit: Kit) -> Result:
    """The same with `state.i += 1` after the commit."""

    def loop(state: Any, step: Callable[[int, int], None]) -> None:
        while state.i < STEPS:
            step(state.i, 0)
            step(state.i, 1)
            state.commit()
            state.i += 1

    return _gan(kit, loop)


# ---- schedulers

def _scheduler(name: str, make: Any, metric: bool = False) -> None:
    def loop(kit: Kit) -> Result:
        model = net()
        opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))
        scheduler = make(opt)
        state = kit.state(model, opt, scheduler=scheduler, i=0)

        def after(i: int) -> None:
            kit.allreduce(torch.ones(1))
            scheduler.step(*([1.0 / (1 + i // 4)] if metric else []))

        kit.run(lambda state: steps(kit, state, model, opt, after=after))(state)
        return result(model, opt, scheduler=scheduler)

    loop.__doc__ = name
    habit("schedulers")(loop)


_scheduler("StepLR", lambda o: schedulers.StepLR(o, 3))
_scheduler("MultiStepLR", lambda o: schedulers.MultiStepLR(o, [2, 5]))
_scheduler("ExponentialLR", lambda o: schedulers.ExponentialLR(o, 0.9))
_scheduler("CosineAnnealingLR", lambda o: schedulers.CosineAnnealingLR(o, STEPS))
_scheduler("CosineAnnealingWarmRestarts", lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4))
_scheduler("OneCycleLR", lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=STEPS + 2))
_scheduler("CyclicLR", lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3))
_scheduler("LambdaLR", lambda o: schedulers.LambdaLR(o, lambda k: 1 / (k + 1)))
_scheduler("LinearLR, then CosineAnnealingLR, by SequentialLR", lambda o: schedulers.SequentialLR(
    o, [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.CosineAnnealingLR(o, 8)], [4]))
_scheduler("ChainedScheduler", lambda o: schedulers.ChainedScheduler(
    [schedulers.ConstantLR(o, 0.5, 4), schedulers.ExponentialLR(o, 0.9)]))
_scheduler("ReduceLROnPlateau by a value of the loop", lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
           metric=True)


@habit("schedulers")
def scheduler_before_the_gradient(kit: Kit) -> Result:
    """`scheduler.step()` at the top of the body."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))
    scheduler = schedulers.ExponentialLR(opt, 0.9)
    state = kit.state(model, opt, scheduler=scheduler, i=0)

    def top(i: int) -> None:
        if i:
            scheduler.step()

    kit.run(lambda state: steps(kit, state, model, opt, top, each=NEVER))(state)
    return result(model, opt, scheduler=scheduler)


@habit("schedulers")
def rate_by_hand(kit: Kit) -> Result:
    """The rate is set by hand in each iteration, from the loop variable."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def top(i: int) -> None:
        for group in opt.param_groups:
            group["lr"] = 0.1 / (1 + i)

    kit.run(lambda state: steps(kit, state, model, opt, top, each=NEVER))(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("schedulers")
def rate_multiplied(kit: Kit) -> Result:
    """The rate is multiplied by hand at the top of the body."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def top(i: int) -> None:
        for group in opt.param_groups:
            group["lr"] *= 0.9

    kit.run(lambda state: steps(kit, state, model, opt, top, each=NEVER))(kit.state(model, opt, i=0))
    return result(model, opt)
