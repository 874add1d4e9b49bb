"""Numbers of its place that a script has read before its worker had one in a generation.

A joiner's script may build from them before `elastic.run` (a sampler's share, a learning rate, the writer of logs). So
the worker may enter only a generation in which they are true. The dispatcher gives it no other place while it waits,
or starts it anew; `check` is the worker's own guard.
"""

from __future__ import annotations

import sys

from spotfleet.protocol.messages import RankInfo
from spotfleet.worker.errors import PlaceDiffers


class PlaceReads:
    """Numbers read so far: the name of each, its value, and the line that read it first."""

    def __init__(self) -> None:
        self._reads: dict[str, tuple[int, str]] = {}

    def note(self, name: str, value: int, where: str) -> None:
        self._reads.setdefault(name, (value, where))

    def clear(self) -> None:
        """Forget all: the worker trains, and later changes are those of a survivor."""
        self._reads.clear()

    @property
    def rank(self) -> int | None:
        """The rank that was read."""
        return self._reads["rank"][0] if "rank" in self._reads else None

    @property
    def size(self) -> int:
        """The world size that was read; 0 for none."""
        return self._reads.get("size", (0, ""))[0]

    def print_all(self) -> None:
        """Write what binds this worker into its log."""
        if self._reads:
            reads = ", ".join(f"hvd.{name}() as {value} ({where})" for name, (value, where) in self._reads.items())
            print(f"spotfleet: before elastic.run this script has read {reads}; where its place differs, the process "
                  "starts anew", file=sys.stderr, flush=True)

    def check(self, place: RankInfo) -> None:
        """Check that everything read is true in `place`; PlaceDiffers otherwise."""
        for name, (value, where) in self._reads.items():
            if getattr(place, name) != value:
                raise PlaceDiffers(f"hvd.{name}() gave {value} before elastic.run ({where}), but this worker would "
                                   f"train with {getattr(place, name)}: its process is started anew. Read it inside "
                                   "the function decorated with @hvd.elastic.run to avoid that")
