"""Values that belong to a version of the training state: position, schema of the tensors, and a copy of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spotfleet.errors import UsageError
from spotfleet.train.state.buffers import Moments
from spotfleet.train.state.copies import Buffer

Site = tuple[tuple[str, int], ...]  # place in the script: name and offset of each function called, innermost first


@dataclass(frozen=True)
class Position:
    """Position of training; everything in it is a copy."""

    version: int
    round: int
    world: int  # world size and rank that the hyper-parameters were set up for; 0 and -1: none yet
    rank: int
    scalars: dict[str, Any]
    stateful: dict[str, Any]
    hyper: dict[str, list[dict[str, Any]]]
    generators: dict[str, Any] = field(default_factory=dict)  # states after the last step, or after a later commit
    trained: tuple[bool, ...] = ()  # for each parameter of the state: does it require gradients?
    sampler: str = ""  # name of the sampler whose batch is being computed; empty: none known
    moved: tuple[str, ...] | None = None  # values changed between a step and this gradient; None: of no gradient
    rounds: int = 1  # reductions of its iteration, once that has ended
    counted: tuple[tuple[str, Site], ...] = ()  # changes of values between a call of the function and its gradient
    tries: tuple[tuple[str, Site, Any], ...] = ()  # see repeats.py
    left: Any = None  # hyper-parameters as the last step left them, where code has changed them since
    as_left: bool = False  # and `hyper` has those
    touched: tuple[str, ...] = ()  # names in optimizer state that code changed between a step and this gradient
    still: int = 0  # see script/beginnings.py
    completed: tuple[str, int, int | None] | None = None  # see script/commits.py
    unfit: str = ""  # the reason why this commit cannot be resumed from
    moments: Moments | None = None
    applied: dict[str, Any] | None = None  # values set between this gradient and its step, once that is applied


@dataclass(frozen=True)
class Copy:
    """Copy of all of a state, independent of the live tensors."""

    version: int
    position: Position
    schema: Schema
    tensors: Sequence[torch.Tensor]
    buffer: Buffer | None = None  # memory of the tensors, if it is a reused buffer


@dataclass(frozen=True)
class Schema:
    """Types and shapes of a state's tensors, from which a process without optimizer state can allocate them; and values
    that belong to them."""

    fixed: list[tuple[str, torch.dtype, tuple[int, ...]]]  # parameters and buffers
    optimizers: dict[str, list[dict[str, Any]]]  # per parameter: key -> (dtype, shape, on cpu) or [value]
    plain: dict[str, Any] | None = None  # see plain.py; None in older checkpoints


@dataclass(frozen=True)
class HeldTensor:
    """Tensor on the CPU, and the type of the device that it belongs to."""

    value: torch.Tensor
    device: str


class PerRank:
    """The names given as `per_rank` to a state: values ("loss"), whole objects ("average") or parts of them
    ("model.center")."""

    def __init__(self, names: Iterable[str], known: Iterable[str]) -> None:
        self._names = (names,) if isinstance(names, str) else tuple(names)
        for name in self._names:
            if not isinstance(name, str) or name.partition(".")[0] not in known:
                raise UsageError(f"state: per_rank names {name!r}, which is not in the state",
                                 hint='name values of the state or parts of them, such as per_rank=("loss",)')

    def covers(self, name: str) -> bool:
        """Return whether `name`, such as "model.center", is declared to differ by rank."""
        return any(name == own or name.startswith((own + ".", own + "[")) for own in self._names)
