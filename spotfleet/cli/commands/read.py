"""Commands that only read: status, hosts, jobs, events, logs, outputs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotfleet.addresses import joined
from spotfleet.api import Fleet
from spotfleet.api.home import Home, newest
from spotfleet.api.lifecycle.up import up_hosts
from spotfleet.cli import event_text, render
from spotfleet.cli.commands.follow import print_progress
from spotfleet.cli.console import ends_with_its_reader, next_command, print_message, print_step, told_if_slow
from spotfleet.cli.options import Interrupted
from spotfleet.cli.tables import flow
from spotfleet.codec import to_json
from spotfleet.config.values import duration_s
from spotfleet.errors import DispatcherUnreachable, SpotfleetError, UsageError
from spotfleet.model import JobState
from spotfleet.protocol.messages import FleetStatus
from spotfleet.words import counted, harmless, size

WATCH_S = 1.0


def emit(value: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(to_json(value), indent=1))


def status(name: str, *, watch: bool, everything: bool, as_json: bool) -> None:
    home = Home()
    if everything and (name or watch):
        raise UsageError("--all lists every fleet once: leave the name and --watch out", hint="spotfleet status --all")
    if _no_fleet(name, as_json):
        return
    if everything:
        _all([folder.name for folder in home.fleets()], as_json)
        return
    if not name and not watch and len(folders := home.living() or home.fleets()) > 1:
        shown = folders if home.living() or as_json else newest(folders)
        _all([folder.name for folder in shown], as_json)
        if len(shown) < len(folders):
            print_message(f"and {counted(len(folders) - len(shown), 'more fleet')} that ended before: "
                          "`spotfleet status --all`")
        return
    fleet = Fleet(name)
    if not watch:
        found = _status(fleet)
        if as_json:
            emit(found)
            return
        print(render.fleet_status(found))
        if found.state == "down":
            if fleet.ended and (kept := fleet.archive):
                print_message(f"its results are in {kept}; `spotfleet down` has nothing left to do")
            if not fleet.ended:
                print_message("its dispatcher's machine still runs and keeps the results: `spotfleet down "
                              f"{fleet.name}` copies them here and ends it")
            next_command(f"spotfleet cost {fleet.name}",
                         "spotfleet up FILE" if fleet.ended else f"spotfleet down {fleet.name}")
        return
    if sys.stdout.isatty() and not as_json:
        _redraw(fleet)
        return
    last: tuple = ()
    with ends_with_its_reader():
        for found in _watched(fleet):
            if (now := _gist(found)) != last:
                print(json.dumps(to_json(found)) if as_json else render.fleet_status(found) + "\n", flush=True)
                last = now


def _no_fleet(name: str, as_json: bool) -> bool:
    """Print that there is no fleet, or [], if none is named and none was ever made here."""
    if name or Home().fleets():
        return False
    if as_json:
        emit([])
    else:
        print_message("there is no fleet; `spotfleet up FILE` makes one")
    return True


def _status(fleet: Fleet) -> FleetStatus:
    with told_if_slow(f"waiting for an answer from the dispatcher of fleet {fleet.name} ..."):
        return fleet.status()


def _all(names: list[str], as_json: bool) -> None:
    """Print one line for each fleet; one that does not answer is shown with the reason."""
    found = []
    for name in names:
        try:
            found.append(_status(Fleet(name)))
        except SpotfleetError as error:
            found.append(FleetStatus(name, "unknown", str(error), 0, 0, 0))
    emit(found) if as_json else print(render.fleets(found))


def _watched(fleet: Fleet) -> Iterator[FleetStatus]:
    """Yield the status every WATCH_S until the fleet is down."""
    while True:
        found = fleet.status()
        yield found
        if found.state == "down" and fleet.ended:
            return
        time.sleep(WATCH_S)


def _gist(found: FleetStatus) -> tuple:
    """Return the values whose change is printed where the screen cannot be redrawn."""
    return (found.state, found.why, tuple((h.host, h.state, h.why) for h in found.hosts),
            tuple((j.job, j.state, j.why, j.generation) for j in found.jobs))


def _redraw(fleet: Fleet) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False, screen=False) as live:
        for found in _watched(fleet):
            live.update(Text(render.fleet_status(found), overflow="fold"), refresh=True)


def hosts(name: str, *, as_json: bool) -> None:
    found = _status(Fleet(name))
    if as_json:
        emit(found.hosts)
        return
    if not up_hosts(found):
        print_message(f"fleet {found.fleet} is {found.state}: no host is up")
    for host in up_hosts(found):
        print(harmless(joined(host.address or host.host, host.slots)))


def jobs(name: str, *, as_json: bool) -> None:
    if _no_fleet(name, as_json):
        return
    fleet = Fleet(name)
    now = _status(fleet)
    found = now.jobs
    if as_json:
        emit(found)
    elif found:
        print(render.jobs(found))
    else:
        print_message(f"fleet {fleet.name} has had no job")
    if now.past_jobs:
        print_message(f"{counted(now.past_jobs, 'older job')} not listed: `logs` and `outputs` still find them by "
                      "name, `spotfleet jobs --prune` removes their files")


def queue(name: str, *, as_json: bool) -> None:
    if _no_fleet(name, as_json):
        return
    fleet = Fleet(name)
    left = [job for job in _status(fleet).jobs if not JobState(job.state).ended]
    left.sort(key=lambda job: (job.state == JobState.QUEUED.value, -job.priority))  # in order of submission else
    if as_json:
        emit(left)
    elif left:
        print(render.queue(left))
    else:
        print_message(f"no job runs or waits on fleet {fleet.name}")


def events(name: str, *, watch: bool, as_json: bool, everything: bool) -> None:
    if _no_fleet(name, as_json):
        return
    fleet = Fleet(name)
    rows = fleet.events()
    if as_json and not watch:
        emit(rows)
        return
    shown = _Events(as_json, everything)
    shown.print(rows)
    if watch and not fleet.ended:
        with ends_with_its_reader():
            _follow_events(fleet, max((r["seq"] for r in rows if r["ledger"] == "dispatcher"), default=0), shown)


def _follow_events(fleet: Fleet, after: int, shown: _Events) -> None:
    while True:
        try:
            rows = [{"ledger": "dispatcher", **e} for e in fleet.client.events(after, wait_s=20.0)]
        except DispatcherUnreachable:
            if fleet.status().state == "down":
                return
            raise
        shown.print(rows)
        after = max((r["seq"] for r in rows), default=after)


class _Events:
    """Printer of events: as JSON lines, or for people, with the date where it changes."""

    def __init__(self, as_json: bool, everything: bool) -> None:
        self._as_json, self._everything, self._day = as_json, everything, ""
        self._preempted: Mapping[str, str] = {}

    def print(self, rows: list[dict[str, Any]]) -> None:
        if self._as_json:
            for row in rows:
                print(json.dumps(row), flush=True)
            return
        chosen = [row for row in rows if self._everything or row["kind"] not in event_text.ROUTINE]
        for row, day in event_text.days(chosen, self._day):
            self._preempted = event_text.preemption(row, self._preempted)
            if day:
                print(f"{day} UTC", flush=True)
                self._day = day
            print(flow(event_text.line(row, self._preempted)), flush=True)


@dataclass(frozen=True)
class LogQuery:
    """Options of `logs` as typed."""

    follow: bool = False
    rank: int = 0
    worker: str = ""
    everything: bool = False  # all ranks
    tail: int | None = None
    since: str = ""
    setup: bool = False
    host: str = ""

    def since_s(self) -> float:
        try:
            return duration_s(self.since) if self.since else 0.0
        except ValueError as error:
            raise UsageError(f"--since: {error}", hint="--since 10m is the last ten minutes") from None


def logs(name: str, job: str, **options: Any) -> None:
    query = LogQuery(**options)
    since_s = query.since_s()
    if query.everything and (query.rank or query.worker):
        raise UsageError("--all prints every rank: leave --rank and --worker out", hint="spotfleet logs --all JOB")
    fleet = Fleet(name)
    job = job or _newest_job(fleet)
    if query.setup or query.host:
        for where, data in fleet.setup_logs(job, query.host, tail=query.tail, since_s=since_s):
            _put(f"==> {where} <==\n".encode() + data)
        return
    some = False
    try:
        with print_progress(fleet, job) if query.follow and not fleet.ended else nullcontext(), ends_with_its_reader():
            if query.everything:
                some = _by_rank(fleet.all_logs(job, follow=query.follow, tail=query.tail, since_s=since_s))
            else:
                for data in fleet.logs(job, follow=query.follow, rank=query.rank, worker=query.worker, tail=query.tail,
                                       since_s=since_s):
                    _put(data)
                    some = some or bool(data)
    except KeyboardInterrupt:
        if not query.follow:
            raise
        print_message(f"\nthe output is no longer shown; job {job} goes on")
        raise Interrupted from None
    if query.follow or not (some or query.tail == 0):
        _print_state(fleet, job, some)


def _print_state(fleet: Fleet, job: str, some: bool) -> None:
    """Print how a job has ended, or what one that has printed nothing waits for."""
    status = next((j for j in _status(fleet).jobs if j.job == job), None)
    if status is None:  # an old one, which the dispatcher does not list
        return
    has = {JobState.SUCCEEDED.value: "has succeeded", JobState.FAILED.value: "has failed",
           JobState.CANCELLED.value: "was cancelled"}.get(status.state, f"is {status.state}")
    print_message(f"job {job} {has}: {status.why}{'' if some else '; no output of it so far'}")


def _by_rank(pieces: Iterable[tuple[int, bytes]]) -> bool:
    """Print whole lines, each with its rank before it; return whether there was any output."""
    begun: dict[int, bytes] = {}
    for rank, data in pieces:
        *lines, begun[rank] = (begun.get(rank, b"") + data).split(b"\n")
        _put(b"".join(f"rank {rank}: ".encode() + line + b"\n" for line in lines))
    _put(b"".join(f"rank {rank}: ".encode() + rest + b"\n" for rank, rest in sorted(begun.items()) if rest))
    return bool(begun)


def _put(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.flush()


def outputs(name: str, job: str, into: str) -> None:
    copied = Fleet(name).outputs(job, Path(into), progress=print_step)
    if copied.files:
        print(f"{counted(copied.files, 'file')}, {size(copied.bytes)}, of {job} in {Path(into).resolve()}")
    else:
        print(f"{job} has written no file to SPOTFLEET_OUTPUT so far; nothing was copied")


def _newest_job(fleet: Fleet) -> str:
    found = _status(fleet).jobs
    if not found:
        raise SpotfleetError(f"fleet '{fleet.name}' has had no job", hint="spotfleet train SCRIPT")
    return found[-1].job
