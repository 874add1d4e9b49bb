"""The first difference between two runs, and its symptoms. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from spotfleet.verify.scenarios import Disturbance, Record, RecordedRun


class RecordPart(Enum):
    """RecordPart of a record in which two runs differ."""

    VALUES = "values"  # the position's values
    BEFORE = "before"  # weights at the first gradient
    TENSORS = "tensors"  # weights and optimizer state after the step
    BUFFERS = "buffers"  # statistics and the like, which each rank has for itself
    DRAWS = "draws"  # random generators at the first gradient
    GRADIENT = "gradient"  # this rank's own, before it is averaged


@dataclass(frozen=True)
class RunDifference:
    """First step at which a run differs from the undisturbed one."""

    run: str
    version: int
    ranks: tuple[int, ...]
    name: str  # the first tensor or value that differs
    part: RecordPart
    text: str  # both values, if they are known
    after: Disturbance | None
    parts: frozenset[RecordPart]  # all that differ in this step
    lone_rank: int | None = None  # the only rank whose own gradient differs
    own: bool = False  # that rank's worker is a replacement


BATCH_NORM = {"running_mean", "running_var", "num_batches_tracked"}


def first_difference(expected: RecordedRun, found: RecordedRun) -> RunDifference | None:
    """Return the first step at which values or tensors differ; statistics of a rank's own count only with them."""
    for version in range(1, min(expected.version, found.version) + 1):
        pairs = {rank: (expected.records[v, rank], record) for (v, rank), record in sorted(found.records.items())
                 if v == version and (v, rank) in expected.records}
        parts = {part: [r for r, (a, b) in pairs.items() if _differs(part, a, b)] for part in RecordPart}
        if any(parts[part] for part in (RecordPart.VALUES, RecordPart.BEFORE, RecordPart.TENSORS)):
            return _difference(expected, found, version, pairs, parts)
    return None


def statistics(expected: RecordedRun, found: RecordedRun) -> list[str]:
    """Return the buffers of ranks' own that differ at the last common step."""
    version = min(expected.version, found.version)
    names = [name for (v, rank), record in sorted(found.records.items())
             if v == version and (v, rank) in expected.records
             for name in _names(RecordPart.BUFFERS, expected.records[v, rank], record)]
    return list(dict.fromkeys(names))


def ranks_apart(run: RecordedRun) -> RunDifference | None:
    """Return the first step after which the ranks of one run do not hold the same weights."""
    for (version, rank), record in sorted(run.records.items()):
        first = run.records.get((version, 0))
        if first is not None and rank and (names := _names(RecordPart.TENSORS, first, record)):
            part = RecordPart.TENSORS
            return RunDifference(run.name, version, (0, rank), names[0], part, "", None, frozenset({part}))
    return None


def _difference(expected: RecordedRun, found: RecordedRun, version: int, pairs: dict[int, tuple[Record, Record]],
                parts: dict[RecordPart, list[int]]) -> RunDifference:
    after = found.before(version)
    own = parts[RecordPart.GRADIENT]
    lone = own[0] if len(own) == 1 and len(pairs) > 1 and not parts[RecordPart.BEFORE] else None
    stale = _stale_buffer(expected, found, version) if not parts[RecordPart.VALUES] else None
    if parts[RecordPart.VALUES]:
        part = RecordPart.VALUES
    elif parts[RecordPart.BEFORE]:
        part = RecordPart.BEFORE
    elif stale is not None:
        part = RecordPart.BUFFERS
    else:
        part = RecordPart.TENSORS
    ranks, reported = tuple(parts[part]), ()
    if part is RecordPart.TENSORS and (reported := pairs[ranks[0]][1].get("reported", ())):
        part = RecordPart.VALUES  # it was put back at the gradient, but the forward pass has used it
    ranks = (stale[0],) if stale is not None and part is RecordPart.BUFFERS else ranks
    a, b = pairs[ranks[0]]
    name = (stale[1] if stale is not None and part is RecordPart.BUFFERS else
            reported[0] if reported else _names(part, a, b)[0])
    both = part is RecordPart.VALUES and name in a["values"] and name in b["values"]
    text = f"{a['values'][name][1]} became {b['values'][name][1]}" if both else ""
    text = "the forward pass used another value" if reported else text
    founders = list(found.entered)[:len(pairs)]
    return RunDifference(found.name, version, ranks, name, part, text, after,
                      frozenset(p for p, on in parts.items() if on), lone,
                      lone is not None and found.records[version, lone]["worker"] not in founders)


def _stale_buffer(expected: RecordedRun, found: RecordedRun, version: int) -> tuple[int, str] | None:
    """Return rank and name of a buffer that differs by `version` on a rank whose gradient differs now.

    Those of batch norm do not count: in training they have no effect on the gradient.
    """
    for (v, rank), record in sorted(found.records.items()):
        a, then, now = (expected.records.get((v, rank)), expected.records.get((version, rank)),
                        found.records.get((version, rank)))
        if a is None or then is None or now is None or v > version or not _differs(RecordPart.GRADIENT, then, now):
            continue
        names = [n for n in _names(RecordPart.BUFFERS, a, record) if n.rpartition(".")[2] not in BATCH_NORM]
        if names:
            return rank, names[0]
    return None


def _differs(part: RecordPart, a: Record, b: Record) -> bool:
    if isinstance(a[part.value], dict):
        return bool(_names(part, a, b))
    return a[part.value] != b[part.value] and 0 not in (a[part.value], b[part.value])


def _names(part: RecordPart, a: Record, b: Record) -> list[str]:
    """Return the names in which the records differ, in the order of the first one."""
    one, other = a[part.value], b[part.value]
    if part is RecordPart.BEFORE and not (one and other):
        return []
    return [name for name in dict.fromkeys([*one, *other]) if _number(one.get(name)) != _number(other.get(name))]


def _number(entry: object) -> object:
    return entry[0] if isinstance(entry, list) else entry
