"""A silent host: its network link goes down without notice, its processes live on. Needs Linux, root and `ip`.

The fleet is that of tests/network: dispatcher and agents are real processes, each host in its own network namespace on
one bridge. The event is the moment before the link goes down. Afterwards the link returns and the host rejoins, so that
the next round begins with three workers.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from worlds import STEPS, WORLD, World

NETWORK = Path(__file__).parent.parent / "tests" / "network"


def why_not() -> str:
    """Return why this cannot be measured here; empty if it can."""
    if not NETWORK.is_dir():
        return "needs tests/network of the source tree"
    sys.path.insert(0, str(NETWORK))
    from tests.support.network.namespaces import why_not as why_no_namespaces

    return why_no_namespaces()


class Silent(World):
    """Spotfleet on machines whose links can be cut."""

    name = "spotfleet"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from tests.support.network.network_fleet import NetworkFleet

        self.fleet = NetworkFleet(folder / "net", WORLD)
        self._job = ""
        self._cut: list[str] = []

    def __enter__(self) -> Silent:
        (self.folder / "net").mkdir()
        try:
            self.fleet.start()
            self._job = self.fleet.submit({"steps.py": STEPS.read_text()}, (2, WORLD),
                                          ("--under", "spotfleet", "--folder", str(self.folder)),
                                          envs={"OMP_NUM_THREADS": "1"})
        except BaseException:
            self.fleet.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.fleet.stop()

    def cut(self, rank: int) -> float:
        from tests.support.network.network_fleet import host_of

        host = host_of(self.fleet.members(self._job)[rank])
        self._cut.append(host)
        at = time.monotonic()
        self.fleet.cut(host)
        return at

    kill_host = leave = cut

    def join(self) -> float:
        """Restore the link; the fleet may have replaced the host before."""
        at = time.monotonic()
        while self._cut:
            self.fleet.restore(self._cut.pop())
        return at
