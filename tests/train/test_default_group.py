"""torch.distributed inside a job: the default group is the generation's, it counts, it breaks and it comes again."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from spotfleet.errors import UsageError
from spotfleet.train import default_group
from spotfleet.train.comm.torch_group import TorchGroup
from spotfleet.worker.errors import CommBroken
from tests.support.train.train_scripts import FAULTS

# ---- the operations, on threads of this process


def reduced(op, *, kind=torch.float32):
    def work(group):
        options = dist.AllreduceOptions()
        options.reduceOp = op
        tensor = torch.tensor([group.rank, 2, 3]).to(kind)
        TorchGroup(group).allreduce([tensor], options).wait()
        return tensor.tolist()

    return work


@pytest.mark.parametrize("op, kind, result", [
    (dist.ReduceOp.SUM, torch.float32, [3, 6, 9]),
    (dist.ReduceOp.AVG, torch.float32, [1, 2, 3]),
    (dist.ReduceOp.MAX, torch.int64, [2, 2, 3]),
    (dist.ReduceOp.MIN, torch.int16, [0, 2, 3]),
    (dist.ReduceOp.PRODUCT, torch.float64, [0, 8, 27]),
    (dist.ReduceOp.SUM, torch.bool, [True, True, True]),
    (dist.ReduceOp.PRODUCT, torch.bool, [False, True, True]),
    (dist.ReduceOp.BOR, torch.int32, [3, 2, 3]),
    (dist.ReduceOp.SUM, torch.complex64, [3, 6, 9]),
])
def test_reductions_of_any_type(ranks, op, kind, result):
    assert ranks(3).each(reduced(op, kind=kind)) == [result] * 3


def test_a_type_that_cannot_be_reduced_is_the_scripts_error_and_breaks_no_generation(ranks):
    made = ranks(2)
    errors = made.each(reduced(dist.ReduceOp.BAND))
    assert all(isinstance(e, UsageError) for e in errors) and not any(g.aborted for g in made.groups)
    assert made.each(reduced(dist.ReduceOp.SUM)) == [[1, 4, 6]] * 2


def test_a_result_comes_with_wait_and_not_before(ranks):
    def work(group):
        tensor = torch.full((3,), 1.0)
        pending = TorchGroup(group).allreduce([tensor])
        before = tensor.clone()
        pending.wait()
        return before.tolist(), tensor.tolist(), pending.is_completed()

    assert ranks(2).each(work) == [([1.0] * 3, [2.0] * 3, True)] * 2


def everything(group):
    made, rank = TorchGroup(group), group.rank
    root = dist.BroadcastOptions()
    root.rootRank = 1
    sent = torch.arange(6).view(2, 3).t() + 10 * rank if rank == 1 else torch.zeros(3, 2, dtype=torch.int64)
    made.broadcast([sent], root).wait()
    lists = [torch.zeros(2, dtype=torch.bfloat16) for _ in range(2)]
    made.allgather([lists], [torch.full((2,), rank + 1, dtype=torch.bfloat16)]).wait()
    joined = torch.zeros(2, 2, dtype=torch.bool)
    made._allgather_base(joined, torch.tensor([rank == 0, True])).wait()
    scattered = torch.zeros(2)
    made._reduce_scatter_base(scattered, torch.arange(4.0)).wait()
    parts = torch.zeros(1)
    made.reduce_scatter([parts], [[torch.tensor([1.0]), torch.tensor([2.0])]]).wait()
    gather, scatter = dist.GatherOptions(), dist.ScatterOptions()
    gather.rootRank = scatter.rootRank = 1
    gathered = [torch.zeros(1) for _ in range(2)]
    made.gather([gathered] if rank == 1 else [], [torch.tensor([rank + 5.0])], gather).wait()
    own = torch.zeros(1)
    made.scatter([own], [[torch.tensor([7.0]), torch.tensor([8.0])]] if rank == 1 else [], scatter).wait()
    swapped = torch.zeros(3 if rank == 0 else 1)
    made.alltoall_base(swapped, torch.arange(2.0) + 10 * rank, [1, 2] if rank == 0 else [1, 0],
                       [1, 1] if rank == 0 else [2, 0]).wait()
    message = torch.full((2,), 9.0) if rank == 0 else torch.zeros(2)
    (made.send([message], 1, 3) if rank == 0 else made.recv([message], 0, 3)).wait()
    made.barrier().wait()
    return [x.tolist() for x in (sent, torch.stack(lists), joined, scattered, parts, own, swapped, message)], [
        g.item() for g in gathered]


def test_all_operations_bring_what_torchs_own_groups_bring(ranks):
    (zero, on_zero), (one, on_one) = ranks(2).each(everything)
    alike = [[[10, 13], [11, 14], [12, 15]], [[1.0, 1.0], [2.0, 2.0]], [[True, True], [False, True]]]
    assert zero == [*alike, [0.0, 2.0], [2.0], [7.0], [0.0, 10.0, 11.0], [9.0, 9.0]]
    assert one == [*alike, [4.0, 6.0], [4.0], [8.0], [1.0], [9.0, 9.0]]
    assert (on_zero, on_one) == ([0.0, 0.0], [5.0, 6.0])


def test_an_operation_that_a_peer_does_not_come_to_ends_with_an_abort_as_a_broken_generation(ranks):
    made = ranks(2)

    def work(group):
        if group.rank == 1:
            group.abort()
            return None
        with pytest.raises(CommBroken):
            TorchGroup(group).allreduce([torch.ones(1)]).wait()
        return group.aborted

    assert made.each(work) == [True, None]


# ---- the default group


@pytest.fixture
def initialised(alone, monkeypatch):
    """A script that was started by hand and has called init(); torch's functions are its own again afterwards."""
    default_group.leave()
    for name in default_group.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    originals = dist.init_process_group, dist.destroy_process_group
    default_group.watch()
    default_group.enter(alone.group, alone.place)
    yield alone
    default_group.leave()
    default_group._inits.clear()
    for module in (dist, dist.distributed_c10d):
        module.init_process_group, module.destroy_process_group = originals


