"""Cost of an interruption on a Ray cluster: spotfleet's ElasticExecutor and Ray Train v2 in one run, on one machine.

    python bench/on_ray/recovery.py [--turns N] [--repeat N] [--events kill,node,drain] [--deadline S] [-o json]
                                    [--rows FILE]

A head and raylets of one CPU each; three workers train the same MLP over gloo, each step writes a line to a diary. Then

- kill    SIGKILL to a worker's process
- node    SIGKILL to a raylet and all of its processes; the node does not come back (a spare one is there)
- drain   a drain with `--deadline` seconds; then the node is killed
- join    no event of its own: after a kill or a lost node, the third worker is back

Each kind of event is played `--repeat` times in a turn. The systems take turns on one cluster, another one first in
each turn; a system's workers start anew in each turn.

- spotfleet         ElasticExecutor(min_workers=2, max_workers=3)
- train             Ray Train v2 as it comes, with ScalingConfig(num_workers=(2, 3)) and a checkpoint each 20 steps
- train tuned       the same, its health check each second
- train torchft     Ray Train v2 with TorchftConfig, as in Ray's own example, with 3 workers: it is not elastic. Where
                    torchft can be imported; it has no drain, since Ray's watcher of drains is off there

Ray's own probes of nodes are at 1 s with 3 failures for all, and workers have the niceness 0 in place of Ray's 15.
*Next step* is the time from the event until each rank of the next membership has made a step; *pause* the time without
any step, for a join that around its first step; *repeated* the steps that were made again. Needs what Ray Train needs
(pandas, pyarrow). Exit status 0 whatever the result. The time of a step and the weights are measured by steady.py.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

ADDRESS = "127.0.0.2"
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_memory_monitor_refresh_ms": "0", "RAY_DEDUP_LOGS": "0",
       "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "180", "RAY_TRAIN_V2_ENABLED": "1",
       "RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "1000",
       "RAY_health_check_failure_threshold": "3", "RAY_enable_metrics_collection": "0", "OMP_NUM_THREADS": "1",
       "RAY_worker_niceness": "0"}
TUNED = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1", "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "10"}
WORLD, NODES = 3, 4
WORKER = "worker"  # a resource of all nodes but the head
LIMIT_S = 240.0
# Reading the diaries keeps this process busy, and our coordinator has its threads here: it rests after each event.
QUIET_S, POLL_S = 3.0, 0.5
TORCHFT = "train torchft"
TORCHFT_S = 5.0  # its collectives' limit; the example has 30 s for machines under load
# Aims: seconds beyond a step for "join" and "drain"; parts of the others' times.
KILL_S, JOIN_S, DRAIN_S, PART_OF_TRAIN, PART_OF_TORCHFT = 0.35, 0.25, 0.1, 0.1, 0.5
KEEP_EVERY = 20  # steps between two checkpoints of Ray Train


@dataclass(frozen=True)
class Step:
    at: float  # monotonic: one clock for all processes of this machine
    step: int
    size: int
    world: int  # a number that all ranks of one membership share
    pid: int
    node: str


@dataclass(frozen=True)
class Row:
    """Result of one event for one system. Seconds; -1: no step came within the limit."""

    system: str
    event: str
    next_step_s: float
    pause_s: float
    repeated: int
    step_s: float
    load: float


def write(file: Any, step: int, size: int, world: int, node: str) -> None:
    file.write(f"{time.monotonic()} {step} {size} {world} {os.getpid()} {node}\n")


def read(folder: Path) -> list[Step]:
    found = []
    for file in folder.glob("*.steps"):
        for line in file.read_text().splitlines():
            parts = line.split()
            if len(parts) == 6:
                found.append(Step(float(parts[0]), *(int(p) for p in parts[1:5]), parts[5]))
    return sorted(found, key=lambda s: s.at)


def model() -> Any:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))


def ours(folder: str) -> None:
    import ray
    import torch

    import spotfleet.train as hvd
    from spotfleet.train.runtime import current

    hvd.init()
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters())
    node = ray.get_runtime_context().get_node_id()

    with open(f"{folder}/{os.getpid()}.steps", "a", buffering=1) as file:
        @hvd.elastic.run
        def loop(state: Any) -> None:
            for state.batch in range(state.batch, 10**9):  # noqa: B020
                optimizer.zero_grad()
                net(torch.randn(32, 256)).square().mean().backward()
                optimizer.step()
                write(file, state.batch, hvd.size(), current().generation, node)
                time.sleep(0.02)
                if os.path.exists(f"{folder}/stop"):
                    return

        loop(hvd.elastic.TorchState(net, optimizer, batch=0))


def theirs(config: dict[str, str]) -> None:
    import ray.train
    import ray.train.torch
    import torch

    context = ray.train.get_context()
    net = ray.train.torch.prepare_model(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    begin = 0
    if (kept := ray.train.get_checkpoint()) is not None:
        with kept.as_directory() as folder:
            saved = torch.load(f"{folder}/state.pt", weights_only=True)
            net.load_state_dict(saved["net"])
            begin = saved["step"] + 1
    world = torch.tensor([time.time_ns() % 10**9])
    torch.distributed.broadcast(world, 0)
    node, rank = ray.get_runtime_context().get_node_id(), context.get_world_rank()
    with open(f"{config['folder']}/{os.getpid()}.steps", "a", buffering=1) as file:
        for step in range(begin, 10**9):
            optimizer.zero_grad()
            net(torch.randn(32, 256)).square().mean().backward()
            optimizer.step()
            write(file, step, context.get_world_size(), int(world), node)
            if step % KEEP_EVERY == 0:
                with tempfile.TemporaryDirectory() as made:
                    torch.save({"net": net.state_dict(), "step": step}, f"{made}/state.pt")
                    report = ray.train.Checkpoint.from_directory(made) if rank == 0 else None
                    ray.train.report({"step": step}, checkpoint=report)
            time.sleep(0.02)
            if os.path.exists(f"{config['folder']}/stop"):
                return


def theirs_torchft(config: dict[str, str]) -> None:
    """Three replica groups of one worker, as in Ray's example (ray/train/v2/examples/pytorch).

    torchft's own DistributedDataParallel asserts in survivors when a peer dies (torchft 0.2.0 under torch 2.13), so
    gradients are averaged by one flat managed allreduce."""
    import ray.train
    import torch
    from torchft import Manager, Optimizer, ProcessGroupGloo

    rank, limit = ray.train.get_context().get_world_rank(), datetime.timedelta(seconds=TORCHFT_S)
    net = model()
    plain = torch.optim.SGD(net.parameters(), lr=0.01)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit), min_replica_size=2, timeout=limit,
        quorum_timeout=datetime.timedelta(seconds=60), world_size=1, rank=0,
        load_state_dict=lambda held: (net.load_state_dict(held["net"]), plain.load_state_dict(held["optimizer"])),
        state_dict=lambda: {"net": net.state_dict(), "optimizer": plain.state_dict()},
        replica_id=f"bench_{rank}_{os.getpid()}")
    optimizer, node = Optimizer(manager, plain), ray.get_runtime_context().get_node_id()
    with open(f"{config['folder']}/{os.getpid()}.steps", "a", buffering=1) as file:
        while not os.path.exists(f"{config['folder']}/stop"):
            step = manager.current_step()
            optimizer.zero_grad()
            net(torch.randn(32, 256)).square().mean().backward()
            flat = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
            manager.allreduce(flat).wait()
            for p, grad in zip(net.parameters(), flat.split([p.numel() for p in net.parameters()]), strict=True):
                p.grad.copy_(grad.view_as(p))
            optimizer.step()
            if manager.current_step() > step and manager.is_participating():
                world = manager.num_participants()  # a joiner takes part one step after its quorum has begun
                write(file, step, world, 10 * manager._quorum_id + world, node)
            time.sleep(0.02)
    manager.shutdown()


def run_ours(folder: Path) -> Callable[[], None]:
    from spotfleet.ray import ElasticExecutor

    executor = ElasticExecutor(min_workers=2, max_workers=WORLD)
    executor.start()
    threading.Thread(target=lambda: executor.run(ours, args=[str(folder)]), daemon=True).start()
    return executor.shutdown


def run_theirs(folder: Path, env: dict[str, str], torchft: bool = False) -> Callable[[], None]:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    backend: Any = TorchConfig(backend="gloo")
    if torchft:
        from ray.train.v2.torch.torchft_config import TorchftConfig

        backend = TorchftConfig(lighthouse_kwargs={"min_replicas": 2}, backend="gloo")
    trainer = TorchTrainer(
        theirs_torchft if torchft else theirs, train_loop_config={"folder": str(folder)}, torch_config=backend,
        scaling_config=ScalingConfig(num_workers=WORLD if torchft else (2, WORLD),
                                     resources_per_worker={"CPU": 1, WORKER: 1}),
        run_config=RunConfig(storage_path=str(folder / "store"), failure_config=FailureConfig(max_failures=100)))
    thread = threading.Thread(target=trainer.fit, daemon=True)
    thread.start()

    def stop() -> None:
        (folder / "stop").touch()
        thread.join(timeout=60)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})

    return stop


class Holder:
    def ready(self) -> bool:
        return True


class Nodes:
    """The cluster."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._args = {"node_ip_address": ADDRESS, "object_store_memory": 80 << 20}
        self.cluster = Cluster(initialize_head=True, shutdown_at_exit=False,
                               head_node_args={**self._args, "num_cpus": 1, "include_dashboard": False})
        self.nodes: list[Any] = []
        self.whole()
        ray.init(self.cluster.address, _node_ip_address=ADDRESS, log_to_driver=False, logging_level="ERROR")
        self._holder: Any = None
        self.hold()

    def hold(self) -> None:
        """Use the head's CPU, so that no worker is placed there."""
        import ray

        if self._holder is None:
            head = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False)
            self._holder = ray.remote(Holder).options(num_cpus=1, scheduling_strategy=head).remote()
            ray.get(self._holder.ready.remote(), timeout=LIMIT_S)

    def free(self) -> None:
        """Give the head's CPU back: Ray places torchft's lighthouse there, and nowhere else."""
        import ray

        ray.kill(self._holder)
        self._holder = None

    def whole(self) -> None:
        while len(self.nodes) < NODES:
            self.nodes.append(self.cluster.add_node(num_cpus=1, resources={WORKER: 1}, **self._args))

    def lose(self, node_id: str) -> None:
        node = next((n for n in self.nodes if n.node_id == node_id), None)
        if node is None:
            return  # the head, on which the driver runs
        raylets = [p.process.pid for p in node.all_processes.get("raylet", ())]
        processes = [child for pid in raylets for child in psutil.Process(pid).children(recursive=True)]
        node.kill_raylet(check_alive=False)
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.cluster.remove_node(node, allow_graceful=False)
        self.nodes.remove(node)


