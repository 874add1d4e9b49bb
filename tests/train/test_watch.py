"""SPOTFLEET_CHECK: ranks that drift apart without any change of membership are found within so many steps."""

from __future__ import annotations

import pytest
import torch

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from spotfleet.train import watch
from spotfleet.worker.errors import StateDiverged, StateLost
from tests.support.train.thread_fleet import Lost, Worker

CHECKED = {watch.CHECK: "1", watch.EVERY: "4"}


def script(drifts_at: int = -1, copies: bool = False, dies_at: int = -1, environ: dict[str, str] | None = None):
    def run(worker: Worker) -> float:
        worker.runtime.watchers = watch.watchers(worker.runtime, CHECKED if environ is None else environ)
        hvd.init()
        model = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(model.weight, 0.5)  # without random numbers, which the workers' threads share
        torch.nn.init.zeros_(model.bias)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        other = {"second": hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))}

        @hvd.elastic.run
        def train(state):
            while state.step < 12:
                if state.step == drifts_at and hvd.rank() == 1:
                    model.bias.data += 1e-6
                if state.step == dies_at and worker.name == "h1/0/1":
                    raise Lost
                optimizer.zero_grad()
                (model(torch.ones(2, 3)).sum() * (1 + hvd.rank())).backward()
                optimizer.step()
                worker.notes.append(state.step)
                state.step += 1
                state.commit()
            return model.bias.item()

        return train(hvd.elastic.TorchState(model, optimizer, step=0, **(other if copies else {})))

    return run


@pytest.mark.parametrize("copies", [False, True], ids=["step mode", "copy mode"])
def test_ranks_that_drift_apart_are_found_at_the_next_check_by_name_rank_and_step(threads, copies):
    fleet = threads(script(drifts_at=5, copies=copies), founders=2)
    fleet.wait(lambda: not any(w.alive for w in fleet.workers.values()), "the end")
    assert all(isinstance(w.error, StateLost) for w in fleet.workers.values()), fleet.story()
    told = [str(w.error) for w in fleet.workers.values() if isinstance(w.error, StateDiverged)]
    assert told and all("after step 8, ranks" in t and "state.model.bias is of norm" in t for t in told)
    assert all("rank 0, " in t and "rank 1" in t for t in told)
    assert all(max(w.notes) in (6, 7) for w in fleet.workers.values())  # nobody trained on


def test_equal_ranks_train_on_also_through_a_loss(threads):
    plain, = {w.result for w in threads(script(environ={}), founders=2).finish()}
    fleet = threads(script(dies_at=7), founders=2, spares=1)
    assert {w.result for w in fleet.finish()} == {plain}


def test_without_the_variable_nothing_is_watched_and_a_wrong_interval_is_refused(alone):
    assert watch.watchers(alone, {}) == watch.watchers(alone, {watch.CHECK: "0", watch.EVERY: "x"}) == []
    with pytest.raises(UsageError, match="SPOTFLEET_CHECK_EVERY is '0'"):
        watch.watchers(alone, {watch.CHECK: "1", watch.EVERY: "0"})