def test_a_script_finds_the_group_and_the_variables_while_it_has_a_generation(initialised):
    assert dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert [os.environ[name] for name in default_group.VARIABLES] == ["0", "1", "0", "1", "127.0.0.1", "0"]
    found = [None]
    dist.all_gather_object(found, {"here": 1})
    assert found == [{"here": 1}]
    initialised.drop_group()
    assert not dist.is_initialized() and not any(name in os.environ for name in default_group.VARIABLES)


def test_a_scripts_own_init_passes_where_it_asks_for_what_is_there(initialised):
    for options in ({}, {"backend": "gloo"}, {"backend": "cpu:gloo,cuda:nccl"}, {"init_method": "env://"},
                    {"backend": "gloo", "rank": 0, "world_size": 1}):
        dist.init_process_group(**options)
    dist.destroy_process_group()
    dist.destroy_process_group(dist.group.WORLD)
    assert default_group.is_ours()
    with pytest.raises(UsageError, match="rank 1 of 4 was asked for, and this worker is rank 0 of 1"):
        dist.init_process_group("gloo", rank=1, world_size=4)
    with pytest.raises(UsageError, match="nccl was asked for, and this generation uses gloo"):
        dist.init_process_group("nccl")
    with pytest.raises(UsageError, match="one group only"):
        dist.new_group([0])


def test_a_worker_that_has_no_peers_yet_says_so(initialised):
    initialised.drop_group()
    with pytest.raises(UsageError, match="joined a running job, so it has no peers"):
        dist.init_process_group("gloo")


def test_a_group_that_the_script_made_first_stays(initialised):
    default_group.leave()
    initialised.initialized = False
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    initialised.initialized = True
    default_group.enter(initialised.group, initialised.place)
    assert dist.is_initialized() and not default_group.is_ours()
    default_group.leave()
    assert dist.is_initialized()
    dist.destroy_process_group()
    assert not dist.is_initialized()


