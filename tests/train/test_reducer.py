"""Gradients over ranks that are threads: what `step()` and clipping see."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spotfleet.protocol.messages import Assignment
from spotfleet.train.comm.gloo import GlooGroup
from spotfleet.train.gradients.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, bucket_layout
from spotfleet.train.gradients.reducer import Reducer
from spotfleet.worker.errors import CommBroken


def build(group, params, passes=1, average=True, weight=None, log=None, wire=None) -> Reducer:
    heard = [] if log is None else log
    made = Reducer(params, passes, average, lambda: group, lambda r: heard.append("round"),
                   lambda r, change, save: heard.append(change), lambda: weight, wire)
    params[0].reducer = made  # as an optimizer holds it
    return made


def model() -> nn.Sequential:
    m, generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return m


def batch(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 + rank))


def grads(m: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in m.parameters()]


def local(rank: int, batches=None) -> list[torch.Tensor]:
    m = model()
    for x in batches or [batch(rank)]:
        m(x).square().mean().backward()
    return grads(m)


def mean_of(world: int) -> list[torch.Tensor]:
    return [torch.stack(parts).mean(0) for parts in zip(*(local(r) for r in range(world)), strict=True)]


def close(a, b) -> bool:
    return all(torch.allclose(x, y, atol=1e-6) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_the_mean_at_the_end_of_backward_whatever_zero_grad_does(ranks, set_to_none):
    def work(group):
        m = model()
        build(group, list(m.parameters()))
        for _ in range(2):
            m.zero_grad(set_to_none=set_to_none)
            m(batch(group.rank)).square().mean().backward()
        return grads(m)

    for result in ranks(2).each(work):
        assert close(result, mean_of(2))


def test_clipping_sees_reduced_gradients(ranks):
    def work(group):
        m = model()
        build(group, list(m.parameters()))
        m(batch(group.rank)).square().mean().backward()
        return float(nn.utils.clip_grad_norm_(m.parameters(), 1e9))

    expected = float(torch.cat([g.flatten() for g in mean_of(2)]).norm())
    assert ranks(2).each(work) == pytest.approx([expected] * 2)


def test_a_parameter_that_no_rank_used_has_no_gradient_and_one_that_some_used_has_the_mean(ranks):
    def work(group):
        a, b, c = (nn.Parameter(torch.ones(3)) for _ in range(3))
        build(group, [a, b, c])
        (a.sum() + (b.sum() if group.rank == 0 else 0)).backward()
        return a.grad.tolist(), b.grad.tolist(), c.grad

    assert ranks(2).each(work) == [([1.0] * 3, [0.5] * 3, None)] * 2


def test_zeros_that_the_user_keeps_as_gradient_stay_a_gradient(ranks):
    def work(group):
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        build(group, [a, b])
        b.grad = torch.zeros(2)
        a.sum().backward()
        return b.grad.tolist()

    assert ranks(2).each(work) == [[0.0, 0.0]] * 2


def test_passes_accumulate_and_only_the_last_reduces(ranks):
    def work(group):
        log: list = []
        m = model()
        build(group, list(m.parameters()), passes=2, log=log)
        m(batch(group.rank)).square().mean().backward()
        alone = close(grads(m), local(group.rank))
        m(batch(group.rank + 10)).square().mean().backward()
        return alone, log, grads(m)

    both = [local(r, [batch(r), batch(r + 10)]) for r in range(2)]
    expected = [torch.stack(parts).mean(0) for parts in zip(*both, strict=True)]
    for alone, log, result in ranks(2).each(work):
        assert alone and log == ["round", False] and close(result, expected)


def test_a_gradient_of_an_earlier_pass_alone_is_averaged_too(ranks):
    def work(group):
        a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        build(group, [a, b], passes=2)
        (a * (group.rank + 1)).sum().backward()
        (b * (group.rank + 1)).sum().backward()
        return a.grad.item(), b.grad.item()

    assert ranks(2).each(work) == [(1.5, 1.5)] * 2


def test_no_sync_accumulates_until_the_first_pass_outside(ranks):
    def work(group):
        p = nn.Parameter(torch.zeros(1))
        reducer = build(group, [p])
        with reducer.hold():
            (p * (group.rank + 1)).sum().backward()
        held = p.grad.item()
        (p * 10).sum().backward()
        return held, p.grad.item()

    assert ranks(2).each(work) == [(1.0, 11.5), (2.0, 11.5)]


def test_samples_weigh_alike_however_many_each_rank_has(ranks):
    def work(group):
        p = nn.Parameter(torch.zeros(1))
        build(group, [p], weight=[(3.0, 4.0), (1.0, 4.0)][group.rank])
        (p * [8.0, 4.0][group.rank]).sum().backward()
        return p.grad.item()

    assert ranks(2).each(work) == [7.0, 7.0]


def test_a_rank_whose_only_sample_is_a_repeated_one_counts_nothing(ranks):
    def work(group):
        p = nn.Parameter(torch.zeros(1))
        build(group, [p], weight=[(2.0, 2.0), (0.0, 2.0)][group.rank])
        (p * [8.0, 1000.0][group.rank]).sum().backward()
        return p.grad.item()

    assert ranks(2).each(work) == [8.0, 8.0]


def test_equal_weights_give_the_same_bits_as_no_weights(ranks):
    def work(group):
        found = []
        for weight in (None, (5.0, 15.0)):
            m = model()
            build(group, list(m.parameters()), weight=weight)
            m(batch(group.rank)).square().mean().backward()
            found.append(grads(m))
        return all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    assert ranks(3).each(work) == [True] * 3


def test_the_sum_is_not_divided(ranks):
    def work(group):
        p = nn.Parameter(torch.zeros(1))
        build(group, [p], average=False)
        (p * (group.rank + 1)).sum().backward()
        return p.grad.item()

    assert ranks(3).each(work) == [6.0] * 3


def test_all_ranks_learn_from_one_reduction_that_a_change_waits_on_one(ranks):
    def work(group):
        log: list = []
        group.change_waits = group.rank == 1
        p = nn.Parameter(torch.zeros(1))
        build(group, [p], log=log)
        p.sum().backward()
        return log

    assert ranks(3).each(work) == [["round", True]] * 3


def test_a_rank_that_skips_backward_still_takes_part_in_the_step(ranks):
    def work(group):
        p = nn.Parameter(torch.zeros(1))
        reducer = build(group, [p])
        if group.rank == 0:
            (p * 4).sum().backward()
        reducer.finish_round()
        reducer.finish_round()  # idempotent
        return p.grad.item()

    assert ranks(2).each(work) == [2.0, 2.0]


def test_half_precision_parameters_have_a_tail_of_their_own(ranks):
    def work(group):
        log: list = []
        group.change_waits = True
        p, q = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        build(group, [p, q], log=log)
        (p * (group.rank + 1)).sum().backward()
        return p.grad.tolist(), q.grad, log

    assert ranks(2).each(work) == [([1.5, 1.5], None, ["round", True])] * 2


@pytest.mark.parametrize(("wire", "bits"), [(torch.float16, 11), (torch.bfloat16, 8)])
def test_compressed_gradients_are_rounded_to_the_bits_of_their_type_on_the_wire_only(ranks, wire, bits):
    """The flags and counts stay exact, and so does what a rank accumulates for itself."""
    fine, coarse = 1 + 2.0 ** (1 - bits), 1 + 2.0 ** -bits

    def work(group):
        log: list = []
        group.change_waits = group.rank == 1
        p, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        many = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        reducer = build(group, [p, unused, many], passes=2, log=log, wire=wire)
        (p * torch.tensor([fine, coarse])).sum().backward()
        accumulated = p.grad.tolist()
        (p * 0).sum().backward()
        kinds = {flat.dtype for flat in reducer._buckets.wires}
        return accumulated, p.grad.tolist(), p.grad.dtype, unused.grad, many.grad, log, kinds

    kinds = {wire, torch.bfloat16, torch.float32}
    assert ranks(2).each(work) == [([fine, coarse], [fine, 1.0], torch.float32, None, None, ["round", True], kinds)] * 2


def test_weights_of_samples_are_applied_before_gradients_are_compressed(ranks):
    def work(group):
        p = nn.Parameter(torch.zeros(1))
        build(group, [p], weight=[(3.0, 4.0), (1.0, 4.0)][group.rank], wire=torch.float16)
        (p * [80000.0, 4096.0][group.rank]).sum().backward()  # the first is too large for float16, its share is not
        return p.grad.item()

    assert ranks(2).each(work) == [61024.0, 61024.0]


def test_a_lost_peer_breaks_backward_and_a_reset_leaves_nothing_in_flight(ranks):
    two = ranks(2)

    def work(group):
        p = nn.Parameter(torch.zeros(1))
        reducer = build(group, [p])
        if group.rank == 1:
            group.abort()
            return None
        with pytest.raises(CommBroken):
            p.sum().backward()
        reducer.reset()
        return p.grad, reducer.round_open, reducer._works

    assert two.each(work)[0] == (None, False, [])


class Forgotten:
    """An operation that gloo has lost, or that was given no processor for too long."""

    def wait(self, timeout=None) -> None:
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


def test_memory_that_a_forgotten_operation_may_still_write_is_not_used_again():
    group = GlooGroup(Assignment(1, 0, ("a/0/1", "b/0/1"), ""), "job", "127.0.0.1")
    p = nn.Parameter(torch.zeros(3))
    reducer = build(group, [p])
    with reducer.hold():
        p.sum().backward()
    doomed = reducer._buckets.flats[0]
    group.abort()
    with pytest.raises(CommBroken):
        group.finish([Forgotten()])
    reducer.reset()
    with reducer.hold():
        p.sum().backward()
    doomed.fill_(7.0)
    assert p.grad.tolist() == [1.0, 1.0, 1.0]


def test_a_rank_that_is_alone_has_no_buckets_and_one_that_becomes_so_gives_them_back():
    group = GlooGroup(Assignment(1, 0, ("a/0/1",), ""), "job", "127.0.0.1")
    p = nn.Parameter(torch.zeros(3))
    reducer = build(group, [p])
    p.sum().backward()
    assert reducer._buckets is None
    group.size = 2
    with reducer.hold():
        p.sum().backward()
    assert reducer._buckets is not None
    group.size = 1
    p.sum().backward()
    assert reducer._buckets is None and p.grad.tolist() == [3.0] * 3


def test_buckets_run_from_the_last_parameter_and_never_mix_dtypes():
    small = [nn.Parameter(torch.zeros(10)) for _ in range(3)]
    half = nn.Parameter(torch.zeros(10, dtype=torch.float16))
    assert bucket_layout([*small, half]) == [[3], [2, 1, 0]]


def test_the_first_bucket_is_small_so_that_communication_starts_early():
    mib = [nn.Parameter(torch.zeros(FIRST_BUCKET_BYTES // 4)) for _ in range(2 + BUCKET_BYTES // FIRST_BUCKET_BYTES)]
    assert [len(b) for b in bucket_layout(mib)] == [1, BUCKET_BYTES // FIRST_BUCKET_BYTES, 1]


def test_before_there_is_a_group_backward_leaves_gradients_as_they_are():
    """A worker that joins may try its model out before elastic.run, however many buckets the gradients fill."""
    p, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))
    build(None, [p, other])
    ((p * 3).sum() + (other * 5).sum()).backward()
    assert (p.grad.tolist(), other.grad.tolist()) == ([3.0, 3.0], [5.0, 5.0])
