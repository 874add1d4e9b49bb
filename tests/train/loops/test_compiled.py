"""Models and functions that are compiled, checkpointed, or called part by part: no hook of ours is in their way."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from tests.support.train.loops import Disturbance, Job, bits, check, data, disturbances, seeded

STEPS = 8


class Net(nn.Module):
    """Batch-norm statistics and dropout: what a wrong random number or a statistic counted twice would show in."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(6, 1)
        seeded(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.body(x)))


def trained(state, opt, loss_of, steps: int = STEPS) -> str:
    while state.step < steps:
        opt.zero_grad()
        loss_of(data(state.step)).backward()
        opt.step()
        state.step += 1
    return bits(state.net)


def alone_with(alone, how: str) -> tuple[str, int, int]:
    """Bits after training, number of graphs compiled, number of times that compiled code ran."""
    net, graphs, calls = Net(), [], []
    opt = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))

    def backend(module, inputs):
        graphs.append(1)

        def run(*args):
            calls.append(1)
            return module.forward(*args)

        return run

    def loss_of(x):
        return net(x).pow(2).mean()

    torch._dynamo.reset()
    match how:
        case "function":
            loss_of = torch.compile(loss_of, backend=backend)
        case "function called before":
            loss_of = torch.compile(loss_of, backend=backend)
            held = copy.deepcopy(net.state_dict())
            loss_of(data(0))
            net.load_state_dict(held)
        case "model":
            net.compile(backend=backend)
        case "fullgraph":
            net.compile(backend=backend, fullgraph=True)
    state = hvd.elastic.TorchState(net=net, opt=opt, step=0)
    found = hvd.elastic.run(lambda state: trained(state, opt, loss_of))(state)
    assert not net._forward_pre_hooks and not net._forward_hooks
    return found, len(graphs), len(calls)


@pytest.mark.parametrize("how", ["function", "function called before", "model", "fullgraph"])
def test_what_is_compiled_stays_one_graph_and_draws_the_numbers_of_eager_mode(alone, how, monkeypatch):
    eager = alone_with(alone, "eager")
    monkeypatch.setattr(alone, "state", None)
    monkeypatch.setattr(alone, "optimizers", [])
    found = alone_with(alone, how)
    assert found == (eager[0], 1, STEPS + (how == "function called before"))


class Recording(nn.Module):
    """Dropout that notes its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[list] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(x.shape) > 0.5
        self.masks.append(mask.tolist())
        return x * mask


def test_a_checkpointed_module_of_the_state_is_computed_again_with_the_same_masks(alone):
    parts = [nn.Sequential(nn.Linear(4, 4), Recording(), nn.Linear(4, 4)) for _ in range(2)]
    opt = hvd.DistributedOptimizer(torch.optim.SGD([p for m in parts for p in m.parameters()], lr=0.1))

    @hvd.elastic.run
    def train(state):
        for state.step in range(state.step, 3):  # noqa: B020
            x = data(state.step)
            for part in parts:
                x = checkpoint(part, x, use_reentrant=False)
            x.pow(2).mean().backward()
            opt.step()

    train(hvd.elastic.TorchState(None, opt, a=parts[0], b=parts[1], step=0))
    for part in parts:
        masks = part[1].masks
        assert len(masks) == 6 and all(masks[i] == masks[i + 1] for i in (0, 2, 4))
        assert masks[0] != masks[2]


@pytest.mark.parametrize("before", [True, False])
def test_a_backward_pass_inside_another_is_refused_where_it_would_end_the_reduction(alone, before):
    """Where the last layers are computed once, the first gradient is the outer pass's and all is right."""
    body, head = nn.Linear(4, 4), nn.Linear(4, 1)
    opt = hvd.DistributedOptimizer(torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1))

    def backward() -> None:
        x = checkpoint(body, data(0).requires_grad_(), use_reentrant=True)
        (x if before else head(x)).sum().backward()

    if not before:
        backward()
        assert all(p.grad is not None for g in opt.param_groups for p in g["params"])
        return
    with pytest.raises(UsageError, match="inside another") as caught:
        backward()
    assert "use_reentrant=False" in (caught.value.hint or "")


class Parts(nn.Module):
    """Batch norm in a part that is called by itself; the large buffer is copied only when it has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()), nn.Linear(6, 1)
        seeded(self)
        self.body[1].register_buffer("large", torch.zeros(70_000))


def by_parts(job: Job):
    net = Parts()
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))

    def train(state):
        while state.step < STEPS:
            opt.zero_grad()
            job.at("top", state.step)
            hidden = net.body(data(state.step))
            with torch.no_grad():
                net.body[1].large += hidden.mean()
            job.at("forward", state.step)
            net.head(hidden).pow(2).mean().backward()
            job.at("backward", state.step)
            opt.step()
            job.at("stepped", state.step)
            job.metric()
            state.step += 1
        return bits(net)

    return job.run(train, model=net, optimizer=opt, step=0)


@pytest.mark.parametrize("change", disturbances(["top", "forward", "backward", "stepped"], 5), ids=str)
def test_statistics_of_a_part_that_is_called_by_itself_are_counted_once(threads, change):
    check(threads, by_parts, change)


def freed(job: Job):
    """The head trains from step 3 on; it is called by itself. In the end only the head trains."""
    net = Parts()
    net.head.requires_grad_(False)
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))

    def train(state):
        while state.step < STEPS:
            net.head.requires_grad_(state.step >= 3)
            net.body.requires_grad_(state.step < 6)
            opt.zero_grad()
            job.at("top", state.step)
            scale = 1.0 if job.worker is None else 2.0 * (hvd.rank() + 1) / (hvd.size() + 1)  # a mean of 1
            (scale * net.head(net.body(data(state.step))).pow(2).mean()).backward()
            opt.step()
            state.step += 1
        return [round(v, 4) for p in net.parameters() for v in p.flatten().tolist()]

    return job.run(train, model=net, optimizer=opt, step=0)


@pytest.mark.parametrize("change", [None, Disturbance("notice", "top", 5, spares=1)], ids=str)
def test_a_part_that_is_set_free_later_is_averaged_from_then_on(threads, change):
    """Each rank has a gradient of its own; that of plain torch is their mean."""
    check(threads, freed, change)