def test_variables_that_somebody_else_has_set_stay(initialised, monkeypatch):
    default_group.leave()
    monkeypatch.setenv("WORLD_SIZE", "12")
    default_group.enter(initialised.group, initialised.place)
    default_group.leave()
    assert os.environ["WORLD_SIZE"] == "12" and "RANK" not in os.environ


def test_torchs_hook_for_uncaught_errors_is_not_stacked_up(initialised):
    import sys

    hook = sys.excepthook
    for _ in range(3):
        default_group.enter(initialised.group, initialised.place)
    assert sys.excepthook is hook


# ---- a job

METRIC = FAULTS + '''
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler
hvd.init()
model = torch.nn.Linear(1, 1, bias=False)
with torch.no_grad(): model.weight.zero_()
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))

@hvd.elastic.run
def train(state):
    world = [os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    print("WORLD", *world, dist.get_rank(), dist.get_world_size(), len(DistributedSampler(range(12))), flush=True)
    while state.step < 40:
        opt.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        die_at("reduced", step=state.step)
        opt.step()
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        state.totals = [*state.totals[-1:], total.item()]
        state.step += 1
        time.sleep(0.01)

state = hvd.elastic.TorchState(model, opt, step=0, totals=[])
train(state)
print("END", model.weight.item(), state.totals[-1], dist.is_initialized(), flush=True)
'''


@pytest.mark.processes
def test_a_collective_of_torch_survives_the_loss_of_a_peer_as_hvds_own_does(fleets):
    """Real processes: torch has one default group in each."""
    fleet = fleets(METRIC)
    fleet.start_all(DIE="h1/0/1:reduced:20")
    fleet.wait_end()
    assert fleet.lines("END") == ["-40.0 3.0 True"] * 2, fleet.story()
    worlds = {line for line in fleet.lines("WORLD")}
    assert worlds == {"0 3 0 1 0 3 4", "1 3 0 1 1 3 4", "2 3 0 1 2 3 4", "0 2 0 1 0 2 6", "1 2 0 1 1 2 6"}

USERS = FAULTS + '''
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
hvd.init()

@hvd.elastic.run
def train(state):
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered, scattered, objects, roots = torch.zeros(2), torch.zeros(1), [None] * size, [rank]
    dist.all_gather_into_tensor(gathered, torch.tensor([rank + 1.0]))
    dist.reduce_scatter_tensor(scattered, torch.arange(2.0))
    dist.all_gather_object(objects, {"rank": rank})
    dist.broadcast_object_list(roots, 1)
    swapped = torch.zeros(2)
    dist.all_to_all_single(swapped, torch.arange(2.0) + 10 * rank)
    traced = functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
    path, held = os.environ["SPOTFLEET_OUTPUT"] + "/dcp", {"w": torch.zeros(3)}
    dcp.save({"w": torch.arange(3.0)}, checkpoint_id=path)
    dcp.load(held, checkpoint_id=path)
    dist.barrier()
    print("FOUND", rank, gathered.tolist(), scattered.item(), objects, roots, swapped.tolist(), traced.item(),
          held["w"].tolist(), init_device_mesh("cpu", (size,)).size(), flush=True)

train(hvd.elastic.ObjectState())
'''


@pytest.mark.processes
def test_torchs_own_users_of_the_default_group_find_it(fleets):
    """Objects, functional collectives, a mesh, a distributed checkpoint; real processes, as above."""
    fleet = fleets(USERS, founders=2)
    fleet.start_all()
    fleet.wait_end()
    alike = "[{'rank': 0}, {'rank': 1}] [1]"
    assert fleet.lines("FOUND") == [f"0 [1.0, 2.0] 0.0 {alike} [0.0, 10.0] 2.0 [0.0, 1.0, 2.0] 2",
                                    f"1 [1.0, 2.0] 2.0 {alike} [1.0, 11.0] 2.0 [0.0, 1.0, 2.0] 2"], fleet.story()
