"""Variables of a gang's processes, and the command that they run."""

from __future__ import annotations

import socket

from spotfleet.agent.processes.env import GangPlace, gang_env
from spotfleet.agent.workers.gang import ReservedPort, command_of, place_in
from spotfleet.model import JobSpec
from spotfleet.protocol.messages import Assignment, GangOrder, SlotOrder, WorkerLaunch, WorkerOrders

MEMBERS = ("a/0/1", "a/1/2", "b/0/3", "b/1/4")
ORDER = GangOrder(("10.0.0.1", "10.0.0.2"), restarts=2, saved="d")


def env(rank: int, local_rank: int, **spec: object) -> dict[str, str]:
    launch = WorkerLaunch("train-1", JobSpec("train", gang=True, max_restarts=3, **spec), {})  # type: ignore[arg-type]
    place = Assignment(5, rank, MEMBERS, "10.0.0.1:4321", local_rank, 2)
    return gang_env(launch, GangPlace(place, ORDER, slots=2, gpus=8))


def test_a_process_gets_the_variables_of_torchrun():
    found = env(3, 1)
    wanted = {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "NODE_RANK": "1",
        "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4321", "RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "train-1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert {name: found[name] for name in wanted} == wanted
    assert not any(name.startswith("PET_") for name in found)


def test_a_launcher_for_each_host_gets_torchruns_options_and_skypilots_variables():
    found = env(2, 0, per_host=True)
    wanted = {
        "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PET_NNODES": "2", "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "4321", "PET_NPROC_PER_NODE": "2",
        "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_TASK_ID": "train-1", "SPOTFLEET_NODE_RANK": "1",
        "SPOTFLEET_NUM_NODES": "2", "SPOTFLEET_NODE_IPS": "10.0.0.1\n10.0.0.2", "SPOTFLEET_NUM_SLOTS_PER_NODE": "2"}
    assert {name: found[name] for name in wanted} == wanted


def test_resume_args_are_added_only_once_a_checkpoint_exists():
    script = JobSpec("j", argv=("t.py", "--lr", "1"), resume_args="--init_from=resume '--note=a b'")
    assert command_of(script, "") == (("t.py", "--lr", "1"), "")
    assert command_of(script, "d") == (("t.py", "--lr", "1", "--init_from=resume", "--note=a b"), "")
    command = JobSpec("j", run="torchrun t.py\n", resume_args="--resume x")
    assert command_of(command, "d") == ((), "torchrun t.py --resume x")


def test_a_process_starts_only_with_a_rank_and_the_gangs_addresses():
    def order(assignment: Assignment | None, gang: GangOrder | None) -> SlotOrder:
        return SlotOrder("a/0/1", "j", 0, 0, WorkerOrders(assignment), gang)

    spare, member = Assignment(5, -1, MEMBERS, "s:1"), Assignment(5, 0, MEMBERS, "s:1")
    assert place_in(order(None, ORDER), 1) is None and place_in(order(spare, ORDER), 1) is None
    assert place_in(order(member, None), 1) is None
    assert place_in(order(member, ORDER), 1).assignment is member


def test_a_reserved_port_can_be_listened_on_and_is_given_to_nobody_else():
    reserved = ReservedPort("127.0.0.1")
    port = int(reserved.store.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)) as listener:
        socket.create_connection(listener.getsockname()).close()
    reserved.close()
