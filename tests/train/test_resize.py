"""What a change of the world size does to learning rates and to the global batch; what a job asks for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from spotfleet.model import ResizeSpec
from spotfleet.protocol.messages import dump
from spotfleet.train import runtime
from spotfleet.train.data.sampler import slice_for
from spotfleet.train.elastic import ElasticSampler, Progress, Resize, TorchState, micro_batches, run
from spotfleet.train.gradients.reducer import Reducer
from spotfleet.train.resize import Ramp, Resizer, ramp_at, read, workers_at
from spotfleet.worker.member import RankInfo

sizes = st.integers(1, 7)


def factors(worlds: list[int], warmup: int, resizer: Resizer | None = None) -> list[float]:
    """Of the steps made at these world sizes."""
    resizer = resizer or Resizer(Resize("scale-lr", warmup), {})
    return [resizer.factor(step, world) for step, world in enumerate(worlds)]


# ---- learning rates


def test_learning_rates_go_with_the_world_size_of_the_first_step():
    assert factors([4, 4, 2, 2, 8, 4], warmup=0) == [1.0, 1.0, 0.5, 0.5, 2.0, 1.0]


def test_the_warm_up_is_linear_and_begins_where_the_last_one_had_come():
    assert factors([1, 3, 3, 3, 3, 1, 1], warmup=4) == [1.0, 1.5, 2.0, 2.5, 3.0, 2.5, 2.0]
    assert factors([2, 4, 4, 1, 1, 1, 1, 1], warmup=4) == [1.0, 1.25, 1.5, 1.25, 1.0, 0.75, 0.5, 0.5]


@settings(max_examples=200, deadline=None)
@given(worlds=st.lists(sizes, min_size=1, max_size=30), warmup=st.integers(0, 6), cut=st.integers(0, 29),
       tried=st.lists(sizes, max_size=3))
def test_factors_follow_from_the_applied_steps_alone(worlds, warmup, cut, tried):
    """A step that fails at other world sizes, is taken back and made at last leaves no trace; nor does a joiner."""
    whole = factors(worlds, warmup)
    resizer, found = Resizer(Resize("scale-lr", warmup), {}), []
    for step, world in enumerate(worlds):
        position = resizer.state_dict()
        for other in tried if step == cut else []:
            resizer.factor(step, other)
            resizer = Resizer(Resize("scale-lr", warmup), {})
            resizer.load_state_dict(position)
        found.append(resizer.factor(step, world))
        assert resizer.factor(step, world) == found[-1], "a replay moves it on"
    assert found == whole


def test_a_ramp_goes_on_in_another_process():
    held = ramp_at(ramp_at(None, 2, 0, 4), 4, 10, 4)
    assert held == Ramp(reference=2, world=4, since=10, begin=1.0)
    assert [held.factor(step, 4) for step in (10, 13, 14)] == [1.25, 2.0, 2.0]


def stepped(worlds: list[int], alone: runtime.Runtime, optimizer, scheduler=None) -> list[float]:
    """How far a weight whose gradient is 1 falls in each step."""
    (p,) = optimizer.param_groups[0]["params"]
    fell = []
    for world in worlds:
        alone.state.mark(position=None)
        alone.place = RankInfo(size=world)
        before = p.item()
        optimizer.zero_grad()
        p.sum().backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
        fell.append(round(before - p.item(), 6))
    return fell


def entered(alone: runtime.Runtime, resize: object, **values: object) -> TorchState:
    state = TorchState(**values)
    alone._enter(state, resize)
    alone.join(state)
    return state


def test_a_step_sees_the_scaled_rate_and_nobody_else_does(alone):
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.5))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    entered(alone, "scale-lr", optimizer=optimizer, scheduler=scheduler)
    assert stepped([2, 4, 2], alone, optimizer, scheduler) == [0.5, 0.5, 0.125]
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 0.0625


def test_a_replayed_step_counts_at_the_world_size_at_which_it_was_applied(alone):
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    state = entered(alone, Resize("scale-lr", warmup_steps=2), optimizer=optimizer)
    assert stepped([2, 4], alone, optimizer) == [1.0, 1.5]
    state.rewind(state._position)  # the step is applied, and its iteration runs again among fewer
    alone.place = RankInfo(size=2)
    p.sum().backward()
    optimizer.step()
    assert p.item() == -2.5
    assert stepped([4, 2], alone, optimizer) == [2.0, 1.5]


def test_without_the_policy_a_step_sees_the_rate_itself(alone):
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.5))
    entered(alone, None, optimizer=optimizer)
    assert stepped([2, 4], alone, optimizer) == [0.5, 0.5]


# ---- the global batch


@settings(max_examples=200, deadline=None)
@given(total=st.integers(1, 300), batch=st.integers(1, 40), worlds=st.lists(sizes, min_size=1, max_size=20))
def test_a_kept_global_batch_cuts_the_epoch_into_the_same_steps_at_any_world_size(total, batch, worlds):
    position, step = 0, 0
    while position < total:
        world = worlds[step % len(worlds)]
        parts = [slice_for(position, total, world, rank, batch) for rank in range(world)]
        seen = [i for start, end in parts for i in range(start, end)]
        assert seen == list(range(position, min(total, position + batch)))
        assert max(e - s for s, e in parts) - min(e - s for s, e in parts) <= 1
        position, step = position + batch, step + 1
    assert step == -(-total // batch)


def test_the_batch_of_the_first_world_is_kept_and_goes_with_the_state(alone):
    alone.place = RankInfo(size=3)
    sampler = ElasticSampler(100, batch_size=4)
    state = entered(alone, "keep-global-batch", sampler=sampler)
    assert sampler.global_batch == 12
    alone.place = RankInfo(rank=1, size=2)
    assert [len(b) for b in sampler.batches()] == [6] * 8 + [2]
    assert sampler.weight() == (6.0, 12.0)
    sampler.record_batch()
    assert sampler.processed_num == 12
    joiner = ElasticSampler(100, batch_size=4)
    joiner.load_state_dict(state.capture(2, 0).stateful["sampler"])
    assert (joiner.global_batch, joiner.processed_num) == (12, 12)


def test_more_workers_than_samples_in_the_global_batch_leave_some_with_weight_0(alone):
    sampler, found = ElasticSampler(4, batch_size=1, global_batch=2, shuffle=False), []
    for rank in range(3):
        alone.place = RankInfo(rank=rank, size=3)
        found.append((list(sampler.batches()), sampler.weight()))
    assert found == [([[0], [2]], (1.0, 2.0)), ([[1], [3]], (1.0, 2.0)), ([[0], [2]], (0.0, 2.0))]


def test_a_loader_that_would_cut_the_share_by_itself_is_refused(alone):
    sampler = ElasticSampler(100, batch_size=4)
    entered(alone, "keep-global-batch", sampler=sampler)
    with pytest.raises(UsageError, match=r"share of it changes"):
        iter(sampler)


@pytest.mark.parametrize("share", [1, 4, 5, 12])
def test_micro_batches_reduce_once_and_add_up_to_the_mean_of_the_whole(ranks, share):
    """Over two ranks, against the gradient of the mean over all samples."""
    data = torch.linspace(0, 1, 2 * share, dtype=torch.float64)

    def work(group):
        p = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        reductions = []
        reducer = Reducer([p], 1, True, lambda: group, lambda r: None,
                                        lambda *a: reductions.append(1), lambda: (share, 2 * share))

        class Optimizer:
            no_sync = staticmethod(reducer.hold)

        own = data[group.rank * share:(group.rank + 1) * share]
        for (x, y), weight in micro_batches(Optimizer, (own, own), 4):
            assert len(x) <= 4
            ((p * x + y - y).mean() * weight).backward()
        return p.grad.item(), len(reductions)

    for grad, reductions in ranks(2).each(work):
        assert grad == pytest.approx(data.mean().item(), abs=1e-12) and reductions == 1


def test_a_batch_is_cut_whatever_it_is_made_of(alone):
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    batch = {"x": torch.arange(5), "y": [torch.arange(5), (torch.arange(5),)], "names": list("abcde")}
    last = list(micro_batches(optimizer, batch, 2))[-1]
    assert (last[0]["x"].tolist(), last[0]["y"][1][0].tolist(), last[0]["names"], last[1]) == ([4], [4], ["e"], 0.2)
    with pytest.raises(UsageError, match="hold"):
        list(micro_batches(optimizer, (torch.arange(5), torch.arange(4)), 2))


# ---- what a job asks for


def test_growth_goes_by_the_epoch_of_the_state(alone):
    state = entered(alone, Resize(growth={0: 2, 3: 4}), epoch=0)
    asked = []
    for state.epoch in range(5):
        asked.append(alone.resizer.wanted(state, 2))
    assert asked == [2, 2, 2, 4, 4]


def test_growth_goes_by_the_samplers_epoch_where_the_state_has_none(alone):
    sampler = ElasticSampler(10, batch_size=2)
    state = entered(alone, Resize(growth={0: 1, 2: 3}), sampler=sampler)
    sampler.set_epoch(2)
    assert alone.resizer.wanted(state, 1) == 3


def test_a_callback_sees_the_progress_and_what_is_out_of_range_is_clamped_and_said_once(alone, capfd):
    seen = []

    def wish(progress: Progress) -> int | None:
        seen.append(progress)
        return {0: None, 1: 99, 2: 98}[progress.epoch]

    alone._environ = {"SPOTFLEET_WORKERS": "2:4"}
    state = entered(alone, wish, epoch=0)
    asked = []
    for state.epoch in (0, 1, 2):
        asked.append(alone.resizer.wanted(state, 3))
    assert asked == [0, 4, 4] and seen[-1] == Progress(0, 2, 3, 2, 4)
    assert capfd.readouterr().err.count("99 workers are wanted; the job may have 2 to 4") == 1


@pytest.mark.parametrize("answer", ["three", 2.5, True])
def test_what_is_no_number_of_workers_is_refused(alone, answer):
    with pytest.raises(UsageError, match="the callback returned"):
        entered(alone, lambda progress: answer, epoch=0)


def test_a_step_tells_of_a_new_wish_and_makes_no_report_else(alone):
    p, told = torch.nn.Parameter(torch.zeros(1)), []
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    entered(alone, lambda progress: 2 + progress.version // 3, optimizer=optimizer)
    alone.control = SimpleNamespace(update=lambda **fields: told.append(fields.get("wanted")))  # has no report
    alone._resumed = alone.generation
    for _ in range(6):
        p.sum().backward()
        optimizer.step()
    assert told == [3, 4]


def test_the_callbacks_exception_leaves_the_step_as_it_was_raised(alone):
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))

    def wish(progress: Progress) -> int:
        return 1 // (1 - progress.version)

    entered(alone, wish, optimizer=optimizer)
    p.sum().backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()


def test_the_script_goes_before_the_job_and_the_job_before_nothing():
    given = {"SPOTFLEET_RESIZE": dump(ResizeSpec("scale-lr", 10, ((0, 1), (3, 2)), 1, 1, 5.0))}
    assert read(None, given) == Resize("scale-lr", 10, {0: 1, 3: 2})
    assert read("keep-global-batch", given) == Resize("keep-global-batch")
    assert read(None, {}) == Resize()
    with pytest.raises(UsageError):
        read(7, {})


def test_the_decorator_is_used_with_and_without_arguments(alone):
    @run(resize="scale-lr")
    def one(state, more):
        return "one", more, runtime.current().resizer.resize.policy

    assert one(TorchState(epoch=0), more=2) == ("one", 2, "scale-lr") and one.__name__ == "one"
    with pytest.raises(UsageError):
        run("scale-lr")


def test_the_last_entry_that_is_due_counts():
    assert [workers_at({0: 2, 30: 4, 60: 8}, epoch) for epoch in (0, 29, 30, 59, 60, 1000)] == [2, 2, 4, 4, 8, 8]


@pytest.mark.parametrize("bad", [
    {"policy": "keep"}, {"policy": "none", "warmup_steps": 3}, {"policy": "scale-lr", "warmup_steps": -1},
    {"growth": {1: 2}}, {"growth": {0: 0}}, {"growth": {0: 2, 30: 4, 20: 3}},
    {"growth": {0: 2}, "wanted": lambda progress: 1},
])
def test_an_impossible_policy_is_refused(bad):
    with pytest.raises(UsageError):
        Resize(**bad)


@pytest.mark.parametrize(("resize", "missing"), [("keep-global-batch", "elastic sampler"),
                                                 (Resize(growth={0: 2}), "epoch")])
def test_a_policy_that_finds_nothing_to_work_on_says_so_when_the_function_is_entered(alone, resize, missing):
    with pytest.raises(UsageError, match=missing):
        alone._enter(TorchState(batch=0), resize)


def test_what_was_done_is_told_in_one_line(alone):
    sampler = ElasticSampler(100, batch_size=4)
    alone.place = RankInfo(size=3)
    kept = entered(alone, "keep-global-batch", sampler=sampler)
    assert alone.resizer.apply(kept, 2, 3) == "the global batch stays 12, 6 at most on each worker"
    assert alone.resizer.apply(kept, 3, 3) == ""
    scale = Resizer(Resize("scale-lr", 5), {})
    scale.factor(0, 4)
    assert scale.apply(TorchState(epoch=0), 3, 4) == "learning rates are 3/4 of those for 4 workers after 5 steps"
