"""Cost of spotfleet without any event: per step against plain DDP, a new worker's start, a copy, memory.

    python bench/overhead.py [--only step,start,copy,memory] [--pairs N] [-o json]

- step    worlds of three processes train bench/steps.py by turns, one block of steps each, in changing order: spotfleet
          on three hosts of the local provider, committing at every step, DistributedDataParallel with its defaults, and
          the same with gradient_as_bucket_view. CPU is that of the workers' processes with all their threads, summed;
          wall is the slowest rank's. One ratio per pair of blocks; the figure is their median, with its 95 % bootstrap
          interval.
- memory  values of /proc for the workers of these worlds after those steps: resident (RSS), the same with shared pages
          divided among their holders (PSS), and private pages (USS)
- start   from the order to fork a worker until it reports READY, out of a real warm zygote; it builds the same model.
          The bench plays the agent: it serves the worker's socket and notes when the report arrives.
- copy    `State.keep_copy` of model and Adam against `Tensor.copy_` of the same tensors into buffers that are warm,
          by turns in one process
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diary import interval
from worlds import HERE, LIMIT_S, STEPS, WORLD, Ddp, DdpViews, Spotfleet

PARTS = ("step", "start", "copy", "memory")
BLOCK_STEPS = 6
WARM_STEPS = 12
STARTS = 7
COPIES = 25
NEVER_S = 86400.0


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Metered:
    """The bench's side of steps.py's Meter: orders steps from three workers and receives their times."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(16)
        self._listener.settimeout(LIMIT_S)
        self._files: list[Any] = []
        self.pids: list[int] = []

    def meet(self) -> None:
        """Wait until all workers have done their first step."""
        for i in range(WORLD):
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                raise SystemExit(f"only {i} of {WORLD} workers of {self.path} came in {LIMIT_S:.0f} s") from None
            sock.settimeout(LIMIT_S)
            self._files.append(sock.makefile("rw"))

    def block(self, steps: int) -> tuple[float, float]:
        """Return (wall seconds of the slowest rank, CPU seconds of all) of so many steps."""
        for file in self._files:
            file.write(f"{steps}\n")
            file.flush()
        reports = [json.loads(file.readline()) for file in self._files]
        self.pids = [t["pid"] for t in reports]
        return max(t["wall_s"] for t in reports), sum(t["cpu_s"] for t in reports)

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._listener.close()


@contextlib.contextmanager
def all_worlds() -> Iterator[dict[str, Metered]]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="spotfleet-bench-", ignore_cleanup_errors=True) as name, \
            contextlib.ExitStack() as stack:
        meters = {}
        for kind in (Spotfleet, Ddp, DdpViews):
            folder = Path(name) / kind.name.replace(" ", "-")
            folder.mkdir()
            meter = meters[kind.name] = Metered(folder / "meter.sock")
            stack.callback(meter.close)
            extra = ("--meter", meter.path)
            # DDP writes no checkpoints.
            stack.enter_context(Spotfleet(folder, extra, NEVER_S) if kind is Spotfleet else kind(folder, extra))
            meter.meet()
        yield meters


def steps_and_memory(pairs: int) -> dict[str, Any]:
    """Return the figures of `step` and `memory`."""
    with all_worlds() as meters:
        for meter in meters.values():
            meter.block(WARM_STEPS)
        rows = []
        for i in range(pairs):
            names = list(meters)
            order = [*names[i % len(names):], *names[:i % len(names)]]
            rows.append({name: dict(zip(("wall_s", "cpu_s"), meters[name].block(BLOCK_STEPS), strict=True))
                         for name in order})
            ours, ddp = rows[-1]["spotfleet"], rows[-1]["ddp"]
            log(f"  pair {i}: CPU {ours['cpu_s'] / ddp['cpu_s']:.3f}, wall {ours['wall_s'] / ddp['wall_s']:.3f}")
        held = {name: memory_of(meter.pids) for name, meter in meters.items()}
    figures: dict[str, Any] = {"block_steps": BLOCK_STEPS, "blocks": rows}
    for name in ("ddp", "ddp views"):
        figures[name] = {what: compare([r["spotfleet"][f"{what}_s"] / BLOCK_STEPS for r in rows],
                                       [r[name][f"{what}_s"] / BLOCK_STEPS for r in rows]) for what in ("cpu", "wall")}
    return {"step": figures, "memory": held}


