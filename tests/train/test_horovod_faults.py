"""Faults of Elastic Horovod 0.20 to 0.28.1, and that ours does right. One test each; the docstring names the fault.

Most are tried on a whole job whose workers are threads (thread_fleet.py). Where the layer in question is not the
runtime, the test here shows what workers rely on, and these show the rest with the real thing:
a cloud that does not answer holds nobody up (tests/dispatcher/cloud/test_outage.py), what is told is told again
(tests/worker/test_control.py), strangers are refused (tests/dispatcher/http/test_auth.py, test_tls.py,
tests/train/comm/test_store.py), real processes end with status 0 (tests/train/test_recovery.py:
test_a_worker_told_to_stop_leaves_at_a_step_boundary_with_exit_0), copies lie in the host's memory (tests/gpu).
"""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from spotfleet.protocol.messages import WorkerOrders, WorkerReport, dump, load
from spotfleet.train import elastic
from spotfleet.train.comm.group import Group
from spotfleet.train.runtime import Runtime
from tests.support.train.thread_fleet import Lost, ThreadFleet, Worker

STEPS, CHANGE_AT = 12, 5


def counting(during: Callable[[Worker, Any], None] = lambda worker, state: None, every: int = 10, decay: float = 0.0,
             apart: bool = False) -> Callable[[Worker], Any]:
    """A weight that falls by one in each applied step; `during(worker, state)` runs before each forward pass.

    A worker's result is its weight; its notes are what it found whenever it entered the function: weight and step.
    """

    def script(worker: Worker) -> Any:
        hvd.init()
        model, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.0 if worker.name in ("h0/0/1", "h1/0/1") else 77.0)
            other.weight.zero_()
        make = torch.optim.AdamW if decay else torch.optim.SGD
        opt = hvd.DistributedOptimizer(make(model.parameters(), lr=1.0, weight_decay=decay))
        more = {"other": other, "second": hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=1.0))}
        state = elastic.TorchState(model, opt, step=0, **(more if apart else {}))

        @elastic.run
        def train(state: Any) -> float:
            worker.notes.append((model.weight.item(), state.step))
            while state.step < STEPS:
                during(worker, state)
                opt.zero_grad()
                model(torch.full((1, 1), 1.0 + (state.step % 3 if decay else 0))).sum().backward()
                opt.step()
                state.step += 1
                if state.step % every == 0:
                    state.commit()
            return model.weight.item()

        return train(state)

    return script


def drain_at(step: int, *names: str) -> Callable[[Worker, Any], None]:
    """The first of the workers `names` that comes to `step` has all of them leave, at once."""

    def during(worker: Worker, state: Any) -> None:
        if state.step == step and worker.name == names[0]:
            for name in names:
                worker.fleet.drain(name)

    return during


def results(fleet: ThreadFleet) -> list[Any]:
    return [w.result for w in fleet.finish()]


# ---- what a change of membership does to the state

def test_after_a_planned_change_no_applied_step_runs_again(threads):
    """Elastic Horovod broadcasts values of the last commit with today's weights: up to a commit's steps twice."""
    fleet = threads(counting(drain_at(CHANGE_AT, "h0/0/1")), spares=1)
    assert set(results(fleet)) == {-float(STEPS)}
    assert [w.control.report.repeated for w in fleet.workers.values()] == [0, 0, 0]
    assert all(weight == -step for w in fleet.workers.values() for weight, step in w.notes)


def test_a_joiner_is_equal_to_the_others_bit_for_bit_also_with_weight_decay(threads):
    """Elastic Horovod makes the joiner's optimizer state by a step on no gradient, which decays its weights."""
    fleet = threads(counting(drain_at(CHANGE_AT, "h0/0/1"), decay=0.01), spares=1)
    found = results(fleet)
    assert len(found) == 2 and len(set(found)) == 1
    assert fleet.workers["h1/0/1"].notes[-1] == fleet.workers["h2/0/1"].notes[-1]


