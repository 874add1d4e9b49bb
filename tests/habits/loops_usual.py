"""The everyday loops: one step per batch, epochs, accumulation, clipping, schedulers, precision, optimizers."""
# ruff: noqa: B020  `for state.i in range(state.i, ...)` is how a loop starts where training stands

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from tests.habits.kit import STEPS, Kit, Result, batch, habit, loss_of, net, result

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def steps(kit: Kit, state: Any, model: Any, opt: Any, before: Any = None, after: Any = None, each: int = 1) -> None:
    """Iterate `state.i` to STEPS, a step per batch; `before(i)` runs between backward and step, `after(i)` after it."""
    for state.i in range(state.i, STEPS):
        i = state.i
        kit.point("forward", i)
        opt.zero_grad()
        loss_of(model, i).backward()
        kit.point("reduced", i)
        if before:
            before(i)
        opt.step()
        kit.point("stepped", i)
        if after:
            after(i)
        if (i + 1) % each == 0:
            state.commit()


def simple(kit: Kit, model: Any, make: Any, before: Any = None, after: Any = None, each: int = 1,
           **values: Any) -> Result:
    opt = kit.optimizer(make(model.parameters()))
    state = kit.state(model, opt, i=0, **values)
    kit.run(lambda state: steps(kit, state, model, opt, before, after, each))(state)
    return result(model, opt)


@habit("usual")
def plain_sgd(kit: Kit) -> Result:
    """SGD with momentum, one step per batch, a commit after each."""
    return simple(kit, net(), lambda p: SGD(p, lr=0.1, momentum=0.9))


@habit("usual")
def seldom_commits(kit: Kit) -> Result:
    """A commit only every fifth step."""
    return simple(kit, net(), lambda p: SGD(p, lr=0.1, momentum=0.9), each=5)


@habit("usual")
def no_commit(kit: Kit) -> Result:
    """No commit at all."""
    return simple(kit, net(), lambda p: Adam(p, lr=0.01), each=10**9)


@habit("usual")
def while_loop(kit: Kit) -> Result:
    """`while state.i < N`, counted up at the end of the body."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def train(state: Any) -> None:
        while state.i < STEPS:
            kit.point("forward", state.i)
            opt.zero_grad()
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)
            state.i += 1
            state.commit()

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("usual")
def nested_epochs(kit: Kit) -> Result:
    """Epochs of batches, both loop variables in the state."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def train(state: Any) -> None:
        for state.epoch in range(state.epoch, 3):
            for state.batch in range(state.batch, 4):
                i = state.epoch * 4 + state.batch
                kit.point("forward", i)
                opt.zero_grad()
                loss_of(model, i).backward()
                kit.point("reduced", i)
                opt.step()
                kit.point("stepped", i)
                state.commit()
            state.batch = 0

    kit.run(train)(kit.state(model, opt, epoch=0, batch=0))
    return result(model, opt)


@habit("usual")
def zero_grad_at_the_end(kit: Kit) -> Result:
    """`zero_grad()` after the step instead of before the gradient."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)
            opt.zero_grad()

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("usual")
def gradients_to_zero(kit: Kit) -> Result:
    """`zero_grad(set_to_none=False)`."""
    model = net()
    opt = kit.optimizer(Adam(model.parameters(), lr=0.01))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            opt.zero_grad(set_to_none=False)
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("usual")
def model_zero_grad(kit: Kit) -> Result:
    """`model.zero_grad()` instead of the optimizer's."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            model.zero_grad()
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("usual")
def closure(kit: Kit) -> Result:
    """`opt.step(closure)`."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            def closure() -> torch.Tensor:
                opt.zero_grad()
                loss = loss_of(model, state.i)
                loss.backward()
                return loss

            kit.point("forward", state.i)
            opt.step(closure)
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("usual")
def metric_after_the_step(kit: Kit) -> Result:
    """A metric averaged over ranks after each step."""
    return simple(kit, net(), lambda p: SGD(p, lr=0.1, momentum=0.9), after=lambda i: kit.allreduce(torch.ones(1)))


@habit("usual")
def early_stopping(kit: Kit) -> Result:
    """The loop ends early, by a loss that all ranks have averaged."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.05))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            opt.zero_grad()
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)
            with torch.no_grad():
                seen = kit.allreduce(loss_of(model, 0)).item()
            if seen < 0.1 or state.i >= 9:
                break

    state = kit.state(model, opt, i=0)
    kit.run(train)(state)
    return result(model, opt)


# ---- accumulation

