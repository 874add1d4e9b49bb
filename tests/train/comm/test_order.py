"""Ranks that make different calls get an error that names them, on every rank; ranks are threads."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from spotfleet.train.comm import order
from spotfleet.train.comm.gloo import GlooGroup
from spotfleet.train.gradients.reducer import Reducer
from spotfleet.worker.errors import CommBroken
from tests.support.train.thread_fleet import Lost, Worker


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(order, "STALL_S", 0.3)


def refusal(call) -> str:
    with pytest.raises(UsageError) as found:
        call()
    assert found.value.hint
    return str(found.value)


DIFFERENT = {
    "shapes": (lambda r: hvd.allreduce(torch.ones(2 + r)), "allreduce average of float32[2]", "float32[3]"),
    "forms": (lambda r: hvd.allreduce(torch.ones(6).view(2 + r, 3 - r)), "float32[2, 3]", "float32[3, 2]"),
    "types": (lambda r: hvd.allreduce_(torch.ones(2).to([torch.float32, torch.int32][r])), "float32[2]", "int32[2]"),
    "ops": (lambda r: hvd.allreduce(torch.ones(2), op=[hvd.Sum, hvd.Max][r]), "allreduce sum", "allreduce max"),
    "compression": (lambda r: hvd.allreduce(torch.ones(2), compression=[hvd.Compression.none, hvd.Compression.fp16][r]),
                    "float32[2] at", "float32[2] as float16"),
    "groups": (lambda r: hvd.grouped_allreduce([torch.ones(2)] * (r + 1)), "of float32[2]", "of 2 tensors"),
    "roots": (lambda r: hvd.broadcast(torch.ones(2), r), "broadcast from rank 0", "broadcast from rank 1"),
    "sizes": (lambda r: hvd.broadcast_(torch.ones(2 + r), 0), "float32[2]", "float32[3]"),
    "rows": (lambda r: hvd.allgather(torch.ones(2, 2 + r)), "allgather of float32[*, 2]", "float32[*, 3]"),
    "objects": (lambda r: hvd.broadcast_object(1, r), "broadcast_object from rank 0", "from rank 1"),
    "parameters": (lambda r: hvd.broadcast_parameters({"a": torch.ones(2 + r)}, 0), "float32[2]", "float32[3]"),
    "collectives": (lambda r: [hvd.barrier, lambda: hvd.allreduce(torch.ones(1))][r](), "barrier", "allreduce"),
    "handles": (lambda r: hvd.synchronize(hvd.allreduce_async(torch.ones(6).view(2 + r, 3 - r))), "[2, 3]", "[3, 2]"),
    "async gathers": (lambda r: hvd.synchronize(hvd.allgather_async(torch.ones(2, 2 + r))), "[*, 2]", "[*, 3]"),
    "async broadcasts": (lambda r: hvd.synchronize(hvd.broadcast_async_(torch.ones(2), r)), "rank 0", "from rank 1"),
    "long lists": (lambda r: hvd.broadcast_parameters([(str(i), torch.ones((i == 99 and r) or 3)) for i in range(100)]),
                   "of 100 tensors", "of 100 tensors"),
}


@pytest.mark.parametrize("what", list(DIFFERENT))
def test_calls_that_differ_are_refused_on_every_rank_and_break_nothing(several, what):
    call, first, second = DIFFERENT[what]

    def work(group):
        text = refusal(lambda: call(group.rank))
        return text, hvd.allreduce(torch.tensor([float(group.rank)])).item()

    for text, mean in several()(work):
        side = text.split("; ")
        assert side[0].startswith("the ranks' collectives differ: rank 0: ") and side[1].startswith("rank 1: ")
        assert first in side[0] and second in side[1] and text.count("comm/test_order.py:") == 2 and mean == 0.5


def test_equal_calls_from_different_places_are_allowed_unless_they_are_checked(several, monkeypatch):
    def work(group):
        if group.rank:
            return hvd.allreduce(torch.ones(1)).item()
        return hvd.allreduce(torch.ones(1)).item()

    assert several()(work) == [1.0, 1.0]
    monkeypatch.setenv(order.CHECK, "1")
    for text in several()(lambda group: refusal(lambda: work(group))):
        assert len({part.rsplit(":", 1)[1] for part in text.split("; ")}) == 2


def gradient(group) -> None:
    p = nn.Parameter(torch.ones(50))
    p.reducer = Reducer([p], 1, True, lambda: group, lambda r: None, lambda r, change, save: None, lambda: None)
    p.sum().backward()


UNEVEN = {
    "a collective of rank 0 alone": lambda g: hvd.allreduce(torch.ones(1)) if g.rank == 0 else None,
    "an allgather of rank 1 alone": lambda g: hvd.allgather(torch.ones(1)) if g.rank == 1 else None,
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("what", list(UNEVEN))
def test_a_collective_of_one_rank_that_meets_gradients_of_the_others_is_an_error_on_all(several, what, size):
    def work(group):
        return refusal(lambda: (UNEVEN[what](group), gradient(group)))

    for text in several(size)(work):
        assert "wait for each other in different collectives" in text and "gradients of 63 float32" in text
        assert ("allreduce average of float32[1]" in text) == ("rank 0 alone" in what)
        assert ("allgather of float32[*]" in text) == ("rank 1 alone" in what) and "test_order.py:" in text


def test_with_checks_gradients_are_compared_before_they_are_reduced(several, monkeypatch):
    monkeypatch.setenv(order.CHECK, "1")

    def work(group):
        gradient(group)
        return refusal(lambda: group.allreduce(torch.ones(3)) if group.rank else gradient(group))

    for text in several()(work):
        assert "rank 0: gradients of 63 float32 at comm/test_order.py:" in text
        assert "rank 1: reduction of 3 float32 at comm/test_order.py:" in text


def test_with_checks_a_handle_of_another_size_is_refused(several, monkeypatch):
    monkeypatch.setenv(order.CHECK, "1")

    def work(group):
        return refusal(lambda: hvd.synchronize(hvd.allreduce_async(torch.ones(5000 + 4000 * group.rank))))

    for text in several()(work):
        assert "rank 0: reduction of 5000 float32" in text and "rank 1: reduction of 9000 float32" in text


def test_a_rank_that_is_only_slow_is_waited_for(several):
    first = threading.Event()

    def work(group):
        if group.rank == 1:
            assert first.wait(30)
        handle = hvd.allreduce_async(torch.ones(1))
        if group.rank == 0:
            threading.Timer(4 * order.STALL_S, first.set).start()
        mean = hvd.synchronize(handle).item()
        group.order.end("")  # would raise if the ranks had been found to differ
        return mean

    assert several()(work) == [1.0, 1.0]


# ---- whole jobs


def uneven(habit):
    """Eight steps; rank 1 does not make the fourth, makes a call more at the end, or is lost when rank 0 has ended."""

    def script(worker: Worker):
        hvd.init()
        net = nn.Linear(2, 1)
        opt = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))

        @hvd.elastic.run
        def train(state):
            while state.step < 8:
                state.step += 1
                if hvd.rank() == 1 and state.step == 4 and habit == "skip":
                    continue
                if hvd.rank() == 1 and state.step == 4 and habit == "stop":
                    break
                opt.zero_grad()
                net(torch.ones(1, 2)).sum().backward()
                opt.step()
            if hvd.rank() == 1 and habit == "metric":
                hvd.allreduce(torch.ones(1))
            if hvd.rank() == 1 and habit == "lost":
                while not worker.fleet.workers["h0/0/1"].runtime.has_finished():
                    time.sleep(0.005)
                raise Lost
            return state.step

        return train(hvd.elastic.TorchState(net, opt, step=0, per_rank=("step",)))

    return script


@pytest.mark.parametrize(("habit", "ended", "waited"), [
    ("skip", "rank 1: the end of the function (after step 7)", "rank 0: gradients of"),
    ("stop", "rank 1: the end of the function (after step 3)", "rank 0: gradients of"),
    ("metric", "rank 0: the end of the function (after step 8)", "rank 1: allreduce average of float32[1]"),
])
def test_a_rank_that_makes_fewer_steps_or_calls_is_an_error_on_all_ranks(threads, habit, ended, waited):
    fleet = threads(uneven(habit))
    fleet.wait(lambda: not any(w.alive for w in fleet.workers.values()), "the end")
    for worker in fleet.workers.values():
        assert isinstance(worker.error, UsageError) and worker.result is None
        assert ended in str(worker.error) and waited in str(worker.error)


def test_a_rank_lost_while_another_has_returned_is_no_error(threads):
    fleet = threads(uneven("lost"))
    assert [w.result for w in fleet.finish()] == [8] and fleet.members == ("h0/0/1",)


def test_an_abort_that_cuts_no_connection_ends_the_wait_at_the_functions_end(several, monkeypatch):
    """A group over NCCL knows of no connection that was cut."""
    monkeypatch.setattr(GlooGroup, "is_cut", lambda group: False)

    def work(group):
        if group.rank == 1:
            return None
        threading.Timer(0.2, group.abort).start()
        with pytest.raises(CommBroken, match="the group was aborted"):
            group.order.end("after step 3")
        return True

    assert several()(work) == [True, None]


def test_a_lost_peer_is_no_difference(several):
    def work(group):
        if group.rank == 1:
            threading.Timer(3 * order.STALL_S, group.abort).start()
            return None
        with pytest.raises(CommBroken):
            hvd.allreduce(torch.ones(1))
        return True

    assert several()(work) == [True, None]
