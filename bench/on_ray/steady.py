"""Workers on a Ray cluster beside the same workers under our agent: the time of a step, and the weights after a drain.

    python bench/on_ray/steady.py [--pairs N] [--steps N] [-o json]

- step      three workers on Ray and three on a local fleet train bench/steps.py (10.2 million parameters, Adam) by
            turns, one block of steps each, in changing order. One ratio per pair of blocks; the figure is their median
            with its 95 % bootstrap interval. The aim is 1.01
- weights   two runs of three workers on Ray make the same number of steps; in one a node is drained meanwhile, and a
            spare node takes its worker's place. All six weights are the same, bit for bit

Exit status 1 where the weights differ.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import recovery  # noqa: E402
from overhead import BLOCK_STEPS, NEVER_S, WARM_STEPS, Metered, compare  # noqa: E402
from worlds import WORLD, Spotfleet  # noqa: E402

STEP_RATIO = 1.01
DEADLINE_S = 60.0


def blocks(folder: str, meter: str) -> None:
    """Train as under our agent, with the same code."""
    import steps

    steps.with_spotfleet(argparse.Namespace(folder=Path(folder), meter=meter))


def fixed(folder: str, steps: int) -> str:
    """Make a number of steps whose batches depend on step and rank; return the digest of the weights."""
    import torch

    import spotfleet.train as hvd

    hvd.init()
    net = recovery.model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
                                         net.named_parameters())

    @hvd.elastic.run
    def loop(state: Any) -> None:
        for state.batch in range(state.batch, steps):  # noqa: B020
            generator = torch.Generator().manual_seed(1000 * state.batch + hvd.rank())
            optimizer.zero_grad()
            net(torch.randn(32, 256, generator=generator)).square().mean().backward()
            optimizer.step()
            with open(f"{folder}/{os.getpid()}.steps", "a") as file:
                recovery.write(file, state.batch, hvd.size(), 0, os.environ["SPOTFLEET_WORKER"].partition("/")[0])
            time.sleep(0.05)

    loop(hvd.elastic.TorchState(net, optimizer, batch=0))
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()


@contextlib.contextmanager
def metered(top: Path) -> Iterator[dict[str, Metered]]:
    """Both worlds at a time; the one whose turn it is trains, the other one waits."""
    from spotfleet.ray import ElasticExecutor

    with contextlib.ExitStack() as stack:
        meters: dict[str, Metered] = {}
        for name in ("ray", "agent"):
            (top / name).mkdir()
            meters[name] = Metered(top / name / "meter.sock")
            stack.callback(meters[name].close)
        executor = ElasticExecutor(min_workers=WORLD, max_workers=WORLD)
        executor.start(extra_env_vars={"OMP_NUM_THREADS": "1"})
        stack.callback(executor.shutdown)
        threading.Thread(target=_run, args=(executor, blocks, str(top / "ray"), meters["ray"].path),
                         daemon=True).start()
        meters["ray"].meet()
        stack.enter_context(Spotfleet(top / "agent", ("--meter", meters["agent"].path), NEVER_S))
        meters["agent"].meet()
        yield meters


def _run(executor: Any, *call: Any) -> None:
    with contextlib.suppress(Exception):  # the bench ends it while it trains
        executor.run(call[0], args=list(call[1:]))


def step_times(pairs: int, top: Path) -> dict[str, float]:
    with metered(top) as meters:
        for meter in meters.values():
            meter.block(WARM_STEPS)
        walls: dict[str, list[float]] = {name: [] for name in meters}
        for turn in range(pairs):
            for name in sorted(meters, reverse=turn % 2 == 1):
                walls[name].append(meters[name].block(BLOCK_STEPS)[0] / BLOCK_STEPS)
            print(f"pair {turn}: {walls['ray'][-1] / walls['agent'][-1]:.3f}", file=sys.stderr, flush=True)
    return compare(walls["ray"], walls["agent"])


def weights(nodes: recovery.Nodes, steps: int, drained: bool, top: Path) -> list[str]:
    """Return the digest of each rank's weights."""
    from spotfleet.ray import ElasticExecutor
    from spotfleet.ray.drains import drain_node

    folder = Path(tempfile.mkdtemp(dir=top))
    executor = ElasticExecutor(min_workers=WORLD, max_workers=WORLD)
    executor.start()
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(executor.run(fixed, args=[str(folder), steps])), daemon=True)
    thread.start()
    if drained and recovery.wait(lambda: len(recovery.read(folder)) > 10 * WORLD):
        host = recovery.read(folder)[-1].node
        node = next(n for n in nodes.nodes if n.node_id.startswith(host))
        drain_node(nodes.cluster.address, node.node_id, "spot notice", DEADLINE_S)
    thread.join(timeout=recovery.LIMIT_S)
    print("\n".join(executor.changes), file=sys.stderr, flush=True)
    executor.shutdown()
    if drained:
        nodes.lose(node.node_id)
        nodes.whole()
    made = [s.step for s in recovery.read(folder) if s.step >= 0]
    assert len(made) == WORLD * steps, f"{len(made)} steps of {WORLD} workers in place of {WORLD * steps}"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("-o", dest="output", choices=("table", "json"), default="table")
    given = parser.parse_args()
    top = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    (top / "ray-tmp" / "ray").mkdir(parents=True)
    os.environ.update(recovery.RAY, RAY_TMPDIR=str(top / "ray-tmp"))
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    found: dict[str, Any] = {"load": os.getloadavg()[0]}
    try:
        nodes = recovery.Nodes()
        digests = [weights(nodes, given.steps, drained, top) for drained in (True, False)] if given.steps else []
        found["weights"] = digests
        if given.pairs:
            found["step"] = step_times(given.pairs, top)
    finally:
        recovery.end_all(str(top / "ray-tmp"))
        shutil.rmtree(top, ignore_errors=True)
    same = len({digest for run in digests for digest in run}) <= 1
    if given.output == "json":
        print(json.dumps(found))
    else:
        print(f"{datetime.date.today().isoformat()}, load {found['load']:.0f} at the start\n")
        if digests:
            print(f"- weights of {len(digests[0])} workers after {given.steps} steps, with a drain and without: "
                  f"{'equal bit for bit' if same else 'DIFFERENT'}")
        if "step" in found:
            step = found["step"]
            print(f"- step on Ray / under our agent: {step['ratio']:.3f} ({step['low']:.3f} to {step['high']:.3f}) of "
                  f"{given.pairs} pairs, {1000 * step['ours_s']:.0f} against {1000 * step['theirs_s']:.0f} ms; aim "
                  f"<= {STEP_RATIO:g}: {'kept' if step['ratio'] <= STEP_RATIO else 'MISSED'}")
    sys.stdout.flush()
    return 0 if same else 1


if __name__ == "__main__":
    os._exit(main())  # Ray's threads would wait for the cluster that has ended
