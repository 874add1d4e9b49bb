"""States, the wrapped optimizer and a run without any fleet, in this process."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from spotfleet.train.state import sync
from spotfleet.train.state.buffers import LARGE, Extras
from spotfleet.train.state.rng import reseed
from spotfleet.train.state.sync import DAMAGED, FRESH, RankState, choose_source, ranks_behind


def build(lr=0.1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=lr))
    return model, optimizer


def train(model, optimizer, steps: int) -> None:
    for k in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=torch.Generator().manual_seed(k))).square().mean().backward()
        optimizer.step()


# ---- who gives what to whom

def row(version: int, round_: int = 0, position: int = 0, made_in: int = 1) -> RankState:
    return RankState(version, round_, position, 0, 2, 0, made_in)


@pytest.mark.parametrize(("rows", "source", "receivers"), [
    ([row(5, 5, 5), row(6, 5, 5), row(6, 5, 5)], 1, [0]),  # newest version, lowest rank
    ([row(6, 5, 5), row(6, 6, 6)], 1, []),  # same tensors: only the newer position is taken over
    ([row(FRESH), row(0), row(DAMAGED)], 1, [0, 2]),
    ([row(FRESH), row(FRESH), row(DAMAGED)], 0, [1, 2]),  # models built alike or not: one of them counts
    ([row(4, 5, 4), row(4, 4, 4)], 0, []),  # a step skipped by a GradScaler: the version is the same
    ([row(6, 5, 5, 1), row(6, 5, 5, 2), row(6, 5, 5, 2)], 1, [0]),  # stopped after a step that the others made anew
    ([row(7, 6, 6, 1), row(6, 6, 6, 2)], 0, [1]),
])
def test_the_newest_state_wins_and_goes_only_to_those_behind(rows, source, receivers):
    assert (choose_source(rows), ranks_behind(rows, choose_source(rows))) == (source, receivers)


def test_who_came_less_far_after_a_step_takes_over_averages_if_there_are_any():
    rows = [row(6, 5, 5), row(6, 6, 6)]
    assert (ranks_behind(rows, 1), ranks_behind(rows, 1, averages=True)) == ([], [0])


def test_a_half_received_state_is_worth_less_than_a_fresh_one(alone):
    state = hvd.elastic.TorchState(*build())
    state.attach(1, 0)
    assert sync.rank_state(state).version == FRESH
    state.mark(version=7, held=True)
    assert sync.rank_state(state).version == 7
    state.mark(damaged=True)
    assert sync.rank_state(state).version == DAMAGED < FRESH


def test_a_step_that_others_made_anew_is_given_up_for_theirs(alone, ranks):
    """Who is stopped after it has stepped, and before anybody else has, holds the same version with other weights."""
    def held(generation: int, data: float):
        model, optimizer = build()
        state = alone.state = hvd.elastic.TorchState(model, optimizer)
        state.attach(2, 0)
        alone.generation = generation
        model(torch.full((5, 3), data)).square().mean().backward()
        optimizer.step()
        state.mark(held=True)
        return state

    states = [held(1, 0.1), held(2, 0.7)]
    assert ranks(2).each(lambda group: sync.synchronize(group, states[group.rank])) == [True, True]
    first, second = (s.tensors() for s in states)
    assert [s.version for s in states] == [1, 1]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- optimizer

def test_the_wrapped_optimizer_is_the_same_object_of_the_same_kind(alone):
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    wrapped = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    assert wrapped is inner and isinstance(wrapped, torch.optim.SGD) and type(wrapped).__name__ == "SGD"
    model(torch.ones(1, 2)).sum().backward()
    wrapped.step()
    scheduler.step()
    assert wrapped.param_groups[0]["lr"] == 0.05


def test_step_hooks_run_once_also_after_loading_a_state(alone):
    model, optimizer = build()
    optimizer.load_state_dict(optimizer.state_dict())
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *a: calls.append(1))
    train(model, optimizer, 3)
    assert len(calls) == 3


def test_a_closure_is_evaluated_once(alone):
    model, optimizer = build()
    calls: list[int] = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).ndim == 0 and calls == [1]


class Closing(torch.optim.SGD):
    """Evaluates its closure at a moment of its own."""

    def __init__(self, params, when: str, touch) -> None:
        super().__init__(params, lr=0.1)
        self.when, self.touch = when, touch

    @torch.no_grad()
    def step(self, closure=None):
        evaluate = torch.enable_grad()(closure)
        for _ in range(self.when.count("before")):
            evaluate()
        self.touch(self)
        for _ in range(self.when.count("after")):
            evaluate()
        return super().step()


@pytest.mark.parametrize(("when", "touch", "refused"), [
    ("before", lambda o: None, ""),
    ("after", lambda o: None, ""),
    ("before", lambda o: o.param_groups[0]["params"][0].add_(1), ""),
    ("after", lambda o: o.param_groups[0]["params"][0].add_(1), "after it has changed"),
    ("after", lambda o: o.param_groups[0]["params"][0].data.add_(1), "after it has changed"),
    ("after", lambda o: o.param_groups[0]["params"][0].grad.add_(1), "after it has changed"),
    ("after", lambda o: o.zero_grad(), "after it has changed"),
    ("before after", lambda o: None, "more than once"),
    ("never", lambda o: None, "never"),
])
def test_a_step_that_needs_more_of_its_closure_is_refused(alone, when, touch, refused):
    def trained(wrapped):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = wrapped(Closing(model.parameters(), when, touch))

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return model.weight.tolist()

    if not refused:
        assert trained(hvd.DistributedOptimizer) == trained(lambda o: o)
        return
    with pytest.raises(UsageError, match=rf"Closing.step\(closure\) .* evaluates its closure {refused}") as caught:
        trained(hvd.DistributedOptimizer)
    assert "without a closure" in (caught.value.hint or "")


@pytest.mark.parametrize(("make", "reason"), [
    (lambda p: hvd.DistributedOptimizer(torch.optim.LBFGS(p)), "LBFGS evaluates"),
    (lambda p: hvd.DistributedOptimizer("adam"), "expected a torch optimizer"),
    (lambda p: hvd.DistributedOptimizer(hvd.DistributedOptimizer(torch.optim.SGD(p, lr=1))), "already"),
    (lambda p: hvd.DistributedOptimizer(torch.optim.SGD(p, lr=1), op=hvd.Max), "not for gradients"),
    (lambda p: hvd.DistributedOptimizer(torch.optim.SGD(p, lr=1), backward_passes_per_step=0), "per_step is 0"),
    (lambda p: hvd.DistributedOptimizer(torch.optim.SGD(p, lr=1), named_parameters=[("a", p[0])] * 2), "twice"),
    (lambda p: hvd.DistributedOptimizer(torch.optim.SGD(p, lr=1), named_parameters=[]), "lacks parameters"),
])
def test_what_cannot_be_distributed_is_refused_with_the_reason(alone, make, reason):
    with pytest.raises(UsageError, match=reason) as caught:
        make([nn.Parameter(torch.zeros(1))])
    assert caught.value.hint


# ---- state

def test_rewinding_restores_scalars_schedules_hyper_parameters_and_buffers(alone):
    model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, batch=3, seen=[1])
    state.attach(1, 0)
    alone.state = state
    train(model, optimizer, 2)
    position, buffers = state._position, [b.clone() for b in model.buffers()]
    weights = [p.detach().clone() for p in model.parameters()]
    state._extras.take(state._round)
    state.batch, state.seen[0] = 9, 7
    scheduler.step()
    model(torch.ones(5, 3))
    state.rewind(replace(position, round=state._round))
    assert (state.batch, state.seen, optimizer.param_groups[0]["lr"], scheduler.last_epoch) == (3, [1], 0.1, 0)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))


def test_rewinding_writes_into_the_object_that_a_value_was_copied_from_and_into_no_other(alone):
    model, optimizer = build()
    first, later = [1], [9]
    state = hvd.elastic.TorchState(model, optimizer, kept=first, chunk=first)
    state.attach(1, 0)
    alone.state = state
    train(model, optimizer, 1)
    first[0] = 5
    state.chunk = later  # a part of the script's data
    state._extras.take(state._round)
    state.rewind(replace(state._position, round=state._round))
    assert state.kept is first
    assert (first, state.chunk, later) == ([1], [1], [9])


def test_what_is_tracked_cannot_be_replaced_silently(alone):
    model, optimizer = build()
    state = hvd.elastic.TorchState(model, optimizer, epoch=0)
    state.epoch = 4
    with pytest.raises(UsageError, match="model cannot be replaced"):
        state.model = nn.Linear(1, 1)
    with pytest.raises(UsageError, match="'commit' is a name of the State"):
        hvd.elastic.TorchState(model, optimizer, commit=1)


def test_constants_and_frozen_weights_are_not_copied_each_step():
    mask, frozen = torch.zeros(LARGE + 1), torch.zeros(3)
    extras = Extras([mask], [[frozen]])
    extras.take(0)
    first = extras._slots[0].copies[0] if extras._slots[0].round == 0 else extras._slots[1].copies[0]
    assert first is not None and all(s.copies[1:] in ([], [None]) for s in extras._slots)
    frozen.add_(1)
    extras.take(1)
    frozen.add_(1)
    mask.add_(1)
    extras.put_back(1)
    assert frozen.tolist() == [1.0] * 3 and not mask.any()


def test_a_moving_average_that_changes_uncounted_is_found_out_and_put_back():
    """torch does not count changes through `.data`; one tensor that shows them tells of all of its module."""
    average, still, frozen = torch.ones(3), torch.zeros(2), torch.ones(4)
    extras = Extras([], [[average, still], [frozen]])
    for round_ in range(8):  # looked at before rounds 0, 1, 2, 4
        extras.take(round_)
        average.data.mul_(0.5)
    extras.take(8)
    expected = average.clone()
    average.data.mul_(0.5)
    still.data.add_(1)
    extras.put_back(8)
    assert (average.tolist(), still.tolist()) == (expected.tolist(), [0, 0])
    assert [s.copies[2] for s in extras._slots] == [None, None]  # frozen weights still cost nothing


def test_an_average_that_begins_to_change_late_is_found_out_within_64_rounds():
    average = torch.ones(3)
    extras = Extras([], [[average]])
    for round_ in range(65, 129):
        extras.take(round_)
        average.data.mul_(0.99)
    extras.take(129)
    expected = average.clone()
    average.data.zero_()
    extras.put_back(129)
    assert average.tolist() == expected.tolist()


def test_a_replay_leaves_the_buffers_as_the_step_found_them():
    statistics, queue = torch.zeros(2), torch.zeros(LARGE + 1)
    extras = Extras([statistics, queue], [])
    extras.take(0)
    statistics.fill_(1)
    queue.fill_(1)
    extras.step_applied(0)
    statistics.fill_(7)  # by code after the step, which will run again
    extras.put_back(0)
    assert (statistics[0], queue[0]) == (0, 0)
    statistics.fill_(3)  # the forward pass again, on newer weights
    queue.fill_(3)
    extras.step_replayed(0)
    assert (statistics[0], queue[0]) == (1, 1)


def test_who_went_back_one_iteration_too_far_comes_forward_again():
    """Another rank had begun the next iteration; this one had failed before it."""
    statistics = torch.zeros(2)
    extras = Extras([statistics], [])
    extras.take(0)
    statistics.fill_(1)
    extras.step_applied(0)
    extras.put_back(0)
    extras.put_back(1)
    assert statistics.tolist() == [1, 1]


def test_buffers_of_an_iteration_that_was_given_up_are_forgotten():
    statistics = torch.zeros(2)
    extras = Extras([statistics], [])
    extras.take(0)
    statistics.fill_(1)
    extras.take(1)
    extras.put_back(0)
    assert statistics.tolist() == [0, 0]
    statistics.fill_(5)  # iteration 0 again, with other data
    extras.put_back(1)
    assert statistics.tolist() == [5, 5]


def test_random_numbers_depend_on_seed_rank_round_and_microbatch_alone():
    def draw(*key):
        reseed(*key)
        return torch.rand(1).item(), random.random()

    keys = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    assert len({draw(*k) for k in keys}) == len(keys) and draw(*keys[0]) == draw(*keys[0])


@pytest.mark.parametrize("whole_batches", [False, True])
def test_what_is_drawn_with_a_batch_is_the_same_if_its_loader_has_just_begun(alone, whole_batches):
    """As it has where the function was entered again; a loader that begins draws a seed for its workers."""
    state = hvd.elastic.TorchState(*build(), i=0)
    state.attach(1, 0)
    alone.state = state
    data, sampler = torch.zeros(12, 1), hvd.elastic.ElasticSampler(12, batch_size=2)
    loader = iter(torch.utils.data.DataLoader(data, batch_sampler=sampler.batches()) if whole_batches else
                  torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler))
    next(loader)
    drawn = torch.rand(3), random.random()
    alone.restart_draws()
    assert (torch.rand(3).tolist(), random.random()) == (drawn[0].tolist(), drawn[1])


def test_places_count_hosts_and_workers_on_a_host():
    from spotfleet.protocol.messages import Assignment

    members = ("a/0/1", "a/1/1", "b/0/1")
    places = [Assignment(1, r, members, "", local, size).place for r, local, size in
              ((0, 0, 2), (1, 1, 2), (2, 0, 1))]
    assert [(p.rank, p.size, p.local_rank, p.cross_rank, p.cross_size) for p in places] == [
        (0, 3, 0, 0, 2), (1, 3, 1, 0, 1), (2, 3, 0, 1, 2)]


# ---- transfer

def test_tensors_of_any_type_and_layout_arrive_bit_for_bit(ranks, monkeypatch):
    monkeypatch.setattr(sync, "CHUNK_BYTES", 64)  # so that tensors straddle chunks

    def tensors(fill: int):
        g = torch.Generator().manual_seed(fill)
        return [torch.randn(7, 5, generator=g), torch.randn(3, generator=g).bfloat16(), torch.tensor(fill),
                torch.randn(2, 3, 4, 4, generator=g).to(memory_format=torch.channels_last),
                torch.tensor([True, fill > 0]), torch.empty(0), torch.randn(9, generator=g, dtype=torch.float64)]

    def work(group):
        mine = tensors(group.rank)
        sync.broadcast_tensors(group, mine, 1)
        return all(torch.equal(a, b) for a, b in zip(mine, tensors(1), strict=True))

    assert ranks(2).each(work) == [True, True]


@pytest.mark.parametrize(("labels", "due"), [([(2, 0), (2, 1)], False), ([(2, 0), (0, -1)], True),
                                              ([(3, 0), (3, 1)], True)])
def test_reset_callbacks_are_due_on_all_ranks_or_on_none(alone, ranks, labels, due):
    def work(group):
        state = hvd.elastic.ObjectState(i=0)
        state.attach(*labels[group.rank])
        return sync.synchronize(group, state)

    assert ranks(2).each(work) == [due, due]


# ---- without a fleet

@pytest.mark.processes
def test_a_script_started_by_hand_trains_alone(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text("""
import torch, spotfleet.train as hvd
hvd.init()
model = torch.nn.Linear(1, 1, bias=False)
with torch.no_grad(): model.weight.zero_()
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 2):
        for state.batch in range(state.batch, 3):
            opt.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            opt.step()
            state.commit()
        state.batch = 0
    return "result"
