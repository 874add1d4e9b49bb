"""PNG plots of a run of recovery.py: each system's steps around its first events, and all latencies on a log axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEFORE_S, AFTER_S = 3.0, 20.0


def draw(path: Path, timelines: Sequence[Any], rows: Sequence[dict[str, Any]]) -> None:
    """Draw `timelines` and `rows` of recovery.py: the first event of each kind of each system."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = _first_events(timelines)
    figure, (steps, latencies) = pyplot.subplots(2, 1, figsize=(11, 4 + 0.45 * len(shown)), layout="constrained",
                                                 height_ratios=[max(1, 0.45 * len(shown)), 3])
    for height, (timeline, _, at) in enumerate(shown):
        for note in timeline.notes:
            if -BEFORE_S < note.at - at < AFTER_S:
                offset = 0.12 * (note.rank - 1)
                steps.plot(note.at - at, height + offset, "|", color=f"C{note.rank % 10}", markersize=5)
    steps.set_yticks(range(len(shown)), [f"{t.system}: {event}" for t, event, _ in shown])
    steps.set_ylim(-0.6, len(shown) - 0.4)
    steps.axvline(0.0, color="black", linewidth=0.8)
    steps.set_xlim(-BEFORE_S, AFTER_S)
    steps.set_xlabel("seconds since the event; one tick per step, one line per rank")
    held = [r for r in rows if r["outcome"] and r["event"] != "join"]
    names = list(dict.fromkeys((r["event"], r["system"]) for r in sorted(held, key=lambda r: r["event"])))
    for height, name in enumerate(names):
        found = [r["outcome"]["latency_s"] for r in held if (r["event"], r["system"]) == name]
        latencies.plot(found, [height] * len(found), "o", alpha=0.5, color="C2" if name[1] == "spotfleet" else "C3")
    latencies.set_yticks(range(len(names)), [f"{system}: {event}" for event, system in names])
    latencies.set_xscale("log")
    latencies.set_xlabel("seconds from the event to all survivors' next step, log scale")
    latencies.grid(axis="x", alpha=0.4)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _first_events(timelines: Sequence[Any]) -> list[tuple[Any, str, float]]:
    found: dict[tuple[str, str], tuple[Any, str, float]] = {}
    for timeline in timelines:
        for event, at in timeline.events:
            found.setdefault((event, timeline.system), (timeline, event, at))
    return [found[key] for key in sorted(found, reverse=True)]
