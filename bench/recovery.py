"""Cost of an interruption: spotfleet, torchrun and torchft side by side in one run, on this machine, over gloo.

    python bench/recovery.py [-o json] [--only worker,host,...] [--rounds N] [--rows FILE] [--plot PNG] [--raw FILE]

Three workers train an MLP of 10.2 million parameters (bench/steps.py); then, repeatedly, one is lost or joins:

- worker   SIGKILL to a worker's process
- host     SIGKILL to an agent, its zygote and its worker at once; the machine does not come back
- silent   a host's network link goes down and nothing more arrives from it (needs root: network namespaces)
- leave    a notice of 5 s, and no other host available: the worker leaves at a step boundary. Peers: SIGTERM to the
           host's process
- join     the replacement enters; survivors train until it is warm
- step, start, copy, memory: the cost without any event (bench/overhead.py)

The systems take turns: each turn plays a share of every system's events on a new world of that system, and another
system is first in each turn. So a load that drifts meets all of them. Each row is written to --rows as soon as it is
measured; after Ctrl-C the rows so far are printed.

Every figure is computed from the workers' diaries (see bench/diary.py), one line per step with the machine's monotonic
clock; no system's own report is used. The headline is all survivors' next step: from the event until each process that
outlived it has finished a step in the next membership. torchrun runs tuned and with its defaults as far as they work;
torchft runs tuned twice (heartbeats may be missed for 500 and for 250 ms) and with its defaults, if it can be imported
here or by --torchft-python. The exit status is 0 whatever the result, and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aims
import overhead
import silence
from diary import Note, Outcome, by_label, changed, is_whole, outcome, step_s, survivors_back
from worlds import (
    LIMIT_S,
    WORLD,
    QuickTorchft,
    Shrinking,
    Spotfleet,
    Torchft,
    Torchrun,
    TunedTorchft,
    TunedTorchrun,
    has_torchft,
)
from worlds import World as System

EVENTS = ("worker", "host", "silent", "leave", "join")
STEADY_STEPS = 5  # number for each rank before the next event
LOOK_S = 0.1
BEFORE_S = 60.0  # time before an event that is read: long enough for the steps that it may repeat
PEER_LIMIT_S = 75.0  # a peer that has not continued training after this time counts as hung
REJOIN_LIMIT_S = 45.0  # the same for a third worker that does not join


@dataclass(frozen=True)
class Row:
    """One event of one system."""

    system: str
    event: str
    at: float
    outcome: Outcome | None
    problem: str = ""


@dataclass(frozen=True)
class Timeline:
    """Steps of a system's workers, for the plot."""

    system: str
    notes: list[Note]
    events: list[tuple[str, float]]


class Hung(Exception):
    """Training did not go on in time."""


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def wait_for(what: str, condition: Callable[[], object], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise Hung(f"not within {limit_s:.0f} s: {what}")
        time.sleep(LOOK_S)


class Results:
    """Rows and timelines of a run. Each row is also appended to a file at once."""

    def __init__(self, about: dict[str, Any], file: Path | None = None) -> None:
        self.rows: list[Row] = []
        self.timelines: list[Timeline] = []
        self._file = file
        self._write({"about": about})

    def keep(self, row: Row) -> None:
        self.rows.append(row)
        self._write({"row": asdict(row)})
        o = row.outcome
        text = (f"next step {o.latency_s:6.3f} s, pause {o.pause_s:6.3f} s, step {o.step_s:.3f} s, "
                f"{o.repeated} repeated, {o.world_before} -> {o.world_after} workers") if o else row.problem
        log(f"{row.system:20} {row.event:7} {text}")

    def finish(self, figures: dict[str, Any]) -> None:
        """Write the figures that are no rows."""
        self._write({"figures": figures})

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(entry) + "\n")


