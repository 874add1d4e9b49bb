"""Handing the newest state to those behind: who sends what, and what becomes of it when it breaks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import spotfleet.train as hvd
from spotfleet.train.state import handover, sync
from spotfleet.train.state.handover import Message, TensorPiece, hand_over, plan
from spotfleet.worker.errors import CommBroken


@pytest.mark.parametrize(("senders", "source"), [([0], 0), ([0, 1, 3], 1), ([2, 4], 4)])
def test_every_byte_is_sent_once_and_what_differs_between_ranks_comes_from_the_source(monkeypatch, senders, source):
    monkeypatch.setattr(handover, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(handover, "DIRECT_BYTES", 300)
    sizes, shared = [5, 4000, 64, 0, 700, 999, 2500, 8], [True, True, False, True, True, True, True, False]
    messages = plan(sizes, shared, senders, source)
    pieces = sorted((p.tensor, p.start, p.stop) for m in messages for p in m.pieces)
    joined = [(t, [(a, b) for i, a, b in pieces if i == t]) for t in range(len(sizes))]
    for tensor, ranges in joined:
        ends = [0, *(b for _, b in ranges)]
        assert ends[-1] == sizes[tensor] and [a for a, _ in ranges] == ends[:-1]
    assert {m.sender for m in messages for p in m.pieces if not shared[p.tensor]} == {source}
    assert all(m.bytes <= 1000 for m in messages)
    loads = {s: sum(m.bytes for m in messages if m.sender == s) for s in senders}
    assert max(loads.values()) - min(loads.values()) <= 2 * handover.ALIGN * len(sizes)


def test_small_pieces_travel_together_and_large_ones_alone():
    large = handover.DIRECT_BYTES
    assert plan([10, large, 20], [True] * 3, [0], 0) == [
        Message(0, (TensorPiece(1, 0, large),)), Message(0, (TensorPiece(0, 0, 10), TensorPiece(2, 0, 20)))]


def tensors(seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(70, 50, generator=g), torch.randn(3, generator=g).bfloat16(), torch.tensor(seed),
            torch.randn(2, 3, 4, 4, generator=g).to(memory_format=torch.channels_last), torch.empty(0),
            torch.tensor([True, seed > 0]), torch.randn(9, generator=g, dtype=torch.float64)]


@pytest.mark.parametrize("holders", [[0], [0, 2], [1, 2, 3]])
def test_tensors_of_any_type_and_layout_arrive_bit_for_bit_and_only_where_they_lack(ranks, monkeypatch, holders):
    monkeypatch.setattr(handover, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(handover, "DIRECT_BYTES", 512)
    receivers = [r for r in range(4) if r not in holders]

    def work(group):
        mine = tensors(9 if group.rank in holders else group.rank)
        hand_over(group, mine, [True] * len(mine), holders, receivers, holders[-1])
        return all(torch.equal(a, b) for a, b in zip(mine, tensors(9), strict=True))

    assert ranks(4).each(work) == [True] * 4


def test_after_an_operation_was_given_up_the_live_tensors_lie_elsewhere(alone, monkeypatch):
    """It may still be written to where it was to go."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    state = alone.state = hvd.elastic.TorchState(model, optimizer)
    state.attach(2, 1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before, memory = [t.clone() for t in state.tensors()], [t.data_ptr() for t in state.tensors()]

    def given_up(*args) -> None:
        raise CommBroken("a peer was lost")

    monkeypatch.setattr(sync, "hand_over", given_up)
    group = SimpleNamespace(rank=1, size=3, abandoned=True)
    with pytest.raises(CommBroken):
        sync._transfer(group, state, [0, 2], 0, state._position, state.schema())
    assert not set(memory) & {t.data_ptr() for t in state.tensors()}
    assert [t.shape for t in state.tensors()] == [t.shape for t in before] and not model.weight.grad_fn
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_when_it_fails_it_waits_until_nothing_under_way_writes_to_the_live_tensors():
    """What has come from another sender may be written a moment later, over what was restored by then."""
    drained = []

    class Broken(SimpleNamespace):
        def receive(self, tensor, source, tag):
            return (source, tag)

        def finish(self, works):
            raise CommBroken("sender 0 was lost")

        def drain(self, works):
            drained.extend(works)

    group = Broken(rank=2, device=torch.device("cpu"), abandoned=False)
    live = [torch.zeros(4 * handover.CHUNK_BYTES // 4)]
    with pytest.raises(CommBroken):
        hand_over(group, live, [True], [0, 1], [2], 0)
    assert sorted(drained) == [(0, 1), (1, 0), (1, 1)]
