"""What a script sees of its place in the job before it trains, and what becomes of what it built from that."""

from __future__ import annotations

import re
import threading
import warnings

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import spotfleet.train as hvd
from spotfleet.protocol.messages import RankInfo, Stage
from spotfleet.train.data import torch_sampler
from spotfleet.worker.errors import PlaceDiffers
from tests.support.train.thread_fleet import Lost, ThreadFleet, Worker


class Predicting(ThreadFleet):
    """Tells each joiner `provisional`."""

    provisional = RankInfo(1, 2, local_rank=3, local_size=4, cross_rank=5, cross_size=6)


def spare_waits(fleet: ThreadFleet) -> bool:
    spare = fleet.workers.get("h2/0/1")
    return spare is not None and spare.control._report.stage is Stage.READY


def counting(read, steps: int = 8, lost_at: int = 3):
    """A script that calls `read` before elastic.run, and whose worker 1 is lost; its result is what `read` returned."""

    def script(worker: Worker):
        hvd.init()
        found = read()
        model = torch.nn.Linear(1, 1)
        opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def train(state):
            while state.step < steps:
                if worker.name == "h1/0/1" and state.step == lost_at:
                    worker.fleet.wait(lambda: spare_waits(worker.fleet), "the spare")
                    raise Lost
                worker.notes.append((state.step, hvd.size()))
                opt.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                opt.step()
                state.step += 1
            return found

        return hvd.elastic.run(train)(hvd.elastic.TorchState(model, opt, step=0))

    return script


def test_before_elastic_run_a_joiner_sees_the_place_that_it_will_take(threads):
    fleet = threads(counting(lambda: (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(),
                                      hvd.cross_size())), spares=1, kind=Predicting)
    fleet.wait(lambda: not fleet.workers["h2/0/1"].alive, "the joiner's end")
    error = fleet.workers["h2/0/1"].error
    assert isinstance(error, PlaceDiffers) and "hvd.local_rank() gave 3 before elastic.run" in str(error)
    assert error.blame_peer  # its slot starts anew


def test_a_joiner_whose_place_is_the_one_it_has_read_trains(threads):
    fleet = threads(counting(lambda: (hvd.rank(), hvd.size())), spares=1, kind=Predicting)
    results = {w.name: w.result for w in fleet.finish()}
    assert results == {"h0/0/1": (0, 2), "h2/0/1": (1, 2)}
    assert fleet.workers["h2/0/1"].control.report.read_size == 0  # it has a place, and is bound no more


@pytest.mark.parametrize("name, place", [("size", RankInfo(1, 1)), ("rank", RankInfo(0, 2))])
def test_a_joiner_trains_never_with_another_place_than_it_has_read(threads, monkeypatch, name, place):
    monkeypatch.setattr(Predicting, "provisional", place)
    fleet = threads(counting(lambda: getattr(hvd, name)()), spares=1, kind=Predicting)
    fleet.wait(lambda: not any(w.alive for w in fleet.workers.values()), "the end")
    survivor, joiner = fleet.workers["h0/0/1"], fleet.workers["h2/0/1"]
    assert isinstance(joiner.error, PlaceDiffers) and joiner.notes == []
    wrong, right = getattr(place, name), getattr(RankInfo(1, 2), name)
    assert re.search(rf"hvd.{name}\(\) gave {wrong} .*test_place.py:\d+\), but .* with {right}", str(joiner.error))
    assert survivor.result is not None and survivor.notes[-1] == (7, 1)


def test_a_joiner_that_has_read_nothing_takes_any_place(threads, monkeypatch):
    monkeypatch.setattr(Predicting, "provisional", RankInfo(7, 9))
    fleet = threads(counting(lambda: True), spares=1, kind=Predicting)
    assert [w.name for w in fleet.finish()] == ["h0/0/1", "h2/0/1"]


