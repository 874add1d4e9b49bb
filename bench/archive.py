"""Benchmark of results on their way home: the archive by manifest and ranges, beside rsync over ssh, cp and sha256sum.

    python bench/archive.py [--megabytes 1000] [--repeat 1] [-o json]

One fleet of the `local` provider: a dispatcher's process and one host. Its job's results are random bytes: a checkpoint
of four fifths, sent as an agent sends it, and outputs of 5 MB each, written to the dispatcher's disk.

- fetch: a process of its own copies all of it over TLS on loopback, as `spotfleet down` does, and syncs the files
- rsync: `rsync -a --inplace` of the same files to an empty folder, over ssh to an own sshd on a port of the kernel
- cp + sha256sum: the same bytes once copied and once hashed, by the tools themselves
- killed: a fetch gets SIGKILL halfway; the next one must move no more than the rest
- down: with a fifth more of outputs, the time of `down` from the end of the last host until the results are here,
  beside cp + sha256sum of these bytes

Aims: fetch >= 60 % of rsync's rate; the archive's part of `down` <= 3 times cp + sha256sum.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from urllib.parse import urlencode

from spotfleet.api import Fleet, transfers
from spotfleet.dispatcher.http.auth import host_token
from spotfleet.model import FleetSpec, JobSpec, Need, Nodes
from spotfleet.protocol.archive import LEDGER
from spotfleet.providers.local import LocalCloud
from spotfleet.storage import atomic
from spotfleet.transport.client import DispatcherClient, Endpoint

NAME, LIMIT_S = "archive", 300.0
OUTPUT_BYTES = 5_000_000
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
HOST_KEY = ["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o",
            "LogLevel=ERROR", "-o", "IdentitiesOnly=yes"]
CONFIG = """ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
UseDNS no
"""


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---- the fleet and its results


@dataclass
class World:
    """One fleet with one running job."""

    fleet: Fleet
    home: Path
    job: str
    host: str
    generation: int
    worker: str

    @property
    def files(self) -> Path:
        """The job's folder on the dispatcher's disk."""
        (found,) = (self.home / "local" / "hosts" / f"{NAME}-d-0").glob(f"jobs/{self.job}")
        return found

    def keep_checkpoint(self, size: int) -> None:
        """Send a checkpoint as the host's agent does."""
        folder = self.fleet.home.folder(NAME)
        data = random_file(self.home / "sent", size)
        with data.open("rb") as file:
            query = {"generation": self.generation, "digest": file_digest(file, "sha256").hexdigest()}
        endpoint = self.fleet.client.endpoint
        sender = DispatcherClient(Endpoint(endpoint.url, host_token(folder.keys.fleet_secret, self.host), folder.ca))
        sender._call("PUT", f"/v1/jobs/{self.job}/checkpoints/1?{urlencode(query)}", body=data)
        data.unlink()

    def add_outputs(self, size: int, folder: str) -> None:
        place = self.files / "outputs" / self.worker.replace("/", "@") / folder
        place.mkdir(parents=True)
        for number in range(size // OUTPUT_BYTES):
            random_file(place / f"{number}.bin", OUTPUT_BYTES)


def random_file(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        for at in range(0, size, 1 << 24):
            file.write(os.urandom(min(size - at, 1 << 24)))
    return path


@contextlib.contextmanager
def world(home: Path) -> Iterator[World]:
    spec = FleetSpec(NAME, any_of=(Need(instance_type="cpu.small"),), nodes=Nodes(1, 1, 1))
    fleet = Fleet(spec, home)
    try:
        fleet.up(timeout_s=LIMIT_S)
        job = fleet.client.submit(JobSpec("bench", run="sleep 3600", min_workers=1, max_workers=1), {}, wait=True)
        wait("a worker", lambda: fleet.job(job).status().workers)
        status = fleet.job(job).status()
        worker = status.workers[0].worker
        yield World(fleet, home, job, worker.split("/")[0], status.generation, worker)
    finally:
        LocalCloud(home).shutdown()


def wait(what: str, ready: object) -> None:
    until = time.monotonic() + LIMIT_S
    while not ready():  # type: ignore[operator]
        if time.monotonic() > until:
            raise SystemExit(f"{what}: not within {LIMIT_S:g} s")
        time.sleep(0.1)


# ---- what is measured


def fetch_in_child(home: Path, draft: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, __file__, "--fetch", str(draft), "--home", str(home)], text=True,
                            stdout=subprocess.PIPE)


def fetch_here(home: Path, draft: Path) -> None:
    """Be that process: copy the archive to `draft`, print seconds, bytes and peak memory."""
    client = Fleet(NAME, home).client
    began = time.monotonic()
    found = transfers.fetch(client, draft, log, "  fetch")
    assert found is not None
    atomic.sync_tree(found.files)
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(json.dumps({"s": time.monotonic() - began, "moved": found.moved, "peak_mb": int(peak) / 1000}))


def fetched(child: subprocess.Popen[str]) -> dict[str, float]:
    out, _ = child.communicate(timeout=LIMIT_S)
    if child.returncode:
        raise SystemExit(f"the fetch ended with status {child.returncode}")
    return json.loads(out)


def size_of(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            found += path.stat().st_size if path.is_file() else 0
    return found


def killed(home: Path, draft: Path, total: int) -> dict[str, float]:
    """Kill a fetch halfway, and let another go on."""
    child = fetch_in_child(home, draft)
    wait("half of the bytes", lambda: size_of(draft) > total / 2 or child.poll() is not None)
    child.send_signal(signal.SIGKILL)
    child.wait()
    (draft / "files" / LEDGER).unlink(missing_ok=True)  # it has new events since, and is read again
    here = size_of(draft)
    found = fetched(fetch_in_child(home, draft))
    return {"here_mb": here / 1e6, "moved_mb": found["moved"] / 1e6, "s": found["s"],
            "at_most_the_rest": found["moved"] <= size_of(draft / "files") - here}


@contextlib.contextmanager
def own_sshd(folder: Path) -> Iterator[list[str]]:
    """Start a sshd; yield the ssh command that reaches it."""
    folder.mkdir()
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (folder / "config").write_text(CONFIG.format(port=port, folder=folder))
    with (folder / "log").open("wb") as said:
        daemon = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "config")], stdin=subprocess.DEVNULL,
                                  stdout=said, stderr=said)
    ssh = ["ssh", *HOST_KEY, "-i", str(folder / "user_key"), "-p", str(port), "-l", getpass.getuser()]
    try:
        wait("sshd", lambda: not subprocess.run([*ssh, "127.0.0.1", "true"], capture_output=True).returncode)
        yield ssh
    finally:
        daemon.kill()
        daemon.wait()


