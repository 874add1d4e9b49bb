"""Values of the state that code derives from gradients or losses, between the gradient and the step that uses them."""

from __future__ import annotations

import pytest
import torch

from tests.support.train.loops import Job, bits, check, data, disturbances, linear

STEPS = 8
POINTS = ["top", "reduced", "stepped"]


def filtered(state, net, loss):
    """Grokfast: a moving average of the gradients, added to them."""
    for name, p in net.named_parameters():
        state.held[name] = 0.9 * state.held.get(name, torch.zeros_like(p)) + 0.1 * p.grad
        p.grad.add_(state.held[name], alpha=2.0)


def clipped(state, net, loss):
    """Clipping at a moving average of the norm."""
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), state.held["norm"]).item()
    state.held = {"norm": 0.9 * state.held["norm"] + 0.1 * norm}


def clipped_by_a_float(state, net, loss):
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), state.held).item()
    state.held = 0.9 * state.held + 0.1 * norm


def clipped_by_a_tensor(state, net, loss):
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), state.held.item())
    state.held.mul_(0.9).add_(0.1 * norm)


class Clip:
    """An object of the script."""

    def __init__(self) -> None:
        self.norm = 1.0

    def state_dict(self):
        return {"norm": self.norm}

    def load_state_dict(self, held):
        self.norm = held["norm"]

    def __str__(self):
        return f"{self.norm!r}"


def clipped_by_an_object(state, net, loss):
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), state.held.norm).item()
    state.held.norm = 0.9 * state.held.norm + 0.1 * norm


def weighted(state, net, loss):
    """A weight of the loss that follows the loss."""
    for p in net.parameters():
        p.grad.mul_(state.held)
    state.held = 1 / (0.5 + loss.item())


KINDS = {"grokfast": (filtered, dict), "autoclip": (clipped, lambda: {"norm": 1.0}),
         "float": (clipped_by_a_float, lambda: 1.0), "tensor": (clipped_by_a_tensor, lambda: torch.tensor(1.0)),
         "object": (clipped_by_an_object, Clip), "loss": (weighted, lambda: 1.0)}


def loop_of(derive, first):
    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))

        def train(state):
            while state.step < STEPS:
                job.at("top", state.step)
                opt.zero_grad()
                loss = (net(data(state.step)) - 1).pow(2).mean()
                loss.backward()
                job.at("reduced", state.step)
                derive(state, net, loss)
                opt.step()
                job.at("stepped", state.step)
                job.metric()
                state.step += 1
            return bits(net), str(state.held)

        return job.run(train, model=net, optimizer=opt, step=0, held=first())

    return loop


@pytest.mark.parametrize("change", disturbances(POINTS, 4), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_values_derived_from_the_gradient_of_an_applied_step_are_exact(threads, kind, change):
    check(threads, loop_of(*KINDS[kind]), change)


class Counter:
    """A loader of the script, which cannot be loaded into while it runs."""

    def __init__(self) -> None:
        self.count, self.runs = 0, False

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, held):
        assert not self.runs
        self.count = held["count"]

    def __str__(self):
        return str(self.count)


@pytest.mark.parametrize("change", disturbances(["stepped"], 4), ids=str)
def test_an_object_that_moves_by_itself_before_the_step_is_not_loaded_into_while_it_runs(threads, change):
    def counted(state, net, loss):
        state.held.runs = True
        state.held.count += 1

    def loop(job: Job):
        inner, held = loop_of(counted, lambda: None), Counter()
        run = job.run

        def stopped(train, **values):
            def whole(state):
                try:
                    return train(state)
                finally:
                    held.runs = False

            return run(whole, **{**values, "held": held})

        job.run = stopped
        return inner(job)

    check(threads, loop, change)