def wait(holds: Callable[[], Any], limit_s: float = LIMIT_S) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(POLL_S)
    return False


def newest_world(steps: list[Step]) -> list[Step]:
    return [s for s in steps if s.world == steps[-1].world] if steps else []


def settled(folder: Path) -> bool:
    """Return whether the whole world has trained for a while."""
    steps = newest_world(read(folder))
    return bool(steps) and steps[-1].size == WORLD and len(steps) >= 60 and time.monotonic() - steps[-1].at < 1.0


def play(system: str, event: str, folder: Path, nodes: Nodes, deadline_s: float) -> Row:
    """Let one event happen; wait for its end."""
    from spotfleet.ray.drains import drain_node

    before = newest_world(read(folder))
    world, victim = before[-1].world, before[-1]
    made = [s.at for s in before if s.pid == victim.pid]
    step_s = statistics.median(b - a for a, b in itertools.pairwise(made))
    load, at = os.getloadavg()[0], time.monotonic()
    if event == "kill":
        os.kill(victim.pid, signal.SIGKILL)
    elif event == "node":
        nodes.lose(victim.node)
    else:
        drain_node(nodes.cluster.address, victim.node, "spot notice", deadline_s)
        threading.Timer(deadline_s, nodes.lose, [victim.node]).start()

    time.sleep(QUIET_S)

    def after() -> list[Step]:
        later = [s for s in read(folder) if s.world != world and s.at > at]
        return [s for s in later if s.world == later[0].world] if later else []

    def whole() -> bool:
        found = after()
        return bool(found) and len({s.pid for s in found}) >= found[0].size

    if not wait(whole, LIMIT_S + deadline_s):
        return Row(system, event, -1, -1, -1, step_s, load)
    found, old = after(), [s for s in read(folder) if s.world == world]
    firsts = {s.pid: s.at for s in reversed(found)}
    again = max(0, max(s.step for s in old) + 1 - found[0].step)
    return Row(system, event, max(firsts.values()) - at, found[0].at - old[-1].at, again, step_s, load)


