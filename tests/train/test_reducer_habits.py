"""Habits of training scripts that touch gradients, over ranks that are threads: the numbers are plain torch's."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from spotfleet.protocol.messages import Stage
from spotfleet.train import current
from spotfleet.train.gradients.buckets import FIRST_BUCKET_BYTES
from spotfleet.train.gradients.optimizer_tag import handle_of
from spotfleet.train.gradients.reducer import PeerBackwardError, Reducer
from tests.support.train.thread_fleet import Lost

WORLDS = [1, 2]


def build(group, params, passes=1, average=True, **options) -> Reducer:
    params = list(params)
    params[0].reducer = Reducer(params, passes, average, lambda: group, lambda r: None, lambda r, change, save: None,
                                lambda: None, **options)
    return params[0].reducer


def linear(seed: int = 0) -> nn.Linear:
    made = nn.Linear(4, 1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
    return made


def rows(step: int, rank: int = 0, world: int = 1) -> torch.Tensor:
    """A rank's share of a global batch of 8 rows."""
    whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return whole[rank * 8 // world:(rank + 1) * 8 // world]


def grads(params) -> list[list[float]]:
    return [None if p.grad is None else p.grad.flatten().tolist() for p in params]


def near(found, expected) -> bool:
    return all(a == pytest.approx(b, rel=1e-6, abs=1e-6) for a, b in zip(found, expected, strict=True))


# ---- a backward pass that raises


class Fails(torch.autograd.Function):
    """Stands for an allocation that fails half-way through backward."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise torch.OutOfMemoryError("out of memory, as if")
        return grad, None


def train_with_failure(rank, world, who, to_none=True, passes=1, module=False, at=-1):
    """Six batches; the backward pass of the third raises on the ranks `who`, and is skipped. Returns weights, skips.

    Of several passes that with index `at` raises. `module`: the module's zero_grad is called, not the optimizer's.
    """
    first, second = nn.Linear(4, 4), linear(1)
    with torch.no_grad():
        first.weight.copy_(torch.eye(4))
        first.bias.zero_()
    params = [*first.parameters(), *second.parameters()]
    opt = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    if world:
        opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=passes)
    skipped = []
    for step in range(6):
        (nn.Module.zero_grad if module else type(opt).zero_grad)(
            nn.ModuleList([first, second]) if module else opt, set_to_none=to_none)
        for number in range(passes):
            loss = second(Fails.apply(first(rows(10 * step + number, rank, world or 1)),
                                      step == 2 and number == range(passes)[at] and rank in who)).square().mean()
            try:
                loss.backward()
            except torch.OutOfMemoryError:
                skipped.append(step)
                break
        else:
            opt.step()
    return [p.flatten().tolist() for p in map(torch.Tensor.detach, params)], skipped


@pytest.mark.parametrize(("passes", "at"), [(1, 0), (3, 0), (3, 1), (3, 2)])
@pytest.mark.parametrize("who", [(0, 1), (1,), (0,), ()], ids=str)
def test_a_batch_whose_backward_raises_is_skipped_on_all_ranks_and_later_ones_are_right(several, who, passes, at):
    expected, _ = train_with_failure(0, 0, (0,) if who else (), passes=passes, at=at)
    for weights, skipped in several(2)(lambda g: train_with_failure(g.rank, 2, who, passes=passes, at=at)):
        assert near(weights, expected) and skipped == ([2] if who else [])


@pytest.mark.parametrize("module", [False, True])
def test_zeroing_in_place_after_a_failed_backward_keeps_later_gradients_right(several, module):
    expected, _ = train_with_failure(0, 0, (0,))
    for weights, skipped in several(2)(lambda g: train_with_failure(g.rank, 2, (1,), to_none=False, module=module)):
        assert near(weights, expected) and skipped == [2]


@pytest.mark.parametrize("world", WORLDS)
def test_a_failed_pass_in_between_leaves_the_gradients_of_the_others(several, world):
    """All ranks lose the second of three passes, and go on with the third.

    As in plain torch, the parameter that had its gradient already keeps it.
    """
    def work(group):
        below, above = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        build(group, [below, above], passes=3)
        for number, factor in enumerate((1.0, 10.0, 100.0)):
            try:
                scale = factor * (1 + 2 * group.rank)
                (Fails.apply(below * scale, number == 1) + above * scale).sum().backward()
            except torch.OutOfMemoryError:
                continue
        below.reducer.finish_round()
        return below.grad.item(), above.grad.item()

    assert several(world)(work) == [(101.0, 111.0) if world == 1 else (202.0, 222.0)] * world


def after_a_launched_bucket(rank, world, seen):
    """The second of four backward passes raises on rank 1 after a bucket was launched. Returns gradients, by pass.

    `seen`: zeroed by the optimizer, which notices. Else in place, in memory that the failed round may still write.
    """
    below, above = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(FIRST_BUCKET_BYTES // 4))
    opt = hvd.DistributedOptimizer(torch.optim.SGD([below, above], lr=0.1))
    found = []
    for number in range(4):
        if seen:
            opt.zero_grad(set_to_none=False)
        else:
            for p in (below, above):
                if p.grad is not None:
                    p.grad.zero_()
        try:
            ((1 + 2 * rank + number) * (Fails.apply(below, number == 1 and rank == 1).sum() + above.sum())).backward()
            found.append((below.grad[0].item(), above.grad[-1].item()))
        except torch.OutOfMemoryError:
            found.append(None)
    return found


@pytest.mark.parametrize("seen", [True, False])
def test_gradients_in_memory_of_a_failed_round_are_never_taken_for_good(several, seen):
    expected = [(2.0, 2.0), None, (4.0, 4.0) if seen else None, (5.0, 5.0)]
    assert several(2)(lambda g: after_a_launched_bucket(g.rank, 2, seen)) == [expected] * 2


def test_a_rank_that_is_alone_trains_on_after_a_failed_backward(several):
    expected, _ = train_with_failure(0, 0, (0,))
    assert several(1)(lambda g: train_with_failure(0, 1, (0,)))[0] == (expected, [2])


def test_a_rank_whose_backward_raised_may_call_a_collective_next(several):
    def work(group):
        p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(300_000))
        reducer = build(group, [p, q])
        try:
            (Fails.apply(p.sum(), group.rank == 1) + q.sum() * 0).backward()
        except torch.OutOfMemoryError as error:
            kind = type(error)
        reducer.settle()
        total = group.allreduce(torch.ones(1)).item()
        reducer.finish_round()
        return kind is PeerBackwardError, total, p.grad, q.grad

    assert several(2)(work) == [(True, 2.0, None, None), (False, 2.0, None, None)]


def losing(worker):
    """The backward pass of step 2 raises on rank 1 alone; rank 0 is lost in step 5."""
    hvd.init()
    net, spare = linear(), "h2/0/1"
    opt = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))

    @hvd.elastic.run
    def train(state):
        while state.step < 8:
            if state.step == 5 and worker.name == "h0/0/1":
                worker.fleet.wait(lambda: spare in worker.fleet.workers
                                  and worker.fleet.workers[spare].control.report.stage is Stage.READY, "the spare")
                raise Lost
            opt.zero_grad()
            try:
                loss = net(Fails.apply(rows(state.step, hvd.rank(), 2).requires_grad_(),
                                       state.step == 2 and hvd.rank() == 1)).square().mean()
                loss.backward()
            except torch.OutOfMemoryError:
                state.step += 1
                continue
            opt.step()
            state.step += 1
        return [p.flatten().tolist() for p in map(torch.Tensor.detach, net.parameters())], state.version

    return train(hvd.elastic.TorchState(net, opt, step=0))


def test_a_loss_after_a_failed_backward_changes_nothing(threads):
    net = linear()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in (0, 1, 3, 4, 5, 6, 7):
        opt.zero_grad()
        net(rows(step)).square().mean().backward()
        opt.step()
    fleet = threads(losing, spares=1)
    found = [w.result for w in fleet.finish()]
    assert len(found) == 2 and found[0] == found[1] and found[0][1] == 7
    assert near(found[0][0], [p.detach().flatten().tolist() for p in net.parameters()])


# ---- memory formats, kept gradients


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_parameters_in_channels_last_and_fused_steps(several, kind, fused):
    def weights(group):
        torch.manual_seed(3) if group is None else None
        net = nn.Conv2d(3, 4, 3)
        with torch.no_grad():
            net.weight.copy_(torch.arange(net.weight.numel()).view(net.weight.shape) / 50)
            net.bias.zero_()
        net = net.to(memory_format=torch.channels_last)
        opt = kind(net.parameters(), lr=0.1, fused=fused, foreach=False)
        if group is not None:
            opt = hvd.DistributedOptimizer(opt)
        x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(5))
        for _ in range(2):
            opt.zero_grad()
            net(x.to(memory_format=torch.channels_last)).square().sum().backward()
            opt.step()
        return net.weight.detach().flatten().tolist(), net.weight.grad.stride() == net.weight.stride()

    assert several(2)(weights) == [weights(None)] * 2


KEEPS = {"itself": lambda g: g, "a slice": lambda g: g.view(-1), "detached": lambda g: g.detach()}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("keep", list(KEEPS))
def test_gradients_that_a_script_keeps_over_zero_grad_stay(several, world, keep):
    def work(group):
        net = linear()
        build(group, net.parameters())
        kept = []
        for loss in (torch.square, torch.abs, torch.cos):
            net.zero_grad()
            loss(net(rows(0))).mean().backward()
            kept.append([KEEPS[keep](p.grad) for p in net.parameters()])
        return [[g.flatten().tolist() for g in row] for row in kept]

    expected = []
    for loss in (torch.square, torch.abs, torch.cos):
        net = linear()
        loss(net(rows(0))).mean().backward()
        expected.append(grads(net.parameters()))
    assert several(world)(work) == [expected] * world


def test_a_kept_gradient_stays_when_its_parameter_is_not_used_next(several):
    def work(group):
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        build(group, [a, b])
        (a.sum() + b.sum()).backward()
        kept = b.grad
        a.grad = b.grad = None
        (a * 5).sum().backward()
        return kept.tolist(), a.grad.tolist(), b.grad

    assert several(2)(work) == [([1.0] * 2, [5.0] * 2, None)] * 2


def test_gradients_that_nobody_keeps_use_the_same_memory_each_step(several):
    def work(group):
        net = linear()
        opt = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        places = set()
        for step in range(4):
            opt.zero_grad()
            net(rows(step)).sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            places.add(net.weight.grad.data_ptr())
        return len(places)

    assert several(2)(work) == [1, 1]


# ---- parameters that come and go


def test_a_parameter_that_replaces_another_in_the_optimizer_is_averaged_from_its_first_gradient(several):
    def work(group):
        points, fixed = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
        opt = hvd.DistributedOptimizer(torch.optim.SGD([points, fixed], lr=0.1))
        for step in range(4):
            if step in (1, 3):  # once with, once without a gradient of a parameter that was there before
                points = nn.Parameter(torch.cat([points.detach()] * 2))
                opt.param_groups[0]["params"][0] = points
            opt.zero_grad()
            (((1 + 2 * group.rank) * points).sum() + (fixed.sum() if step < 3 else 0)).backward()
            opt.step()
        return points.tolist(), len(handle_of(opt).reducer._hooks)

    assert several(2)(work) == [(pytest.approx([0.2] * 8), 2)] * 2  # four steps of 0.1 * mean(1, 3)


def test_a_parameter_that_is_set_free_without_a_forward_pass_of_a_module_is_averaged(several):
    def work(group):
        a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1), requires_grad=False)
        opt = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=0.1))
        for step in range(2):
            b.requires_grad_(step == 1)
            opt.zero_grad()
            ((1 + 2 * group.rank) * (a + b)).sum().backward()
        return a.grad.item(), b.grad.item()

    assert several(2)(work) == [(2.0, 2.0)] * 2


def test_a_parameter_that_joins_between_two_passes_of_a_step_leaves_the_first_pass_as_it_was(several):
    def work(group):
        a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        opt = hvd.DistributedOptimizer(torch.optim.SGD([a], lr=1.0), backward_passes_per_step=2)
        (a * (1 + 2 * group.rank)).sum().backward()
        opt.add_param_group({"params": [b]})
        ((a + b) * 10).sum().backward()
        return a.grad.item(), b.grad.item()

    assert several(2)(work) == [(12.0, 10.0)] * 2


# ---- wrappers


@pytest.mark.parametrize("world", WORLDS)
def test_a_later_wrapper_over_the_same_parameters_replaces_the_earlier_one(several, world):
    def work(group):
        net, found, made = linear(), [], []
        for _ in range(3):
            made.append(hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1)))
            net.zero_grad()
            net(rows(0, group.rank, world)).square().mean().backward()
            found.append(grads(net.parameters()))
        with pytest.raises(UsageError, match="later DistributedOptimizer"):
            made[0].step()
        return found, len(list(current.runtime().optimizers))

    net = linear()
    net(rows(0)).square().mean().backward()
    for found, count in several(world)(work):
        assert all(near(one, grads(net.parameters())) for one in found) and count == 1


def test_optimizers_that_a_script_drops_are_dropped_here(several):
    def work(group):
        gone = []
        for _ in range(3):
            net = linear()
            gone.append(weakref.ref(hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))))
            net(rows(0)).sum().backward()
        del net
        gc.collect()
        return [g() for g in gone], len(list(current.runtime().optimizers))

    assert several(1)(work) == [([None] * 3, 0)]


def test_an_optimizer_beside_the_one_in_the_state_is_refused(several):
    def work(group):
        net = linear()
        held = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        current.runtime().state = SimpleNamespace(_optimizers={"optimizer": held})
        with pytest.raises(UsageError, match="belong to an optimizer in the state"):
            hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.2))
        current.runtime().state = None
        other = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.2))
        current.runtime().state = SimpleNamespace(_optimizers={"optimizer": held})
        with pytest.raises(UsageError, match="belong to an optimizer in the state"):
            net(rows(0)).sum().backward()
        return other is not held

    assert several(1)(work) == [True]


@pytest.mark.parametrize("world", WORLDS)
def test_a_step_inside_a_gradient_hook_is_an_error_that_says_what_to_do(several, world):
    def work(group):
        net = linear()
        opt = hvd.DistributedOptimizer(torch.optim.SGD([net.weight], lr=0.1))
        net.weight.register_post_accumulate_grad_hook(lambda p: opt.step())
        with pytest.raises(UsageError, match=r"inside backward\(\)") as found:
            net(rows(0)).sum().backward()
        return "after backward() has returned" in found.value.hint

    assert several(world)(work) == [True] * world


# ---- sums and means


def test_a_sum_counts_each_pass_once_and_a_second_step_has_the_same_gradient(several):
    def work(group):
        net = linear()
        opt = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), op=hvd.Sum)
        x = rows(0, group.rank, 2)
        net(x).square().sum().backward()
        net(x).abs().sum().backward()
        found = [grads(net.parameters())]
        for _ in range(2):
            opt.step()
            found.append(grads(net.parameters()))
        (net.weight * 1).sum().backward()  # the other parameter's gradient is reduced once more
        return [*found, grads(net.parameters())]

    net = linear()
    (net(rows(0)).square().sum() + net(rows(0)).abs().sum()).backward()
    expected = grads(net.parameters())
    last = [[g + 2 for g in expected[0]], expected[1]]
    for found in several(2)(work):
        assert all(near(one, expected) for one in found[:3]) and near(found[3], last)


def test_a_sum_whose_gradients_were_zeroed_or_replaced_between_two_passes(several):
    def work(group):
        p = nn.Parameter(torch.zeros(1))
        build(group, [p], average=False)
        p.sum().backward()
        p.grad.zero_()
        p.sum().backward()
        zeroed = p.grad.item()
        p.grad = torch.full((1,), 10.0)
        p.sum().backward()
        return zeroed, p.grad.item()

    assert several(2)(work) == [(2.0, 22.0)] * 2


@pytest.mark.parametrize("factor", [1.0, 0.5, 4.0])
def test_a_predivide_factor_splits_the_mean_in_two(several, factor):
    def work(group):
        net, sent = linear(), []
        as_built = group.launch
        group.launch = lambda t, *more: sent.append(t[:1].item()) or as_built(t, *more)
        opt = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), gradient_predivide_factor=factor)
        net(rows(0, group.rank, 2)).square().mean().backward()
        own = linear()
        own(rows(0, group.rank, 2)).square().mean().backward()
        opt.step()
        return grads(net.parameters()), sent[0] == pytest.approx(own.bias.grad.item() / (2 if factor == 1 else factor))

    net = linear()
    net(rows(0)).square().mean().backward()
    for found, sent in several(2)(work):
        assert near(found, grads(net.parameters())) and sent


def test_what_a_predivide_factor_and_groups_may_be(alone):
    made = lambda: torch.optim.SGD(linear().parameters(), lr=0.1)  # noqa: E731
    with pytest.raises(UsageError, match="needs op=Average"):
        hvd.DistributedOptimizer(made(), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(UsageError, match="negative"):
        hvd.DistributedOptimizer(made(), num_groups=-1)
    with pytest.raises(UsageError, match="gradient_predivide_factor is 0"):
        hvd.DistributedOptimizer(made(), gradient_predivide_factor=0)
    opt = made()
    assert hvd.DistributedOptimizer(opt, op=hvd.Sum, gradient_predivide_factor=1.0, num_groups=2, groups=None) is opt


# ---- sparse gradients


@pytest.mark.parametrize("world", WORLDS)
def test_sparse_gradients_are_refused_or_made_dense_alike_in_every_world(several, world):
    def work(group):
        net = nn.Embedding(5, 2, sparse=True)
        build(group, net.parameters())
        with pytest.raises(UsageError, match="sparse gradient") as refusal:
            net(torch.tensor([1])).sum().backward()
        dense = nn.Embedding(5, 2, sparse=True)
        build(group, dense.parameters(), sparse_as_dense=True)
        dense(torch.tensor([1 + group.rank])).sum().backward()
        return "sparse_as_dense=True" in refusal.value.hint, dense.weight.grad.sum(1).tolist()

    expected = [0.0, 2.0, 0.0, 0.0, 0.0] if world == 1 else [0.0, 1.0, 1.0, 0.0, 0.0]
    assert several(world)(work) == [(True, expected)] * world


# ---- gradients of gradients


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_a_gradient_that_is_part_of_a_graph_is_refused_in_every_world(several, world, held):
    def work(group):
        net = nn.Linear(2, 1)
        reducer = build(group, net.parameters())
        with reducer.hold() if held else nullcontext(), pytest.raises(UsageError, match="create_graph=True") as refusal:
            net(torch.ones(3, 2)).square().mean().backward(create_graph=True)
        return "torch.autograd.grad(" in refusal.value.hint

    assert several(world)(work) == [True] * world
