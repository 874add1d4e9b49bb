"""Engines of the histories in engine_history.py: which worker of a new generation has the state that all take over.

Both answer the same question about the same workers. `TorchEngine` asks the torch engine's own functions; `ToyEngine`
counts in plain Python, as an engine without tensors would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Protocol

from spotfleet.train.state import sync


@dataclass
class HeldState:
    """Training state of one worker: the number of its steps, and the unique number of the last one."""

    version: int = 0
    step: int = 0
    made_in: int = 0  # generation of that step
    held: bool = False  # False: as the script has built it


class Engine(Protocol):
    def hand_over(self, states: Sequence[HeldState]) -> None:
        """Bring the states of all ranks of a new generation to the newest one."""


class ToyEngine:
    """Counts steps."""

    def hand_over(self, states: Sequence[HeldState]) -> None:
        newest = max(states, key=lambda s: (s.held, s.version, s.made_in))
        for state in states:
            state.version, state.step, state.made_in, state.held = newest.version, newest.step, newest.made_in, True


class TorchEngine:
    """Decides by `train/state/sync.py`, whose collectives stay out."""

    def hand_over(self, states: Sequence[HeldState]) -> None:
        rows, lost = sync.without_moved([self._row(s, rank, len(states)) for rank, s in enumerate(states)])
        assert not lost
        source = sync.choose_source(rows)
        for rank in sync.ranks_behind(rows, source):
            vars(states[rank]).update(vars(replace(states[source])))
        for state in states:
            state.held = True

    def _row(self, state: HeldState, rank: int, world: int) -> sync.RankState:
        position = SimpleNamespace(round=state.version, version=state.version, world=world, rank=rank)
        unchanged = SimpleNamespace(changes=False)
        return sync.rank_state(SimpleNamespace(
            _damaged=False, _held=state.held, _version=state.version, _position=position, _finished=False,
            _made_in=state.made_in, _moved=0, _marks=unchanged, _touches=unchanged))


ENGINES: dict[str, Engine] = {"torch": TorchEngine(), "toy": ToyEngine()}
