"""Benchmark of checkpoints: ours beside torch.distributed.checkpoint and torch.save, to the same disk in the same run.

    python bench/checkpoint.py [--megabytes 1000] [--workers 3] [--repeat 3] [--folder DIR] [-o json]

The workers are processes that hold the same parameters, as data-parallel ranks do; a gloo group on loopback lets them
begin together. Each system writes the whole state and syncs it, then every worker restores all of it:

- parts: each rank's share as a file for the agent, as without a target; then linked into a folder as on the dispatcher.
  Restored from a copy that one process of the host makes of the folder, comparing sha256, as the agent does. Both ways
  over the network are left out
  Then each worker is a host of its own that restores them over TLS from a process that sends files as the dispatcher
  does: *alone* downloads all; *shared* downloads its share and exchanges the rest with the others
- store: each rank's share into a folder of pieces with the manifest last, as in an object store. Restored through the
  one copy that a worker fetches for all of its host
- dcp: `torch.distributed.checkpoint.save` and `load`; *async* is the pause of its `async_save`
- torch.save: rank 0 writes everything; every worker reads it with `torch.load`
- disk: one process writes and syncs as many bytes, for the disk's own rate

Times are the slowest worker's; *pause* is the time for which a step waits. CPU is the sum of the workers' processor
time, which other work on the machine disturbs least. Peak memory is the sum over the workers of what each added to its
resident memory. Reads come from the page cache.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from aiohttp import web

from spotfleet.agent.boot import AgentBoot
from spotfleet.agent.transfer import Transfers, open_session
from spotfleet.dispatcher.checkpoints import parts
from spotfleet.protocol.checkpoint_files import MANIFEST, share_of
from spotfleet.protocol.messages import Assignment, Checkpoint
from spotfleet.storage import verified
from spotfleet.storage.checkpoint_folder import files_of, read_manifest
from spotfleet.storage.folder import FolderStore, read_range
from spotfleet.train.checkpoint import peers, restore, shards, store_folder
from spotfleet.train.checkpoint.exchange import PartReport
from spotfleet.train.checkpoint.format import Shard
from spotfleet.train.checkpoint.host_copy import HostFolder
from spotfleet.train.comm.gloo import GlooGroup
from spotfleet.train.state.copies import Buffer
from spotfleet.transport import certs
from spotfleet.worker.store import open_store

LIMIT_S = 1800.0
SIDE = 1024  # rows are tensors of SIDE x SIDE floats: 4 MiB
SYSTEMS = ("parts", "store", "dcp", "torch.save")
WAYS = ("alone", "shared")  # in which hosts restore from the dispatcher
LOCAL = "127.0.0.1"


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---- one worker


class Worker:
    """One rank: its state, and what each system does with it."""

    def __init__(self, rank: int, world: int, megabytes: int, folder: Path) -> None:
        self.rank, self.world, self.folder = rank, world, folder
        torch.manual_seed(0)
        count = max(1, round(megabytes * 1e6 / (4 * SIDE * SIDE)))
        self.tensors = [torch.rand(SIDE, SIDE) for _ in range(count)]
        self.rows = [shards.TensorRow((("model", f"{n}.weight"),), torch.float32, (SIDE, SIDE), True)
                     for n in range(count)]
        self.bytes = sum(t.numel() * t.element_size() for t in self.tensors)
        self.made: dict[str, Checkpoint] = {}
        self.turn = 0

    def shard(self) -> Shard:
        values = [piece.view_of(self.tensors[piece.row]) for piece in shards.plan(self.rows, self.world)[self.rank]]
        return Shard(1, 1, self.rank, self.world, self.rows, values)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return {f"{n}.weight": tensor for n, tensor in enumerate(self.tensors)}

    def place(self, system: str) -> Path:
        return self.folder / f"{system}-{self.turn}"

    def gather(self, own: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, own)
        return found

    def reports(self, write: Callable[[Callable[[float], list[PartReport]]], tuple[Any, PartReport]]
                ) -> tuple[Any, PartReport]:
        """Write this rank's share; rank 0 gets the others' reports, as over the bootstrap store."""
        if self.rank == 0:
            return write(lambda own_s: self.gather(None)[1:])
        done, report = write(lambda own_s: [])
        self.gather(report)
        return done, report

    # ---- writing; each returns the pause in seconds

    def copied(self) -> tuple[Shard, float]:
        """Copy the share to memory that the product keeps warm; also return how long that took."""
        live = self.shard()
        began = time.monotonic()
        copy = replace(live, values=self.warm.fill(live.values))
        self.warm.wait()
        return copy, time.monotonic() - began

    def write_parts(self) -> float:
        copy, pause_s = self.copied()
        place = self.place("parts")
        done, _ = self.reports(lambda others: store_folder.write_here(copy, place / str(self.rank), others))
        found = self.gather(done)
        if self.rank == 0:
            arrived = parts.Parts(place)
            for piece in [piece for made in found for piece in files_of(made)]:
                os.link(piece.path, place / "arrived")
                arrived.keep(piece, place / "arrived")
            whole = parts.assemble(arrived.ready()[0], place / "whole")
            self.made["parts"] = replace(whole, path=str(place / "whole"))
        self.made["parts"] = self.gather(self.made.get("parts"))[0]
        return pause_s

    def write_store(self) -> float:
        copy, pause_s = self.copied()
        done, _ = self.reports(lambda others: store_folder.write(copy, f"file://{self.place('store')}", others))
        os.sync()  # an object store answers once the bytes are safe
        self.made["store"] = self.gather(done)[0]
        return pause_s

    def write_dcp(self) -> float:
        began = time.monotonic()
        dcp.save(self.state, checkpoint_id=self.place("dcp"))
        return time.monotonic() - began

    def write_torch(self) -> float:
        began = time.monotonic()
        if self.rank == 0:
            self.place("torch.save").mkdir()
            with (self.place("torch.save") / "state.pt").open("wb") as out:
                torch.save(self.state, out)
                out.flush()
                os.fsync(out.fileno())
        return time.monotonic() - began

    # ---- restoring; each leaves all values in `into`

    def restore_parts(self, into: list[torch.Tensor]) -> None:
        named = self.made["parts"]
        here = Path(named.path).with_name("restored")
        if self.rank == 0:
            listed = {name: entry.sha256 for name, entry in read_manifest(Path(named.path)).files.items()}
            for name, digest in {**listed, MANIFEST: named.digest}.items():
                assert FolderStore(here).put(name, read_range(Path(named.path) / name)) == digest
            verified.note(here, named.digest)
        dist.barrier()
        with restore.opened(replace(named, path=str(here))) as held:
            self.install(held.tensors, into)

    @property
    def hosts(self) -> list[str]:
        return [f"h{rank}" for rank in range(self.world)]

    def download(self, way: str, into: Path) -> None:
        """Download all or this host's share of the parts from the dispatcher to the folder `into`."""
        named, at = self.made["parts"], json.loads((self.folder / "dispatcher.json").read_text())
        boot = AgentBoot("fleet", self.hosts[self.rank], "local", 1, at["url"], at["ca"], "token")

        async def fetch() -> None:
            transfers = Transfers(open_session(boot, ""), SimpleNamespace(url=at["url"]))  # type: ignore[arg-type]
            await transfers.checkpoint_share(
                Path(named.path).parent.name, named, into, lambda size: None,
                lambda files: share_of(files, self.hosts, self.hosts[self.rank]) if way == "shared" else list(files))
            await transfers.close()

        asyncio.run(fetch())

    def restore_from_dispatcher(self, way: str, into: list[torch.Tensor]) -> None:
        here = self.place(way).with_name(f"{way}-{self.rank}-{self.turn}")
        self.download(way, here)
        named = replace(self.made["parts"], path=str(here))
        if way == "alone":
            verified.note(here, named.digest)
        else:
            served = open_store(LOCAL, "key") if self.rank == 0 else (None, "")
            members = tuple(f"{host}/0/1" for host in self.hosts)
            place = Assignment(self.turn + 1, self.rank, members, self.gather(served[1])[0])
            group = GlooGroup(place, "job", LOCAL, "key")
            group.announces = peers.announcement(named)
            group.form()
            peers.complete(group, named, lambda: None)
            dist.barrier()
            group.retire().join()
        with restore.opened(named) as held:
            self.install(held.tensors, into)

    def restore_store(self, into: list[torch.Tensor]) -> None:
        place = HostFolder(self.place("store").with_name(f"host-{self.turn}"), self.world)
        with restore.opened_url(self.made["store"], place) as held:
            self.install(held.tensors, into)

    def restore_dcp(self, into: list[torch.Tensor]) -> None:
        dcp.load({f"{n}.weight": tensor for n, tensor in enumerate(into)}, checkpoint_id=self.place("dcp"))

    def restore_torch(self, into: list[torch.Tensor]) -> None:
        found = torch.load(self.place("torch.save") / "state.pt", weights_only=True)
        self.install([found[f"{n}.weight"] for n in range(len(into))], into)

    def install(self, found: Sequence[torch.Tensor], into: list[torch.Tensor]) -> None:
        for tensor, value in zip(into, found, strict=True):
            tensor.copy_(value)

    # ---- measuring

    def measured(self, what: str, work: Callable[[], Any]) -> tuple[dict[str, float], Any]:
        """Return the seconds that `work` took on this rank, those of the processor, the memory that it added at most
        (MB), and its result."""
        gc.collect()
        dist.barrier()
        before = resident_mb()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        began, cpu_began = time.monotonic(), time.process_time()
        result = work()
        took = {f"{what}_s": time.monotonic() - began, f"{what}_cpu_s": time.process_time() - cpu_began}
        return took | {f"{what}_mb": max(0.0, resident_mb("VmHWM") - before)}, result

    def round(self, turn: int) -> dict[str, dict[str, float]]:
        self.turn, found = turn, {}
        writes = {"parts": self.write_parts, "store": self.write_store, "dcp": self.write_dcp,
                  "torch.save": self.write_torch}
        restores = {"parts": self.restore_parts, "store": self.restore_store, "dcp": self.restore_dcp,
                    "torch.save": self.restore_torch}
        order = SYSTEMS if turn % 2 == 0 else SYSTEMS[::-1]
        for system in order:
            if system in ("parts", "store"):
                self.warm = Buffer(self.shard().values)
            write, pause_s = self.measured("write", writes[system])
            dist.barrier()
            self.warm = None  # type: ignore[assignment]
            into = [torch.zeros_like(t) for t in self.tensors]
            restored, _ = self.measured("restore", lambda system=system, into=into: restores[system](into))
            assert all(torch.equal(a, b) for a, b in zip(self.tensors, into, strict=True)), f"{system}: other values"
            found[system] = {"pause_s": pause_s, **write, **restored}
            for way in (WAYS if turn % 2 == 0 else WAYS[::-1]) if system == "parts" else ():
                for tensor in into:
                    tensor.zero_()
                before = self.sent_mb()
                took, _ = self.measured(way, lambda way=way, into=into: self.restore_from_dispatcher(way, into))
                assert all(torch.equal(a, b) for a, b in zip(self.tensors, into, strict=True)), f"{way}: other values"
                dist.barrier()
                found[system] |= took | {f"{way}_sent": self.sent_mb() - before}
            del into
            dist.barrier()
            if self.rank == 0:
                for path in self.folder.glob(f"*-{turn}"):
                    shutil.rmtree(path)
            dist.barrier()
        found["dcp"]["async_pause_s"] = self.async_pause()
        return found

    def sent_mb(self) -> float:
        """Return the megabytes that have left the dispatcher, the same on all workers."""
        found = float((self.folder / "sent").read_text()) if self.rank == 0 else 0.0
        return float(self.gather(found)[0]) / 1e6

    def async_pause(self) -> float:
        """Return how long `async_save` holds up a step."""
        dist.barrier()
        began = time.monotonic()
        saving = dcp.async_save(self.state, checkpoint_id=self.place("async"))
        pause_s = time.monotonic() - began
        saving.result()
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.place("async"))
        return pause_s


