"""Weights that a script changes by itself: between two gradients, after a step, for an evaluation, for a search."""

# ruff: noqa: B020  `for state.i in range(state.i, ...)` is how a loop starts where training stands

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from tests.support.train.loops import Disturbance, Job, bits, check, data, disturbances, fleet_of, linear
from tests.train.loops.test_buffers import Centre, Masked

STEPS = 8


def loss_of(net, step: int) -> torch.Tensor:
    return (net(data(step)) - 1).pow(2).mean()


def second_gradient(borrowed: bool):
    """Each step has the gradient at other weights, which the first gradient leads to (SAM)."""

    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))

        def train(state):
            while state.step < STEPS:
                opt.zero_grad()
                job.at("first", state.step)
                loss_of(net, state.step).backward()
                moved = [0.5 * p.grad for p in net.parameters()]
                with state.borrowed() if borrowed else nullcontext():
                    with torch.no_grad():
                        for p, m in zip(net.parameters(), moved, strict=True):
                            p.add_(m)
                    opt.zero_grad()
                    loss = loss_of(net, state.step)
                    job.at("second", state.step)
                    loss.backward()
                    if not borrowed:
                        with torch.no_grad():
                            for p, m in zip(net.parameters(), moved, strict=True):
                                p.sub_(m)
                opt.step()
                state.step += 1
            return bits(net)

        return job.run(train, model=net, optimizer=opt, step=0)

    return loop


@pytest.mark.parametrize("change", disturbances(["first", "second"], 4), ids=str)
def test_a_second_gradient_at_borrowed_weights_is_exact(threads, change):
    check(threads, second_gradient(True), change)


@pytest.mark.parametrize("change", disturbances(["first", "second"], 4), ids=str)
def test_a_second_gradient_at_moved_weights_is_exact(threads, capfd, change):
    check(threads, second_gradient(False), change)
    assert "changes weights between gradients: a copy of them, 0.0 MB, is kept at each step" in capfd.readouterr().err


@pytest.mark.parametrize("point", ["second", "metric"])
def test_before_weights_were_seen_to_move_there_is_no_copy_and_a_loss_is_an_error(threads, point):
    loop = second_gradient(False) if point == "second" else decaying("after")
    with pytest.raises(UsageError, match="changes weights between gradients or after step") as caught:
        fleet_of(threads, loop, Disturbance("kill", point, 0))
    assert "state.borrowed()" in (caught.value.hint or "")


def noisy(borrowed: bool):
    """Each gradient is taken at weights with noise, which comes before it and goes after it."""

    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.05))

        def train(state):
            while state.step < STEPS:
                opt.zero_grad()
                with state.borrowed() if borrowed else nullcontext():
                    held = [p.detach().clone() for p in net.parameters()]
                    with torch.no_grad():
                        for p in net.parameters():
                            p.mul_(1.5)
                    job.at("noise", state.step)
                    loss_of(net, state.step).backward()
                    with torch.no_grad():
                        for p, value in zip(net.parameters(), held, strict=True):
                            p.copy_(value)
                opt.step()
                state.step += 1
            return bits(net)

        return job.run(train, model=net, optimizer=opt, step=0)

    return loop


@pytest.mark.parametrize("change", disturbances(["noise"], 4), ids=str)
def test_noise_on_borrowed_weights_is_exact(threads, change):
    check(threads, noisy(True), change)


def test_a_planned_change_with_noise_on_weights_waits_for_the_step(threads):
    fleet = check(threads, noisy(False), Disturbance("notice", "noise", 4))
    assert fleet.workers["h0/0/1"].control.report.recomputed == 1  # a replay


def test_a_loss_with_noise_on_weights_is_an_error(threads):  # a change before the gradient may be one of the last step
    with pytest.raises(UsageError, match="changes weights"):
        fleet_of(threads, noisy(False), Disturbance("kill", "noise", 4))