@dataclass(frozen=True)
class Part:
    """Events to play on one system, in this order."""

    make: Callable[[Path], System]
    events: tuple[tuple[str, int], ...]  # kind and number
    limit_s: float = PEER_LIMIT_S
    alone: bool = False  # each event on a world of its own

    def share(self, turn: int, turns: int) -> tuple[tuple[str, int], ...]:
        """Return the events of one turn; the turns differ by one event at most."""
        count = len(self.events)
        return self.events[count * turn // turns:count * (turn + 1) // turns]


def mixed(counts: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Return all events, their kinds by turns, so that no slot fails so often that it is skipped for a while."""
    return tuple((event, i) for i in range(max(counts.values(), default=0)) for event, n in counts.items() if i < n)


def in_turns(parts: Sequence[Part], turns: int) -> Iterator[tuple[Part, list[tuple[str, int]]]]:
    """Yield (part, events of one world). Each turn has a share of every part, and begins with another one."""
    for turn in range(turns):
        first = turn % max(1, len(parts))
        for part in [*parts[first:], *parts[:first]]:
            share = part.share(turn, turns)
            if share:
                yield from ((part, [event]) for event in share) if part.alone else [(part, list(share))]


class Rounds:
    """Runner of events on one system."""

    def __init__(self, make: Callable[[Path], System], limit_s: float, results: Results) -> None:
        self._make, self._limit_s, self._results = make, limit_s, results
        self.name = ""  # the name of the newest system

    @contextlib.contextmanager
    def system(self) -> Iterator[System]:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=memory, prefix="spotfleet-bench-", ignore_cleanup_errors=True) as name:
            world = self._make(Path(name))
            events: list[tuple[str, float]] = []
            self._events, self.name = events, world.name
            try:
                with world:
                    log(f"{world.name}: starting")
                    self._whole(world, LIMIT_S)
                    yield world
            finally:
                self._results.timelines.append(Timeline(world.name, list(world.diary.read()), events))

    def _whole(self, world: System, limit_s: float) -> None:
        since = time.monotonic()
        wait_for("three workers that train", lambda: is_whole(world.diary.read(since), WORLD, STEADY_STEPS), limit_s)

    def play(self, world: System, event: str, act: Callable[[], float]) -> None:
        """Play one event on a complete world, and wait until it is complete again. Raises Hung when that fails."""
        at = act()
        self._events.append((event, at))
        try:
            wait_for("all survivors' next step", partial(self._told, world, at), self._limit_s)
        except Hung as hung:
            self._results.keep(Row(world.name, event, at, None, str(hung)))
            raise
        self._results.keep(Row(world.name, event, at, outcome(world.diary.read(at - BEFORE_S), at)))
        self._rejoin(world, event, at)

    def _told(self, world: System, at: float) -> bool:
        """Return whether the next membership has trained long enough for its step time, or has ended."""
        notes = world.diary.read(at - BEFORE_S)
        label = changed(notes, at)
        if label is None or not survivors_back(notes, at, WORLD - 1):
            return False
        held = by_label(notes)
        return step_s(held[label]) is not None or list(held)[-1] != label

    def _rejoin(self, world: System, event: str, at: float) -> None:
        """Wait for the third worker, or start it; its join is a separate event."""
        if not world.replaces or is_whole(world.diary.read(at), WORLD, 1):
            return
        comes = world.rejoins if event == "worker" else world.host_returns
        if not comes:
            at = world.join()
            self._events.append(("join", at))
        try:
            self._whole(world, min(self._limit_s, REJOIN_LIMIT_S))
        except Hung as hung:
            self._results.keep(Row(world.name, "join", at, None, str(hung)))
            raise
        notes = world.diary.read(at - BEFORE_S)
        whole = next((label for label, held in by_label(notes).items() if held[0].at > at and held[0].world == WORLD),
                     None)
        if whole is not None:
            self._results.keep(Row(world.name, "join", at, outcome(notes, at, whole)))


def play_all(part: Part, events: list[tuple[str, int]], results: Results) -> None:
    """Play all events. A world that hangs is ended, and the remaining events are played on a new one."""
    rounds = Rounds(part.make, part.limit_s, results)
    while events:
        left = len(events)
        try:
            with rounds.system() as world:
                acts = {"worker": world.kill_worker, "host": world.kill_host, "leave": world.leave,
                        "silent": world.kill_host}
                while events:
                    event, i = events.pop(0)
                    rounds.play(world, event, partial(acts[event], i % WORLD))
        except Hung as hung:
            log(f"  gave it up: {hung}")
            if len(events) == left:  # it did not even begin to train
                results.keep(Row(rounds.name, events.pop(0)[0], time.monotonic(), None, str(hung)))


def parts_of(args: argparse.Namespace, skipped: dict[str, str]) -> list[Part]:
    """Return the wanted events of all systems; names in `skipped` what cannot be measured here."""
    wanted = set(args.only)
    counts = {"worker": args.rounds, "host": args.rounds, "leave": args.leaves}
    counts = {e: n for e, n in counts.items() if e in wanted or (e == "worker" and "join" in wanted)}
    kills = mixed({event: n for event, n in counts.items() if event != "leave"})
    parts = [Part(Spotfleet, kills, LIMIT_S),
             Part(Shrinking, mixed({"leave": counts.get("leave", 0)}), LIMIT_S, alone=True)]
    if "silent" in wanted and (reason := silence.why_not()):
        skipped["silent"] = reason
    elif "silent" in wanted:
        parts.append(Part(silence.Silent, mixed({"silent": args.silent}), LIMIT_S))
    parts += [Part(make, mixed(few)) for make, few in peers(args, list(counts), skipped)]
    return [part for part in parts if part.events]


def measure(args: argparse.Namespace, results: Results, skipped: dict[str, str]) -> dict[str, Any]:
    """Fill `results` and `skipped`; return the figures that are no rows."""
    try:
        for part, events in in_turns(parts_of(args, skipped), args.turns):
            play_all(part, events, results)
        return overhead.measure(set(args.only), args.pairs)
    finally:
        _draw(args, results)


def _draw(args: argparse.Namespace, results: Results) -> None:
    if args.plot:
        import plot

        plot.draw(args.plot, results.timelines, [asdict(row) for row in results.rows])
    if args.raw:
        args.raw.write_text("".join(json.dumps({"system": t.system, **asdict(n)}) + "\n"
                                    for t in results.timelines for n in t.notes))


def peers(args: argparse.Namespace, events: list[str], skipped: dict[str, str]
          ) -> Iterator[tuple[Callable[[Path], System], dict[str, int]]]:
    """Return the other systems, each with the number of events of each kind."""
    if not events or not args.peer_rounds:
        return
    few = {event: 1 if event == "leave" else args.peer_rounds for event in events}
    once = {event: 1 for event in events if event == "worker"}
    if not has_torchft(args.torchft_python):
        skipped["torchft"] = "not installed (its interpreter: --torchft-python)"
    else:
        yield partial(QuickTorchft, python=args.torchft_python), few
        yield partial(TunedTorchft, python=args.torchft_python), few
        yield partial(Torchft, python=args.torchft_python), once
    yield TunedTorchrun, few
    yield Torchrun, once


def commit() -> str:
    """Return the measured commit, with a plus if the working tree differs."""
    run = partial(subprocess.run, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    changes = run(["git", "status", "--porcelain", "-uno"]).stdout
    return run(["git", "rev-parse", "--short", "HEAD"]).stdout.strip() + ("+" if changes else "")


def show(found: dict[str, Any]) -> None:
    if "the rest" in found["skipped"]:
        print("INTERRUPTED: figures of the events so far")
    print(f"{found['cores']} cores, load average {found['load_before']:.2f} before and {found['load_after']:.2f} after"
          f" (the benchmark's own processes included), commit {found['commit']}, torch {found['torch']}")
    print("\n".join(["", *aims.headline(found), ""]))
    for line in aims.systems(found):
        print(line)
    print()
    for line in aims.table(found):
        print(line)
    for what, why in found["skipped"].items():
        print(f"{what}: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=[*EVENTS, *overhead.PARTS],
                        help=f"of {','.join([*EVENTS, *overhead.PARTS])}")
    parser.add_argument("--rounds", type=int, default=20, help="kills of a worker, and of a host, under spotfleet")
    parser.add_argument("--leaves", type=int, default=5, help="of spotfleet, each in a fleet of its own")
    parser.add_argument("--silent", type=int, default=3)
    parser.add_argument("--peer-rounds", type=int, default=2, help="kills under each tuned peer; 0: no peers")
    parser.add_argument("--turns", type=int, default=4, help="each plays a share of every system's events")
    parser.add_argument("--pairs", type=int, default=24, help="blocks of steps under spotfleet and under DDP")
    parser.add_argument("--torchft-python", default=sys.executable, help="an interpreter that can import torchft")
    parser.add_argument("--plot", type=Path, help="PNG: steps around each event, and latencies")
    parser.add_argument("--rows", type=Path, help="file to which each row is appended as it is measured, one JSON line")
    parser.add_argument("--raw", type=Path, help="one JSON line for each step of every worker")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    args = parser.parse_args()
    if args.turns < 1:
        parser.error("--turns: at least 1")
    if unknown := set(args.only) - {*EVENTS, *overhead.PARTS}:
        parser.error(f"--only {','.join(sorted(unknown))}: choose from {','.join([*EVENTS, *overhead.PARTS])}")
    import torch

    os.environ["SPOTFLEET_LOCAL_OWNER_PID"] = str(os.getpid())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no process is left then
    about = {"at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "commit": commit(),
             "cores": os.cpu_count(), "torch": torch.__version__, "load_before": os.getloadavg()[0]}
    results, skipped, figures = Results(about, args.rows), {}, {}
    try:
        figures = measure(args, results, skipped)
    except KeyboardInterrupt:
        skipped["the rest"] = "interrupted"
    figures |= {"load_after": os.getloadavg()[0], "skipped": skipped}
    results.finish(figures)
    found: dict[str, Any] = about | figures | {"rows": [asdict(row) for row in results.rows]}
    found["aims"] = [asdict(a) for a in aims.judge(found)]
    if args.output == "json":
        print(json.dumps(found, indent=1))
    else:
        show(found)
    if "the rest" in skipped:
        sys.exit(130)


if __name__ == "__main__":
    main()
