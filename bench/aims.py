"""Aims for speed and memory, compared with a run's figures. Pure: figures in, lines out.

Figures are what recovery.py and overhead.py print with `-o json`. A line without figures says "not measured".
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diary import percentile

KILLED_MEDIAN_S, KILLED_P95_S = 0.25, 0.6  # plus one step
SILENT_S = 5.0
LEAVE_S, JOIN_S = 0.10, 0.25
START_S = 0.5
STEP_RATIO, COPY_RATIO = 1.02, 1.15
MEMORY_MB = 64.0
TUNED = " tuned"
NEXT = "all survivors' next step"
OURS = "spotfleet"
EVENTS = {"worker": "kill worker", "host": "kill host", "silent": "silent host loss", "leave": "graceful leave",
          "join": "scale-up"}


@dataclass(frozen=True)
class Aim:
    """One line of the table. `holds` is None if nothing was measured."""

    line: str
    aim: str
    measured: str
    holds: bool | None


def outcomes(found: dict[str, Any], system: str, event: str) -> list[dict[str, Any]]:
    return [r["outcome"] for r in found["rows"] if (r["system"], r["event"]) == (system, event) and r["outcome"]]


def beyond_s(outcome: dict[str, Any]) -> float:
    return outcome["pause_s"] - outcome["step_s"]


def judge(found: dict[str, Any]) -> list[Aim]:
    """Return every line of the table. After a spotfleet event without further training, its lines do not hold."""
    lost = {event: sum(r["outcome"] is None for r in found["rows"] if (r["system"], r["event"]) == (OURS, event))
            for event in EVENTS}
    return [replace(a, measured=f"{a.measured}, {lost[e]} FAILED", holds=False) if (e := _event(a)) and lost[e] else a
            for a in _judge(found)]


def _event(aim: Aim) -> str:
    return next((event for event, words in EVENTS.items() if aim.line.startswith(words)), "")


def _judge(found: dict[str, Any]) -> list[Aim]:
    return [*_killed(found, "worker"), *_killed(found, "host"), _silent(found), _planned(found, "leave", LEAVE_S),
            _planned(found, "join", JOIN_S), _start(found), *_step(found), _copy(found), _memory(found)]


def _killed(found: dict[str, Any], event: str) -> list[Aim]:
    what, rows = EVENTS[event], outcomes(found, OURS, event)
    aims = [f"{what} -> {NEXT}, median", f"{what} -> {NEXT}, p95", f"{what}: half of the best tuned peer"]
    if not rows:
        return [Aim(line, "", "not measured", None) for line in aims]
    step = statistics.median(r["step_s"] for r in rows)
    latencies = [r["latency_s"] for r in rows]
    middle, late = statistics.median(latencies), percentile(latencies, 0.95)
    judged = [
        Aim(aims[0], f"{KILLED_MEDIAN_S} s + step of {step:.3f} s", f"{middle:.3f} s of {len(rows)}",
            middle <= KILLED_MEDIAN_S + step),
        Aim(aims[1], f"{KILLED_P95_S} s + step of {step:.3f} s", f"{late:.3f} s", late <= KILLED_P95_S + step)]
    peers = {r["system"] for r in found["rows"] if r["system"].endswith(TUNED)}
    medians = {p: statistics.median(o["latency_s"] for o in held) for p in peers if (held := outcomes(found, p, event))}
    if not medians:
        return [*judged, Aim(aims[2], "", "not measured", None)]
    best = min(medians, key=lambda p: medians[p])
    return [*judged, Aim(aims[2], f"{medians[best] / 2:.3f} s ({best}: {medians[best]:.3f} s)", f"{middle:.3f} s",
                         middle <= medians[best] / 2)]


def _silent(found: dict[str, Any]) -> Aim:
    rows, line = outcomes(found, OURS, "silent"), f"silent host loss -> {NEXT}"
    if not rows:
        return Aim(line, f"{SILENT_S:g} s", "not measured", None)
    worst = max(r["latency_s"] for r in rows)
    return Aim(line, f"{SILENT_S:g} s", f"at most {worst:.2f} s of {len(rows)}", worst <= SILENT_S)


def _planned(found: dict[str, Any], event: str, limit_s: float) -> Aim:
    rows, line = outcomes(found, OURS, event), f"{EVENTS[event]}: pause beyond one step, steps repeated"
    if not rows:
        return Aim(line, f"{limit_s:.2f} s, 0", "not measured", None)
    pause, repeated = statistics.median(map(beyond_s, rows)), max(r["repeated"] for r in rows)
    worst = max(map(beyond_s, rows))
    return Aim(line, f"{limit_s:.2f} s, 0", f"{pause:.3f} s (at most {worst:.3f}), {repeated} of {len(rows)}",
               pause <= limit_s and repeated == 0)


def _start(found: dict[str, Any]) -> Aim:
    line, figures = "new worker process to warm, from the zygote", found.get("start")
    if not figures:
        return Aim(line, f"{START_S} s", "not measured", None)
    return Aim(line, f"{START_S} s", f"{figures['median_s']:.3f} s of {len(figures['seconds'])}",
               figures["median_s"] <= START_S)


def _step(found: dict[str, Any]) -> Iterable[Aim]:
    for what, words in (("cpu", "CPU time"), ("wall", "wall time")):
        for peer, name in (("ddp", "plain DDP"), ("ddp views", "DDP with bucket views")):
            aim, line = f"{STEP_RATIO}" if peer == "ddp" else "", f"{words} per step against {name}"
            figures = found.get("step", {}).get(peer, {}).get(what)
            if not figures:
                yield Aim(line, aim, "not measured", None)
                continue
            text = (f"{_ratio(figures)} of {len(found['step']['blocks'])} pairs, "
                    f"{1000 * figures['ours_s']:.0f} against {1000 * figures['theirs_s']:.0f} ms")
            yield Aim(line, aim, text, figures["ratio"] <= STEP_RATIO if aim else None)


def _copy(found: dict[str, Any]) -> Aim:
    line, figures = "in-memory copy against memcpy into warm buffers", found.get("copy")
    if not figures:
        return Aim(line, f"{COPY_RATIO}", "not measured", None)
    return Aim(line, f"{COPY_RATIO}", f"{_ratio(figures)}, {figures['mb']:.0f} MB in {1000 * figures['ours_s']:.1f} ms",
               figures["ratio"] <= COPY_RATIO)


def _ratio(figures: dict[str, float]) -> str:
    return f"{figures['ratio']:.3f} ({figures['low']:.3f} to {figures['high']:.3f})"


def _memory(found: dict[str, Any]) -> Aim:
    line, held = "extra resident memory of a worker", found.get("memory")
    if not held:
        return Aim(line, f"{MEMORY_MB:g} MB", "not measured", None)
    more = {key: held[OURS][key] - held["ddp"][key] for key in held[OURS]}
    return Aim(line, f"{MEMORY_MB:g} MB", f"{more['rss_mb']:+.0f} MB (RSS {held[OURS]['rss_mb']:.0f} against "
               f"{held['ddp']['rss_mb']:.0f}; PSS {more['pss_mb']:+.0f}, USS {more['uss_mb']:+.0f})",
               more["rss_mb"] <= MEMORY_MB)


def table(found: dict[str, Any]) -> list[str]:
    words = {True: "yes", False: "NO", None: "-"}
    return columns([("", "aim, at most", "measured", "holds"),
                    *((a.line, a.aim, a.measured, words[a.holds]) for a in judge(found))])


def headline(found: dict[str, Any]) -> list[str]:
    """Return one line per event that was measured: the median of all survivors' next step under each system."""
    lines = []
    for event, words in EVENTS.items():
        names = dict.fromkeys(r["system"] for r in found["rows"] if r["event"] == event)
        medians = {n: statistics.median(o["latency_s"] for o in held) for n in names
                   if (held := outcomes(found, n, event))}
        ordered = sorted(medians, key=lambda n: (n != OURS, medians[n]))
        if event != "join" and medians:
            lines.append(f"{words} -> {NEXT}, median: " + ", ".join(f"{n} {medians[n]:.2f} s" for n in ordered))
    return lines


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return all systems side by side, with a heading first."""
    lines = [("system", "event", "n", f"{NEXT}: median (min-max), s", "pause beyond one step, s", "repeated", "failed")]
    names = dict.fromkeys(r["system"] for r in found["rows"])
    for event, words in EVENTS.items():
        for name in names:
            here = [r for r in found["rows"] if (r["system"], r["event"]) == (name, event)]
            held = [r["outcome"] for r in here if r["outcome"]]
            if held:
                latencies = [o["latency_s"] for o in held]
                lines.append((name, words, str(len(held)),
                             f"{statistics.median(latencies):.2f} ({min(latencies):.2f}-{max(latencies):.2f})",
                             f"{statistics.median(map(beyond_s, held)):.3f}",
                             f"{min(o['repeated'] for o in held)}-{max(o['repeated'] for o in held)}",
                             str(len(here) - len(held))))
            elif here:
                lines.append((name, words, "0", here[0]["problem"], "", "", str(len(here))))
    return lines


def systems(found: dict[str, Any]) -> list[str]:
    return columns(rows(found))


def columns(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