def decaying(how: str):
    """A change of the weights after each step, then a collective."""

    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.05))

        @torch.no_grad()
        def change(*_):
            for p in net.parameters():
                if how == "by data":
                    p.data = p.data * 0.8
                else:
                    p.mul_(0.8)

        if how == "hook":
            opt.register_step_post_hook(change)

        def train(state):
            while state.step < STEPS:
                opt.zero_grad()
                loss_of(net, state.step).backward()
                job.at("gradient", state.step)
                opt.step()
                if how != "hook":
                    change()
                job.at("metric", state.step)
                job.metric()
                state.step += 1
            return bits(net)

        return job.run(train, model=net, optimizer=opt, step=0)

    return loop


@pytest.mark.parametrize("how", ["after", "by data", "hook"])
@pytest.mark.parametrize("change", disturbances(["gradient", "metric"], 4), ids=str)
def test_a_change_after_each_step_is_exact_in_a_step_hook_without_a_copy(threads, capfd, how, change):
    check(threads, decaying(how), change)  # a loss is seen in the collective: a replay
    assert ("changes weights after step()" in capfd.readouterr().err) == (how != "hook")


def averaged(how: str):
    """Averaged weights are swapped in for an evaluation with a collective, each second step."""

    def loop(job: Job):
        net = linear()
        average = copy.deepcopy(net)
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))

        @torch.no_grad()
        def evaluate(state):
            with state.borrowed() if how == "borrowed" else nullcontext():
                held = [p.clone() for p in net.parameters()]
                for p, a in zip(net.parameters(), average.parameters(), strict=True):
                    p.copy_(a)
                job.at("metric", state.step)
                if how != "asks":
                    job.metric()
                state.check_host_updates()
                for p, value in zip(net.parameters(), held, strict=True):
                    p.copy_(value)

        def train(state):
            while state.step < STEPS:
                opt.zero_grad()
                loss_of(net, state.step).backward()
                opt.step()
                with torch.no_grad():
                    for p, a in zip(net.parameters(), average.parameters(), strict=True):
                        a.lerp_(p, 0.1)
                if state.step % 2 == 0:
                    evaluate(state)
                state.step += 1
            return bits(net, average)

        return job.run(train, model=net, optimizer=opt, average=average, step=0)

    return loop


@pytest.mark.parametrize("how", ["borrowed", "held", "asks"])
@pytest.mark.parametrize("change", disturbances(["metric"], 4), ids=str)
def test_weights_swapped_in_for_an_evaluation_never_become_those_of_training(threads, how, change):
    check(threads, averaged(how), change)


def searching(job: Job):
    """Steps of a search for a learning rate, undone at its end, before training."""
    net = torch.nn.Sequential(linear(), torch.nn.BatchNorm1d(1))
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))

    def train(state):
        if state.step == 0 or (state.step == 4 and not state.searched):
            with state.borrowed():
                held = copy.deepcopy(opt.state_dict())
                statistics = [b.clone() for b in net.buffers()]
                for i in range(4):
                    opt.zero_grad()
                    loss = loss_of(net, i)
                    job.at(f"search from {state.step}", i)
                    loss.backward()
                    opt.step()
                if job.worker is None:  # what the context does besides the weights
                    opt.load_state_dict(held)
                    for b, value in zip(net.buffers(), statistics, strict=True):
                        b.copy_(value)
            state.searched = state.step > 0
        while state.step < STEPS:
            if state.step == 4 and not state.searched:
                return train(state)
            opt.zero_grad()
            loss_of(net, state.step).backward()
            opt.step()
            job.at("stepped", state.step)
            job.metric()
            state.step += 1
        return bits(net), [opt.state[p]["momentum_buffer"].tolist() for p in net.parameters()]

    return job.run(train, model=net, optimizer=opt, step=0, searched=False)


@pytest.mark.parametrize("change", [
    None, *(Disturbance(kind, f"search from {start}", 2, spares) for kind in ("kill", "notice") for spares in (0, 1)
            for start in (0, 4)), Disturbance("kill", "stepped", 0), Disturbance("notice", "stepped", 0)], ids=str)
def test_steps_of_a_search_on_borrowed_weights_are_undone_wherever_it_is_cut(threads, change):
    check(threads, searching, change)


