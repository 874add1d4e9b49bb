"""Benchmark of a dispatcher with connections that have no token: its memory, and how fast it serves members meanwhile.

    python bench/strangers.py [--silent 10000] [--tls 1000] [-o json]

The fleet is one of the `local` provider with one host. Four processes keep the connections open, each from its own
addresses of 127.0.0.0/8, and open each one again after REOPEN_S when the dispatcher closes it. First the connections
send nothing, then as many as `--tls` complete TLS and send half a request. Resident memory is that of the dispatcher's
process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from asyncio import sslproto
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from spotfleet.addresses import split
from spotfleet.api import Fleet
from spotfleet.model import FleetSpec, Need, Nodes
from spotfleet.providers.local import LocalCloud

PROCESSES = 4
ADDRESSES = 4  # source addresses of each process
LIMIT_S = 120.0
HOLD_S = 20.0  # time with all connections, longer than it takes to replace closed ones
REOPEN_S = 10.0
ASKED = 20  # times that `status` is asked in each phase


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def keep_open(address: str, port: int, number: int, count: int, tls: ssl.SSLContext | None) -> None:
    """Keep `count` connections open until stdin ends; print a line once each was open."""
    opened, ended = 0, asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, ended.set)  # it ends with its parent

    async def one(source: str) -> None:
        nonlocal opened
        first = True
        while True:
            try:
                reader, writer = await asyncio.open_connection(address, port, local_addr=(source, 0), ssl=tls)
                if tls:
                    writer.write(b"GET /v1/status HTTP/1.1\r\nX-Half: ")
                opened, first = opened + first, False
                await reader.read()
                writer.close()
            except OSError:
                pass
            await asyncio.sleep(REOPEN_S)

    tasks = []
    for i in range(count):
        tasks.append(asyncio.create_task(one(f"127.77.{number}.{i % ADDRESSES + 1}")))
        if i % 50 == 49:
            await asyncio.sleep(0.1)
    while opened < count and not tls and not ended.is_set():  # connections with TLS wait for a place
        await asyncio.sleep(0.1)
    print("open", flush=True)
    await ended.wait()


@contextmanager
def strangers(url: str, count: int, tls: bool) -> Iterator[None]:
    """Hold the connections while the body runs."""
    command = [sys.executable, __file__, "--client", url, "--silent", str(count // PROCESSES)]
    found = [subprocess.Popen([*command, "--number", str(n), *(["--tls", "1"] if tls else ["--tls", "0"])],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for n in range(PROCESSES)]
    try:
        for process in found:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n", "a client process has failed"
        yield
    finally:
        for process in found:
            process.kill()
        for process in found:
            process.communicate()


def measure(fleet: Fleet, dispatcher: psutil.Process, phase: str) -> dict[str, object]:
    """Ask for the status ASKED times; return memory, descriptors and times."""
    times = []
    for _ in range(ASKED):
        began = time.monotonic()
        status = fleet.status()
        times.append(time.monotonic() - began)
        assert [h.state for h in status.hosts if h.role == "worker"] == ["up"], f"a host is lost: {status.hosts}"
    row = {"phase": phase, "rss_mb": round(dispatcher.memory_info().rss / 1e6, 1), "sockets": dispatcher.num_fds(),
           "status_median_s": round(statistics.median(times), 3), "status_max_s": round(max(times), 3)}
    log(f"{phase}: {row['rss_mb']} MB, {row['sockets']} descriptors; status {row['status_median_s']:.3f} s, at most "
        f"{row['status_max_s']:.3f} s")
    return row


def run(home: Path, silent: int, tls: int) -> list[dict[str, object]]:
    cloud = LocalCloud(home)
    fleet = Fleet(FleetSpec("bench", any_of=(Need(instance_type="cpu.small"),), nodes=Nodes(1, 1, 1)), home)
    try:
        fleet.up(timeout_s=LIMIT_S)
        own = next(h.host for h in fleet.status().hosts if h.role == "dispatcher")
        process = psutil.Process(next(t.processes[0] for t in cloud.truth() if t.request_id == own))
        url = fleet.client.endpoint.url
        rows = [measure(fleet, process, "before")]
        for count, with_tls, phase in ((silent, False, "silent"), (tls, True, "with TLS")):
            with strangers(url, count, with_tls):
                rows.append(measure(fleet, process, f"{count} {phase}, at once"))
                time.sleep(HOLD_S)
                rows.append(measure(fleet, process, f"{count} {phase}, after {HOLD_S:.0f} s"))
            time.sleep(3.0)
            rows.append(measure(fleet, process, "all closed"))
        fleet.down(discard=True)
        return rows
    finally:
        cloud.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--silent", type=int, default=10_000)
    parser.add_argument("--tls", type=int, default=1_000)
    parser.add_argument("--client", default="", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    args = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if args.client:
        sslproto.SSLProtocol.max_size = 16 << 10  # 256 KiB for each connection by default
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        address, port = split(args.client.removeprefix("https://"))
        asyncio.run(keep_open(address, port, args.number, args.silent, context if args.tls else None))
        return
    os.environ["SPOTFLEET_LOCAL_OWNER_PID"] = str(os.getpid())
    load = os.getloadavg()[0]
    log(f"{os.cpu_count()} cores, load average {load:.2f}, {most} file descriptors")
    with tempfile.TemporaryDirectory(prefix="spotfleet-strangers-") as home:
        rows = run(Path(home), args.silent, args.tls)
    figures = {"load_before": load, "load_after": os.getloadavg()[0], "rows": rows}
    if args.output == "json":
        print(json.dumps(figures, indent=1))
    else:
        grown = max(float(str(row["rss_mb"])) for row in rows) - float(str(rows[0]["rss_mb"]))
        print(f"at most {grown:.1f} MB more with {args.silent} silent and {args.tls} TLS connections; load average "
              f"{load:.1f} to {figures['load_after']:.1f}")


if __name__ == "__main__":
    main()