print(train(hvd.elastic.TorchState(model, opt, epoch=0, batch=0)), model.weight.item(), hvd.rank(), hvd.size(),
      hvd.allreduce(torch.tensor([4.0])).item(), hvd.allgather(torch.ones(2)).tolist(), hvd.broadcast_object("o"),
      hvd.allgather_object(5))
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "result -6.0 0 1 4.0 [1.0, 1.0] o [5]", done.stderr


def test_calls_before_init_say_what_to_do(monkeypatch):
    from spotfleet.train import runtime

    monkeypatch.setattr(runtime, "_runtime", runtime.Runtime({}))
    for call in (hvd.rank, hvd.barrier, lambda: hvd.elastic.run(lambda state: None)(hvd.elastic.ObjectState(i=0))):
        with pytest.raises(UsageError, match=r"hvd.init\(\) has not been called"):
            call()


def test_importing_the_package_does_not_import_torch():
    code = "import sys, spotfleet.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_optimizer_state_that_is_received_lies_in_memory_as_its_parameter_does(alone):
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    opt = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1, fused=True))
    state = hvd.elastic.TorchState(model, opt)
    model(torch.ones(1, 2, 4, 4)).sum().backward()
    opt.step()
    state.allocate_tensors(state.schema())
    assert opt.state[model.weight]["exp_avg"].stride() == model.weight.stride() != torch.empty(3, 2, 3, 3).stride()