def joined(system: str, folder: Path, since: float) -> Row:
    """Wait until the whole world trains again; return the pause that the last worker's entry has cost."""
    load = os.getloadavg()[0]

    def whole() -> list[Step]:
        later = [s for s in read(folder) if s.at > since]
        return [s for s in later if s.world == later[-1].world and s.size == WORLD] if later else []

    if not wait(whole):
        return Row(system, "join", -1, -1, -1, 0.0, load)
    first = whole()[0]
    old = [s for s in read(folder) if s.at < first.at]
    made = [s.at for s in old if s.pid == old[-1].pid][-20:]
    step_s = statistics.median(b - a for a, b in itertools.pairwise(made)) if len(made) > 1 else 0.0
    again = max(0, max(s.step for s in old) + 1 - first.step)
    return Row(system, "join", first.at - old[-1].at, first.at - old[-1].at, again, step_s, load)


def turn(system: str, start: Callable[[Path], Callable[[], None]], events: list[str], nodes: Nodes,
         deadline_s: float, note: Callable[[Row], None]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ray-bench-"))
    stop = start(folder)
    try:
        for event in events:
            nodes.whole()
            if not wait(lambda: settled(folder)):
                note(Row(system, event, -1, -1, -1, 0.0, os.getloadavg()[0]))
                return
            note(row := play(system, event, folder, nodes, deadline_s))
            if event == "drain":
                time.sleep(deadline_s)
            elif row.next_step_s >= 0 and (smaller := newest_world(read(folder))[0]).size < WORLD:
                nodes.whole()
                note(joined(system, folder, smaller.at))
    finally:
        stop()
        shutil.rmtree(folder, ignore_errors=True)


def p90(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.9 * len(values)))]


