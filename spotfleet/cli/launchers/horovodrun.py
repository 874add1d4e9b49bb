"""The command `horovodrun`: Horovod's own flags, on machines over SSH.

It makes a fleet of the listed machines, brings it up, runs the script as a job, prints its output, and ends the fleet:
also when the script fails, and after Ctrl-C. Workers on this machine alone need no SSH.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import socket
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spotfleet.api import Fleet, Job
from spotfleet.api.job import succeeded
from spotfleet.cli.commands.follow import print_progress
from spotfleet.cli.console import print_message, print_step, told_if_slow
from spotfleet.cli.launchers.convert import listed
from spotfleet.cli.options import Interrupted
from spotfleet.config import parse
from spotfleet.config.foreign import horovod
from spotfleet.config.foreign.source import name
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.words import counted

ANY_PORT = 9  # only the route is looked up; nothing is sent
PYTHON = re.compile(r"python(\d(\.\d+)?)?")


@dataclass(frozen=True)
class HorovodRun:
    """Arguments of `horovodrun`, with its names."""

    num_proc: int
    min_num_proc: int = 0
    max_num_proc: int = 0
    slots: int = 0
    hosts: str = ""
    hostfile: Path | None = None
    script: Path | None = None  # --host-discovery-script
    reset_limit: int = 0
    elastic_timeout_s: float = 600.0
    timeline: Path | None = None
    verbose: bool = False
    output: Path | None = None
    ssh_port: int = 0
    identity_file: str = ""
    dispatcher: str = ""
    engine: bool = False  # a flag for MPI or for the engine of Horovod was given
    nics: bool = False  # network interfaces were named

    @property
    def np(self) -> tuple[int, int]:
        """The fewest and the most workers; without limits, exactly `num_proc`."""
        return self.min_num_proc or self.num_proc, max(self.max_num_proc, self.num_proc)


def main(words: Sequence[str], **options: Any) -> None:
    horovodrun(words, HorovodRun(**options))


def horovodrun(words: Sequence[str], given: HorovodRun) -> None:
    script, args, command = program(words)
    _check(given)
    where = hosts_of(given)
    data = fleet_file(given, where, script or "command") | ({"run": command} if command else {})
    if script and not where.here and os.path.isabs(words[0]):
        data["environment"]["python"] = words[0]
    if given.verbose:
        print_message(f"the fleet file:\n{yaml.safe_dump(data, sort_keys=False)}")
    for note in notes(given, where):
        print_message(f"note: {note}")
    fleet = Fleet(parse(yaml.safe_dump(data), Path.cwd() / f"{data['name']}.yaml", os.environ, check_files=True))
    try:
        run(fleet, given, script, args)
    except KeyboardInterrupt:
        print_message("\ninterrupted: ending the workers")
        end(fleet, given)
        raise Interrupted from None
    except SpotfleetError:
        end(fleet, given)
        raise
    end(fleet, given)


def notes(given: HorovodRun, where: horovod.HorovodHosts) -> list[str]:
    """Return what is different here from horovodrun, for the flags that were given."""
    found = []
    if where.here and len(list(Path("/dev").glob("nvidia[0-9]*"))) > 1:
        found.append("workers on this machine alone are hosts with one slot each, all with LOCAL_RANK 0; to use "
                     "several GPUs, name the machine: -H NAME:GPUS, and another one as --dispatcher")
    if given.engine:
        found.append("flags for MPI and for Horovod's engine (fusion, cycle time, cache, autotune, stall check, log "
                     "level) change nothing: gradients travel through torch.distributed")
    if given.nics:
        found.append("--network-interface is not followed: a host uses the address of its route to the dispatcher; in "
                     "a fleet file, `ssh.hosts: [{host: ..., address: ...}]` names another")
    if given.reset_limit:
        found.append("--reset-limit is not followed: a job goes on as long as --min-np workers remain")
    return found


def program(words: Sequence[str]) -> tuple[str, tuple[str, ...], str]:
    """Return (script, its arguments, "") for `python train.py ...`, or ("", (), the command) for any other."""
    if not words:
        raise UsageError("there is no command", hint="spotfleet horovodrun -np 4 -H node1:4 python train.py")
    rest = [*words[1:]] if PYTHON.fullmatch(os.path.basename(words[0])) else [*words]
    while rest and rest[0] in ("-u", "-O", "-B"):
        rest.pop(0)
    if rest and rest[0].endswith(".py"):
        return rest[0], tuple(rest[1:]), ""
    return "", (), shlex.join(words)


def _check(given: HorovodRun) -> None:
    least, most = given.np
    if not 1 <= least <= given.num_proc <= most or (given.max_num_proc and given.max_num_proc < given.num_proc):
        raise UsageError(f"expected --min-np <= -np <= --max-np, got {least}, {given.num_proc}, {given.max_num_proc}",
                         hint="-np 8 --min-np 4 --max-np 12")
    if sum(map(bool, (given.hosts, given.hostfile, given.script))) > 1:
        raise UsageError("-H, --hostfile and --host-discovery-script name the same thing; keep one of them")


def hosts_of(given: HorovodRun) -> horovod.HorovodHosts:
    """Return where the workers run: of a list, the first hosts that hold them all."""
    if given.script is not None:
        script = given.script.resolve()
        if not os.access(script, os.X_OK):
            raise UsageError(f"--host-discovery-script {given.script}: is not there, or is not executable",
                             hint=f"chmod +x {given.script}")
        return horovod.HorovodHosts(script=str(script), slots=given.slots or 1)
    hosts = listed(given.hosts, given.slots) if given.hosts else ((horovod.HERE[0], given.np[1]),)
    if given.hostfile is not None:
        try:
            hosts = horovod.from_file(given.hostfile.read_text(), given.slots)
        except (OSError, ValueError) as error:
            raise UsageError(f"--hostfile {given.hostfile}: {error}",
                             hint="a line for each host: node1 slots=4") from None
    room = sum(slots for _, slots in hosts)
    if room < given.num_proc:
        raise UsageError(f"-np {given.num_proc}: the hosts have {room} slots", hint="name more hosts, or more slots")
    return horovod.HorovodHosts(hosts[:_first(hosts, given.np[1])])


def _first(hosts: Sequence[tuple[str, int]], workers: int) -> int:
    """Return how many of the hosts, from the first on, hold so many workers."""
    for count in range(1, len(hosts)):
        if sum(slots for _, slots in hosts[:count]) >= workers:
            return count
    return len(hosts)


def fleet_file(given: HorovodRun, where: horovod.HorovodHosts, title: str) -> dict[str, Any]:
    most = given.np[1]
    if where.here:
        nodes = given.num_proc, most
    elif where.script:
        nodes = horovod.hosts_for(given.num_proc, where.slots), horovod.hosts_for(most, where.slots)
    else:
        nodes = _first(where.hosts, given.num_proc), len(where.hosts)
    called = f"{name(Path(title).stem)[:20].rstrip('-')}-{secrets.token_hex(2)}"
    dispatcher = given.dispatcher or ("" if where.here else own_address(where))
    return horovod.fleet_file(called, where, dispatcher, nodes, port=given.ssh_port,
                              identity_file=str(Path(given.identity_file).expanduser()) if given.identity_file else "")


def own_address(where: horovod.HorovodHosts) -> str:
    """Return this machine's address on its route to the hosts: it runs the dispatcher, as it runs Horovod's driver."""
    target = next((host for host, _ in where.hosts if host not in horovod.HERE), "")
    if not target:
        return socket.gethostname()
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(target, ANY_PORT, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return probe.getsockname()[0]
    return socket.gethostname()


def run(fleet: Fleet, given: HorovodRun, script: str, args: Sequence[str]) -> None:
    """Bring the fleet up, and run the job to its end. Raises JobFailed."""
    progress = print_step if given.verbose else _quiet
    if not given.verbose:
        print_message(f"starting machines for {counted(given.num_proc, 'worker')}; --verbose shows each step")
    fleet.up(progress=progress, timeout_s=given.elastic_timeout_s)
    job = fleet.train(script, args, np=given.np, detach=True, progress=print_step)
    if given.verbose:
        with print_progress(fleet, job.id):
            _stream(job.logs(follow=True))
    else:
        _stream(job.logs(follow=True))
    if given.output is not None:
        write_outputs(fleet, job, given.output, given.np[1])
    succeeded(job.status(), f" -c {fleet.name}")


def _quiet(_line: str) -> None:
    pass


def _stream(data: Iterable[bytes]) -> None:
    for some in data:
        sys.stdout.buffer.write(some)
        sys.stdout.flush()


def write_outputs(fleet: Fleet, job: Job, folder: Path, workers: int) -> None:
    """Write each rank's output to FOLDER/rank.N/stdout, N as wide as the largest, as Horovod does."""
    width = len(str(workers - 1))
    for rank in range(workers):
        try:
            text = b"".join(fleet.logs(job.id, rank=rank))
        except SpotfleetError:
            continue  # the job had fewer workers
        there = folder / f"rank.{rank:0{width}}"
        there.mkdir(parents=True, exist_ok=True)
        (there / "stdout").write_bytes(text)


def end(fleet: Fleet, given: HorovodRun) -> None:
    """End the fleet, if there is one; write its timeline first."""
    if not fleet.home.folder(fleet.name).exists:
        return
    if given.timeline is not None:
        given.timeline.write_text(json.dumps(timeline(fleet.events())))
    with nullcontext() if given.verbose else told_if_slow("copying the results and ending the machines ..."):
        done = fleet.down(progress=print_step if given.verbose else _quiet)
    for line in (*done.missing, *done.partial):
        print_message(f"not collected: {line}")


def timeline(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the fleet's events in the format of Chrome's tracing, which Horovod's timeline has. Operations of single
    tensors are not in it."""
    first = min((e["at"] for e in events), default=0.0)
    return [{"name": e["kind"], "ph": "i", "s": "g", "ts": round((e["at"] - first) * 1e6), "tid": 0,
             "pid": str(e.get("host") or e.get("request_id") or e.get("job") or "fleet"),
             "args": {k: v for k, v in e.items() if isinstance(v, (str, int, float))}} for e in events]