def test_a_joiner_reports_what_binds_it_when_it_is_ready(threads):
    seen = []

    class Watching(Predicting):
        def decide(self):
            seen.extend((r.read_rank, r.read_size) for w in self.workers.values()
                        if w.name == "h2/0/1" and (r := w.control._report).stage.value == "ready")
            super().decide()

    threads(counting(hvd.size), spares=1, kind=Watching).finish()
    assert list(dict.fromkeys(seen)) == [(None, 2), (None, 0)]


# ---- torch's own sampler

DATA = torch.arange(24.0).view(-1, 1)


def sampling(worker: Worker, second_epoch: threading.Barrier):
    """Horovod's tutorial: a DistributedSampler from the numbers before elastic.run."""
    hvd.init()
    sampler = DistributedSampler(DATA, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    loader = DataLoader(DATA, batch_size=2, sampler=sampler)
    model = torch.nn.Linear(1, 1)
    opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))

    @hvd.elastic.run
    def train(state):
        while state.epoch < 3:
            drawn = []
            if state.epoch == 1 and hvd.size() == 3:
                second_epoch.wait(60)  # a loss in the middle of an epoch is another case
            for x in loader:
                if worker.name == "h1/0/1" and state.epoch == 1:
                    raise Lost
                opt.zero_grad()
                model(x).sum().backward()
                opt.step()
                drawn += x.flatten().tolist()
            worker.notes.append((state.epoch, hvd.size(), len(loader), drawn))
            state.epoch += 1
        return True

    return train(hvd.elastic.TorchState(model, opt, epoch=0))


def test_a_plain_distributed_sampler_follows_a_change_of_the_world_and_says_so(threads):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second_epoch = threading.Barrier(3)
        fleet = threads(lambda worker: sampling(worker, second_epoch), founders=3)
        fleet.finish()
    last = {w.name: w.notes[-1] for w in fleet.workers.values() if w.result}
    assert {name: note[:3] for name, note in last.items()} == {"h0/0/1": (2, 2, 6), "h2/0/1": (2, 2, 6)}
    assert sorted(x for note in last.values() for x in note[3]) == DATA.flatten().tolist()
    texts = {str(w.message) for w in caught if "DistributedSampler" in str(w.message)}
    assert any("made for rank 0 of 3, used as rank 0 of 2" in t and "hvd.elastic.ElasticSampler" in t for t in texts)


def of_a_sampler() -> tuple[int, int]:
    sampler = DistributedSampler(DATA)
    return sampler.num_replicas, sampler.rank


def test_a_distributed_sampler_without_numbers_takes_those_of_the_place_that_a_joiner_will_take(threads):
    results = {w.name: w.result for w in threads(counting(of_a_sampler), spares=1, kind=Predicting).finish()}
    assert results == {"h0/0/1": (2, 0), "h2/0/1": (2, 1)}


def test_such_a_sampler_binds_the_joiner(threads, monkeypatch):
    monkeypatch.setattr(Predicting, "provisional", RankInfo(0, 2))
    fleet = threads(counting(of_a_sampler), spares=1, kind=Predicting)
    fleet.wait(lambda: not any(w.alive for w in fleet.workers.values()), "the end")
    assert re.search(r"hvd.rank\(\) gave 0 .*test_place.py:\d+\), but .* with 1", str(fleet.workers["h2/0/1"].error))


def test_a_distributed_sampler_for_another_purpose_is_left_alone(alone):
    torch_sampler.watch(lambda name: 1)
    evaluation = DistributedSampler(DATA, num_replicas=4, rank=2, shuffle=False)
    own = DistributedSampler(DATA, num_replicas=1, rank=0, shuffle=False, drop_last=True)
    own.set_epoch(5)
    alone.place = RankInfo(1, 2)
    with pytest.warns(UserWarning, match="made for rank 0 of 1, used as rank 1 of 2"):
        assert list(own) == list(range(1, 24, 2))
    assert (own.epoch, own.drop_last, len(own)) == (5, True, 12)
    assert list(evaluation) == list(range(2, 24, 4)) and len(evaluation) == 6