def sampling(total: int, batch: int, during: Callable[[Worker, Any], None], early: bool = False) -> Callable[..., Any]:
    """Weight i falls by one each time sample i is in an applied step. `early`: recorded before the step."""

    def script(worker: Worker) -> Any:
        hvd.init()
        model = nn.Linear(total, 1, bias=False)
        nn.init.zeros_(model.weight)
        opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)
        sampler = elastic.ElasticSampler(total, batch_size=batch)
        state = elastic.TorchState(model, opt, sampler=sampler, step=0)

        @elastic.run
        def train(state: Any) -> list[float]:
            for number, indices in enumerate(sampler.batches()):
                opt.zero_grad()
                model(nn.functional.one_hot(torch.tensor(indices), total).float()).sum().backward()
                if early:
                    sampler.record_batch(number)
                during(worker, state)
                opt.step()
                if not early:
                    sampler.record_batch(number)
                state.step += 1
                state.commit()
            return sorted(set(model.weight.flatten().tolist()))

        return train(state)

    return script


def test_after_a_removal_each_sample_is_still_seen_once(threads):
    """Elastic Horovod skips the sync after a removal, and samplers keep their old share: some twice, some never."""
    fleet = threads(sampling(40, 2, drain_at(1, "h2/0/1")), founders=4)
    assert results(fleet) == [[-1.0]] * 3 and len(fleet.members) == 3


def test_a_batch_recorded_before_its_step_is_counted_once_though_the_step_breaks(threads):
    """Elastic Horovod's own example records before it steps, so that a failure in between skips the batch."""

    def dies(worker: Worker, state: Any) -> None:
        if (worker.name, state.step) == ("h1/0/1", 3):
            raise Lost

    fleet = threads(sampling(64, 4, dies, early=True), spares=1)
    assert set(map(tuple, results(fleet))) == {(-1.0,)}


def test_changes_at_the_same_instant_are_all_followed(threads):
    """Elastic Horovod numbers updates by whole seconds: the second of two is dropped, and the joiner waits for ever."""
    fleet = threads(counting(drain_at(CHANGE_AT, "h0/0/1", "h1/0/1")), founders=3, spares=1)
    assert set(results(fleet)) == {-float(STEPS)}
    assert not {"h0/0/1", "h1/0/1"} & set(fleet.members) and fleet.members


def test_what_a_joiner_falls_back_to_is_the_state_it_was_given(threads):
    """Elastic Horovod leaves the joiner's rollback copy at its random start: as rank 0 it hands that to everybody."""

    def goes_back(worker: Worker, state: Any) -> None:
        drain_at(CHANGE_AT, "h0/0/1")(worker, state)
        if worker.name == "h2/0/1" and len(worker.notes) == 1:
            with torch.no_grad():
                state.model.weight.fill_(7.0)
            state.restore()
            worker.notes.append((state.model.weight.item(), state.step))

    fleet = threads(counting(goes_back, every=1, apart=True), spares=1)
    fleet.finish()
    notes = fleet.workers["h2/0/1"].notes
    assert notes[0] == notes[1] and notes[0][1] > 0 and notes[0][0] == -notes[0][1]


def test_a_commit_holds_values_of_its_own(alone):
    """Elastic Horovod commits references: what is appended to a list afterwards is in the commit too."""
    state = elastic.ObjectState(seen=[1, 2])
    state.attach(1, 0)
    alone.state = state
    with_commit = state.seen
    state.commit()
    with_commit.append(3)
    state.restore()
    assert state.seen == [1, 2]


# ---- how a change is learnt

def test_nobody_waits_for_a_dispatcher_that_is_busy(threads, monkeypatch):
    """Elastic Horovod runs the discovery script under the lock that everything else needs, without a time limit."""
    fleet = threads(counting())
    monkeypatch.setattr(fleet, "decide", fleet.cv.notify_all)  # from now on it only listens
    assert results(fleet) == [-float(STEPS)] * 2


class Whispering(ThreadFleet):
    """Tells a planned change to the last rank only, and the others when they have found out."""

    def _form(self, members: tuple[str, ...], urgent: bool) -> None:
        if not self.founded or urgent:
            super()._form(members, urgent)
            return
        told = self.workers[self.members[-1]]
        assert told.runtime.group is not None
        told.runtime.group.change_waits = True
        others = [self.workers[n] for n in self.members]

        def tell() -> None:
            with self.cv:
                self.cv.wait_for(lambda: all(w.runtime.group is None or not w.alive for w in others), 30)
                ThreadFleet._form(self, members, urgent)
                self.cv.notify_all()

        if not getattr(self, "_telling", False):
            self._telling = True
            threading.Thread(target=tell, daemon=True).start()


