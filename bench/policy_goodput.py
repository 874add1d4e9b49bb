"""Table B2 of policy.py: share of a spot market's offer that becomes useful work, by a system's handling of changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from spotfleet.simulate.constants import BOOT_S, JOIN, LOSS, REDONE
from spotfleet.simulate.values.trace import Trace

Each = Callable[[Callable[..., Any], Sequence[tuple], str], list[Any]]
HOUR_S = 3600.0
SPOT_SHARE = 0.30  # share of the on-demand price
SHORTEST_S = 2 * HOUR_S


@dataclass(frozen=True)
class System:
    """Handling of changes by a system. `loss_s`, `join_s`: wait of all hosts when hosts are lost or join.

    A loss undoes the work after the last checkpoint, one each `checkpoint_s` of work (0: nothing is lost).
    """

    name: str
    loss_s: float
    join_s: float
    checkpoint_s: float = 0.0
    gang: bool = False  # works only with all N


SYSTEMS = (
    System("spotfleet", LOSS.seconds, JOIN.seconds, REDONE.seconds),
    System("gang, all N or nothing, restart 180 s", 180.0, 180.0, 600.0, gang=True),
    System("restart 180 s, checkpoint every 600 s", 180.0, 180.0, 600.0),
    System("torchelastic, 75 s after a loss, 14 s for a join", 75.0, 14.0, 600.0),
    System("the same, checkpoint on notice", 75.0, 14.0),
    System("elastic 15 s per change, commit every 60 s", 15.0, 15.0, 60.0),
    System("elastic 5 s + notice", 5.0, 5.0),
    System("elastic 1 s + notice", 1.0, 1.0),
    System("ideal", 0.0, 0.0),
)


@dataclass(frozen=True)
class Goodput:
    useful_s: float
    redone_s: float
    paid_s: float
    offered_s: float
    whole_s: float  # N x T


def summary(cells: Sequence[Goodput]) -> tuple[float, float, float, float]:
    """Return G, E, L %, $: useful of N T; useful of the offer; share computed again; price of useful work, 1 on demand.

    Each record counts the same, whatever its length and N. L and $ are ratios of such means, since a system may do
    nothing useful in one record.
    """
    useful, redone, paid = (fmean(getattr(c, f) / c.whole_s for c in cells) for f in ("useful_s", "redone_s", "paid_s"))
    return (useful, fmean(c.useful_s / c.offered_s if c.offered_s else 0.0 for c in cells),
            100.0 * redone / (useful + redone) if useful + redone else 0.0,
            SPOT_SHARE * paid / useful if useful else float("inf"))


def goodput_of(trace: Trace, system: System, boot_s: float = BOOT_S) -> Goodput:
    """Run a system that takes and pays all offered hosts at once; a host works after `boot_s`.

    The youngest hosts are lost first. A gang takes hosts only while all N are offered.

    Exact: from one instant that matters to the next. `ideal` boots in no time.
    """
    boot_s = 0.0 if system.name == "ideal" else boot_s
    steps = list(trace.capacity)
    times = sorted({at for at, _ in steps} | {at + boot_s for at, _ in steps if at + boot_s < trace.length_s})
    ends = [*times[1:], trace.length_s]
    cohorts: list[list[float]] = []  # (ready at, hosts)
    working, waits_until, since_s = 0, 0.0, 0.0  # since_s: work since the last checkpoint
    useful = redone = paid = 0.0
    place, capacity = 0, 0
    for now, end in zip(times, ends, strict=True):
        while place < len(steps) and steps[place][0] <= now:
            capacity, place = steps[place][1], place + 1
        held, before = sum(int(n) for _, n in cohorts), working
        lost = 0
        while held > capacity:
            gone = min(held - capacity, int(cohorts[-1][1]))
            lost += gone if cohorts[-1][0] < now else 0  # a host that becomes ready now has done nothing yet
            cohorts[-1][1] -= gone
            held -= gone
            if not cohorts[-1][1]:
                cohorts.pop()
        if held < capacity:
            cohorts.append([now + boot_s, capacity - held])
        ready = sum(int(n) for at, n in cohorts if at <= now)
        working = ready if not system.gang or ready >= trace.most else 0
        if lost and before:
            if system.checkpoint_s:
                back = since_s * before
                useful, redone, since_s = useful - back, redone + back, 0.0
            waits_until = now + system.loss_s
        elif working != before:
            waits_until = max(waits_until, now + system.join_s)
        begun = min(max(now, waits_until), end)
        worked = end - begun if working else 0.0
        useful += working * worked
        if system.checkpoint_s and working:
            since_s = (since_s + worked) % system.checkpoint_s
        if not system.gang or capacity >= trace.most:
            paid += sum(n for _, n in cohorts) * (end - now)
    offered = sum(n * (end - at) for (at, n), end in
                  zip(steps, [*(at for at, _ in steps[1:]), trace.length_s], strict=True))
    return Goodput(useful, redone, paid, offered, trace.most * trace.length_s)


def goodput(traces: Sequence[Trace], every_s: float, each: Each) -> dict[str, Any]:
    used, skipped = [], {}
    for trace in traces:
        why = ("of prices alone" if not trace.capacity else "of one host" if trace.most <= 1 else
               f"shorter than {SHORTEST_S / HOUR_S:g} h" if trace.length_s < SHORTEST_S else "")
        if why:
            skipped[trace.name] = why
        else:
            used.append(trace)
    found = iter(each(goodput_of, [(trace, system) for system in SYSTEMS for trace in used], "B2"))
    rows = [["system", "G", "E", "L %", "$"]]
    figures, ours = {}, ""
    for system in SYSTEMS if used else ():
        cells = [next(found) for _ in used]
        g, e, lost, price = summary(cells)
        ours = ours or ", ".join(f"{t.name} {c.useful_s / c.offered_s:.4f}" if c.offered_s else f"{t.name} -"
                                 for t, c in zip(used, cells, strict=True))
        rows.append([system.name, f"{g:.3f}", f"{e:.4f}", f"{lost:.2f}", f"{price:.4f}"])
        figures[system.name] = e
    notes = [f"Ours: {LOSS.source}; {JOIN.source}.", "Mean of records, N the most hosts that each had: "
             + ", ".join(f"{t.name} {t.most}" for t in used) + ".",
             f"E of {SYSTEMS[0].name} in each: {ours or 'none'}."]
    return {"title": "Elastic goodput, N hosts, spot only", "rows": rows, "used": [t.name for t in used],
            "skipped": skipped, "notes": notes, "figures": figures}
