"""Count of the promises that an attack tried, kept and broke."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

LINES = "attack"  # property of a test's report: the lines that a run prints at its end
SEED = "SPOTFLEET_ATTACK_SEED"  # environment: seed of the first turn of each kind
SAME = "SPOTFLEET_SAME_EXAMPLES"  # environment: a change is judged by the same seeds each time
LONG = bool(os.environ.get("SPOTFLEET_LONG"))
ONCE = pytest.mark.parametrize("turn", [0])  # for a test that ends the fleet of others, or that draws nothing
SHOWN = 1000  # characters of an error
TURNS = 3 if LONG else 1  # seeds of each kind


def strokes(usual: int, long: int) -> int:
    """Return the number of strokes for this form of the run."""
    return long if LONG else usual


def seed_of(turn: int) -> int:
    first = int(os.environ.get(SEED, 1 if os.environ.get(SAME) else random.randrange(10**6)))
    return first + turn


class PromiseBroken(AssertionError):
    """Some promise did not hold."""


@dataclass
class Tally:
    """What one kind has tried so far."""

    kind: str
    seed: int
    tried: int = 0
    broken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self, promise: str, kept: object, details: object = "") -> bool:
        """Count one promise; `details` are printed if it is broken."""
        self.tried += 1
        if not kept:
            self.broken.append(f"{promise}: {details}" if details else promise)
        return bool(kept)

    def none(self, promise: str, exceptions: dict | list | set | tuple, of: int = 1) -> None:
        """Count a promise about `of` things, of which `exceptions` are those for which it does not hold."""
        self.tried += max(of, len(exceptions))
        shown = exceptions.items() if isinstance(exceptions, dict) else exceptions
        self.broken += [f"{promise}: {one}" for one in shown]

    def note(self, text: str) -> None:
        """Keep a figure for the line's end."""
        self.notes.append(text)

    def lines(self, stopped: str = "") -> str:
        counts = f"tried {self.tried}, kept {self.tried - len(self.broken)}, broken {len(self.broken)}"
        first = "; ".join([f"{self.kind}, seed {self.seed}: {stopped or counts}", *self.notes])
        return "\n".join([first, *(f"    broken: {what}" for what in self.broken)])


@contextmanager
def tallied(kind: str, seed: int, record: Callable[[str, object], None]) -> Iterator[Tally]:
    """Yield the tally of one kind; record its lines, and raise PromiseBroken if a promise broke.

    An error that ends the attack counts as one that broke, and is raised again. A skip is recorded with its reason.
    """
    tally = Tally(kind, seed)
    try:
        yield tally
    except pytest.skip.Exception as skipped:
        record(LINES, tally.lines(f"skipped: {skipped}"))
        raise
    except Exception as error:
        tally.check("the attack comes to its end", False, f"{type(error).__name__}: {error}"[:SHOWN])
        record(LINES, tally.lines())
        raise
    record(LINES, tally.lines())
    if tally.broken:
        raise PromiseBroken(tally.lines())