def test_steps_of_a_search_leave_buffers_that_a_forward_pass_sets_anew_as_they_were(alone):
    net = torch.nn.Sequential(linear(), Centre(3), Masked(1))
    net.again = net[1]
    opt = hvd.DistributedOptimizer(torch.optim.SGD(net[0].parameters(), lr=0.1))

    @hvd.elastic.run
    def train(state):
        loss_of(net, 0).backward()
        opt.step()
        before = bits(net)
        with state.borrowed():
            for i in range(1, 3):
                opt.zero_grad()
                loss_of(net, i).backward()
                opt.step()
            assert bits(net) != before
        assert bits(net) == before and net[2].mask.data_ptr() == net[2].row.data_ptr()
        opt.zero_grad()
        loss_of(net, 1).backward()
        state._extras.put_back(state._round)
        assert bits(net) == before

    train(hvd.elastic.TorchState(net, opt, step=0))


def one_clean(job: Job):
    """Worker 0 fails before it changes its weights after the step, the other after."""
    net = linear()
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.05))

    def train(state):
        while state.step < STEPS:
            opt.zero_grad()
            loss_of(net, state.step).backward()
            opt.step()
            if job.worker is not None and state.step == 4 and not job.worker.notes:
                job.note("failed")
                if job.worker.name != "h0/0/1":
                    with torch.no_grad():
                        for p in net.parameters():
                            p.mul_(0.5)
                raise job.worker.runtime.group.refuse("as a collective does")
            state.step += 1
        return bits(net)

    return job.run(train, model=net, optimizer=opt, step=0)


def test_where_one_worker_holds_untouched_weights_all_take_them_over(threads):
    fleet = check(threads, one_clean)
    assert [w.notes for w in fleet.workers.values()] == [["failed"]] * 2 and fleet.generation > 1


def half_way(job: Job):
    """One worker fails before it changes its weights after the step, the other in the next gradient."""
    net = linear()
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.05))

    def train(state):
        while state.step < STEPS:
            opt.zero_grad()
            loss_of(net, state.step).backward()
            opt.step()
            if job.worker is not None and job.worker.name == "h0/0/1" and state.step == 4 and not job.worker.notes:
                job.note("failed")
                raise job.worker.runtime.group.refuse("as a collective does")
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(0.5)
            state.step += 1
        return bits(net)

    return job.run(train, model=net, optimizer=opt, step=0)


def test_who_fails_before_its_change_takes_over_the_weights_of_who_has_gone_on(threads):
    fleet = check(threads, half_way)
    assert fleet.workers["h0/0/1"].notes == ["failed"] and fleet.generation > 1


def changed_and_lent(gradient: bool):
    """Weights are changed after each step, and then borrowed: for an evaluation, or for a gradient with noise."""

    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.05))

        @torch.no_grad()
        def scale(factor: float):
            for p in net.parameters():
                p.mul_(factor)

        def train(state):
            while state.step < STEPS:
                opt.zero_grad()
                with state.borrowed() if gradient else nullcontext():
                    if gradient:
                        scale(1.5)
                    loss_of(net, state.step).backward()
                    job.at("inside", state.step)
                    if gradient:
                        job.metric()
                opt.step()
                scale(0.8)
                if not gradient:
                    with state.borrowed():
                        scale(2.0)
                        job.at("inside", state.step)
                        job.metric()
                state.step += 1
            return bits(net)

        return job.run(train, model=net, optimizer=opt, step=0)

    return loop


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("change", disturbances(["inside"], 4), ids=str)
def test_a_loan_after_a_change_is_exact(threads, gradient, change):
    check(threads, changed_and_lent(gradient), change)


def counting(job: Job):
    """Code that logs each iteration once, by `state.is_replay`."""
    net, logged = linear(), []
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.05))

    def train(state):
        while state.step < STEPS:
            opt.zero_grad()
            loss_of(net, state.step).backward()
            opt.step()
            if not state.is_replay:
                logged.append(state.step)
            job.at("metric", state.step)
            job.metric()
            state.step += 1
        return logged

    return job.run(train, model=net, optimizer=opt, step=0)


def test_an_iteration_that_was_applied_before_is_known_as_a_replay(threads):
    check(threads, counting, Disturbance("kill", "metric", 4))


