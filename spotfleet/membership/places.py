"""Places for spares: the next members by rank, and predictions for workers that start. Pure.

A script may read its rank and the world size before its worker has a place, and build from them. Then the worker may
take that place alone (`Claim`). A worker in init() gets the place that it would take if all that came before it, and
those that start on its host with it, were ready.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

BLANK = ""  # a worker that is not known yet, in a prediction


@dataclass(frozen=True)
class Claim:
    """The numbers that a spare's place must have; unset ones may be any."""

    rank: int = -1
    size: int = 0

    def __bool__(self) -> bool:
        return self != Claim()


ANY = Claim()


def arrange(ranks: Sequence[str], kept: Collection[str], spares: Sequence[str], limit: int,
            claims: Mapping[str, Claim], at_least: int = 0) -> list[str]:
    """Return the most members, by rank: `kept` keep their ranks, spares fill gaps, others move up.

    `limit`: the most members if a spare comes. `spares`, the preferred ones first, get no place against their claims;
    blanks fill up to `at_least` members.
    """
    held = [w for w in ranks if w in kept]
    for more in range(min(max(len(spares), at_least - len(held)), limit - len(held)), 0, -1):
        blanks = more if len(held) + more <= at_least else 0
        if found := _filled(_with_gaps(ranks, kept, more), spares, claims, blanks):
            return found
    return held


def _with_gaps(ranks: Sequence[str], kept: Collection[str], gaps: int) -> list[str | None]:
    """Return `ranks` with `gaps` gaps: where the first lost ones were, then at the end."""
    slots: list[str | None] = []
    for worker in ranks:
        if worker in kept:
            slots.append(worker)
        elif gaps:
            slots.append(None)
            gaps -= 1
    return [*slots, *[None] * gaps]


def _filled(slots: list[str | None], spares: Sequence[str], claims: Mapping[str, Claim], blanks: int) -> list[str]:
    """Fill all gaps; [] if the spares that fit do not suffice."""
    fitting = [(w, claims.get(w, ANY)) for w in spares if claims.get(w, ANY).size in (0, len(slots))]
    for worker, claim in fitting:
        if 0 <= claim.rank < len(slots) and slots[claim.rank] is None:
            slots[claim.rank] = worker
    free = iter([*(w for w, claim in fitting if claim.rank < 0), *[BLANK] * blanks])
    filled = [next(free, None) if w is None else w for w in slots]
    return [w for w in filled if w is not None] if None not in filled else []
