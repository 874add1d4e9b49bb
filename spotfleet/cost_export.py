"""Billing exports: a cloud's own bill as lines of a file, in one form for every cloud. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol


@dataclass(frozen=True)
class BilledLine:
    """One line of an export."""

    resource: str  # the cloud's id
    kind: str  # "machine", "disk", "address", "traffic"; "" for a kind that no ledger counts
    left_out: str  # name of a tax, credit, fee or kind that no ledger counts; "": it bills usage
    since: float  # Unix seconds; of usage only
    until: float
    fleet: str  # value of our tag with the fleet; "" without
    host: str  # value of our tag with the host
    dollars: Callable[[], Decimal]  # reads the amount; UsageError if it is no number of dollars


class CostExport(Protocol):
    """Reader of a cloud's billing exports (`CloudPlugin.cost_export`)."""

    name: str  # the export's name, for messages
    how: str  # how to make one
    lag: str  # how far exports lag behind
    untagged: str  # why a tagged disk or address may be missing

    def reads(self, header: Sequence[str]) -> bool:
        """Return whether a file with this first line is such an export, complete or not."""

    def lines(self, header: Sequence[str], rows: Iterable[Mapping[str, str]]) -> Iterator[BilledLine]:
        """Yield the lines of a file. Raises UsageError for a missing column or a line that cannot be understood."""
