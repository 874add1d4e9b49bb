"""Quotas: whether those of one region hold a fleet. Pure.

A cloud counts machines of a family and market in units of its own: vCPUs, or GPUs of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from spotfleet.model import Nodes
from spotfleet.providers import Finding


@dataclass(frozen=True)
class QuotaUse:
    """A quota of one region, and what others use of it."""

    name: str
    limit: int
    used: int
    how_to_raise: Callable[[int], str]  # to so many
    unit: str = "vCPUs"

    @property
    def state(self) -> str:
        return f"'{self.name}' allows {self.limit} {self.unit}, {self.used} are used"

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


@dataclass(frozen=True)
class QuotaShare:
    """One quota's share for a fleet."""

    quota: QuotaUse
    each: int  # units of the smallest machine that would do
    kinds: tuple[str, ...]

    @property
    def hosts(self) -> int:
        return self.quota.left // self.each


def hosts_fit(region: str, shares: Sequence[QuotaShare], nodes: Nodes) -> Iterator[Finding]:
    """The quotas add up: a fleet may have hosts of several families and markets.

    One host more than the target is asked for: a host that ends counts until it is gone, and so does its replacement.
    """
    together = sum(s.hosts for s in shares)
    for share in shares:
        needed = (nodes.target + 1) * share.each
        kinds = ", ".join(share.kinds[:3]) + (" ..." if len(share.kinds) > 3 else "")
        much = "enough for" if share.hosts >= nodes.target else f"room for {share.hosts} of"
        room = f"{much} {nodes.target} hosts of {kinds} ({share.each} {share.quota.unit} each)"
        what = f"{region}: {share.quota.state}: {room}"
        if share.hosts > nodes.target or together > nodes.target:
            yield Finding(what)
        elif together == nodes.target:
            yield Finding(f"{what}, none to spare: a replacement waits until the host before it is gone", "warning",
                          share.quota.how_to_raise(share.quota.used + needed))
        else:
            level = "warning" if together >= nodes.min else "blocker"
            yield Finding(what, level, share.quota.how_to_raise(share.quota.used + needed))


def one_fits(region: str, quota: QuotaUse, needed: int, whom: str) -> Finding:
    """Check one machine, such as the dispatcher's."""
    what = f"{region}: {quota.state}; {whom} needs {needed}"
    if quota.limit - quota.used >= needed:
        return Finding(what)
    return Finding(what, "blocker", quota.how_to_raise(quota.used + needed))