def resident_mb(field: str = "VmRSS") -> float:
    (found,) = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) / 1000


def be_worker(rank: int, world: int, megabytes: int, repeat: int, folder: Path) -> None:
    """Be one rank, and print its figures."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    worker = Worker(rank, world, megabytes, folder)
    print(json.dumps({"bytes": worker.bytes, "rounds": [worker.round(turn) for turn in range(repeat)]}))
    dist.destroy_process_group()


# ---- all of them


@contextmanager
def dispatcher(folder: Path) -> Iterator[None]:
    """Send the parts below `folder` over TLS in another thread; the number of bytes sent is in the file `sent`."""
    made, sent, stop = certs.make("fleet", time.time()), 0, threading.Event()
    (folder / "cert.pem").write_text(made.cert)
    (folder / "key.pem").write_text(made.key)
    (folder / "sent").write_text("0")

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        path = folder / request.match_info["turn"] / "whole" / request.match_info["name"]
        sent += path.stat().st_size
        (folder / "sent").write_text(str(sent))
        return web.FileResponse(path)

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/v1/jobs/{turn}/checkpoints/1/{name}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        tls = certs.server_context(folder / "cert.pem", folder / "key.pem")
        await web.TCPSite(runner, LOCAL, 0, ssl_context=tls).start()
        url = f"https://{LOCAL}:{runner.addresses[0][1]}"
        (folder / "dispatcher.json").write_text(json.dumps({"url": url, "ca": made.ca}))
        await asyncio.to_thread(stop.wait)
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def disk_s(folder: Path, size: int) -> float:
    block = os.urandom(1 << 22)
    began = time.monotonic()
    with (folder / "disk").open("wb") as out:
        for _ in range(size // len(block)):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    took_s = time.monotonic() - began
    (folder / "disk").unlink()
    return took_s


def measure(megabytes: int, workers: int, repeat: int, under: Path | None) -> dict[str, Any]:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="spotfleet-checkpoint-", dir=under) as name, dispatcher(Path(name)):
        began = [sys.executable, __file__, "--megabytes", str(megabytes), "--workers", str(workers), "--repeat",
                 str(repeat), "--folder", name]
        children = [subprocess.Popen([*began, "--rank", str(rank)], text=True, stdout=subprocess.PIPE)
                    for rank in range(workers)]
        try:
            outs = [child.communicate(timeout=LIMIT_S)[0] for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        if any(child.returncode for child in children):
            raise SystemExit(f"workers ended with {[child.returncode for child in children]}")
        ranks = [json.loads(out.splitlines()[-1]) for out in outs]
        disk = statistics.median(disk_s(Path(name), ranks[0]["bytes"]) for _ in range(repeat))
    found: dict[str, Any] = {"megabytes": ranks[0]["bytes"] / 1e6, "workers": workers, "repeat": repeat, "disk_s": disk,
                             "load_before": load, "load_after": os.getloadavg()[0], "cores": os.cpu_count()}
    for system in SYSTEMS:
        rounds = [[rank["rounds"][turn][system] for rank in ranks] for turn in range(repeat)]
        found[system] = {field: statistics.median(of_all(field, [rank[field] for rank in at]) for at in rounds)
                         for field in rounds[0][0]}
    return found


def of_all(field: str, ranks: list[float]) -> float:
    """Return the sum of the workers' memory or processor time, or the time of the slowest."""
    return sum(ranks) if field.endswith(("_mb", "_cpu_s")) else max(ranks)


