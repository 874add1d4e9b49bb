"""Parts `quiet`, `kill`, `form`, `whole` and `habits`: three real ranks, over NCCL on one card, or gloo on the CPU.

A row is ok when all survivors end with the bits of an undisturbed run, each process ends as it should (a killed one by
SIGKILL, all others with 0, and none with the status of a stuck process), and no pause is near half a minute.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cycle
import habits
import stage
from stage import FOUNDERS, Training

Row = dict[str, Any]
LONGEST_PAUSE_MS = 25_000.0
KILLED = -9


@dataclass(frozen=True)
class Scenario:
    """A training with deaths; see worker.py for DIE."""

    name: str
    die: str = ""
    spares: int = 1
    mute_s: float = 0.0  # time without the dispatcher's word, so that the ranks notice by themselves
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """How this run does it."""

    device: str
    short: bool
    folder: Path
    start: Any

    @property
    def size(self) -> dict[str, str]:
        return {"STEPS": "8", "WIDTH": "32"} if self.short else {"STEPS": "40", "WIDTH": "512"}

    @property
    def killed_at(self) -> int:
        return 4 if self.short else 20

    @property
    def limit_s(self) -> float:
        return 60.0 if self.device == "cuda" else 300.0


def train(setting: Setting, scenario: Scenario, **env: str) -> Row:
    """Run a scenario to its end; return what `Training.end` does, and when the survivors noticed."""
    folder = setting.folder / scenario.name.replace(" ", "-")
    training = Training(setting.start, folder, setting.device, setting.limit_s, scenario.spares, DIE=scenario.die,
                        **setting.size | scenario.env | env)
    try:
        training.begin()
        extra: Row = {}
        if scenario.mute_s:
            extra = {"noticed_ms": noticed(training, scenario)}
        return training.end() | extra
    except AssertionError as error:  # a wait came to its limit
        return {"error": str(error)[-3000:]}
    finally:
        training.close()


def noticed(training: Training, scenario: Scenario) -> float | None:
    """Keep the dispatcher mute after the death; return when all survivors had noticed it, None if they did not."""
    fleet, victim = training.fleet, scenario.die.split(":")[0]
    fleet.hold = True
    training.wait(lambda: not fleet.workers[victim].alive, "death")
    began = time.monotonic()
    others = [n for n in FOUNDERS if n != victim]
    found = None
    with contextlib.suppress(AssertionError):
        fleet.wait(lambda: all(fleet.report(n).failed >= 1 for n in others), scenario.mute_s, "notice")
        found = round(1e3 * (time.monotonic() - began), 1)
    fleet.hold = False
    return found


def judged(name: str, found: Row, victims: set[str], bits: set[str] | None) -> Row:
    """Return a row about `found`; `bits`: digests of the undisturbed run."""
    if "error" in found:
        return {"row": name, "ok": False, **found}
    digests = set(found["digests"])
    same = len(digests) == 1 and (bits is None or digests == bits)
    exits = {n: code for n, code in found["exits"].items() if code != (KILLED if n in victims else 0)}
    slow = {n: ms for n, ms in found["pause_ms"].items() if ms > LONGEST_PAUSE_MS}
    return {"row": name, "ok": same and not exits and not slow, "same_bits": same, "wrong_exits": exits,
            "pause_ms": found["pause_ms"], "repeated": found["repeated"], "generations": found["generations"],
            **{k: found[k] for k in ("noticed_ms", "own") if k in found}}


def victims_of(die: str) -> set[str]:
    return {d.split(":")[0] for d in die.split(";") if d}


def disturbed(setting: Setting, scenarios: list[Scenario]) -> Iterator[Row]:
    calm = train(setting, Scenario("undisturbed", spares=0))
    yield judged("undisturbed", calm, set(), None)
    for scenario in scenarios:
        yield judged(scenario.name, train(setting, scenario), victims_of(scenario.die), set(calm.get("digests", ())))


def quiet(setting: Setting) -> Iterator[Row]:
    first = train(setting, Scenario("first", spares=0))
    yield judged("first", first, set(), None)
    again = train(setting, Scenario("again", spares=0, env={"NCCL_DEBUG": "INFO"}))
    row = judged("again", again, set(), set(first.get("digests", ())))
    if setting.device == "cuda":
        log = "".join(p.read_text(errors="replace") for p in (setting.folder / "again").rglob("log"))
        row |= {"over_sockets": "NET/Socket" in log, "duplicate": "Duplicate GPU" in log}
        row["ok"] = row["ok"] and row["over_sockets"] and not row["duplicate"]
    yield row
    if setting.device == "cuda":  # gloo copies CUDA tensors itself
        gloo = {"SPOTFLEET_BACKEND": "gloo"}
        calm = train(setting, Scenario("over gloo", spares=0, env=gloo))
        yield judged("over gloo", calm, set(), None)
        dies = f"h1/0/1:after step:{setting.killed_at}"
        yield judged("over gloo, killed", train(setting, Scenario("over gloo killed", dies, env=gloo)), {"h1/0/1"},
                     set(calm.get("digests", ())))


def kill(setting: Setting) -> Iterator[Row]:
    at = setting.killed_at
    simple = [Scenario(f"in {point}" if point == "forward" else point, f"h1/0/1:{point}:{at}")
              for point in ("forward", "kernel", "buckets", "before step", "after step")]
    yield from disturbed(setting, [
        *simple,
        Scenario("rank 0", f"h0/0/1:buckets:{at}"),
        Scenario("two of three", f"h0/0/1:buckets:{at};h2/0/1:forward:{at}", spares=2),
        Scenario("receiver in a hand-over", f"h1/0/1:forward:{at};h3/0/1:receive:1", spares=2),
        Scenario("sender in a hand-over", f"h1/0/1:forward:{at};h0/0/1:send:1", spares=2),
        Scenario("no word from the dispatcher", f"h1/0/1:forward:{at}", mute_s=2.0),
    ])


def form(setting: Setting) -> Iterator[Row]:
    at = setting.killed_at
    scenarios = [
        Scenario("a member that forms the second generation", f"h1/0/1:forward:{at};h3/0/1:meet:2", spares=2),
        Scenario("the leader that forms the second generation", f"h1/0/1:forward:{at};h0/0/1:meet:2", spares=2),
        Scenario("the first backward", "h1/0/1:buckets:0"),
    ]
    if setting.device == "cuda":
        scenarios.append(Scenario("before the warm-up", f"h1/0/1:forward:{at};h3/0/1:warm:2", spares=2))
    yield from disturbed(setting, scenarios)
    yield from cycle.rows(setting.device, 3 if setting.short else 50, setting.folder)


def whole(setting: Setting) -> Iterator[Row]:
    calm = train(setting, Scenario("undisturbed", spares=0))
    yield judged("undisturbed", calm, set(), None)
    bits = set(calm.get("digests", ()))
    yield judged("a rank that ends 4 s later", train(setting, Scenario("late", spares=0), LATE="h2/0/1"), set(), bits)
    yield own_group(setting, bits)
    yield planned(setting, "leave, with a replacement", spares=1)
    yield planned(setting, "leave, then a joiner", spares=0)
    yield checkpoint(setting)


def own_group(setting: Setting, bits: set[str]) -> Row:
    """A process group of the user's own beside the runtime's. It is usable after an abort of the runtime's."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    training = Training(setting.start, setting.folder / "own", setting.device, setting.limit_s, 1, **setting.size,
                        OWN_PORT=str(port), DIE=f"h1/0/1:buckets:{setting.killed_at}")
    try:
        training.begin()
        found = training.end()
        found["own"] = training.fleet.lines("OWN")
    except AssertionError as error:
        return {"row": "a user's own group", "ok": False, "error": str(error)[-3000:]}
    finally:
        training.close()
    row = judged("a user's own group", found, {"h1/0/1"}, bits)
    row["ok"] = row["ok"] and sorted(found["own"]) == own_lines(setting)
    return row


