"""Gradients through hvd.allreduce, allgather and broadcast, over ranks that are threads, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from spotfleet.protocol.messages import Stage
from spotfleet.train.gradients.buckets import FIRST_BUCKET_BYTES
from spotfleet.train.gradients.reducer import Reducer
from tests.support.train.thread_fleet import Lost, Worker


def leaf(rank: int, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def factors(rank: int, rows: int) -> torch.Tensor:
    """Makes each rank's loss another function of the result."""
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(50 + rank))


def close(found, expected) -> bool:
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_allreduce_reduces_the_gradient_with_the_same_op(several, op, size):
    def work(group):
        x = leaf(group.rank)
        (hvd.allreduce(x, op=op) * factors(group.rank, 2)).sum().backward()
        return x.grad

    total = sum(factors(r, 2) for r in range(size))
    assert close(several(size)(work), [total / size if op == hvd.Average else total] * size)


def test_grouped_allreduce_gives_each_tensor_its_gradient(several):
    def work(group):
        x, y, unused = leaf(group.rank), leaf(group.rank + 5, 1), leaf(9)
        a, b, _ = hvd.grouped_allreduce([x, y, unused], op=hvd.Sum)
        (a.sum() * (1 + group.rank) + b.sum() * 10).backward()
        return x.grad[0, 0].item(), y.grad[0, 0].item(), unused.grad.abs().sum().item()

    assert several()(work) == [(3.0, 20.0, 0.0)] * 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_allgather_sums_the_gradients_of_a_ranks_own_rows(several, size):
    def work(group):
        x = leaf(group.rank, 1 + group.rank)
        (hvd.allgather(x) * factors(group.rank, size * (size + 1) // 2)).sum().backward()
        return x.grad

    total = sum(factors(r, size * (size + 1) // 2) for r in range(size))
    assert close(several(size)(work), total.split([1 + r for r in range(size)]))


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_sums_the_gradients_on_its_root_and_is_zero_elsewhere(several, root):
    def work(group):
        x = leaf(group.rank)
        (hvd.broadcast(x, root) * factors(group.rank, 2)).sum().backward()
        return x.grad

    total = sum(factors(r, 2) for r in range(2))
    assert close(several()(work), [total if r == root else total * 0 for r in range(2)])


def test_a_scalar_and_a_second_derivative(several):
    def work(group):
        x = torch.tensor(2.0 + group.rank, requires_grad=True)
        y = hvd.allreduce(x, op=hvd.Sum) ** 3 + hvd.allgather(x).sum() ** 2
        first, = torch.autograd.grad(y, x, create_graph=True)
        second, = torch.autograd.grad(first, x)
        return first.item(), second.item()

    # the sum over both ranks of (a + b)^3 + (a + b)^2 at a + b = 5, and the same of its derivative
    assert several()(work) == [(2 * (75.0 + 10.0), 4 * (30.0 + 2.0))] * 2


def test_what_has_no_gradient_says_so_and_what_needs_none_has_none(several):
    def work(group):
        x = leaf(0)
        with pytest.raises(UsageError, match="allreduce: max has no gradient"):
            hvd.allreduce(x, op=hvd.Max).sum().backward()
        with torch.no_grad():
            plain = [hvd.allreduce(x), hvd.allgather(x), hvd.broadcast(x, 0)]
        return [t.requires_grad for t in [*plain, hvd.allgather(x.detach())]]

    assert several()(work) == [[False] * 4] * 2


def test_a_graph_of_an_earlier_generation_is_refused(alone):
    x = leaf(0)
    y = hvd.allreduce(x).sum()
    alone.group = object()
    with pytest.raises(UsageError, match="earlier generation"):
        y.backward()


# ---- with the reduction of parameters' gradients


def tower(scale: float) -> nn.Linear:
    made = nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        made.weight.copy_(torch.arange(12.0).view(3, 4) * scale - 0.3)
    return made


def contrastive(texts, images, own_texts, own_images, first: int) -> torch.Tensor:
    """Each of the own rows against all: the part of the loss that one rank computes."""
    at = torch.arange(len(own_texts)) + first
    return (functional.cross_entropy(own_texts @ images.t() / 0.5, at)
            + functional.cross_entropy(own_images @ texts.t() / 0.5, at)) / 2


def batch(which: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(which))


def features(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return functional.normalize(model(x), dim=1)


@pytest.mark.parametrize("whole", [True, False], ids=["whole loss on each rank", "own rows on each rank"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_contrastive_loss_over_gathered_features_has_the_gradient_of_the_whole_batch(several, whole, size):
    def work(group):
        text, image, n = tower(0.1), tower(-0.07), 8 // size
        opt = hvd.DistributedOptimizer(torch.optim.SGD([*text.parameters(), *image.parameters()], lr=0.1))
        mine = slice(group.rank * n, (group.rank + 1) * n)
        f, g = features(text, batch(1)[mine]), features(image, batch(2)[mine])
        all_f, all_g = hvd.allgather(f), hvd.allgather(g)
        loss = (contrastive(all_f, all_g, all_f, all_g, 0) if whole
                else contrastive(all_f, all_g, f, g, group.rank * n))
        loss.backward()
        opt.synchronize()
        return text.weight.grad, image.weight.grad

    text, image = tower(0.1), tower(-0.07)
    f, g = features(text, batch(1)), features(image, batch(2))
    contrastive(f, g, f, g, 0).backward()
    for found in several(size)(work):
        assert close(found, [text.weight.grad, image.weight.grad])


def test_ranks_that_use_other_parameters_run_collectives_of_backward_and_buckets_in_one_order(several):
    """A bucket is full early on rank 0 alone, before the backward pass of the allreduce below it."""
    def work(group):
        below, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(FIRST_BUCKET_BYTES // 4))
        params = [below, late]
        held = Reducer(params, 1, True, lambda: group, lambda r: None, lambda r, change, save: None, lambda: None)
        for _ in range(2):
            below.grad = late.grad = None
            y = hvd.allreduce(below * (1 + group.rank), op=hvd.Sum)
            (y.sum() + (late.sum() if group.rank == 0 else 0)).backward()
        return below.grad.tolist(), late.grad[0].item(), held.reduced

    assert several()(work) == [([3.0] * 3, 0.5, True)] * 2  # the mean of 2 * 1 and 2 * 2


def test_a_metric_that_keeps_a_graph_does_not_hold_up_buckets(several):
    def work(group):
        below, above = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(FIRST_BUCKET_BYTES // 4))
        held = Reducer([below, above], 1, True, lambda: group, lambda r: None, lambda r, change, save: None,
                       lambda: None)
        early, mean = [], None
        for _ in range(2):
            below.register_hook(lambda grad: early.append(held._next))
            loss = below.sum() + above.sum()
            loss.backward()
            mean = hvd.allreduce(loss)
        return early[-1], mean.requires_grad

    assert several()(work) == [(1, True)] * 2


def contrasting(worker: Worker):
    """Rank 1 dies in the fourth step, in the backward pass of its allgather."""
    hvd.init()
    text = tower(0.1)
    opt = hvd.DistributedOptimizer(torch.optim.SGD(text.parameters(), lr=0.5))

    @hvd.elastic.run
    def train(state):
        while state.step < 6:
            mine = batch(state.step)[hvd.rank() * 4:hvd.rank() * 4 + 4]
            f = features(text, mine)
            if state.step == 3 and worker.name == "h1/0/1":
                f.register_hook(lambda grad: die())
            everyone = hvd.allgather(f)
            opt.zero_grad()
            contrastive(everyone, everyone * 0.5, f, f * 0.5, hvd.rank() * 4).backward()
            opt.step()
            state.step += 1
        return text.weight.detach().flatten().tolist()

    def die():
        spare = "h2/0/1"
        worker.fleet.wait(lambda: spare in worker.fleet.workers
                          and worker.fleet.workers[spare].control.report.stage is Stage.READY, "the spare")
        raise Lost

    return train(hvd.elastic.TorchState(text, opt, step=0))


def test_a_rank_lost_in_the_backward_pass_of_a_collective_costs_nothing(threads):
    text = tower(0.1)
    opt = torch.optim.SGD(text.parameters(), lr=0.5)
    for step in range(6):
        f = features(text, batch(step))
        opt.zero_grad()
        contrastive(f, f * 0.5, f, f * 0.5, 0).backward()
        opt.step()
    found = [w.result for w in threads(contrasting, spares=1).finish()]
    assert found[0] == found[1] == pytest.approx(text.weight.detach().flatten().tolist(), abs=1e-5)