def compare(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Return the median of the ratios of pairs with its 95 % interval, and both medians."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, high = interval(ratios)
    return {"ratio": statistics.median(ratios), "low": low, "high": high, "ours_s": statistics.median(ours),
            "theirs_s": statistics.median(theirs)}


def memory_of(pids: list[int]) -> dict[str, float]:
    """Return medians over the processes, in MB (10^6 bytes)."""
    found: dict[str, list[float]] = {"rss_mb": [], "pss_mb": [], "uss_mb": []}
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        own = kib["Private_Clean"] + kib["Private_Dirty"]
        for key, value in (("rss_mb", kib["Rss"]), ("pss_mb", kib["Pss"]), ("uss_mb", own)):
            found[key].append(value * 1024 / 1e6)
    return {key: statistics.median(values) for key, values in found.items()}


async def _starts(folder: Path) -> list[float]:
    from spotfleet.agent.processes.zygote_client import ZygoteClient

    client = ZygoteClient(lambda: None)
    connection = asyncio.create_task(client.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            while not client.warm:
                await asyncio.sleep(0.05)
        return [await _start_one(client, folder, i) for i in range(STARTS)]
    finally:
        connection.cancel()
        await client.close(5.0)
        await asyncio.gather(connection, return_exceptions=True)


async def _start_one(client: Any, folder: Path, number: int) -> float:
    """Seconds from the order until the worker's report that it is READY has arrived."""
    from spotfleet.agent.processes.child import ChildSpec
    from spotfleet.protocol.messages import JOB_KEY

    path, name = str(folder / f"{number}.sock"), f"h{number}/0/1"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "SPOTFLEET_SOCKET": path, "SPOTFLEET_WORKER": name,
               "SPOTFLEET_JOB": "bench", "SPOTFLEET_ADDRESS": "127.0.0.1", "SPOTFLEET_WORK": str(folder / "work"),
               JOB_KEY: "key"}
        spec = ChildSpec(name, str(HERE), str(folder / "log"), env,
                         (str(STEPS), "--under", "spotfleet", "--folder", str(folder)))
        ready = asyncio.get_running_loop().run_in_executor(None, _ready_at, listener)
        began = time.monotonic()
        await client.spawn(spec)
        try:
            return await ready - began
        finally:
            client.kill(name, signal.SIGKILL)


def _ready_at(listener: socket.socket) -> float:
    """Answer one worker as the agent of a job that trains already. Returns the instant at which it is READY."""
    from spotfleet.protocol.messages import RankInfo, Stage, WorkerOrders, WorkerReport, dump, load

    listener.settimeout(LIMIT_S)
    sock, _ = listener.accept()
    with sock:
        sock.sendall(dump(WorkerOrders(founded=True, provisional=RankInfo(size=WORLD))).encode() + b"\n")
        pending = b""
        while select.select([sock], [], [], LIMIT_S)[0] and (data := sock.recv(1 << 16)):
            at = time.monotonic()
            *lines, pending = (pending + data).split(b"\n")
            if any(load(WorkerReport, line).stage is Stage.READY for line in lines):
                return at
    raise SystemExit("the worker ended before it was READY")


def starts() -> dict[str, Any]:
    """Return the figures of `start`."""
    with tempfile.TemporaryDirectory(prefix="spotfleet-bench-", ignore_cleanup_errors=True) as name:
        found = asyncio.run(_starts(Path(name)))
    log(f"  from the zygote to READY: {', '.join(f'{s:.3f}' for s in found)} s")
    return {"start": {"seconds": found, "median_s": statistics.median(found)}}


def copies() -> dict[str, Any]:
    """Return the figures of `copy`: the whole of `State.keep_copy`, repeatedly, as a job in copy mode does."""
    from steps import loss_of, make

    import spotfleet.train as hvd
    from spotfleet.train import runtime

    hvd.init()
    model, optimizer = make()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
    state.attach(1, 0)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    live = [t.detach() for t in state.tensors()]
    buffers = [t.clone() for t in live]
    ours, plain = [], []
    for _ in range(COPIES):
        began = time.perf_counter()
        for buffer, tensor in zip(buffers, live, strict=True):
            buffer.copy_(tensor)
        middle = time.perf_counter()
        state.keep_copy(runtime.current().place.size, 0)
        ours.append(time.perf_counter() - middle)
        plain.append(middle - began)
    size = sum(t.numel() * t.element_size() for t in live)
    return {"copy": {"mb": size / 1e6, **compare(ours[3:], plain[3:])}}


def measure(wanted: set[str], pairs: int) -> dict[str, Any]:
    """Return the figures of the wanted parts."""
    found: dict[str, Any] = {}
    if wanted & {"step", "memory"}:
        log("steps under spotfleet and under DDP, by turns")
        found |= steps_and_memory(pairs)
    if "start" in wanted:
        found |= starts()
    if "copy" in wanted:
        found |= copies()
        log(f"  a copy of {found['copy']['mb']:.0f} MB: {1000 * found['copy']['ours_s']:.1f} ms, memcpy "
            f"{1000 * found['copy']['theirs_s']:.1f} ms")
    return found


def main() -> None:
    import aims

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    args = parser.parse_args()
    os.environ["SPOTFLEET_LOCAL_OWNER_PID"] = str(os.getpid())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no process is left then, either
    load = os.getloadavg()[0]
    found = measure(set(args.only), args.pairs) | {"load_before": load, "load_after": os.getloadavg()[0], "rows": []}
    if args.output == "json":
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(aims.table(found)))


if __name__ == "__main__":
    main()
