"""Names of tensors and values that differ by rank on purpose, which no check compares."""

from __future__ import annotations

from collections.abc import Iterable

from spotfleet.errors import UsageError


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
