"""Collectives of the user's own, on ranks that are threads."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from spotfleet.train import current
from spotfleet.train.comm.gloo import GlooGroup
from spotfleet.train.runtime import Runtime
from spotfleet.worker.errors import CommBroken

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture
def two(ranks, monkeypatch):
    """Two ranks whose `hvd` calls, each in its thread, use that rank's group."""
    here = threading.local()
    monkeypatch.setattr(current, "_find", lambda: here.runtime)
    made = ranks(2)

    def each(work, limit_s: float = 30.0):
        def one(group):
            here.runtime = SimpleNamespace(group=group, initialized=True, state=None,
                                           require_group=lambda what: group)
            return work(group)
        return made.each(one, limit_s)

    return each


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, torch.complex64], ids=str)
def test_every_type_of_number_has_a_sum_and_a_mean_of_its_own_type(two, dtype):
    def work(group):
        mine = torch.tensor([100, 1 + 2 * group.rank]).to(dtype)
        half = mine // 2 if dtype in INTEGERS else mine / 2
        return hvd.allreduce(mine, op=hvd.Average), hvd.allreduce(half, op=hvd.Sum)

    expected = torch.tensor([100, 2]).to(dtype), torch.tensor([100, 1 if dtype in INTEGERS else 2]).to(dtype)
    for mean, total in two(work):
        assert torch.equal(mean, expected[0]) and torch.equal(total, expected[1])
        assert mean.dtype == total.dtype == dtype


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, torch.bool], ids=str)
def test_least_and_greatest(two, dtype):
    def work(group):
        mine = torch.tensor([group.rank, 1 - group.rank, 1]).to(dtype)
        return hvd.allreduce(mine, op=hvd.Min), hvd.allreduce(mine, op=hvd.Max)

    for least, greatest in two(work):
        assert torch.equal(least, torch.tensor([0, 0, 1]).to(dtype))
        assert torch.equal(greatest, torch.tensor([1, 1, 1]).to(dtype))


@pytest.mark.parametrize(("dtype", "op", "says"), [
    (torch.bool, hvd.Sum, "bool has no sum"), (torch.bool, hvd.Average, "bool has no sum"),
    (torch.complex64, hvd.Max, "complex numbers have no max"), (torch.float8_e4m3fn, hvd.Sum, "gloo does not reduce"),
])
def test_a_type_that_cannot_be_reduced_is_refused_on_every_rank_and_breaks_nothing(two, dtype, op, says):
    def work(group):
        with pytest.raises(UsageError, match=says) as refusal:
            hvd.allreduce(torch.ones(2).to(dtype), op=op)
        return bool(refusal.value.hint), hvd.allreduce(torch.ones(1)).item()

    assert two(work) == [(True, 1.0)] * 2


def test_a_handle_is_polled_and_its_tensor_changes_when_it_is_synchronized_not_before(two):
    both = threading.Barrier(2)

    def work(group):
        mine = torch.full((3,), float(group.rank))
        if group.rank == 1:
            both.wait(20)  # rank 0 has begun and asked by then
        handle = hvd.allreduce_async_(mine)
        if group.rank == 0:
            assert not hvd.poll(handle)
            both.wait(20)
        while not hvd.poll(handle):
            continue
        before = mine.tolist()
        return before, hvd.synchronize(handle) is mine, hvd.synchronize(handle) is mine, mine.tolist()

    assert two(work) == [([float(r)] * 3, True, True, [0.5] * 3) for r in range(2)]


def test_handles_may_be_waited_for_in_any_order(two):
    def work(group):
        handles = [hvd.allreduce_async(torch.tensor([float(n + group.rank)])) for n in range(5)]
        order = range(5) if group.rank else reversed(range(5))
        found = {n: hvd.synchronize(handles[n]).item() for n in order}
        return [found[n] for n in range(5)]

    assert two(work) == [[0.5, 1.5, 2.5, 3.5, 4.5]] * 2


def test_a_group_of_tensors_travels_in_one_operation_per_type(two):
    def work(group):
        begun: list[torch.Size] = []
        as_built = group.launch
        group.launch = lambda tensor, op: begun.append(tensor.shape) or as_built(tensor, op)
        rank = float(group.rank)
        tensors = [torch.full((2, 2), rank), torch.tensor([group.rank + 4]), torch.tensor(rank)]
        copies = hvd.grouped_allreduce(tensors)
        assert [t.reshape(-1)[0].item() for t in tensors] == [group.rank, group.rank + 4, group.rank]
        assert hvd.grouped_allreduce_(tensors, op=hvd.Sum)[0] is tensors[0]
        return begun, [t.tolist() for t in copies], [t.tolist() for t in tensors]

    means, sums = [[[0.5, 0.5], [0.5, 0.5]], [4], 0.5], [[[1.0, 1.0], [1.0, 1.0]], [9], 1.0]
    assert two(work) == [([(5,), (1,)] * 2, means, sums)] * 2


@pytest.mark.parametrize(("compression", "bits"), [(hvd.Compression.fp16, 11), (hvd.Compression.bf16, 8)])
def test_compression_rounds_to_the_bits_of_its_type(two, compression, bits):
    fine, coarse = 1 + 2.0 ** (1 - bits), 1 + 2.0 ** -bits
    found = two(lambda group: hvd.allreduce(torch.tensor([fine, coarse]), compression=compression).tolist())
    assert found == [[fine, 1.0]] * 2