def own_lines(setting: Setting) -> list[str]:
    """Return what the two owners print, before the kill and at the end."""
    kind = "ProcessGroupNCCL" if setting.device == "cuda" else "ProcessGroupGloo"
    return sorted([f"3 unset {kind} 3", f"3 unset {kind} {setting.size['STEPS']}"] * 2)


def planned(setting: Setting, name: str, spares: int) -> Row:
    """A worker leaves as planned; a spare takes its place, or a worker that starts then joins the two that are left."""
    nap = "0.05" if spares else "0.15"  # a process that starts needs the time to open a context
    long = {"STEPS": "40", "NAP": "0.03"} if setting.short else {"STEPS": "120", "NAP": nap}
    ballast = {"BALLAST": str((1 << 20) if setting.short else (1 << 30))}
    training = Training(setting.start, setting.folder / name.replace(" ", "-").replace(",", ""), setting.device,
                        setting.limit_s, spares, **setting.size | long | ballast)
    fleet, pauses = training.fleet, []
    try:
        training.begin()
        training.wait(lambda: fleet.report("h0/0/1").version >= 3, "some steps")
        fleet.drain("h1/0/1")
        training.wait(lambda: fleet.generation == 2 and fleet.report("h0/0/1").resumed == 2, "the leave")
        pauses.append(round(1e3 * fleet.report("h0/0/1").pause_s, 1))
        if not spares:
            joiner = training.add()
            training.wait(lambda: joiner in fleet.members and fleet.report("h0/0/1").resumed == 3, "the joiner")
            pauses.append(round(1e3 * fleet.report("h0/0/1").pause_s, 1))
        row = judged(name, training.end(), set(), None)
        row["ok"] = row["ok"] and len(fleet.members) == 3
        return row | {"pauses_ms": pauses}
    except AssertionError as error:
        return {"row": name, "ok": False, "error": str(error)[-3000:]}
    finally:
        training.close()


def checkpoint(setting: Setting) -> Row:
    training = Training(setting.start, setting.folder / "checkpoint", setting.device, setting.limit_s, 0, 0.2,
                        **setting.size | {"NAP": "0.02"})
    try:
        training.begin()
        row = judged("a checkpoint", training.end(), set(), None)
        kept = training.fleet.kept.whole
        row["ok"] = row["ok"] and bool(kept)
        return row | {"checkpoints": len(kept)}
    except AssertionError as error:
        return {"row": "a checkpoint", "ok": False, "error": str(error)[-3000:]}
    finally:
        training.close()


def each_habit(setting: Setting) -> Iterator[Row]:
    names = list(habits.HABITS)
    for name in names[1:3] if setting.short else names[1:]:
        calm = train(setting, Scenario(f"{name} undisturbed", spares=0), HABIT=name)
        dies = f"h1/0/1:buckets:{setting.killed_at}"
        yield judged(name, train(setting, Scenario(f"{name} killed", dies), HABIT=name), {"h1/0/1"},
                     set(calm.get("digests", ("the undisturbed run failed",))))


PARTS = {"quiet": quiet, "kill": kill, "form": form, "whole": whole, "habits": each_habit}


def part(name: str, device: str, short: bool, folder: Path) -> Iterator[Row]:
    start = stage.starter(device)
    try:
        yield from PARTS[name](Setting(device, short, folder, start))
    finally:
        start.close()