def rsync_s(ssh: list[str], source: Path, into: Path) -> float:
    began = time.monotonic()
    subprocess.run(["rsync", "-a", "--inplace", "-e", " ".join(ssh), f"127.0.0.1:{source}/", f"{into}/"], check=True)
    atomic.sync_tree(into)
    return time.monotonic() - began


def cp_and_sha256sum_s(source: Path, into: Path) -> tuple[float, float]:
    began = time.monotonic()
    subprocess.run(["cp", "-r", str(source), str(into)], check=True)
    copied = time.monotonic()
    files = [str(path) for path in into.rglob("*") if path.is_file()]
    subprocess.run(["sha256sum", *files], check=True, stdout=subprocess.DEVNULL)
    return copied - began, time.monotonic() - copied


def down_s(found: World) -> tuple[float, float]:
    """(seconds of the archive's part, of all of `down`)"""
    marks: dict[str, float] = {}
    cloud, began = LocalCloud(found.home), time.monotonic()
    real = transfers.fetch

    def fetch(*args: object, **options: object) -> object:
        left = [m.request_id for m in cloud.truth() if m.processes and not m.request_id.startswith(f"{NAME}-d-")]
        assert not left, f"still billed while the archive moves: {left}"
        marks["from"] = time.monotonic()
        return real(*args, **options)  # type: ignore[arg-type]

    transfers.fetch = fetch  # type: ignore[assignment]
    try:
        found.fleet.down(progress=lambda line: (marks.setdefault(line.partition(":")[0], time.monotonic()),
                                                log(f"  {time.monotonic() - began:5.1f} s  {line}"))[1])
    finally:
        transfers.fetch = real
    ended = next(at for name, at in marks.items() if at > marks["from"] and not re.match("copying", name))
    return ended - marks["from"], time.monotonic() - began


def missing() -> str:
    """What of rsync's side is not installed; empty if nothing."""
    tools = {"rsync": shutil.which("rsync"), "ssh": shutil.which("ssh"), "ssh-keygen": shutil.which("ssh-keygen"),
             "sshd": Path(SSHD).exists()}
    return ", ".join(name for name, found in tools.items() if not found)