def table(rows: list[Row]) -> str:
    lines = ["| system | event | n | next step, s: median, p90 | pause, s: median, p90 | repeated | step, s | load |",
             "|---|---|---|---|---|---|---|---|"]
    for key in dict.fromkeys((r.system, r.event) for r in rows):
        made = [r for r in rows if (r.system, r.event) == key]
        good = [r for r in made if r.next_step_s >= 0]
        if not good:
            lines.append(f"| {key[0]} | {key[1]} | 0 of {len(made)} | no step within {LIMIT_S:g} s | | | | |")
            continue
        times, pauses = [r.next_step_s for r in good], [r.pause_s for r in good]
        again, loads = [r.repeated for r in good], [r.load for r in made]
        lines.append(f"| {key[0]} | {key[1]} | {len(good)} of {len(made)} | {statistics.median(times):.2f}, "
                     f"{p90(times):.2f} | {statistics.median(pauses):.2f}, {p90(pauses):.2f} | {min(again)}-"
                     f"{max(again)} | {statistics.median(r.step_s for r in good):.3f} | "
                     f"{min(loads):.0f}-{max(loads):.0f} |")
    return "\n".join([*lines, "", *ratios(rows), "", *aims(rows)])


def figures(rows: list[Row], event: str) -> dict[str, list[float]]:
    """Return the seconds that count for an event, by system: pauses of planned changes, else times to the next step."""
    return {system: [r.pause_s if event in ("drain", "join") else r.next_step_s for r in rows
                     if (r.system, r.event) == (system, event) and r.next_step_s >= 0]
            for system in dict.fromkeys(r.system for r in rows)}


def ratios(rows: list[Row]) -> list[str]:
    found = []
    for event in dict.fromkeys(r.event for r in rows):
        by = figures(rows, event)
        if not (own := by.pop("spotfleet", [])):
            continue
        what = "pause" if event in ("drain", "join") else "next step"
        found += [f"- {event}: {what} of {name} / spotfleet = {statistics.median(times) / statistics.median(own):.1f}"
                  for name, times in by.items() if times]
    return found


