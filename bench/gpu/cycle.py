"""Groups of three processes that form, reduce and are aborted again and again, without a job around them.

In every second generation the last rank does not come to the reduction, so that the others abort one that waits. Its
kernel must end, the wait must fail, and the next generation must form. In some, kernels of more than 5 s are queued
before it, for which the abort waits. No rank ends a communicator that another may still use: the next generation does,
once all have met. Run by part `form`; one process is one rank: `cycle.py RANK SIZE STORE TIMES`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from spotfleet.protocol.messages import Assignment
from spotfleet.train.comm.backends import make_group
from spotfleet.train.comm.group import Group
from spotfleet.worker.errors import CommBroken
from spotfleet.worker.store import open_store

KEY, SIZE, LIMIT_S = "key", 3, 110.0
LONG = (2, 20)  # generations with queued kernels of more than 5 s, on a device
LONG_CYCLES = 14_000_000_000  # 7 s at 2 GHz
ABORT_S = 0.2  # after the launch: the other ranks have ended the reduction before
LOST_MIB = 64  # for each rank, of the memory that all share


def one(rank: int, size: int, store: str, times: int) -> None:
    """Be a rank; print a row."""
    device = torch.device(os.environ["DEVICE"])
    members = tuple(f"h{r}/0/1" for r in range(size))
    forms: list[float] = []
    frees: dict[bool, list[float]] = {False: [], True: []}  # long: times
    memory: list[int] = []
    wrong, before = 0, None
    for generation in range(1, times + 1):
        group = make_group(Assignment(generation, rank, members, store), "bench", f"127.0.0.{rank + 2}", KEY)
        began = time.perf_counter()
        group.form()
        forms.append(time.perf_counter() - began)
        if before is not None:
            before.retire().join(LIMIT_S)
        data = torch.full((100_000,), float(rank + 1), device=device)
        group.finish([group.launch(data)])
        wrong += not bool((data == size * (size + 1) / 2).all())
        long = generation in LONG and device.type == "cuda"
        frees[long] += cut_short(group, data, generation, long)
        before = group
        if device.type == "cuda":
            memory.append(torch.cuda.mem_get_info()[0])
    if before is not None:
        before.retire().join(LIMIT_S)
    print(json.dumps({"rank": rank, "wrong": wrong, "form_ms": spread(forms[1:]), "first_form_ms": 1e3 * forms[0],
                      "free_ms": spread(frees[False]), "long_free_ms": spread(frees[True]),
                      "lost_mib": lost_mib(memory)}), flush=True)


def lost_mib(memory: list[int]) -> float:
    """Return the loss of free memory, without the first generations, whose buffers stay."""
    return (memory[len(memory) // 5] - memory[-1]) / (1 << 20) if len(memory) >= 10 else 0.0


def cut_short(group: Group, data: torch.Tensor, generation: int, long: bool) -> list[float]:
    """Abort a reduction to which the last rank does not come; return how long the wait went on after the abort."""
    if generation % 2 or group.rank == group.size - 1:
        return []
    if long:
        torch.cuda._sleep(LONG_CYCLES)
    work, at = group.launch(data), [0.0]

    def abort() -> None:
        at[0] = time.perf_counter()
        group.abort()

    timer = threading.Timer(ABORT_S, abort)
    timer.start()
    try:
        group.finish([work])
    except CommBroken:
        timer.join()
        return [max(0.0, time.perf_counter() - at[0])]
    raise SystemExit("a reduction without all ranks succeeded")


def is_good(found: dict[str, Any]) -> bool:
    """Return whether a rank's row shows right sums and no leak."""
    return not found["wrong"] and found["lost_mib"] < LOST_MIB * SIZE


def spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [0.0]
    return {"median": round(1e3 * statistics.median(ordered), 3), "max": round(1e3 * ordered[-1], 3)}


def rows(device: str, times: int, folder: Path) -> Iterator[dict[str, Any]]:
    import stage

    _held, store = open_store("127.0.0.1", KEY)
    processes = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(SIZE), store, str(times)], stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True,
                         env={**os.environ, **stage.variables(device, f"h{rank}"), "SPOTFLEET_ADDRESS": "127.0.0.1"})
        for rank in range(SIZE)]
    try:
        for rank, process in enumerate(processes):
            out, errors = process.communicate(timeout=LIMIT_S)
            line = next((line for line in out.splitlines() if line.startswith("{")), "")
            found = json.loads(line) if line else {"why": errors[-2000:]}
            yield {"row": f"form and abort {times} times, rank {rank}", **found,
                   "ok": process.returncode == 0 and bool(line) and is_good(found)}
    except subprocess.TimeoutExpired:
        yield {"row": f"form and abort {times} times", "ok": False, "why": f"not within {LIMIT_S:g} s"}
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    one(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
