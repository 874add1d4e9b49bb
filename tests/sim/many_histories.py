"""Many random histories, on all cores; a failing seed is printed with the command that replays it.

    python -m tests.sim.many_histories membership|engines|schedule|planner|demand|fleet COUNT [FIRST] [PROCESSES]
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from multiprocessing import get_context

DRIVERS = {  # kind -> the module whose `history(seed)` raises AssertionError for a history that goes wrong
    "membership": "tests.support.membership.membership_history",
    "engines": "tests.support.membership.engine_history",
    "schedule": "tests.support.membership.schedule_history",
    "planner": "tests.support.fleet.planner_history",
    "demand": "tests.support.fleet.demand_history",
    "fleet": "tests.support.fleet.fleet_history",
}
FINDINGS = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
BLOCK = 20  # seeds given to a process at once


def block(kind: str, first: int, last: int) -> list[tuple[int, str]]:
    """The seeds that go wrong, each with what is wrong."""
    driver = importlib.import_module(DRIVERS[kind])
    wrong = []
    gc.disable()  # a history is thrown away as a whole
    for seed in range(first, last):
        try:
            driver.history(seed)
        except FINDINGS as error:
            wrong.append((seed, f"{type(error).__name__}: {error}"))
    gc.collect()
    return wrong


def run(kind: str, count: int, first: int, processes: int) -> int:
    """How many seeds went wrong. Prints as it goes."""
    begun, said, done = time.monotonic(), time.monotonic(), 0
    wrong: list[tuple[int, str]] = []
    print(f"{kind}: {count} histories, seeds {first} to {first + count - 1}, {processes} processes", flush=True)
    blocks = [(kind, n, min(n + BLOCK, first + count)) for n in range(first, first + count, BLOCK)]
    with get_context("spawn").Pool(processes) as pool:
        for found, (_, low, high) in zip(pool.imap(_block, blocks), blocks, strict=True):
            done += high - low
            for seed, what in found:
                print(f"{kind}: seed {seed} FAILED: {what}", flush=True)
                print(f"again: {sys.executable} -m tests.sim.many_histories {kind} 1 {seed} 1", flush=True)
            wrong += found
            if time.monotonic() - said >= 30:
                said = time.monotonic()
                print(f"{kind}: {done} of {count} after {said - begun:.0f} s, {len(wrong)} failed", flush=True)
    took = time.monotonic() - begun
    print(f"{kind}: {done} histories, seeds {first} to {first + count - 1}: {len(wrong)} failed, {took:.0f} s")
    return len(wrong)


def _block(given: tuple[str, int, int]) -> list[tuple[int, str]]:
    return block(*given)


if __name__ == "__main__":
    given = [int(n) for n in sys.argv[2:]]
    amount, start, cores = (*given, *(100, 0, os.cpu_count() or 1)[len(given):])
    sys.exit(1 if run(sys.argv[1], amount, start, cores) else 0)