def commits_before(job: Job, options: dict):
    """Moves weights between its commits, and leaves them moved for a collective."""
    net = linear()
    opt = job.distributed(torch.optim.Adam(net.parameters(), lr=0.05))

    def train(state):
        while state.step < STEPS:
            opt.zero_grad()
            loss_of(net, state.step).backward()
            opt.step()
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(0.9)
            job.at("metric", state.step)
            job.metric()
            state.step += 1
            state.commit()
        return bits(net), state.step

    return job.run(train, options=options, model=net, optimizer=opt, step=0)


@pytest.mark.parametrize("change", disturbances(["metric"], 4), ids=str)
def test_a_job_that_asks_for_copies_goes_back_to_its_commits(threads, change):
    check(threads, lambda job: commits_before(job, {"copy": True}), change)


class TwoSteps(torch.optim.Optimizer):
    """SAM as many scripts have it: an optimizer inside, which `second_step()` steps."""

    def __init__(self, params) -> None:
        super().__init__(params, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["held"] = p.clone()
            p.add_(0.5 * p.grad)

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["held"]
        self.inner.step()

    def step(self, closure=None) -> None:
        self.inner.step()


def in_two_steps(inner: bool, borrowed: bool = False, whole: bool = False):
    """The inner or the outer optimizer is distributed, and `whole` calls step() of the outer one."""

    def loop(job: Job):
        net = linear()
        opt = TwoSteps(net.parameters())
        distributed = job.distributed(opt.inner if inner else opt)

        def train(state):
            while state.step < STEPS:
                job.at("top", state.step)
                with state.borrowed() if borrowed else nullcontext():
                    for move in (opt.step,) if whole else (opt.first_step, opt.second_step):
                        distributed.zero_grad()
                        loss_of(net, state.step).backward()
                        job.at("gradient", state.step)
                        move()
                job.at("metric", state.step)
                job.metric()
                state.step += 1
            return bits(net)

        return job.run(train, model=net, optimizer=distributed, step=0)

    return loop


@pytest.mark.parametrize("borrowed", [False, True])
def test_a_step_of_an_optimizer_inside_that_nothing_counts_is_refused(threads, borrowed):
    with pytest.raises(UsageError, match=r"TwoSteps.inner.step\(\) \(loops/test_moved_weights.py:\d+\)") as caught:
        fleet_of(threads, in_two_steps(False, borrowed))
    assert "DistributedOptimizer(optimizer.inner)" in (caught.value.hint or "")


@pytest.mark.parametrize("change", disturbances(["top", "gradient", "metric"], 4), ids=str)
def test_two_steps_whose_inner_optimizer_is_distributed_are_exact(threads, change):
    check(threads, in_two_steps(True), change)


@pytest.mark.parametrize("change", [None, Disturbance("kill", "gradient", 4)], ids=str)
def test_an_optimizer_that_steps_another_inside_its_own_step_is_not_refused(threads, change):
    check(threads, in_two_steps(False, whole=True), change)


class OwnSteps(torch.optim.SGD):
    """SAM that changes the weights in its second step by itself."""

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.add_(0.5 * p.grad)

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(0.6 * p.grad)


def in_own_steps(calls_step: bool, steps: int):
    def loop(job: Job):
        net = linear()
        opt = job.distributed(OwnSteps(net.parameters(), lr=0.1))

        def train(state):
            for state.step in range(state.step, steps):
                for move in (opt.first_step, opt.step if calls_step else opt.second_step):
                    opt.zero_grad()
                    loss_of(net, state.step).backward()
                    move()
                job.at("stepped", state.step)

        return job.run(train, model=net, optimizer=opt, step=0)

    return loop


@pytest.mark.parametrize("calls_step", [True, False])
@pytest.mark.parametrize("steps", [3, 30])
def test_a_job_whose_weights_change_without_a_step_is_told_once_that_none_is_counted(threads, capfd, calls_step, steps):
    fleet_of(threads, in_own_steps(calls_step, steps))
    told = capfd.readouterr().err.count("step() of the distributed optimizer has not been called")
    assert told == (0 if calls_step else 2)  # by each worker


def test_a_loss_in_a_job_whose_weights_change_without_a_step_is_an_error(threads):
    with pytest.raises(UsageError, match="changes weights between gradients or after step"):
        fleet_of(threads, in_own_steps(False, 9), Disturbance("kill", "stepped", 4))