def test_one_rank_that_hears_of_a_change_is_enough_whichever_it_is(threads):
    """Elastic Horovod tells rank 0 alone, once, and never again if that gets lost."""
    fleet = threads(counting(drain_at(CHANGE_AT, "h0/0/1")), founders=3, kind=Whispering)
    assert set(results(fleet)) == {-float(STEPS)}
    assert fleet.generation == 2 and len(fleet.members) == 2
    assert [w.control.report.repeated for w in fleet.workers.values()] == [0, 0, 0]


def test_a_change_before_the_first_collective_of_all_costs_a_place_and_not_the_job(threads):
    """Elastic Horovod's first init trusts ranks of the environment: a loss before it ends in a mesh that times out."""

    def script(worker: Worker) -> Any:
        if worker.name == "h1/0/1" and not worker.notes:
            hvd.init()
            raise Lost
        return counting()(worker)

    fleet = threads(script, founders=3)
    assert results(fleet) == [-float(STEPS)] * 2 and "h1/0/1" not in fleet.members


# ---- what it costs

def test_a_commit_copies_nothing(alone):
    """Elastic Horovod deep-copies all state at each commit, on the device that trains, while training waits."""
    model = nn.Linear(3, 3)
    opt = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    state = elastic.TorchState(model, opt, step=0)
    state.attach(1, 0)
    alone.state = state
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    held = [t.data_ptr() for t in state.tensors()]
    with torch.profiler.profile(profile_memory=True) as seen:
        state.commit()
    assert [e.key for e in seen.key_averages() if e.key.startswith("aten::")] == []
    assert [t.data_ptr() for t in state.tensors()] == held


@pytest.mark.parametrize("every", [1, 1000])
def test_asking_for_changes_at_each_step_costs_no_collective(threads, monkeypatch, every):
    """Elastic Horovod's check_host_updates, in each commit, is two blocking broadcasts."""
    counts: dict[str, int] = {}
    started = Group._start

    def count(self: Group, *args: Any) -> Any:
        who = threading.current_thread().name
        counts[who] = counts.get(who, 0) + 1
        return started(self, *args)

    monkeypatch.setattr(Group, "_start", count)

    def begin(worker: Worker, state: Any) -> None:
        if state.step == 1:
            counts[worker.name] = 0

    results(threads(counting(begin, every=every)))
    assert counts == dict.fromkeys(["h0/0/1", "h1/0/1"], STEPS - 1 + 1)  # one bucket a step; the barrier at the end


# ---- how it ends, and who may speak

def test_a_worker_that_is_told_to_leave_ends_without_an_error(threads):
    """A worker removed by Elastic Horovod dies of an exception, with a traceback and a status that is not 0."""
    fleet = threads(counting(drain_at(CHANGE_AT, "h0/0/1")))
    fleet.finish()
    left = fleet.workers["h0/0/1"]
    assert (left.exit, left.error, left.control.report.error, left.result) == (0, None, "", None)


def test_control_speaks_json_and_nothing_is_ever_unpickled():
    """Elastic Horovod's control plane is HTTP without authentication that unpickles whatever is put into it."""
    struck: list[int] = []

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return struck.append, (1,)

    assert json.loads(dump(WorkerReport("h/0/1", "job")))["worker"] == "h/0/1"
    with pytest.raises(ValueError):
        load(WorkerOrders, pickle.dumps(Bomb()))
    assert not struck


def test_a_worker_without_its_jobs_key_opens_no_port(tmp_path):
    """In Elastic Horovod whoever reaches the port takes part."""
    member = Runtime({"SPOTFLEET_SOCKET": str(tmp_path / "agent.sock"), "SPOTFLEET_WORKER": "h/0/1"})
    with pytest.raises(UsageError, match="SPOTFLEET_JOB_KEY is not in this process's environment"):
        member.init()
    assert member._stores == []