def test_an_operation_cut_short_never_writes_to_a_tensor_of_the_user(two, monkeypatch):
    sent: list[torch.Tensor] = []
    as_built = GlooGroup.launch
    monkeypatch.setattr(GlooGroup, "launch", lambda self, tensor, op: sent.append(tensor) or as_built(self, tensor, op))

    def work(group):
        mine = torch.full((3,), float(group.rank))
        if group.rank == 1:
            group.abort()
            return mine.tolist()
        handle = hvd.allreduce_async_(mine)
        with pytest.raises(CommBroken):
            hvd.synchronize(handle)
        reached = {flat.data_ptr() for flat in sent}
        return mine.tolist(), mine.data_ptr() in reached

    assert two(work)[0] == ([0.0] * 3, False) and sent


def test_a_handle_of_an_earlier_generation_is_refused_and_does_not_break_the_new_one(alone):
    handle = hvd.allreduce_async(torch.ones(1))
    alone.group = object()
    with pytest.raises(UsageError, match="earlier generation"):
        hvd.synchronize(handle)
    with pytest.raises(UsageError, match="expected a handle"):
        hvd.poll(torch.ones(1))


def test_alone_everything_is_its_own_mean_in_memory_of_its_own(alone):
    mine = torch.tensor([1.0, 3.0])
    copy = hvd.allreduce(mine)
    copy += 1
    hvd.allreduce_(mine, op=hvd.Sum)
    assert (mine.tolist(), hvd.grouped_allreduce([mine])[0].tolist()) == ([1.0, 3.0], [1.0, 3.0])


OTHERS = [torch.bool, torch.int16, torch.bfloat16, torch.complex64, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_every_type_is_gathered_and_broadcast(two, dtype):
    def work(group):
        mine = torch.full((1 + group.rank, 2), group.rank).to(dtype)
        return hvd.allgather(mine), hvd.broadcast(mine[:1], 1)

    for joined, told in two(work):
        assert joined.dtype == told.dtype == dtype
        assert torch.equal(joined.view(torch.uint8), torch.tensor([[0, 0], [1, 1], [1, 1]]).to(dtype).view(torch.uint8))
        assert torch.equal(told.view(torch.uint8), torch.ones(1, 2).to(dtype).view(torch.uint8))


def test_rows_of_different_length_are_refused_on_every_rank_and_none_at_all_are_gathered(two):
    def work(group):
        with pytest.raises(UsageError, match=r"rank 0: allgather of float32\[\*, 2\] at .*; rank 1: .*\[\*, 3\] at "):
            hvd.allgather(torch.ones(1, 2 + group.rank))
        return hvd.allgather(torch.ones(0, 4)).shape, hvd.allgather(torch.ones(2, 0)).shape

    assert two(work) == [((0, 4), (4, 0))] * 2


def test_gathers_and_broadcasts_by_handle(two):
    def work(group):
        mine, told = torch.full((1 + group.rank, 2), float(group.rank)), torch.full((2, 2), float(group.rank)).t()
        handles = [hvd.allgather_async(mine), hvd.broadcast_async_(told, 1), hvd.broadcast_async(mine[:1], 0),
                   hvd.allgather_async(torch.ones(0)), hvd.broadcast_async_(torch.ones(0), 0)]
        assert told.tolist() == [[group.rank] * 2] * 2
        found = [hvd.synchronize(h) for h in reversed(handles)][::-1]
        return found[0].tolist(), found[1] is told, told.tolist(), found[2].tolist(), found[3].shape, mine.tolist()

    expected = [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]], True, [[1.0, 1.0]] * 2, [[0.0, 0.0]], (0,)
    assert two(work) == [(*expected, [[float(r)] * 2] * (1 + r)) for r in range(2)]


@pytest.mark.parametrize("call", [hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.allgather_async,
                                  lambda t: hvd.broadcast(t, 0), lambda t: hvd.broadcast_(t, 0),
                                  lambda t: hvd.broadcast_async(t, 0), lambda t: hvd.grouped_allreduce([t])])
def test_what_is_no_tensor_is_refused_by_name(alone, call):
    with pytest.raises(UsageError, match="expected a tensor, got NoneType"):
        call(None)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_optimizer_state_is_broadcast_also_with_a_frozen_and_an_unused_parameter(several, kind):
    def work(group):
        used, unused, frozen = (torch.nn.Parameter(torch.ones(2), requires_grad=r) for r in (True, True, False))
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        opt = hvd.DistributedOptimizer(kind([used, unused, frozen], lr=0.1 * (1 + group.rank), **options))
        if group.rank == 0:
            used.grad = torch.full((2,), 3.0)
            super(type(opt), opt).step()
            used.grad = None
        hvd.broadcast_optimizer_state(opt, 0)
        values = {k: torch.as_tensor(v).sum().item() for k, v in opt.state_dict()["state"].get(0, {}).items()}
        return values, opt.param_groups[0]["lr"], len(opt.state_dict()["state"])

    found = several()(work)
    assert found[0] == found[1] and found[0][1:] == (0.1, 1) and any(found[0][0].values())


def test_what_a_script_asks_about_the_build():
    assert not any(ask() for ask in (hvd.mpi_built, hvd.mpi_enabled, hvd.mpi_threads_supported, hvd.ddl_built,
                                     hvd.ccl_built))
    assert hvd.gloo_built() and hvd.gloo_enabled()
    assert hvd.cuda_built() == (torch.version.cuda is not None) and hvd.rocm_built() == (torch.version.hip is not None)
    assert bool(hvd.nccl_built()) == (torch.cuda.is_available() and torch.distributed.is_nccl_available())


def test_a_worker_reports_the_nccl_of_its_torch_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 29, 7))
    assert Runtime({}).live()["nccl"] == "2.29.7"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert Runtime({}).live()["nccl"] == ""
