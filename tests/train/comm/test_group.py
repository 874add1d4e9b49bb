"""One generation's communication, its ranks being threads."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from spotfleet.protocol.messages import Assignment
from spotfleet.train.comm import gloo
from spotfleet.train.comm.gloo import GlooGroup
from spotfleet.worker.errors import CommBroken
from spotfleet.worker.store import StoreClient, open_store

KEY = "the job's key"


def test_ranks_add_up_and_share(ranks):
    three = ranks(3)
    sums = three.each(lambda g: g.allreduce(torch.tensor([float(g.rank)])).item())
    parts = three.each(lambda g: [int(t) for t in g.allgather(torch.tensor([g.rank]))])
    told = three.each(lambda g: int(g.broadcast(torch.tensor([g.rank]), 2)))
    assert (sums, parts, told) == ([3.0] * 3, [[0, 1, 2]] * 3, [2] * 3)


class AlsoAtTheStore(GlooGroup):
    """Has one more connection to the generation's store, opened while it forms."""

    def _connect(self):
        self.other = self.dial("other", 10.0)
        return super()._connect()


def test_a_rank_is_cut_off_once_a_peer_ends_and_not_by_the_end_of_another_connection(ranks):
    two = ranks(2, AlsoAtTheStore)
    all_know, ended = threading.Barrier(2), threading.Event()

    def work(group):
        group.other.close()
        all_know.wait(30)
        cut = group.is_cut()
        all_know.wait(30)
        if group.rank == 1:
            group.abort()
            ended.set()
        assert ended.wait(30)
        deadline = time.monotonic() + 30
        while not group.is_cut() and time.monotonic() < deadline:
            time.sleep(0.01)
        return cut, group.is_cut()

    assert two.each(work)[0] == (False, True)


def test_an_abort_from_another_thread_unblocks_a_collective_and_reaches_all_ranks(ranks):
    three = ranks(3)
    inside = threading.Barrier(3)

    def work(group):
        inside.wait(10)
        if group.rank == 2:
            time.sleep(0.2)  # the others wait for this rank by now
            threading.Thread(target=three.groups[0].abort).start()
            time.sleep(0.2)  # rank 0 must come free although this rank, alive, has not come to its collective
            assert three.groups[0].aborted
        began = time.monotonic()
        with pytest.raises(CommBroken):
            group.allreduce(torch.ones(1000))
        return time.monotonic() - began

    assert all(waited_s < 10 for waited_s in three.each(work, limit_s=20))  # gloo's own limit is half an hour


def test_after_an_abort_every_call_fails_and_none_hangs(ranks):
    two = ranks(2)
    two.groups[0].abort()
    two.groups[0].abort()
    calls = [lambda g: g.allreduce(torch.ones(1)), lambda g: g.broadcast(torch.ones(1), 0),
             lambda g: g.allgather(torch.ones(1))]
    for call in calls:
        assert [type(r) for r in two.each(call, limit_s=10)] == [CommBroken] * 2


def test_abort_ends_a_formation_that_waits_for_an_absent_member():
    store, address = open_store("127.0.0.1", KEY)
    group = GlooGroup(Assignment(1, 0, ("a/0/1", "b/0/1"), address), "job", "127.0.0.1", KEY)
    result: list[object] = []

    def form() -> None:
        try:
            group.form()
        except CommBroken as error:
            result.append(error)

    thread = threading.Thread(target=form)
    thread.start()
    deadline = time.monotonic() + 10
    while thread.is_alive() and time.monotonic() < deadline:
        group.abort()  # as the control thread does, again and again
        thread.join(0.05)
    assert [type(r) for r in result] == [CommBroken]
    assert store is not None


def test_a_bootstrap_store_keeps_prefixes_apart_and_answers_when_a_value_comes():
    server, address = open_store("127.0.0.1", KEY)
    host, _, port = address.rpartition(":")
    writer, reader, other = (StoreClient(host, int(port), prefix, 10.0, KEY) for prefix in ("a/1", "a/1", "a/2"))
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(reader.get("key")))
    thread.start()
    other.set("key", b"of another generation")
    writer.set("key", b"value" * 50_000)
    thread.join(10)
    assert got == [b"value" * 50_000]
    writer.wait(["key"])
    for client in (writer, reader, other):
        client.close()
    assert server.port == int(port)


def test_a_bootstrap_store_cuts_off_who_speaks_garbage_and_serves_the_others():
    _server, address = open_store("127.0.0.1", KEY)
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: somebody-else-altogether\r\n\r\n")
        while stranger.recv(100):  # at first a challenge
            continue
    client = StoreClient(host, int(port), "a/1", 10.0, KEY)
    client.set("key", b"value")
    assert client.get("key") == b"value"
    client.close()


def test_abort_spares_sockets_of_others_even_if_they_were_born_while_the_group_formed(ranks):
    server = socket.create_server(("127.0.0.77", 0))
    mine = socket.create_connection(server.getsockname(), source_address=("127.0.0.78", 0))
    theirs, _ = server.accept()
    group = ranks(2).groups[0]
    group._own_sockets |= {s.fileno(): os.fstat(s.fileno()).st_ino for s in (mine, theirs, server)}
    group.abort()
    mine.sendall(b"still here")
    assert theirs.recv(100) == b"still here"
    for s in (mine, theirs, server):
        s.close()


