"""Kill a member at a random moment while its generation forms: `python forming_sweep.py SEED COUNT`.

Prints a line per try, "WAITED_MS PHASE" of the survivor of rank 0 from the kill on, or HUNG. The parent stays without
threads, so that it may fork.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import threading
import time

import torch

from spotfleet.protocol.messages import Assignment
from spotfleet.train.comm.gloo import GlooGroup
from spotfleet.train.comm.group import Group
from spotfleet.worker.errors import CommBroken
from spotfleet.worker.store import open_store

MEMBERS = ("a/0/1", "b/0/1", "c/0/1")
WINDOW_S = 0.03  # a formation takes about so long
NOTICED_S = 0.05  # after so long the dispatcher has told the survivors to abort
HUNG_S = 12.0


def train(group: Group) -> str:
    phase = "forming"
    try:
        group.form()
        phase = "formed"
        while True:
            group.allreduce(torch.ones(1000))
    except CommBroken:
        return phase


def victim_or_witness(rank: int, address_from: int, generation: int) -> None:
    store = os.read(address_from, 100).decode()
    train(GlooGroup(Assignment(generation, rank, MEMBERS, store), "job", f"127.0.0.{rank + 1}", "key"))


def survivor(generation: int, addresses_to: list[int], victim: int, after_s: float) -> str:
    store, address = open_store("127.0.0.1", "key")
    for fd in addresses_to:
        os.write(fd, address.encode())
    group = GlooGroup(Assignment(generation, 0, MEMBERS, address), "job", "127.0.0.1", "key")
    killed: list[float] = []

    def dispatcher() -> None:
        time.sleep(after_s)
        os.kill(victim, signal.SIGKILL)
        killed.append(time.monotonic())
        time.sleep(NOTICED_S)
        while True:
            group.abort()
            time.sleep(0.02)

    threading.Thread(target=dispatcher, daemon=True).start()
    phase = train(group)
    assert store is not None
    return f"{1000 * (time.monotonic() - killed[0]):.0f} {phase}" if killed else "0 early"


def child(work: object, *args: object) -> tuple[int, int]:
    """Fork; the child writes what `work` returns into a pipe. -> pid, pipe"""
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, out
    try:
        os.write(into, str(work(*args)).encode())  # type: ignore[operator]
    finally:
        os._exit(0)


def one(generation: int, after_s: float) -> str:
    pids, addresses_to = [], []
    for rank in (1, 2):
        address_from, to = os.pipe()
        pids.append(child(victim_or_witness, rank, address_from, generation)[0])
        os.close(address_from)
        addresses_to.append(to)
    pid, said = child(survivor, generation, addresses_to, pids[1], after_s)
    ready = select.select([said], [], [], HUNG_S)[0]
    line = os.read(said, 100).decode() or "DIED" if ready else "HUNG"
    os.close(said)
    for fd in addresses_to:
        os.close(fd)
    for each in (*pids, pid):
        os.kill(each, signal.SIGKILL)
        os.waitpid(each, 0)
    return line


if __name__ == "__main__":
    rng = random.Random(int(sys.argv[1]))
    for number in range(int(sys.argv[2])):
        print(one(number + 1, rng.uniform(0, WINDOW_S)), flush=True)