def aims(rows: list[Row]) -> list[str]:
    """Return one line for each aim: kept, missed or not measured."""
    own = [r for r in rows if r.system == "spotfleet"]
    lost = sum(r.next_step_s < 0 for r in own)
    lines = [f"- aim: no event of ours without a next step: {lost} of {len(own)}: {'kept' if not lost else 'MISSED'}"]
    for event, most, beyond in (("kill", KILL_S, False), ("node", KILL_S, False), ("join", JOIN_S, True),
                                ("drain", DRAIN_S, True)):
        found = [(r.pause_s - r.step_s) if beyond else r.next_step_s for r in own
                 if r.event == event and r.next_step_s >= 0]
        lines.append(_aim(f"{event}: median {'beyond a step ' if beyond else ''}<= {most:g} s", found,
                          lambda m, most=most: m <= most))
    again = [float(r.repeated) for r in own if r.event == "drain" and r.repeated >= 0]
    lines.append(_aim("drain: steps repeated <= 0", [max(again)] if again else [], lambda m: m <= 0))
    for event in ("kill", "node"):
        by = figures(rows, event)
        for name, times in by.items():
            if name != "spotfleet":
                part = PART_OF_TORCHFT if name == TORCHFT else PART_OF_TRAIN
                both = [statistics.median(by["spotfleet"]) / statistics.median(times)] if times and by.get(
                    "spotfleet") else []
                lines.append(_aim(f"{event}: spotfleet / {name} <= {part:g}", both, lambda m, part=part: m <= part))
    return lines


def _aim(words: str, found: list[float], holds: Callable[[float], bool]) -> str:
    if not found:
        return f"- aim: {words}: not measured"
    value = statistics.median(found)
    return f"- aim: {words}: {value:.3f} (n={len(found)}): {'kept' if holds(value) else 'MISSED'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--events", default="kill,node,drain")
    parser.add_argument("--systems", default="spotfleet,train,train tuned,train torchft")
    parser.add_argument("--deadline", type=float, default=20.0)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("-o", dest="output", choices=("table", "json"), default="table")
    given = parser.parse_args()
    top = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    (top / "ray").mkdir()
    os.environ.update(RAY, RAY_TMPDIR=str(top))
    sys.path.insert(0, str(Path(__file__).parents[2]))
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(Path(__file__).parents[2]), *sys.path) if p)
    starts: dict[str, Callable[[Path], Callable[[], None]]] = {
        "spotfleet": run_ours, "train": lambda f: run_theirs(f, {}), "train tuned": lambda f: run_theirs(f, TUNED)}
    if importlib.util.find_spec("torchft"):
        starts[TORCHFT] = lambda f: run_theirs(f, {}, torchft=True)
    else:
        print("train torchft is left out: torchft cannot be imported", file=sys.stderr)
    order = [s for s in given.systems.split(",") if s in starts]
    rows: list[Row] = []

    def note(row: Row) -> None:
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
        if given.rows:
            with given.rows.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    try:
        nodes = Nodes()
        for number in range(given.turns):
            for system in order[number % len(order):] + order[:number % len(order)]:
                nodes.whole()
                events = [e for e in given.events.split(",") for _ in range(given.repeat)]
                if system == TORCHFT:
                    events = [e for e in events if e != "drain"]
                    nodes.free()
                else:
                    nodes.hold()
                turn(system, starts[system], events, nodes, given.deadline, note)
    finally:
        end_all(str(top))
        shutil.rmtree(top, ignore_errors=True)
    date = datetime.date.today().isoformat()
    print(json.dumps([asdict(r) for r in rows]) if given.output == "json" else f"{date}\n\n{table(rows)}", flush=True)
    os._exit(0)  # Ray's threads would wait for the cluster that has ended


def end_all(folder: str) -> None:
    """End each process of the cluster."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("RAY_TMPDIR") == folder:
                process.kill()
                left.append(process)
        except psutil.Error:
            continue  # ended meanwhile, or not ours
    psutil.wait_procs(left, timeout=30)


if __name__ == "__main__":
    main()