def table(found: dict[str, Any]) -> list[str]:
    """Return the rows for RESULTS.md."""
    rows = ["| system | write s | MB/s | CPU s | pause s | peak MB | restore s | MB/s | CPU s | peak MB |",
            "|---|---|---|---|---|---|---|---|---|---|"]
    megabytes = found["megabytes"]
    for system in SYSTEMS:
        at = found[system]
        rows.append(f"| {system} | {at['write_s']:.1f} | {megabytes / at['write_s']:.0f} | {at['write_cpu_s']:.1f} | "
                    f"{at['pause_s']:.2f} | {at['write_mb']:.0f} | {at['restore_s']:.1f} | "
                    f"{megabytes / at['restore_s']:.0f} | {at['restore_cpu_s']:.1f} | {at['restore_mb']:.0f} |")
    rows.append(f"| disk alone | {found['disk_s']:.1f} | {megabytes / found['disk_s']:.0f} | | | | | | | |")
    dcp_, plain = found["dcp"], found["torch.save"]
    for system in ("parts", "store"):
        at = found[system]
        rows.append("")
        rows.append(f"{system}: write {dcp_['write_s'] / at['write_s']:.2f} times as fast as dcp and "
                    f"{plain['write_s'] / at['write_s']:.2f} times torch.save; restore "
                    f"{dcp_['restore_s'] / at['restore_s']:.2f} and {plain['restore_s'] / at['restore_s']:.2f} times; "
                    f"pause {at['pause_s'] / dcp_['pause_s']:.3f} of dcp's, "
                    f"{at['pause_s'] / dcp_['async_pause_s']:.2f} of its async_save's "
                    f"({dcp_['async_pause_s']:.2f} s), {at['pause_s'] / plain['pause_s']:.3f} of torch.save's.")
    rows += ["", f"| {found['workers']} hosts restore | left the dispatcher, MB | s | MB/s | CPU s | peak MB |",
             "|---|---|---|---|---|---|"]
    ours = found["parts"]
    for what, sent, at, field in (("each all from the dispatcher", ours["alone_sent"], ours, "alone"),
                                  ("each a share, the rest from peers", ours["shared_sent"], ours, "shared"),
                                  ("torch.distributed.checkpoint, from one disk", 0.0, dcp_, "restore")):
        rows.append(f"| {what} | {sent:.0f} | {at[f'{field}_s']:.1f} | {megabytes / at[f'{field}_s']:.0f} | "
                    f"{at[f'{field}_cpu_s']:.1f} | {at[f'{field}_mb']:.0f} |")
    return [*rows, "", f"{megabytes:.0f} MB, {found['workers']} workers, medians of {found['repeat']}; "
            f"{found['cores']} cores, load average {found['load_before']:.1f} before and {found['load_after']:.1f} "
            "after, the benchmark's own processes included."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", "--size", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3, help="turns, each of all systems in alternating order")
    parser.add_argument("--folder", type=Path, help="where to write; default: the folder for temporary files")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return be_worker(args.rank, args.workers, args.megabytes, args.repeat, args.folder)
    found = measure(args.megabytes, args.workers, args.repeat, args.folder)
    if args.output == "json":
        print(json.dumps(found, indent=1))
        return
    for line in table(found):
        print(line)


if __name__ == "__main__":
    main()