@habit("accumulation")
def accumulation(kit: Kit) -> Result:
    """Accumulation by hand: a step on every fourth backward."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def train(state: Any) -> None:
        for state.i in range(state.i, 24):
            kit.point("forward", state.i)
            (loss_of(model, state.i) / 4).backward()
            kit.point("reduced", state.i)
            if (state.i + 1) % 4 == 0:
                opt.step()
                opt.zero_grad()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("accumulation")
def accumulation_while(kit: Kit) -> Result:
    """Accumulation by hand in a while loop with a count of its own."""
    model = net()
    opt = kit.optimizer(Adam(model.parameters(), lr=0.01))

    def train(state: Any) -> None:
        while state.i < 24:
            kit.point("forward", state.i)
            (loss_of(model, state.i) / 3).backward()
            kit.point("reduced", state.i)
            state.i += 1
            if state.i % 3 == 0:
                opt.step()
                opt.zero_grad()
                state.commit()
            kit.point("stepped", state.i - 1)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("accumulation")
def accumulation_with_commits_between(kit: Kit) -> Result:
    """Accumulation by hand with a commit after each microbatch."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def train(state: Any) -> None:
        for state.i in range(state.i, 24):
            kit.point("forward", state.i)
            (loss_of(model, state.i) / 4).backward()
            kit.point("reduced", state.i)
            if (state.i + 1) % 4 == 0:
                opt.step()
                opt.zero_grad()
            state.commit()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("accumulation")
def accumulation_in_an_inner_loop(kit: Kit) -> Result:
    """Four microbatches in an inner loop, then a step."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            for micro in range(4):
                (loss_of(model, state.i * 4 + micro) / 4).backward()
            kit.point("reduced", state.i)
            opt.step()
            opt.zero_grad()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("accumulation")
def passes_per_step(kit: Kit) -> Result:
    """`backward_passes_per_step=4`."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9), backward_passes_per_step=4)

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            for micro in range(4):
                (loss_of(model, state.i * 4 + micro) / 4).backward()
            kit.point("reduced", state.i)
            opt.step()
            opt.zero_grad()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("accumulation")
def two_losses(kit: Kit) -> Result:
    """Two losses, a backward for each, one step."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            opt.zero_grad()
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            (model(batch(state.i)[0]).pow(2).mean() * 0.1).backward()
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


# ---- between gradient and step

@habit("gradients")
def clipping_by_norm(kit: Kit) -> Result:
    """`clip_grad_norm_` between backward and step."""
    model = net()
    return simple(kit, model, lambda p: Adam(p, lr=0.01),
                  before=lambda i: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@habit("gradients")
def clipping_by_value(kit: Kit) -> Result:
    """`clip_grad_value_`."""
    model = net()
    return simple(kit, model, lambda p: SGD(p, lr=0.1),
                  before=lambda i: nn.utils.clip_grad_value_(model.parameters(), 0.01))


@habit("gradients")
def scaled_by_hand(kit: Kit) -> Result:
    """Gradients multiplied by hand before the step."""
    model = net()

    def halve(i: int) -> None:
        for p in model.parameters():
            p.grad.mul_(0.5)

    return simple(kit, model, lambda p: SGD(p, lr=0.1, momentum=0.9), before=halve)


@habit("gradients")
def gradient_noise(kit: Kit) -> Result:
    """Noise from a generator seeded by the step is added to gradients."""
    model = net()

    def add(i: int) -> None:
        generator = torch.Generator().manual_seed(i)
        for p in model.parameters():
            p.grad.add_(torch.randn(p.shape, generator=generator), alpha=0.01)

    return simple(kit, model, lambda p: SGD(p, lr=0.1), before=add)


@habit("gradients")
def skipped_step(kit: Kit) -> Result:
    """A step that all ranks leave out (a bad batch), with `zero_grad()`."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            if state.i % 3 != 1:
                opt.step()
            opt.zero_grad()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("gradients")
def gradients_kept(kit: Kit) -> Result:
    """Gradients of two losses kept over `zero_grad()` and combined (PCGrad)."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            opt.zero_grad()
            loss_of(model, state.i).backward()
            first = [p.grad for p in model.parameters()]
            opt.zero_grad()
            kit.point("reduced", state.i)
            (model(batch(state.i)[0]).pow(2).mean() * 0.3).backward()
            for p, other in zip(model.parameters(), first, strict=True):
                p.grad = p.grad - 0.5 * other
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


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


@habit("optimizers")
def gan(kit: Kit) -> Result:
    """Two optimizers that step in turn (a GAN), committed once per iteration."""
    one, two = net(seed=1), net(seed=2)
    first, second = kit.optimizer(SGD(one.parameters(), lr=0.1)), kit.optimizer(Adam(two.parameters(), lr=0.01))

    def train(state: Any) -> None:
        while state.i < STEPS:
            x, _ = batch(state.i)
            kit.point("forward", state.i)
            first.zero_grad()
            (one(x) - two(x).detach()).pow(2).mean().backward()
            first.step()
            kit.point("reduced", state.i)
            second.zero_grad()
            (two(x) + one(x).detach()).pow(2).mean().backward()
            second.step()
            kit.point("stepped", state.i)
            state.i += 1
            state.commit()

    state = (kit.state(one, first, other=two, second=second, i=0))
    kit.run(train)(state)
    return result(one, two, first, second)


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

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            if state.i:
                scheduler.step()
            kit.point("forward", state.i)
            opt.zero_grad()
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, scheduler=scheduler, i=0))
    return result(model, opt, scheduler=scheduler)


@habit("schedulers")
def rate_by_hand(kit: Kit) -> Result:
    """The rate is set by hand in each iteration, from the loop variable."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            for group in opt.param_groups:
                group["lr"] = 0.1 / (1 + state.i)
            kit.point("forward", state.i)
            opt.zero_grad()
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)
