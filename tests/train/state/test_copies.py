"""Copies in memory: never a view of what lives, not overwritten while somebody relies on them, as large as said."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import spotfleet.train as hvd
from spotfleet.protocol.messages import WorkerOrders
from spotfleet.train.checkpoint import entries
from spotfleet.train.checkpoint.writer import Checkpointer
from spotfleet.train.state.copies import ALIGN, Buffer, BufferPool, await_copies
from spotfleet.worker.errors import MembershipChanged
from tests.support.train.train_parts import restored
from tests.train.state.test_state import build, train


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(5, 7), torch.tensor(3), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            torch.randn(9, 4).t(), torch.arange(3, dtype=torch.uint8), torch.empty(0, 2),
            torch.randn(3).to(torch.bfloat16), torch.tensor([True, False])]


def test_a_copy_is_equal_and_what_changes_later_does_not_change_it():
    live, held = tensors(), Buffer(tensors())
    expected = [t.clone() for t in live]
    copied = held.fill(live)
    for tensor in live:
        tensor.zero_()
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(copied, expected, strict=True))
    for tensor in copied:
        tensor.fill_(1)
    assert not any(t.any() for t in live)


def test_filling_again_takes_no_new_memory():
    live, held = tensors(), Buffer(tensors())
    where = [t.data_ptr() for t in held.fill(live)]
    assert [t.data_ptr() for t in held.fill(live)] == where
    assert held.bytes <= sum(t.numel() * t.element_size() + ALIGN for t in live)


def test_each_tensor_of_a_copy_has_a_storage_of_its_own_since_torch_saves_whole_storages():
    for tensor in Buffer([torch.zeros(1000), torch.zeros(10)]).tensors:
        out = io.BytesIO()
        torch.save(tensor, out)
        assert len(out.getvalue()) < tensor.nbytes + 2000


def test_a_buffer_fits_what_it_was_made_for_only():
    held = Buffer(tensors())
    assert held.fits(tensors())
    assert not held.fits(tensors()[:-1])
    assert not held.fits([t.float() for t in tensors()])


def test_two_buffers_take_turns_a_third_is_there_only_while_one_is_held_for_longer():
    pool, live = BufferPool(), [torch.zeros(100)]
    last = pool.take(live)
    for _ in range(3):  # commits: the last one stays until the next is made
        following = pool.take(live)
        assert following is not last
        pool.release(last)
        last = following
    assert pool.bytes == 2 * last.bytes
    pool.hold(last)  # it is being written
    for _ in range(3):
        following = pool.take(live)
        pool.release(last)
        last = following
    assert pool.bytes == 3 * last.bytes
    pool.release(last)


def test_memory_that_no_commit_needs_any_more_is_let_go():
    pool, live = BufferPool(), [torch.zeros(100)]
    held = [pool.take(live) for _ in range(3)]
    for buffer in held:
        pool.release(buffer)
    last = pool.take(live)
    assert pool.bytes == 2 * last.bytes
    assert pool.take([torch.zeros(7)]).bytes + last.bytes <= pool.bytes <= 3 * last.bytes


@pytest.fixture
def gan(alone):
    """A state of two models and two plain optimizers, which copies at each commit."""
    torch.manual_seed(0)
    models = [nn.Linear(3, 3) for _ in range(2)]
    first, second = (torch.optim.Adam(m.parameters(), lr=0.1) for m in models)
    state = hvd.elastic.TorchState(models[0], first, other=models[1], second=second, batch=0)
    state.attach(1, 0)
    alone.state = state
    return state


def step(state) -> None:
    for model, optimizer in ((state.model, state.optimizer), (state.other, state.second)):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    state.batch += 1


def values(state) -> list[list]:
    return [t.tolist() for t in state.tensors()]


def test_what_is_trained_after_a_restore_does_not_change_the_commit(gan):
    for _ in range(3):
        step(gan)
        gan.commit()
    committed = values(gan)
    for _ in range(2):
        step(gan)
        assert values(gan) != committed
        gan.restore()
        assert (values(gan), gan.batch) == (committed, 3)


def test_the_last_commit_stays_whole_while_the_next_is_made(gan):
    step(gan)
    gan.commit()
    held = gan._copy
    expected = [t.clone() for t in held.tensors]
    step(gan)
    gan.commit()
    assert gan._copy.buffer is not held.buffer
    assert all(torch.equal(a, b) for a, b in zip(held.tensors, expected, strict=True))


def test_a_rank_that_has_received_the_state_goes_back_to_that_and_not_to_what_it_was_built_with(gan, alone):
    built = values(gan)
    gan.sync()
    step(gan)
    received = values(gan)
    gan.mark(version=500)
    gan.sync()  # as a joiner does
    step(gan)
    gan.restore()
    assert values(gan) == received != built


def test_statistics_in_a_checkpoint_are_those_from_before_the_batch_that_will_be_computed_again(alone):
    model, optimizer = build()
    state = hvd.elastic.TorchState(model, optimizer)
    state.attach(1, 0)
    alone.state = state
    train(model, optimizer, 2)
    before = model[1].running_mean.clone()
    optimizer.zero_grad()
    model(torch.randn(5, 3)).sum().backward()
    held = dict(zip([row.paths[0] for row in entries.rows_of(state, state.schema())], entries.sources(state),
                    strict=True))
    assert not torch.equal(model[1].running_mean, before)
    assert torch.equal(held["model", "1.running_mean"], before)
    assert held["model", "1.num_batches_tracked"] == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_on_cuda_a_copy_is_pinned_and_complete_although_the_device_goes_on_at_once():
    live = [torch.randn(1 << 22, device="cuda"), torch.tensor(1.0)]
    expected, held = [t.cpu().clone() for t in live], Buffer(live)
    for _ in range(3):
        copied = held.fill(live)
        await_copies()
        live[0].zero_()
        held.wait()
        assert all(torch.equal(a, b) for a, b in zip(copied, expected, strict=True))
        live[0].copy_(expected[0])
    assert all(t.is_pinned() for t in copied)


def test_what_is_written_at_rest_is_from_before_the_batch_that_was_given_up(alone, tmp_path):
    """All leave at the first gradient; by then the forward pass has counted its batch."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = alone.state = hvd.elastic.TorchState(model, optimizer)
    state.attach(1, 0)
    train(model, optimizer, 2)
    alone.group.change_agreed = True
    with pytest.raises(MembershipChanged):
        train(model, optimizer, 1)
    made = []
    alone.work = str(tmp_path)
    alone.control = SimpleNamespace(orders=WorkerOrders(), update=lambda checkpoint: made.append(checkpoint))
    Checkpointer(alone).at_rest(state)
    held = restored(made[0])
    names = [name for name, *_ in held.schema.fixed]
    assert held.tensors[names.index("model.1.num_batches_tracked")].item() == 2


def test_the_last_checkpoint_of_a_job_that_copies_is_its_newest_commit_whole(alone, tmp_path):
    """Else steps since that commit would be made again on top of themselves, if all workers were lost just then."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.0)
    state = alone.state = hvd.elastic.TorchState(model, optimizer, step=0)
    state.attach(1, 0)
    alone.sync(state)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        state.step += 1
        if step == 2:
            state.commit()
    state.finish()
    made = []
    alone.work = str(tmp_path)
    alone.control = SimpleNamespace(orders=WorkerOrders(), update=lambda checkpoint: made.append(checkpoint))
    Checkpointer(alone).final(state)
    held = restored(made[0])
    assert (held.version, held.position.scalars, held.tensors[0].item()) == (1, {"step": 3}, -3.0)
    assert model.weight.item() == -5.0