def measure(megabytes: int, repeat: int) -> dict[str, object]:
    total, figures = megabytes * 1_000_000, {"megabytes": megabytes, "load_before": os.getloadavg()[0]}
    lacks = missing()
    if lacks:
        log(f"not compared with rsync over ssh: {lacks} missing")
    with tempfile.TemporaryDirectory(prefix="spotfleet-archive-") as name:
        work = Path(name)
        with world(work / "home") as found:
            found.keep_checkpoint(total * 4 // 5)
            found.add_outputs(total // 5, "first")
            fetch, rsync, cp, sha = [], [], [], []
            with contextlib.ExitStack() as stack:
                ssh = None if lacks else stack.enter_context(own_sshd(work / "sshd"))
                for turn in range(repeat):  # the systems take turns
                    fetch.append(fetched(fetch_in_child(found.home, work / f"fetch-{turn}")))
                    shutil.rmtree(work / f"fetch-{turn}")
                    if ssh is not None:
                        rsync.append(rsync_s(ssh, found.files, work / "rsync"))
                        shutil.rmtree(work / "rsync")
                    for times, took_s in zip((cp, sha), cp_and_sha256sum_s(found.files, work / "cp"), strict=True):
                        times.append(took_s)
                    shutil.rmtree(work / "cp")
            median = statistics.median
            figures |= {"fetch_s": [f["s"] for f in fetch], "rsync_s": rsync, "cp_s": cp, "sha256sum_s": sha,
                        "fetch_mb_s": megabytes / median(f["s"] for f in fetch),
                        "peak_mb": max(f["peak_mb"] for f in fetch)}
            if rsync:
                figures["of_rsync"] = median(rsync) / median(f["s"] for f in fetch)
            figures["killed"] = killed(found.home, work / "killed", int(fetch[-1]["moved"]))
            shutil.rmtree(work / "killed")
            found.add_outputs(total // 5, "more")
            copied_s, hashed_s = cp_and_sha256sum_s(found.files, work / "cp")
            archive_s, all_s = down_s(found)
            figures |= {"down": {"archive_s": archive_s, "all_s": all_s, "cp_s": copied_s, "sha256sum_s": hashed_s,
                                 "times_cp_and_sha256sum": archive_s / (copied_s + hashed_s)}}
    return figures | {"load_after": os.getloadavg()[0], "cores": os.cpu_count(), "lacks": lacks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=1, help="turns of fetch, rsync and cp")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    parser.add_argument("--fetch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fetch:
        return fetch_here(args.home, args.fetch)
    os.environ["SPOTFLEET_LOCAL_OWNER_PID"] = str(os.getpid())
    found = measure(args.megabytes, args.repeat)
    if args.output == "json":
        print(json.dumps(found, indent=1))
        return
    for line in table(found):
        print(line)


def table(found: dict[str, object]) -> list[str]:
    """Return the rows for RESULTS.md."""
    megabytes, killed_at, down = found["megabytes"], found["killed"], found["down"]
    mid = statistics.median
    row = "| {} | {:.1f} | {:.0f} | {} |".format
    rows = ["| what | s | MB/s | |", "|---|---|---|---|",
            row("fetch over TLS", mid(found["fetch_s"]), megabytes / mid(found["fetch_s"]),
                f"peak memory {found['peak_mb']:.0f} MB")]
    if found["rsync_s"]:
        rows.append(row("rsync --inplace over ssh", mid(found["rsync_s"]), megabytes / mid(found["rsync_s"]),
                        f"fetch is at {100 * found['of_rsync']:.0f} % of it; aim: 60"))
    else:
        rows.append(f"| rsync --inplace over ssh | - | - | not measured: {found['lacks']} missing |")
    rows += [row("cp", mid(found["cp_s"]), megabytes / mid(found["cp_s"]), ""),
             row("sha256sum", mid(found["sha256sum_s"]), megabytes / mid(found["sha256sum_s"]), ""),
             row("fetch again after SIGKILL", killed_at["s"], killed_at["moved_mb"] / killed_at["s"],
                 f"{killed_at['here_mb']:.0f} MB were here, {killed_at['moved_mb']:.0f} moved; "
                 f"at most the rest: {'yes' if killed_at['at_most_the_rest'] else 'no'}"),
             row(f"archive's part of `down`, {megabytes * 6 // 5} MB", down["archive_s"],
                 megabytes * 1.2 / down["archive_s"],
                 f"{down['times_cp_and_sha256sum']:.1f} times cp + sha256sum ({down['cp_s'] + down['sha256sum_s']:.1f} "
                 f"s); aim: 3; all of `down` {down['all_s']:.1f} s")]
    return [*rows, "", f"{found['cores']} cores, load average {found['load_before']:.1f} before and "
            f"{found['load_after']:.1f} after, the benchmark's own processes included."]


if __name__ == "__main__":
    main()
