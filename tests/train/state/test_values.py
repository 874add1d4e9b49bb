"""Values of the script that a state cannot copy, or whose copy would refer to copies of what trains."""

from __future__ import annotations

import threading

import pytest
import torch

from spotfleet.errors import UsageError
from tests.support.train.loops import Job, data, fleet_of, linear, plain


class Average:
    """A moving average as many scripts have it, without state_dict()."""

    def __init__(self, model) -> None:
        self.model, self.decay = model, 0.9
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(self) -> None:
        for n, p in self.model.named_parameters():
            self.shadow[n] = (1 - self.decay) * p.detach() + self.decay * self.shadow[n]


class Portable(Average):
    """The same with the methods of the hint."""

    def state_dict(self):
        return self.shadow

    def load_state_dict(self, held):
        self.shadow = held


def with_value(make, each=lambda state, loss: None):
    """Three steps with `make(model, optimizer)` in the state, and `each` after each of them."""

    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))

        def train(state):
            for state.i in range(state.i, 3):  # noqa: B020 - as docs/commit.md has it
                opt.zero_grad()
                loss = net(data(state.i)).square().mean()
                loss.backward()
                opt.step()
                each(state, loss)
            return {n: s.tolist() for n, s in getattr(state.value, "shadow", {}).items()}

        return job.run(train, model=net, optimizer=opt, i=0, value=make(net, opt))

    return loop


@pytest.mark.parametrize("make", [
    lambda net, opt: Average(net),
    lambda net, opt: {"best": [net]},
    lambda net, opt: [net.bias],
    lambda net, opt: ((opt,),),
    lambda net, opt: net.forward,
])
def test_a_value_that_refers_to_what_trains_is_refused(threads, make):
    with pytest.raises(UsageError, match=r"state.value \(state/test_values.py:\d+\) refers to a model") as caught:
        fleet_of(threads, with_value(make))
    assert "state_dict() and load_state_dict()" in (caught.value.hint or "")


@pytest.mark.parametrize(("make", "hint"), [
    (lambda net, opt: {"a": opt}, "give each optimizer its own keyword: TorchState(model, **value)"),
    (lambda net, opt: [opt], "TorchState(model, **{f'optimizer{i}': v for i, v in enumerate(value)})"),
    (lambda net, opt: {"a": net}, "give each model its own keyword: TorchState(**value)"),
])
def test_optimizers_and_models_in_a_container_get_keywords_of_their_own(threads, make, hint):
    with pytest.raises(UsageError, match=r"state\.value .* refers to a model") as caught:
        fleet_of(threads, with_value(make))
    assert hint in (caught.value.hint or "")


def test_a_value_that_refers_to_what_trains_is_refused_also_where_it_is_set_later(threads):
    def each(state, loss):
        state.value = Average(state.model)

    with pytest.raises(UsageError, match=r"state.value .* refers to a model"):
        fleet_of(threads, with_value(lambda net, opt: 0, each))


def test_a_moving_average_with_state_dict_follows_the_model(threads):
    loop = with_value(lambda net, opt: Portable(net), lambda state, loss: state.value.update())
    fleet = fleet_of(threads, loop)
    assert [w.result for w in fleet.workers.values()] == [plain(loop)] * 2


@pytest.mark.parametrize(("make", "each", "reason"), [
    (lambda net, opt: threading.Lock(), lambda state, loss: None, "cannot pickle"),
    (lambda net, opt: [], lambda state, loss: state.value.append(loss), "graph leaves"),
])
def test_a_value_that_cannot_be_copied_is_refused_by_its_name(threads, make, each, reason):
    with pytest.raises(UsageError, match=rf"state.value \(state/test_values.py:\d+\) cannot be copied.*{reason}") as e:
        fleet_of(threads, with_value(make, each))
    assert "loss.detach()" in (e.value.hint or "")
