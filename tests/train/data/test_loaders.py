"""Loaders with worker processes, and a job that grows, on real workers that come and go.

Weight i falls by one each time sample i is in an applied step: all must end at minus the number of epochs.
"""

from __future__ import annotations

import os

import psutil
import pytest

from tests.support.train.train_scripts import FAULTS

pytestmark = pytest.mark.processes
LONG = pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="set SPOTFLEET_LONG: the stream shows the same")

LOADED = FAULTS + '''
hvd.init()
N, B, E = 331, 2, env("EPOCHS", 2)
model = torch.nn.Linear(N, 1, bias=False)
with torch.no_grad(): model.weight.zero_()
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)

def record(i):
    return torch.nn.functional.one_hot(torch.tensor(i), N).float()

class Data(torch.utils.data.Dataset):
    def __len__(self): return N
    def __getitem__(self, i): return record(i)

def loaders():
    """(sampler, function that makes its loader)"""
    how = dict(num_workers=2, multiprocessing_context="fork", persistent_workers=True)
    if os.environ["KIND"] == "map":
        sampler = hvd.elastic.ElasticSampler(Data(), batch_size=B, seed=5)
        return sampler, lambda: torch.utils.data.DataLoader(Data(), batch_sampler=sampler.batches(), **how)
    stream = hvd.elastic.ElasticIterable(lambda epoch: (i * 7 % N for i in range(N)), B, transform=record)
    return stream, lambda: torch.utils.data.DataLoader(stream.batches(), batch_size=None, **how)

sampler, make = loaders()

@hvd.elastic.run(resize=eval(os.environ.get("RESIZE", "None")))
def train(state):
    loader = make()
    for state.epoch in range(state.epoch, E):
        sampler.set_epoch(state.epoch)
        for number, x in enumerate(loader):
            opt.zero_grad()
            model(x).sum().backward()
            die_at("reduced", step=state.steps)
            opt.step()
            sampler.record_batch(number)
            state.steps += 1
            print("STEP", state.epoch, hvd.size(), sampler.global_batch, flush=True)
            awaited = state.epoch + 1 if env("GROWS", 0) else 3
            met = hvd.size() >= awaited or os.path.exists(os.environ["SPOTFLEET_OUTPUT"] + "/met")
            time.sleep(0.004 if met else 0.1)  # else the job might end before a joiner has started
            state.commit()

train(hvd.elastic.TorchState(model, opt, sampler=sampler, epoch=0, steps=0))
print("SEEN", sorted(set(model.weight.flatten().tolist())), flush=True)
'''


def children(fleet, name: str) -> list[int]:
    try:
        return [p.pid for p in psutil.Process(fleet.workers[name].pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def all_gone(fleet) -> bool:
    """Is no process of any worker's group left, its loaders' among them?"""
    for worker in fleet.workers.values():
        try:
            os.killpg(worker.pid, 0)
            return False
        except ProcessLookupError:
            continue
    return True


@pytest.mark.parametrize("kind", ["stream", pytest.param("map", marks=LONG)])
def test_each_sample_counts_once_through_a_kill_a_notice_and_a_join_and_no_loader_process_is_left(fleets, kind):
    fleet = fleets(LOADED, founders=3)
    a, b, c = fleet.start_all(KIND=kind)
    fleet.wait_version(20)
    fleet.kill(b)
    fleet.wait(lambda: fleet.report(a).resumed >= 2, what="going on without b")
    fleet.wait(lambda: len(children(fleet, a)) == 2, what="the loaders of before are gone")
    d = fleet.start(KIND=kind)
    fleet.wait(lambda: fleet.report(d).resumed == fleet.generation > 2, what="d has joined")
    (fleet.folder / "met").touch()
    before = fleet.generation
    fleet.drain(c)
    fleet.wait(lambda: fleet.report(a).resumed == fleet.generation > before, what="c has left")
    assert [fleet.report(w).failed for w in (a, c, d)] == [1, 1, 0] and fleet.report(d).repeated == 0
    fleet.wait_end()
    assert fleet.lines("SEEN") == ["[-2.0]"] * 2, fleet.story()
    fleet.wait(lambda: all_gone(fleet), what="no loader process is left")


def test_a_job_that_grows_by_its_epochs_asks_in_time_and_sees_each_sample_once(fleets):
    fleet = fleets(LOADED, founders=1)
    how = {"KIND": "stream", "EPOCHS": "3", "GROWS": "1", "RESIZE": "hvd.elastic.Resize(growth={0: 1, 1: 2, 2: 3})"}
    (first,) = fleet.start_all(**how)
    for fleet.target in (2, 3):
        fleet.wait(lambda: fleet.report(first).wanted >= fleet.target, what="one more is wanted")
        fleet.start(**how)
        fleet.wait(lambda: len(fleet.members) == fleet.target, what="it joins")
    fleet.wait_end()
    assert fleet.lines("SEEN") == ["[-3.0]"] * 3, fleet.story()
    steps = [line.split() for line in fleet.log(first).splitlines() if line.startswith("STEP")]
    sizes = {epoch: {int(size) for _, e, size, _ in steps if int(e) == epoch} for epoch in range(3)}
    assert sizes[0] == {1} and sizes[1] <= {1, 2} and 2 in sizes[1] | sizes[2] and 3 in sizes[2], sizes
    assert fleet.report(first).repeated == 0


def test_a_kept_global_batch_takes_the_same_steps_with_fewer_workers(fleets):
    fleet = fleets(LOADED, founders=3)
    a, b, _ = fleet.start_all(KIND="map", RESIZE="'keep-global-batch'")
    fleet.wait_version(20)
    fleet.kill(b)
    fleet.wait(lambda: fleet.report(a).resumed >= 2
               and fleet.report(a).resize == "the global batch stays 6, 3 at most on each worker",
               what="going on without b, with c, which may be in the next generation only")
    (fleet.folder / "met").touch()
    fleet.wait_end()
    assert fleet.lines("SEEN") == ["[-2.0]"] * 2, fleet.story()
    assert fleet.report(a).version == 2 * -(-331 // 6)
    assert {line.split()[-1] for line in fleet.log(a).splitlines() if line.startswith("STEP")} == {"6"}
