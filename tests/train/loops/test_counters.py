"""State that an optimizer or a module keeps besides its tensors: it survives replays and goes to those who join."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.train.loops import Disturbance, Job, bits, check, data, disturbances, linear, seeded

STEPS = 9


class Free(torch.optim.Optimizer):
    """Schedule-free SGD in short: it counts in its parameter groups."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "sum": torch.zeros(1)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            c = 1 / (group["k"] + 1)
            group["sum"].add_(c)
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                z.sub_(p.grad, alpha=group["lr"])
                p.lerp_(z, c * float(group["sum"]) / 3)
            group["k"] += 1


class Lookahead(torch.optim.SGD):
    """Slow weights each third step; it counts in an attribute, or in its state under a key that is no parameter."""

    def __init__(self, params, lr: float, where: str) -> None:
        super().__init__(params, lr)
        self.where, self.count = where, 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        if self.where == "attribute":
            self.count += 1
            at = self.count
        else:
            held = self.state.setdefault("all", {"count": 0, "seen": torch.zeros(2)})
            held["count"] += 1
            held["seen"] += 1
            at = int(held["seen"][0])
            assert at == held["count"]
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if at % 3 == 0:
                    p.copy_(slow.lerp_(p, 0.5))


def counted(kind: str, copies: bool = False):
    def loop(job: Job):
        net = linear()
        opt = Free(net.parameters(), 0.1) if kind == "groups" else Lookahead(net.parameters(), 0.1, kind)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        opt = job.distributed(opt)

        def train(state):
            while state.step < STEPS:
                opt.zero_grad()
                (net(data(state.step)) - 1).pow(2).mean().backward()
                job.at("gradient", state.step)
                opt.step()
                schedule.step()
                job.at("metric", state.step)
                job.metric()
                state.step += 1
                state.commit()
            return bits(net), opt.param_groups[0]["lr"], opt.param_groups[0].get("k"), getattr(opt, "count", 0)

        return job.run(train, options={"copy": copies}, model=net, optimizer=opt, schedule=schedule, step=0)

    return loop


@pytest.mark.parametrize("copies", [False, True], ids=["", "copies"])
@pytest.mark.parametrize("kind", ["groups", "attribute", "state"])
@pytest.mark.parametrize("change", disturbances(["gradient", "metric"], 4), ids=str)
def test_counters_of_an_optimizer_count_each_step_once_on_every_rank(threads, kind, change, copies):
    check(threads, counted(kind, copies), change)


class Annealed(nn.Linear):
    """Its temperature is no tensor, and in no state but its extra state."""

    temperature = 1.0

    def get_extra_state(self):
        return {"temperature": self.temperature, "seen": torch.ones(1) * self.temperature}

    def set_extra_state(self, held):
        self.temperature = held["temperature"]
        assert float(held["seen"]) == pytest.approx(self.temperature)


def annealing(job: Job):
    net = nn.Sequential(Annealed(4, 3), nn.Linear(3, 1))
    seeded(net)
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))

    def train(state):
        while state.step < STEPS:
            if state.step < 3:
                net[0].temperature = 0.5 ** state.step
            opt.zero_grad()
            (net(data(state.step) / net[0].temperature) - 1).pow(2).mean().backward()
            job.at("gradient", state.step)
            opt.step()
            state.step += 1
        return bits(net), net[0].temperature

    return job.run(train, model=net, optimizer=opt, step=0)


@pytest.mark.parametrize("kind", ["kill", "notice"])
def test_extra_state_of_modules_goes_to_those_who_join(threads, kind):
    check(threads, annealing, Disturbance(kind, "gradient", 5, spares=1))
