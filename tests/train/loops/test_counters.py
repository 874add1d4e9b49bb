"""State that an optimizer or a module keeps besides its tensors: it survives replays and goes to those who join."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

from spotfleet.errors import UsageError
from tests.support.train.loops import Disturbance, Job, bits, check, data, disturbances, fleet_of, linear, seeded

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
    """Its temperature is no tensor, no plain attribute, and in no state but its extra state."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.held = {"temperature": 1.0}

    def get_extra_state(self):
        return {**self.held, "seen": torch.ones(1) * self.held["temperature"]}

    def set_extra_state(self, held):
        self.held = {"temperature": held["temperature"]}
        assert float(held["seen"]) == pytest.approx(held["temperature"])


def annealing(job: Job):
    net = nn.Sequential(Annealed(4, 3), nn.Linear(3, 1))
    seeded(net)
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))

    def train(state):
        while state.step < STEPS:
            if state.step < 3:
                net[0].held["temperature"] = 0.5 ** state.step
            opt.zero_grad()
            (net(data(state.step) / net[0].held["temperature"]) - 1).pow(2).mean().backward()
            job.at("gradient", state.step)
            opt.step()
            state.step += 1
        return bits(net), net[0].held["temperature"]

    return job.run(train, model=net, optimizer=opt, step=0)


@pytest.mark.parametrize("kind", ["kill", "notice"])
def test_extra_state_of_modules_goes_to_those_who_join(threads, kind):
    check(threads, annealing, Disturbance(kind, "gradient", 5, spares=1))


class Around(torch.optim.Optimizer):
    """Lookahead as others write it: around another optimizer, which has momentum in a state of its own."""

    def __init__(self, inner, shared: bool) -> None:
        self.inner = inner
        groups = [{"params": g["params"]} for g in inner.param_groups]
        super().__init__(groups, {"lr": 0.0})
        if shared:
            self.param_groups = inner.param_groups
            self.state = inner.state
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.param_groups[0]["weight_decay"] = 0.1 / (1 + self.count)
        self.inner.step()
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if self.count % 3 == 0:
                    p.copy_(slow.lerp_(p, 0.5))


class Remembers(torch.optim.SGD):
    """It keeps lists, dicts and tensors as attributes, and steps by them."""

    def __init__(self, params) -> None:
        super().__init__(params, 0.1)
        self.norms, self.total, self.params = [], torch.zeros(1), [p for g in self.param_groups for p in g["params"]]
        self.moments, self.seen, self.kept = {p: torch.zeros_like(p) for p in self.params}, {}, self.norms
        self.last, self.dark = deque(maxlen=2), object()

    @torch.no_grad()
    def step(self, closure=None):
        norm = float(sum(p.grad.abs().sum() for p in self.params))
        self.norms.append(norm)
        self.last.append(torch.full((1,), norm))
        self.total += norm
        for p in self.params:
            self.seen[id(p)] = self.seen.get(id(p), 0) + 1
            p.grad.add_(self.moments[p].lerp_(p.grad, 0.5)).mul_(self.seen[id(p)] / (1 + sum(self.kept)))
            p.grad.add_(sum(self.last) / self.total)
        super().step()


def keeping(make, copies: bool = False):
    def loop(job: Job):
        net = linear()
        opt = job.distributed(make(net.parameters()))

        def train(state):
            while state.step < STEPS:
                opt.zero_grad()
                (net(data(state.step)) - 1).pow(2).mean().backward()
                job.at("gradient", state.step)
                opt.step()
                job.at("metric", state.step)
                job.metric()
                state.step += 1
                state.commit()
            return bits(net)

        return job.run(train, options={"copy": copies}, model=net, optimizer=opt, step=0)

    return loop


KEEPERS = {"around": lambda ps: Around(torch.optim.SGD(ps, 0.1, momentum=0.9), False),
           "around, shared": lambda ps: Around(torch.optim.SGD(ps, 0.1, momentum=0.9), True),
           "twice around": lambda ps: Around(Around(torch.optim.Adam(ps, 0.1), False), False),
           "attributes": Remembers}


@pytest.mark.parametrize("copies", [False, True], ids=["", "copies"])
@pytest.mark.parametrize("make", KEEPERS.values(), ids=KEEPERS)
@pytest.mark.parametrize("change", disturbances(["gradient", "metric"], 4), ids=str)
def test_what_an_optimizer_keeps_in_others_and_in_attributes_goes_to_those_who_join(threads, make, change, copies):
    check(threads, keeping(make, copies), change)


@pytest.mark.parametrize("early", [True, False])
def test_a_second_optimizer_that_is_not_in_the_state_is_refused_when_it_steps(threads, early):
    def loop(job: Job):
        net, head = linear(), nn.Linear(1, 1)
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))
        other = job.distributed(torch.optim.SGD(head.parameters(), lr=0.1)) if early else None

        def train(state):
            while state.step < STEPS:
                probe = other or job.distributed(torch.optim.SGD(head.parameters(), lr=0.1))
                head(net(data(state.step))).pow(2).mean().backward()
                opt.step()
                probe.step()
                state.step += 1
            return bits(net)

        return job.run(train, model=net, optimizer=opt, step=0)

    if early:
        with pytest.raises(UsageError, match=r"SGD.step\(\) \(loops/test_counters.py:\d+\): this optimizer and the "
                                             r"model that it trains are not in the state, which has state") as caught:
            fleet_of(threads, loop)
        assert "TorchState(model, optimizer, head=head" in (caught.value.hint or "")
    else:  # a probe that each call of the function makes anew
        fleet_of(threads, loop)
