"""What a call of the user's function leaves behind outside the state: hooks, tensors in variables, attributes."""

# ruff: noqa: B020  `for state.i in range(state.i, ...)` is how a loop starts where training stands

from __future__ import annotations

import pytest
import torch

from spotfleet.errors import UsageError
from tests.support.train.loops import Disturbance, Job, bits, check, data, fleet_of, linear

STEPS = 9


def hooked(where: str):
    """Each way to register a hook at the function's top; `where` begins with "removed" if the end removes it."""

    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.01))

        def train(state):
            handle = {
                "parameter": lambda: net.weight.register_hook(lambda g: g * 0.9),
                "module": lambda: net.register_forward_hook(lambda m, x, y: y * 0.9),
                "optimizer": lambda: opt.register_step_post_hook(
                    lambda *_: [p.data.mul_(0.9) for p in net.parameters()] and None),
            }[where.removeprefix("removed ")]()
            try:
                for state.i in range(state.i, STEPS):
                    job.at("top", state.i)
                    opt.zero_grad()
                    (net(data(state.i)) - 1).pow(2).mean().backward()
                    opt.step()
            finally:
                if where.startswith("removed"):
                    handle.remove()
            return bits(net)

        return job.run(train, model=net, optimizer=opt, i=0)

    return loop


@pytest.mark.parametrize("where, name", [("parameter", r"state\.model\.weight"), ("module", r"state\.model"),
                                         ("optimizer", r"state\.optimizer")])
def test_hooks_that_would_act_twice_are_an_error_that_names_them(threads, where, name):
    for kind in ("kill", "notice"):
        with pytest.raises(UsageError, match=name + r" again, so that they act twice: loops/test_calls\.py:\d+"):
            fleet_of(threads, hooked(where), Disturbance(kind, "top", 4))


@pytest.mark.parametrize("where", ["removed parameter", "removed module", "removed optimizer"])
def test_hooks_that_are_removed_at_the_end_act_once(threads, where):
    check(threads, hooked(where), Disturbance("kill", "top", 4))


def drawing_ahead(how: str):
    """A batch for the next iteration, the first one before the function is called."""

    def loop(job: Job):
        net, generator = linear(), torch.Generator().manual_seed(1)
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.01))
        x, table = torch.randn(8, 4, generator=generator), torch.randn(8, 4)

        def step(state, rows):
            job.at("top", state.i)
            opt.zero_grad()
            loss = (net(rows) - table[:, :1] * 0).pow(2).mean()
            following = torch.randn(8, 4, generator=generator)
            job.at("forward", state.i)
            loss.backward()
            opt.step()
            return following

        def of_the_module(state):
            nonlocal x
            for state.i in range(state.i, STEPS):
                x = step(state, x)

        def of_an_argument(state, y=x):
            for state.i in range(state.i, STEPS):
                y = step(state, y)

        def where_it_is_used(state):
            for state.i in range(state.i, STEPS):
                step(state, x)

        function = {"variable": of_the_module, "argument": of_an_argument, "no": where_it_is_used}[how]
        if how != "argument" or job.worker is None:
            return job.run(function, model=net, optimizer=opt, i=0)
        import spotfleet.train as hvd

        return hvd.elastic.run(of_an_argument)(hvd.elastic.TorchState(net, opt, i=0), x)

    return loop


@pytest.mark.parametrize("how, message", [("variable", "but x (outside of the state)"),
                                          ("argument", "but y (loops/test_calls.py:"), ("no", "")])
def test_a_batch_drawn_ahead_whose_first_one_is_drawn_before_the_call_is_reported(threads, capfd, how, message):
    fleet_of(threads, drawing_ahead(how), Disturbance("kill", "forward", 4))
    said = capfd.readouterr().err
    assert (message in said) if message else ("is not what the iteration had" not in said)


class Scaled(torch.nn.Module):
    """A model with an attribute that its script changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.share, self.whose = linear(), 1.0, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(x) * self.share
        return out if self.net.training else out * 3


@pytest.mark.parametrize("point", ["top", "forward"])
def test_a_worker_that_joins_takes_over_what_the_script_has_changed_in_modules(threads, point):
    def loop(job: Job):
        model = Scaled()
        model.whose = job.worker.name if job.worker else ""
        opt = job.distributed(torch.optim.SGD(model.parameters(), lr=0.01))

        def train(state):
            for state.i in range(state.i, STEPS):
                job.at("top", state.i)
                if state.i == 2:
                    model.share = 0.5
                    model.net.eval()
                opt.zero_grad()
                loss = (model(data(state.i)) - 1).pow(2).mean()
                job.at("forward", state.i)
                loss.backward()
                opt.step()
            assert model.whose == (job.worker.name if job.worker else "")
            return bits(model)

        return job.run(train, model=model, optimizer=opt, i=0)

    for kind in ("kill", "notice"):
        check(threads, loop, Disturbance(kind, point, 5, spares=1))
