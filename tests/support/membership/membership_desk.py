"""A builder for tests of single rules: the dispatcher's view of each worker, set by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spotfleet.membership import Change, Formed, Membership, Ordered, WorkerView
from spotfleet.protocol.messages import Stage


class Desk:
    def __init__(self, min_workers: int = 1, max_workers: int = 8) -> None:
        self.core = Membership("job", min_workers, max_workers)
        self.views: dict[str, WorkerView] = {}
        self.now = 0.0
        self.expected = 0

    def put(self, *workers: str, **fields: Any) -> None:
        """Workers come, or change. A worker's host is its name's first letter."""
        for name in workers:
            blank = WorkerView(name, host=name[0], local_rank=0, stage=Stage.INIT, store=f"{name}:1")
            self.views[name] = replace(self.views.get(name, blank), **fields)

    def see(self, after: float = 0.0) -> list[Change]:
        self.now += after
        return self.core.observe(list(self.views.values()), self.expected, self.now)

    def form(self, version: int = 10) -> list[Change]:
        """All members obey, and train."""
        self.put(*self.core.members, generation=self.core.generation, stage=Stage.READY, version=version)
        for name in set(self.views) - set(self.core.members):
            self.put(name, generation=0)
        return self.see()

    def ordered(self, after: float = 0.0) -> tuple[str, tuple[str, ...]] | None:
        """What a look decides: cause and members of the new generation."""
        for change in self.see(after):
            if isinstance(change, Ordered):
                return change.cause, change.members
        return None


def training(*workers: str, min_workers: int = 1, max_workers: int = 8) -> Desk:
    """A job that has trained for a while on these workers."""
    desk = Desk(min_workers, max_workers)
    desk.put(*workers)
    desk.see()
    desk.see(after=10.0)
    assert [type(c) for c in desk.form()] == [Formed]
    return desk
