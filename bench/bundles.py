"""Benchmark of a working directory's way from laptop to dispatcher to one host, beside rsync, on loopback.

    python bench/bundles.py [--files 20000] [--megabytes 300] [-o json]

The tree is synthetic: most files are small text, a tenth of the bytes are one large file that cannot be compressed.
The dispatcher is `python -m spotfleet.dispatcher`, a separate process, over TLS; the laptop is
`api/lifecycle/upload.py`, the host `agent/files/blobs.py`, both in this process. rsync copies the same two ways, from
and to its own daemon, without logs and encryption, so it has less to do: it is timed as it is and with -z.

- first: nothing is there yet        - again: nothing has changed
- line: one line of one small file has changed; `moved` is the bytes sent for it, manifest included
- unpack: from pieces on the host to the working directory of a job
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import aiohttp
from scale import ADMIN, HOST, Bench

from spotfleet.agent.endpoint import DispatcherEndpoint
from spotfleet.agent.files.blobs import Blobs
from spotfleet.agent.transfer import Transfers
from spotfleet.api.lifecycle.upload import Shipped, ship
from spotfleet.transport import certs
from spotfleet.transport.client import DispatcherClient, Endpoint

WORDS = ["alpha", "beta", "loss", "model", "batch", "tensor", "rank", "gradient", "return", "import", "def", "class"]
SETTLE_S = 3.0  # after a write, until its time is old enough to be trusted


def plant(folder: Path, files: int, megabytes: int) -> None:
    rng = random.Random(1)
    text = " ".join(rng.choices(WORDS, k=200_000))
    each = megabytes * 900_000 // files
    for number in range(files):
        path = folder / f"part{number % 97:02d}" / f"sub{number % 7}" / f"{number:07d}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        start, size = rng.randrange(len(text) // 2), rng.randrange(1, 2 * each)
        path.write_text(f"# {number}\n" + (text[start:] * (1 + size // (len(text) // 2)))[:size])
    (folder / "weights.bin").write_bytes(rng.randbytes(megabytes * 100_000))


class Ours:
    def __init__(self, folder: Path, work: Path) -> None:
        self.bench, self.work, self.folder = Bench(folder, 1), work, folder
        self.bench.start_dispatcher()
        self.client = DispatcherClient(Endpoint(f"https://{HOST}:{self.bench.port}", ADMIN, self.bench.ca))
        self.messages: list[str] = []

    def laptop(self) -> Shipped:
        return ship(self.client, self.work, {}, self.folder / "house", (), self.messages.append)

    async def host(self, shipped: Shipped, name: str) -> tuple[float, float]:
        """Seconds to fetch, and to unpack."""
        connector = aiohttp.TCPConnector(ssl=certs.client_context(self.bench.ca))
        async with aiohttp.ClientSession(connector=connector, headers={"Authorization": f"Bearer {ADMIN}"}) as session:
            blobs = Blobs(self.folder / "host", Transfers(session, DispatcherEndpoint(self.client.endpoint.url)))
            into, marks = self.folder / "host" / name, [time.monotonic()]

            def log(words: str) -> None:
                if words.startswith("unpacking"):
                    marks.append(time.monotonic())

            into.mkdir(parents=True)
            await blobs.fill(name, shipped.sha256, into, log)
            return marks[1] - marks[0], time.monotonic() - marks[1]

    def held(self) -> int:
        return sum(path.stat().st_size for path in (self.bench.home / "bundles").iterdir())

    def measure(self, name: str) -> dict[str, float]:
        before, began = self.held() if name != "first" else 0, time.monotonic()
        shipped = self.laptop()
        up_s = time.monotonic() - began
        fetch_s, unpack_s = asyncio.run(self.host(shipped, name))
        return {"up_s": up_s, "down_s": fetch_s, "unpack_s": unpack_s, "moved": self.held() - before}

    def close(self) -> None:
        self.bench.stop_dispatcher()


class Rsync:
    def __init__(self, folder: Path, work: Path, *flags: str) -> None:
        self.work, self.host, self.flags = work, folder / "host", flags
        self.there = folder / "there"
        self.there.mkdir(parents=True)
        self.host.mkdir()
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port = probe.getsockname()[1]
        config = folder / "rsyncd.conf"
        config.write_text(f"use chroot = no\nlog file = /dev/null\naddress = {HOST}\nport = {self.port}\n"
                          f"[work]\npath = {self.there}\nread only = no\nuid = 0\ngid = 0\n")
        self.daemon = subprocess.Popen(["rsync", "--daemon", "--no-detach", f"--config={config}"])
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and socket.socket().connect_ex((HOST, self.port)):
            time.sleep(0.05)

    def measure(self) -> dict[str, float]:
        began = time.monotonic()
        moved = self._copy(f"{self.work}/", f"rsync://{HOST}:{self.port}/work/")
        up_s = time.monotonic() - began
        began = time.monotonic()
        self._copy(f"rsync://{HOST}:{self.port}/work/", f"{self.host}/")
        return {"up_s": up_s, "down_s": time.monotonic() - began, "moved": moved}

    def _copy(self, source: str, target: str) -> int:
        output = subprocess.run(["rsync", "-a", "--stats", *self.flags, source, target], check=True, text=True,
                              capture_output=True, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin:/usr/local/bin"}).stdout
        return sum(int(n.replace(",", "")) for n in re.findall(r"Total bytes (?:sent|received): ([\d,]+)", output))

    def close(self) -> None:
        self.daemon.terminate()
        self.daemon.wait()


def change(work: Path) -> None:
    path = sorted(work.glob("part50/*/*.py"))[3]
    path.write_text(path.read_text() + "\nx = 1\n")


def run(files: int, megabytes: int) -> dict[str, dict[str, dict[str, float]]]:
    folder = Path(tempfile.mkdtemp(prefix="bench-bundles-"))
    closing: list[Ours | Rsync] = []
    try:
        (work := folder / "work").mkdir()
        plant(work, files, megabytes)
        (folder / "ours").mkdir()
        closing.append(ours := Ours(folder / "ours", work))
        ways: dict[str, Rsync] = {}
        for name, flags in (("rsync", ()), ("rsync -z", ("-z",))) if shutil.which("rsync") else ():
            ways[name] = Rsync(folder / name.replace(" ", ""), work, *flags)
            closing.append(ways[name])
        time.sleep(SETTLE_S)
        found: dict[str, dict[str, dict[str, float]]] = {}
        for step in ("first", "again", "line"):
            if step == "line":
                change(work)
            found[step] = {"spotfleet": ours.measure(step)} | {name: way.measure() for name, way in ways.items()}
        found["memory"] = {"spotfleet": {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}}
        return found
    finally:
        for one in closing:
            one.close()
        shutil.rmtree(folder, ignore_errors=True)


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = ["| step | system | to the dispatcher, s | to a host, s | unpacked, s | moved, MB | of rsync -z's time |",
             "|---|---|---|---|---|---|---|"]
    for step in ("first", "again", "line"):
        for system, row in found[step].items():
            whole = sum(row.get(k, 0.0) for k in ("up_s", "down_s", "unpack_s"))
            peer = found[step].get("rsync -z")
            ratio = f"{whole / (peer['up_s'] + peer['down_s']):.2f}" if peer else ""
            unpack = f"{row['unpack_s']:.2f}" if "unpack_s" in row else ""
            lines.append(f"| {step} | {system} | {row['up_s']:.2f} | {row['down_s']:.2f} | {unpack} | "
                         f"{row['moved'] / 1e6:.2f} | {ratio} |")
    return "\n".join([*lines, "", f"peak memory of this process {found['memory']['spotfleet']['peak_mib']:.0f} MiB"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    asked = parser.parse_args()
    found = run(asked.files, asked.megabytes)
    print(json.dumps(found, indent=1) if asked.output == "json" else table(found))


if __name__ == "__main__":
    main()
