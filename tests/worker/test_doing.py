"""Whether a worker waits for its peers, which the dispatcher asks of each when no step is made any more."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

from spotfleet.worker.activity import peer_wait, waits_for_peers


def until(condition, limit_s: float = 30.0) -> bool:
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_process_in_its_users_code_waits_for_nobody(ranks):
    ranks(2)
    assert not waits_for_peers()


def test_a_rank_that_is_ahead_waits_for_its_peers_until_they_come(ranks):
    made = ranks(2)
    works = [lambda g: g.allreduce(torch.ones(3)), lambda g: g.finish([g.launch(torch.ones(3), dist.ReduceOp.SUM)]),
             lambda g: g.broadcast(torch.ones(3), 1), lambda g: g.allgather(torch.ones(1))]
    for work in works:
        late = threading.Event()
        thread = threading.Thread(
            target=made.each, args=(lambda g, w=work, e=late: (g.rank == 0 or e.wait(30)) and w(g),))
        thread.start()
        assert until(waits_for_peers)
        late.set()
        thread.join(30)
        assert until(lambda: not waits_for_peers())


def test_an_engine_marks_its_own_waits_and_a_users_function_of_that_name_is_none():
    begun, go_on = threading.Event(), threading.Event()

    def _wait() -> None:
        begun.set()
        go_on.wait(30)

    assert waiting_in(_wait, begun, go_on) is False
    begun.clear()
    go_on.clear()
    assert waiting_in(peer_wait(_wait), begun, go_on) is True


def waiting_in(wait, begun: threading.Event, go_on: threading.Event) -> bool:
    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(30)
    found = waits_for_peers()
    go_on.set()
    thread.join(30)
    return found
