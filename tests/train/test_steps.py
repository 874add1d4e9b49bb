"""What a worker measures of its steps, on real groups and from the kernel's own figures."""

from __future__ import annotations

import socket
import struct
import time

import pytest
import torch

from spotfleet.protocol.messages import StepCost
from spotfleet.train.steps import RECENT_STEPS, Steps
from spotfleet.worker import sockets
from spotfleet.worker.sockets import PeerSocket, links

NAP_S = 0.05


def train(made, steps: int, work) -> list[Steps]:
    """Each rank makes so many steps of `work(group)`; what each has measured."""
    measured = [Steps() for _ in made.groups]

    def run(group) -> None:
        for _ in range(steps):
            work(group)
            measured[group.rank].ended(time.monotonic(), group)

    made.each(run, limit_s=60)
    return measured


def test_who_waits_for_a_slow_rank_waits_as_long_as_that_one_computes(ranks):
    made = ranks(2)

    def work(group) -> None:
        time.sleep(NAP_S if group.rank == 1 else 0.0)
        group.allreduce(torch.ones(1000))

    first, second = (s.cost(g) for s, g in zip(train(made, 9, work), made.groups, strict=True))
    assert first.wait_s >= 0.9 * NAP_S > second.wait_s
    assert (first.steps, first.reductions, first.bytes, first.backend) == (8, 1, 4000, "gloo")


def test_reductions_that_run_together_are_waited_for_once_and_counted_each(ranks):
    made = ranks(2)
    steps = train(made, 4, lambda g: g.finish([g.launch(torch.ones(10)), g.launch(torch.ones(20))]))
    cost = steps[0].cost(made.groups[0])
    assert (cost.reductions, cost.bytes) == (2, 120)
    assert cost.wait_s <= steps[0].step_s


def test_only_recent_steps_count_and_a_new_generation_begins_anew(ranks):
    made = ranks(2)
    steps = train(made, RECENT_STEPS + 5, lambda g: g.allreduce(torch.ones(1)))[0]
    assert steps.cost(made.groups[0]).steps == RECENT_STEPS + 4
    steps.begin()
    assert (steps.step_s, steps.cost(made.groups[0])) == (0.0, StepCost())


def test_a_rank_alone_has_nothing_to_measure(ranks):
    made = ranks(1)
    steps = train(made, 5, lambda g: g.allreduce(torch.ones(1)))[0]
    assert steps.cost(made.groups[0]) == StepCost()
    assert steps.cost(None) == StepCost()


@pytest.mark.parametrize("family, address", [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_kernel_tells_of_connections_to_peers_and_of_no_others(family, address):
    with socket.create_server((address, 0), family=family) as listener, \
            socket.create_connection(listener.getsockname()[:2]) as ours, listener.accept()[0] as theirs:
        theirs.sendall(b"x")
        assert ours.recv(1) == b"x"
        born = {s.fileno(): inode for s in (listener, ours) if (inode := sockets.sockets().get(s.fileno()))}
        (link,) = links(born, {address})
        assert link == PeerSocket(address, link.rtt_s, link.sent, 0)
        assert 0 < link.rtt_s < 1  # the kernel counts microseconds
        assert 1 <= link.sent <= 9
        assert links(born, {"10.9.9.9"}) == []
        assert links({fd: inode + 1 for fd, inode in born.items()}, {address}) == []  # another under the same number


@pytest.mark.parametrize(("size", "twice", "lost"), [(248, 30, 10), (248, 99, 0), (216, 30, 40)])
def test_segments_that_arrived_twice_were_not_lost(size, twice, lost):
    """A kernel from before 2018 does not count them."""
    info = bytearray(248)
    for offset, value in ((100, 40), (136, 5000), (148, 250), (216, twice)):
        struct.pack_into("I", info, offset, value)
    assert sockets.measured("10.0.0.2", bytes(info[:size])) == PeerSocket("10.0.0.2", 0.00025, 5000, lost)


def test_an_ipv4_peer_is_known_on_a_socket_of_both_families():
    listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    with listener, socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as ours, \
            listener.accept()[0] as theirs:
        assert theirs.getpeername()[0] == "::ffff:127.0.0.1"
        born = {theirs.fileno(): sockets.sockets()[theirs.fileno()]}
        assert [link.peer for link in links(born, {"127.0.0.1"})] == ["127.0.0.1"]
        sockets.shut(born, "127.0.0.1", {"127.0.0.1"}, set())
        assert ours.recv(1) == b""


