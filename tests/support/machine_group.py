"""The part that all groups of machines in tests have in common: entered, found by name, closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

M = TypeVar("M")
G = TypeVar("G", bound="MachineGroup")


class MachineGroup(ABC, Generic[M]):
    def __init__(self) -> None:
        self._all: dict[str, M] = {}

    def __enter__(self: G) -> G:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> M:
        return self._all[name]

    def __iter__(self) -> Iterator[M]:
        return iter(self._all.values())

    @abstractmethod
    def close(self) -> None:
        """All that was started is gone."""