class Busy(GlooGroup):
    """Group whose process opens connections of its own while it forms, at the members' own address."""

    def __init__(self, *args):
        super().__init__(*args)
        self.pair = (None, None)

    def _meet(self):
        store = super()._meet()
        server = socket.create_server(("127.0.0.1", 0))
        mine = socket.create_connection(server.getsockname())
        self.pair = mine, server.accept()[0]
        self.server = server
        return store

    def talks(self) -> bool:
        mine, theirs = self.pair
        mine.sendall(b"still here")
        theirs.sendall(b"and here")
        return (theirs.recv(10), mine.recv(8)) == (b"still here", b"and here")

    def hang_up(self) -> None:
        for sock in (*self.pair, self.server):
            sock.close()


def test_a_connection_that_a_user_opens_while_the_group_forms_survives_its_abort(ranks):
    """It may lead to a member's address: a store, a metrics server, the user's own process group."""
    two = ranks(2, Busy)
    inside = threading.Barrier(2)

    def work(group):
        inside.wait(10)
        if group.rank == 0:
            group.abort()
        with pytest.raises(CommBroken):  # an abort unblocks all ranks as before
            group.allreduce(torch.ones(10))
        return group.talks()

    assert two.each(work, limit_s=20) == [True, True]
    for group in two.groups:
        group.hang_up()


def test_a_connection_that_a_user_opens_survives_an_abort_of_the_formation_itself(ranks):
    class Stopped(Busy):
        def _meet(self):
            store = super()._meet()
            self.abort()
            return store

    two = ranks(2, Stopped, form=False)
    assert [type(r) for r in two.each(lambda g: g.form(), limit_s=20)] == [CommBroken] * 2
    met = [g for g in two.groups if g.pair[0] is not None]  # the abort of one may have met the other's first connection
    assert met and all(g.talks() for g in met)
    for group in met:
        group.hang_up()


def test_a_forked_child_keeps_the_users_connections(ranks):
    """`descriptors` are closed in it."""
    group = ranks(2, Busy).groups[0]
    users = {s.fileno() for s in (*group.pair, group.server)}
    assert group.descriptors() and not users & set(group.descriptors())
    group.hang_up()


def test_a_group_knows_all_of_gloos_connections(ranks):
    """Two per pair of ranks in one process: one that was accepted and one that was opened."""
    group = ranks(3).groups[0]
    listening = connected = 0
    for fd in group._own_sockets:
        try:
            mine = os.dup(fd)
        except OSError:  # another thread's, closed since
            continue
        with socket.socket(fileno=mine) as sock:
            listens = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            listening, connected = listening + listens, connected + (not listens)
    assert group._port and listening == 1 and connected >= 2


def test_a_store_that_nobody_serves_fails_the_formation_and_names_the_generation(monkeypatch):
    monkeypatch.setattr("spotfleet.train.comm.group.FORM_LIMIT_S", 0.3)
    broken: list[int] = []
    group = GlooGroup(Assignment(7, 0, ("a/0/1", "b/0/1"), "127.0.0.1:9"), "job", "127.0.0.1", KEY, broken.append)
    with pytest.raises(CommBroken, match="generation 7"):
        group.form()
    assert broken == [7]


def test_the_bootstrap_store_listens_on_the_advertised_address_only():
    store, address = open_store("127.0.0.9", KEY)
    port = int(address.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    socket.create_connection(("127.0.0.9", port), timeout=5).close()
    assert store is not None


@pytest.mark.processes
def test_a_member_killed_at_any_moment_of_the_formation_neither_hangs_nor_ends_the_others():
    """Real processes, since gloo's own waits without a socket are what an abort has to leave behind."""
    seed = random.randrange(1 << 30)
    script = Path(__file__).parents[2] / "support" / "train" / "forming_sweep.py"
    done = subprocess.run([sys.executable, script, str(seed), "60"],
                          capture_output=True, text=True, timeout=170)
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == 60, done.stderr
    assert not {"HUNG", "DIED"} & set(lines), f"seed {seed}"


def test_a_message_may_take_longer_than_one_look_and_an_abort_ends_the_wait_for_it(ranks):
    """gloo's own wait for a message closes the connections of the whole group when its limit is over."""
    late_s = 3 * gloo.WAIT_SLICE.total_seconds()

    def work(group):
        into = torch.zeros(1000)
        if group.rank == 1:
            time.sleep(late_s)
            group.finish([group.send(torch.ones(1000), 0, 0)])
        else:
            group.finish([group.receive(into, 1, 0)])
        group.allreduce(torch.ones(1))
        if group.rank == 1:
            time.sleep(late_s)
            group.abort()
        else:
            with pytest.raises(CommBroken):
                group.finish([group.receive(torch.zeros(1000), 1, 1)])
        return into.sum().item()

    assert ranks(2).each(work, limit_s=20) == [1000.0, 0.0]
