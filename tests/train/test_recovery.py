"""What a worker that joins, resumes or survives holds: bit for bit what an undisturbed run holds."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet.protocol.checkpoint_files import share_of
from spotfleet.protocol.messages import RankInfo, Stage
from spotfleet.storage.checkpoint_folder import read_manifest
from tests.support.train.train_scripts import FAULTS

pytestmark = pytest.mark.processes

# Adam, dropout, batch norm, a scheduler, clipping: everything that a wrong state or random number would show in.
RICH = FAULTS + '''
import random, numpy
hvd.init()
STEPS = env("STEPS", 60)
torch.manual_seed(1 + int(ME[1]))
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.3),
                            torch.nn.Linear(32, 4))
inner = torch.optim.AdamW(model.parameters(), lr=0.01)
early = torch.optim.lr_scheduler.StepLR(inner, 10, 0.9)
opt = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(opt, root_rank=0)

@hvd.elastic.run
def train(state):
    while state.batch < STEPS:
        die_at("begin", step=state.batch)
        # Drawn between two steps, as augmentation and mixup are.
        x, y = torch.randn(16, 8) * random.uniform(0.9, 1.1), torch.randint(0, 4, (16,))
        x += float(numpy.random.rand()) + float(state.mine.random()) + torch.rand(8, generator=state.mix)
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        early.step()
        die_at("stepped", step=state.batch)
        state.losses = [*state.losses[-3:], state.batch]
        state.batch += 1
        time.sleep(env("NAP", 0.004))
        if env("METRIC", 0):
            hvd.allreduce(torch.ones(1))
        state.commit()

state = hvd.elastic.TorchState(model, opt, scheduler=early, batch=0, losses=[],
                               mix=torch.Generator().manual_seed(5), mine=numpy.random.default_rng(6))
train(state)
held = [opt.state[p][k] for p in model.parameters() for k in ("exp_avg", "exp_avg_sq", "step")]
print("DIGEST", digest([p for p in model.parameters()]), digest(held), state.losses,
      early.last_epoch, opt.param_groups[0]["lr"], flush=True)
'''


def digest(fleet) -> set[str]:
    fleet.wait_end()
    found = fleet.lines("DIGEST")
    assert found, fleet.story()
    return set(found)


@pytest.fixture
def undisturbed(fleets):
    fleet = fleets(RICH)
    fleet.start_all()
    found = digest(fleet)
    assert len(found) == 1
    return found


@pytest.mark.parametrize("point", ["begin:30", "stepped:30"])
@pytest.mark.parametrize("metric", ["0", "1"])
def test_a_spare_that_fills_a_dead_ranks_place_ends_with_the_bits_of_an_undisturbed_run(
        fleets, undisturbed, point, metric):
    fleet = fleets(RICH)
    fleet.hold = True
    env = {"DIE": f"h1/0/1:{point}", "METRIC": metric}
    for _ in range(4):
        fleet.start(**env)
    founders, spare = ["h0/0/1", "h1/0/1", "h2/0/1"], "h3/0/1"
    fleet.wait(lambda: all(fleet.report(n).stage is Stage.INIT for n in founders), what="founders")
    fleet.form(tuple(founders), "start")
    fleet.wait(lambda: fleet.report(spare).stage is Stage.READY or not fleet.workers["h1/0/1"].alive, what="spare")
    fleet.wait(lambda: fleet.report(spare).stage is Stage.READY, what="spare")
    fleet.hold = False
    assert digest(fleet) == undisturbed
    assert fleet.members == ("h0/0/1", spare, "h2/0/1")


def test_drains_and_joins_that_keep_the_size_change_no_bit(fleets, undisturbed):
    fleet = fleets(RICH)
    a, _, _ = fleet.start_all(NAP="0.05")  # else the job might end before the spare is ready
    spare = fleet.start()
    fleet.wait(lambda: fleet.report(spare).stage is Stage.READY, what="spare")
    fleet.drain(a)
    assert digest(fleet) == undisturbed
    assert fleet.generation == 2 and fleet.members[0] == spare


def give_shares(fleet, kept, workers, tmp_path):
    """Let each worker's host have its share of the checkpoint's files alone."""
    hosts = [name.partition("/")[0] for name in workers]
    assert len(set(hosts)) == len(hosts)
    files = read_manifest(Path(kept.path)).files
    for name, host in zip(workers, hosts, strict=True):
        (tmp_path / host).mkdir()
        own = share_of(files, hosts, host)
        assert 0 < len(own) < len(files)
        for file in ("manifest.json", *own):
            shutil.copyfile(Path(kept.path) / file, tmp_path / host / file)
        fleet.order(name, restore=replace(kept, path=str(tmp_path / host)))


@pytest.mark.parametrize("place", ["agent", "object store", "shares"])
def test_a_job_that_lost_every_worker_resumes_from_its_checkpoint_with_the_same_bits(
        fleets, undisturbed, tmp_path, place):
    url = f"file://{tmp_path}/bucket/job" if place == "object store" else ""
    fleet = fleets(RICH, checkpoint_every_s=0.1, checkpoint_url=url)
    names = fleet.start_all(NAP="0.02")
    fleet.wait(lambda: fleet.kept.newest, what="a checkpoint")
    fleet.hold = True
    for n in names:
        fleet.kill(n)
    fleet.wait_end()
    kept = fleet.restore = fleet.kept.newest
    fresh = [fleet.start() for _ in range(3)]
    fleet.wait(lambda: all(fleet.report(n).stage is Stage.READY for n in fresh), what="new workers")
    if place == "shares":
        give_shares(fleet, kept, fresh, tmp_path)
    fleet.form(tuple(fresh), "resume", urgent=True)
    fleet.wait(lambda: fleet.report(fresh[0]).resumed == fleet.generation, what="training goes on")
    assert kept.version > 0 and kept.url == (f"{url}/{kept.version}-1" if url else "")
    fleet.hold = False
    assert digest(fleet) == undisturbed
    assert all(fleet.report(n).version == 60 for n in fresh)


def test_a_group_that_broke_and_is_led_by_nobody_can_still_be_saved_with_all_it_had_reached(fleets, undisturbed):
    fleet = fleets(RICH, checkpoint_every_s=1000.0)
    a, b, c = fleet.start_all(NAP="0.02")
    fleet.wait_version(20)
    fleet.hold = True  # no dispatcher
    fleet.kill(b)
    fleet.wait(lambda: all(fleet.report(n).failed == 1 for n in (a, c)), what="the break")
    for n in (a, c):
        fleet.order(n, checkpoint_now=True)
    fleet.wait(lambda: fleet.report(a).checkpoint is not None, what="the checkpoint")
    kept = fleet.restore = fleet.kept.newest
    assert (kept.version, fleet.report(c).checkpoint) == (fleet.report(a).version, None)
    for n in (a, c):
        fleet.kill(n)
    fleet.wait_end()
    fresh = [fleet.start() for _ in range(3)]
    fleet.wait(lambda: all(fleet.report(n).stage is Stage.READY for n in fresh), what="new workers")
    fleet.form(tuple(fresh), "resume", urgent=True)
    fleet.hold = False
    assert digest(fleet) == undisturbed


def test_who_stands_in_for_a_lost_leader_saves_all_that_was_reached_and_nobody_else_does(fleets):
    fleet = fleets(RICH, checkpoint_every_s=1000.0)
    a, b, c = fleet.start_all(NAP="0.02")
    fleet.wait_version(10)
    fleet.hold = True
    fleet.kill(a)
    fleet.wait(lambda: all(fleet.report(n).failed == 1 for n in (b, c)), what="the break")
    for n in (b, c):
        fleet.order(n, checkpoint_now=True, stands_in=n == c)
    fleet.wait(lambda: fleet.report(c).checkpoint is not None, what="the checkpoint")
    assert fleet.report(c).checkpoint.version == fleet.report(c).version >= 9  # the tenth step may be another's alone
    assert fleet.report(b).checkpoint is None


def test_a_checkpoint_ordered_now_is_written_at_the_next_step_and_the_last_one_holds_the_end(fleets):
    fleet = fleets(RICH, checkpoint_every_s=1000.0)
    a, b, c = fleet.start_all(STEPS="120")
    fleet.wait_version(10)
    assert fleet.kept.newest is None
    for n in (a, b, c):
        fleet.order(n, checkpoint_now=True)
    fleet.wait(lambda: fleet.kept.newest, what="the checkpoint")
    early = fleet.kept.newest
    assert [fleet.report(n).checkpoint.part for n in (a, b, c)] == [2, 0, 1]  # each rank has written its share
    fleet.wait_end()
    last = fleet.kept.newest
    assert 10 <= early.version < last.version == 120 and last.generation == 1
    assert all(len(list((fleet.folder / f"{n.replace('/', '-')}" / "work").iterdir())) <= 2 for n in (a, b, c))


LOADER = FAULTS + '''
torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 3600.0  # until then none asks whether its parent lives
hvd.init()
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4000
    def __getitem__(self, i): return torch.ones(1)
model = torch.nn.Linear(1, 1, bias=False)
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
data = Data()
sampler = hvd.elastic.ElasticSampler(data, batch_size=2)

@hvd.elastic.run
def train(state):
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler, num_workers=2,
                                         multiprocessing_context="fork")
    for number, x in enumerate(loader):
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()
        sampler.record_batch(number, len(x))
        die_at("recorded", step=sampler.processed_num)
        time.sleep(0.002)
        state.commit()
        if sampler.processed_num > 1200:
            return

train(hvd.elastic.TorchState(model, opt, sampler=sampler))
print("END", flush=True)
'''


def test_forked_loader_processes_do_not_hide_a_death(fleets):
    """They outlive the process that dies, here for as long as the test runs, and would hold its sockets open."""
    fleet = fleets(LOADER)
    fleet.start_all(DIE="h1/0/1:recorded:600")
    fleet.hold = True  # nobody tells the others: they have only their sockets to know it from
    fleet.wait(lambda: not fleet.workers["h1/0/1"].alive, what="the death")
    fleet.wait(lambda: fleet.report("h0/0/1").failed == 1, what="its peers notice while they live")
    fleet.hold = False
    fleet.wait_end()
    assert len(fleet.lines("END")) == 2


LINGER = '''
def linger():
    """Slow until the file "met" exists: else the job might end before a joiner has started."""
    time.sleep(0.004 if os.path.exists(os.environ["SPOTFLEET_OUTPUT"] + "/met") else 0.05)
'''

ONCE = FAULTS + LINGER + '''
hvd.init()
N, B = 1009, 4
model = torch.nn.Linear(N, 1, bias=False)
with torch.no_grad(): model.weight.zero_()
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)
sampler = hvd.elastic.ElasticSampler(N, batch_size=B, seed=5)

@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 3):
        sampler.set_epoch(state.epoch)
        for number, indices in enumerate(sampler.batches()):
            opt.zero_grad()
            model(torch.nn.functional.one_hot(torch.tensor(indices), N).float()).sum().backward()
            opt.step()
            sampler.record_batch(number, B)
            linger()
            state.commit()

train(hvd.elastic.TorchState(model, opt, sampler=sampler, epoch=0))
print("SEEN", sorted(set(model.weight.flatten().tolist())), flush=True)
'''


def test_each_sample_counts_exactly_once_per_epoch_through_resizes(fleets):
    """Weight i falls by one each time sample i is in an applied step: all must end at minus the number of epochs."""
    fleet = fleets(ONCE)
    _, b, c = fleet.start_all()
    fleet.wait_version(20)
    fleet.kill(b)
    fleet.wait(lambda: fleet.generation >= 2, what="the death")
    fleet.start()
    fleet.wait(lambda: fleet.generation >= 3, what="the join")
    fleet.drain(c)
    fleet.wait(lambda: fleet.generation >= 4, what="the leave")
    (fleet.folder / "met").touch()
    fleet.wait_end()
    assert fleet.generation >= 4 and set(fleet.lines("SEEN")) == {"[-3.0]"}, fleet.story()


COPY = FAULTS + '''
hvd.init()
E = env("EPOCHS", 120)
a, b = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
with torch.no_grad():
    a.weight.zero_(); b.weight.zero_()
oa, ob = (hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=1.0)) for m in (a, b))

@hvd.elastic.run
def train(state):
    while state.i < E:
        for m, o in ((a, oa), (b, ob)):
            o.zero_grad()
            m(torch.ones(1, 1)).sum().backward()
            o.step()
            die_at("half", step=state.i)
            time.sleep(0.002)
        state.i += 1
        if state.i % env("EVERY", 1) == 0:
            state.commit()

train(hvd.elastic.TorchState(a=a, b=b, oa=oa, ob=ob, i=0))
print("BOTH", a.weight.item(), b.weight.item(), flush=True)
'''


@pytest.mark.parametrize("every", ["1", "7"])
def test_two_optimizers_that_step_apart_go_back_to_a_commit_together(fleets, every):
    fleet = fleets(COPY)
    fleet.start_all(EVERY=every, DIE="h1/0/1:half:40")
    spare = fleet.start(EVERY=every)
    fleet.wait(lambda: spare in fleet.members or fleet._settled(), what="the spare trains")
    fleet.drain("h0/0/1")
    fleet.wait_end()
    assert set(fleet.lines("BOTH")) == {"-120.0 -120.0"}, fleet.story()


PLAIN = FAULTS + LINGER + '''
hvd.init()

@hvd.elastic.run
def work(state):
    while state.i < 100:
        state.total += int(hvd.allreduce(torch.ones(1, dtype=torch.int64), op=hvd.Max))
        die_at("worked", step=state.i)
        state.i += 1
        linger()
        state.commit()

state = hvd.elastic.ObjectState(i=0, total=0)
work(state)
print("TOTAL", state.total, flush=True)
'''


def test_a_job_without_an_optimizer_keeps_what_it_commits(fleets):
    fleet = fleets(PLAIN)
    _, _, c = fleet.start_all(DIE="h1/0/1:worked:10")
    fleet.wait(lambda: fleet.generation >= 2, what="the death")
    fleet.start()
    fleet.wait(lambda: fleet.generation >= 3, what="the join")
    fleet.drain(c)
    fleet.wait(lambda: fleet.generation >= 4, what="the leave")
    (fleet.folder / "met").touch()
    fleet.wait_end()
    assert fleet.generation >= 4 and set(fleet.lines("TOTAL")) == {"100"}, fleet.story()


def test_a_users_own_error_ends_the_worker_with_its_traceback_and_is_not_blamed_on_a_peer(fleets):
    fleet = fleets(RICH.replace("die_at(\"begin\", step=state.batch)", "state.batch == 5 and [][1]"))
    names = fleet.start_all()
    fleet.hold = True
    fleet.wait_end()
    for name in names:
        report = fleet.report(name)
        assert report.error.rstrip().endswith("IndexError: list index out of range") and not report.blame_peer
        assert "in train" in report.error and fleet.workers[name].exit == 1


JOINER = RICH.replace("hvd.broadcast_parameters(", '''
print("PLACE", hvd.rank(), hvd.size(), flush=True)
if env("ASK", 0):
    try:
        hvd.allreduce(torch.ones(1))
    except Exception as error:
        print("REFUSED", error, "|", error.hint, flush=True)
print("OBJECT", hvd.broadcast_object({"mine": 1}), flush=True)
hvd.broadcast_parameters(''', 1)


def test_before_elastic_run_a_joiners_broadcasts_do_nothing_and_other_collectives_say_what_to_do(fleets):
    fleet = fleets(JOINER)
    fleet.start_all(STEPS="150", NAP="0.03")
    fleet.provisional = RankInfo(3, 4)
    late = fleet.start(ASK="1", STEPS="150")
    fleet.target = 4
    fleet.wait(lambda: late in fleet.members, what="the join")
    assert len(digest(fleet)) == 1
    log = fleet.log(late)
    assert "PLACE 3 4" in log and "OBJECT {'mine': 1}" in log
    assert re.search(r"REFUSED allreduce: this worker joined.*@hvd.elastic.run", log)


def test_a_founder_whose_peer_dies_before_elastic_run_goes_on_as_one_who_joins(fleets):
    fleet = fleets(RICH.replace("hvd.broadcast_parameters(", "die_at(\"early\")\nhvd.broadcast_parameters(", 1))
    fleet.start_all(DIE="h0/0/1:early:0", NAP="0.05")  # else one might end before the other is ready
    assert len(digest(fleet)) == 1
    assert len(fleet.lines("DIGEST")) == 2


def test_a_worker_told_to_stop_leaves_at_a_step_boundary_with_exit_0(fleets):
    fleet = fleets(RICH)
    a, b, c = fleet.start_all(STEPS="4000")
    fleet.wait_version(20)
    fleet.drain(b)
    fleet.wait(lambda: fleet.workers[b].exit == 0, what="b has left")
    fleet.wait(lambda: fleet.report(a).resumed == 2, what="the others train on")
    assert [fleet.report(n).repeated for n in (a, b, c)] == [0, 0, 0]
    fleet.hold = True
    for n in (a, c):
        fleet.order(n, stop=True)
    fleet.wait_end()
    assert [fleet.workers[n].exit for n in (a, c)] == [0, 0] and not fleet.lines("DIGEST")


def test_a_lone_worker_trains_on_as_a_generation_of_one(fleets):
    fleet = fleets(RICH, founders=2)
    a, _ = fleet.start_all(DIE="h1/0/1:stepped:20")
    digest(fleet)
    assert fleet.report(a).stage is Stage.FINISHED and fleet.members == (a,)
