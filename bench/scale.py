"""Benchmark of one dispatcher with a thousand agents: time until a change reaches all, tick time, memory and CPU.

    python bench/scale.py [--agents 1000] [--repeat 5] [-o json]

The dispatcher is `python -m spotfleet.dispatcher`, a separate process. Agents are simulated by this process, over real
TLS WebSockets; see `bench/scale_world.py`. Both share the machine, so the dispatcher's CPU time is given separately.

- death: one worker dies, its peers report the broken collective; until the last agent has the generation without it
- join: the dead worker's successor is ready; until the last agent has the generation with it
- notice: a host is warned; from its replacement's readiness until the last agent has the generation without it
- connect: the dispatcher is killed and started; until the last agent has its orders again
- tick: `reconcile.tick` on a ledger with as many hosts, nothing to do and ten of them lost
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from scale_world import TYPE, Agent, Cloud, World, plugin, serve

from spotfleet.codec import to_json
from spotfleet.fleet import reconcile
from spotfleet.fleet.ledger import Ledger
from spotfleet.model import FleetSpec, JobSpec, Need, Nodes, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.transport import certs
from spotfleet.transport.boot import DispatcherBoot

LIMIT_S = 120.0
REST_S = 10.0  # observation time of the dispatcher while nothing changes
CHANGES = 10  # hosts that are lost in one tick
ADMIN, HOST = "bench-admin", "127.0.0.1"


class Bench:
    def __init__(self, folder: Path, agents: int) -> None:
        self.folder, self.agents = folder, agents
        self.home, self.cloud = folder / "home", Cloud(agents)
        made, key = certs.make("bench", time.time()), secrets.token_hex(16)
        config = {"port": str(serve(self.cloud, key)), "key": key}
        self.paths, self.ca, self.port = plugin(folder / "plugin"), made.ca, _free_port()
        spec = FleetSpec("bench", "scale", (Need(instance_type=TYPE),), Nodes(1, agents, agents))
        boot = DispatcherBoot("bench", "bench-d-0", spec, "bench-secret", ADMIN, made.ca, made.cert, made.key,
                              config)
        self.home.mkdir()
        (self.home / "boot.json").write_text(json.dumps(to_json(boot)))
        own = self.cloud.offers(Need(use_spot=False))[0]
        self.cloud.launch(LaunchRequest(boot.host, "bench", Role.DISPATCHER, own, Boot("")))
        self.cloud.requests.clear()
        self.process: subprocess.Popen[bytes] | None = None

    def start_dispatcher(self) -> psutil.Process:
        env = os.environ | {"PYTHONPATH": os.pathsep.join([*self.paths, os.environ.get("PYTHONPATH", "")]),
                            "SPOTFLEET_HOST_ADDRESS": HOST, "SPOTFLEET_HOST_PORT": str(self.port)}
        with open(self.folder / "console.log", "ab") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "spotfleet.dispatcher", "--home", str(self.home)],
                                            env=env, stdout=log, stderr=log)
        return psutil.Process(self.process.pid)

    def stop_dispatcher(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        before = self.cpu_s()
        try:
            async with (aiohttp.ClientSession(headers={"Authorization": f"Bearer {ADMIN}"},
                                              timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session,
                        session.request(method, f"https://{HOST}:{self.port}{path}", json=body,
                                        ssl=certs.client_context(self.ca)) as answer):
                assert answer.status == 200, await answer.text()
                return await answer.json()
        except TimeoutError:
            raise self.given_up(f"the answer to {method} {path}", before) from None

    async def until(self, what: str, condition: Callable[[], object]) -> float:
        """Seconds until `condition` holds."""
        began, before = time.monotonic(), self.cpu_s()
        while not condition():
            if time.monotonic() - began > LIMIT_S:
                raise self.given_up(what, before)
            await asyncio.sleep(0.02)
        return time.monotonic() - began

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU seconds of this process and of the dispatcher so far."""
        own = psutil.Process().cpu_times()
        other = psutil.Process(self.process.pid).cpu_times() if self.process and self.process.poll() is None else own
        return own.user + own.system, other.user + other.system

    def given_up(self, what: str, before: tuple[float, float]) -> SystemExit:
        """Return why the run was given up: the machine was too busy, or nothing happened although it had CPU time.

        This distinguishes a benchmark that cannot be measured here from a fault of the dispatcher: a thousand agents'
        reports pile up if they are not read in time, and each answer then comes minutes late."""
        shares = [100 * (after - begun) / LIMIT_S for after, begun in zip(self.cpu_s(), before, strict=True)]
        last = (self.folder / "console.log").read_text()[-2000:]
        return SystemExit(f"gave up after {LIMIT_S:.0f} s waiting for {what}; meanwhile the agents' process had "
                          f"{shares[0]:.0f} % of a core and the dispatcher {shares[1]:.0f} %, load average "
                          f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; the dispatcher said:\n{last}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


class Measured:
    """Figures of one run."""

    def __init__(self, bench: Bench, world: World, dispatcher: psutil.Process) -> None:
        self.bench, self.world, self.dispatcher = bench, world, dispatcher

    async def whole(self) -> float:
        """All agents train in one generation."""
        n = self.bench.agents
        return await self.bench.until(f"{n} workers that train", lambda: len(self.world.training()) == n)

    async def ordered(self, generation: int, among: list[Agent], since: float) -> float:
        """Seconds from `since` until the last of `among` was ordered a generation above `generation`."""
        await self.bench.until(f"a generation above {generation} everywhere",
                               lambda: all(a.generation > generation for a in among))
        return max(a.first_above(generation)[1] for a in among) - since

    async def cpu(self, work: Awaitable[Any]) -> tuple[Any, float]:
        """What `work` gives, and the dispatcher's CPU seconds meanwhile."""
        before = self.dispatcher.cpu_times()
        result = await work
        after = self.dispatcher.cpu_times()
        return result, after.user + after.system - before.user - before.system

    async def death(self, which: int) -> tuple[float, float]:
        """(seconds until all survivors know of the death, seconds until all know of the successor)"""
        await self.whole()
        await asyncio.sleep(0.5)
        agents = list(self.world.agents.values())
        victim = agents.pop(which)
        generation = victim.generation
        victim.kill_worker()
        died_at = time.monotonic()
        for agent in agents:
            agent.lose_peer(generation)
        death_s = await self.ordered(generation, agents, died_at)
        await self.bench.until("a place for the successor", lambda: victim.first_above(generation, 0)[0])
        joined, _ = victim.first_above(generation, 0)  # some may have it before the last agent is informed of the death
        join_at = await self.ordered(joined - 1, [*agents, victim], 0.0)
        return death_s, join_at - victim.ready_at

    async def notice(self) -> float:
        await self.whole()
        await asyncio.sleep(0.5)
        before = dict(self.world.agents)
        victim, generation = next(reversed(before)), next(iter(before.values())).generation
        self.bench.cloud.interrupt(victim, 120.0)
        await self.bench.until("the replacement's host", lambda: self.world.agents.keys() - before.keys())
        new = self.world.agents[next(iter(self.world.agents.keys() - before.keys()))]
        rest = [a for name, a in before.items() if name != victim]
        notice_s = await self.ordered(generation, [*rest, new], 0.0) - new.ready_at
        await self.bench.until("the noticed host's end", lambda: victim not in self.world.agents)
        return notice_s

    async def restart(self) -> dict[str, float]:
        """Kill the dispatcher and start it: seconds from the start of its process."""
        self.bench.stop_dispatcher()
        agents = self.world.agents.values()
        await self.bench.until("all to notice", lambda: not any(a.answered_at for a in agents))
        began, self.dispatcher = time.monotonic(), self.bench.start_dispatcher()
        _, cpu_s = await self.cpu(self.bench.until("all to be answered", lambda: all(a.answered_at for a in agents)))
        answered = sorted(a.answered_at - began for a in agents)
        return {"first_s": answered[0], "last_s": answered[-1], "cpu_s": cpu_s}

    async def status(self) -> tuple[float, float]:
        """Seconds of a look at the status, and of the dispatcher's last tick."""
        began = time.monotonic()
        found = await self.bench.call("GET", "/v1/status")
        return time.monotonic() - began, found.get("tick_s", 0.0)

    def rss_mib(self) -> float:
        return self.dispatcher.memory_info().rss / 2**20


async def measure(bench: Bench, repeat: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    asyncio.get_running_loop().set_exception_handler(without_lost_connections)
    async with World(bench.cloud, bench.ca) as world:
        run = Measured(bench, world, bench.start_dispatcher())
        up_s = await bench.until("all hosts", lambda: sum(bool(a.generation or a.answered_at) for a in
                                                          world.agents.values()) == bench.agents)
        log(f"{bench.agents} hosts launched and connected after {up_s:.1f} s; {run.rss_mib():.0f} MiB")
        spec = JobSpec("bench", argv=("train.py",), min_workers=1, max_workers=bench.agents)
        await bench.call("POST", "/v1/jobs", {"spec": to_json(spec), "secrets": {}, "wait": True})
        figures["first_generation_s"] = await run.whole()
        log(f"one generation of {bench.agents} workers after {figures['first_generation_s']:.1f} s")
        for kind in ("death", "join", "notice"):
            figures[kind] = {"seconds": [], "cpu_s": []}
        for number in range(repeat):
            (death_s, join_s), cpu_s = await run.cpu(run.death(number * bench.agents // repeat))
            figures["death"]["seconds"].append(death_s)
            figures["death"]["cpu_s"].append(cpu_s)
            figures["join"]["seconds"].append(join_s)
            log(f"death {death_s:.2f} s, join {join_s:.2f} s (CPU of both {cpu_s:.2f} s)")
        for _ in range(repeat):
            notice_s, cpu_s = await run.cpu(run.notice())
            figures["notice"]["seconds"].append(notice_s)
            figures["notice"]["cpu_s"].append(cpu_s)
            log(f"notice {notice_s:.2f} s (CPU {cpu_s:.2f} s)")
        await run.whole()
        await asyncio.sleep(2.0)
        _, cpu_s = await run.cpu(asyncio.sleep(REST_S))
        figures["rest"] = {"cpu_percent": 100 * cpu_s / REST_S, "rss_mib": run.rss_mib()}
        looks = [await run.status() for _ in range(repeat)]
        figures["rest"]["status_s"], figures["rest"]["live_tick_s"] = map(statistics.median, zip(*looks, strict=True))
        log("training at rest: " + ", ".join(f"{k} {v:.3f}" for k, v in figures["rest"].items()))
        figures["connect"] = await run.restart()
        await run.whole()
        figures["rss_mib_after"] = run.rss_mib()
        log("restart: " + ", ".join(f"{k} {v:.2f}" for k, v in figures["connect"].items()))
    return figures


def without_lost_connections(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Drop the log lines of lost connections: a killed dispatcher always breaks a thousand of them."""
    if not isinstance(context.get("exception"), (OSError, aiohttp.ClientError)):
        loop.default_exception_handler(context)


def ticks(hosts: int, folder: Path) -> dict[str, float]:
    """Return the seconds of `reconcile.tick` in this process; the cloud answers at once."""
    cloud, ledger = Cloud(hosts), Ledger(folder / "ticks.db")
    wanted = reconcile.Wanted("f", Role.WORKER, hosts, (Need(instance_type=TYPE),))
    reconcile.create(ledger, cloud, "f", Nodes(1, hosts, hosts), time.time())

    def tick() -> float:
        joined = dict.fromkeys(cloud.machines(), "1")
        began = time.perf_counter()
        reconcile.tick(wanted, ledger, cloud, lambda *_: Boot("none"), reconcile.Observed(joined), time.time())
        return time.perf_counter() - began

    first_s = tick()
    tick(), tick()
    idle = [tick() for _ in range(10)]
    busy = []
    for _ in range(5):
        for name in list(cloud.machines())[:CHANGES]:
            cloud.interrupt(name, None)
        busy.append(tick())
        tick()
    ledger.close()
    return {"launch_all_s": first_s, "idle_s": statistics.median(idle), "idle_max_s": max(idle),
            f"{CHANGES}_lost_s": statistics.median(busy), f"{CHANGES}_lost_max_s": max(busy)}


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5, help="deaths and notices")
    parser.add_argument("--ticks", action="store_true", help="only the reconcile tick")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    figures: dict[str, Any] = {"agents": args.agents, "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    log(f"{args.agents} agents; {os.cpu_count()} cores, shared by the dispatcher and the simulated agents; "
        f"load average {os.getloadavg()[0]:.2f}")
    with tempfile.TemporaryDirectory(prefix="spotfleet-scale-") as name:
        figures["tick"] = ticks(args.agents, Path(name))
        log("tick: " + ", ".join(f"{k} {v:.3f}" for k, v in figures["tick"].items()))
        if not args.ticks:
            bench = Bench(Path(name), args.agents)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
            try:
                figures |= asyncio.run(measure(bench, args.repeat))
            finally:
                bench.stop_dispatcher()
    figures["load_after"] = os.getloadavg()[0]
    show(figures, args.output)


def show(figures: dict[str, Any], output: str) -> None:
    if output == "json":
        print(json.dumps(figures, indent=1))
        return
    for kind in ("death", "join", "notice"):
        if kind in figures:
            seconds = figures[kind]["seconds"]
            print(f"{kind:8} median {statistics.median(seconds):.2f} s, max {max(seconds):.2f} s")
    for name in ("tick", "rest", "connect"):
        if name in figures:
            print(f"{name:8} " + ", ".join(f"{k} {v:.3f}" for k, v in figures[name].items()))
    print(f"load average {figures['load_before']:.2f} before, {figures['load_after']:.2f} after, ourselves included")


if __name__ == "__main__":
    main()
