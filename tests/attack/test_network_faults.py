"""Partitions and loss between real machines' namespaces: the weights are those of plain torch, bit for bit.

Each recovery by itself: tests/network/test_recovery_paths.py. Where the kernel or the rights lack, the kind is skipped
with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.chaos import LEAST, chaos, plan
from tests.network.chaos_network import HERE, NetworkStrokes, NetworkWorld
from tests.support.attack.tally import LONG, strokes
from tests.support.network.namespaces import why_not
from tests.support.network.network_fleet import NetworkFleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(7200)]
SOON = {"cut": 1, "cut_dispatcher": 1, "lossy": 1}
CUT_S = (5.0, 10.0)  # so long that the others form a generation without the host, which comes back behind


class WireStrokes(NetworkStrokes):
    """Besides, the dispatcher is cut from all, and a host's link loses and delays."""

    def cut(self) -> str:
        host, cut_s = self.host(), self.dice.uniform(*CUT_S)
        self.net_fleet.cut(host)
        self._later(cut_s, lambda: self.net_fleet.restore(host))
        return f"cut {host} for {cut_s:.1f} s"

    def cut_dispatcher(self) -> str:
        cut_s = self.dice.uniform(1, 8)
        self.net_fleet.cut("dispatcher")
        self._later(cut_s, lambda: self.net_fleet.restore("dispatcher"))
        return f"cut the dispatcher for {cut_s:.1f} s"

    def lossy(self) -> str:
        host, lossy_s = self.host(), self.dice.uniform(2, 6)
        self.net_fleet.net.slow(host, self.dice.uniform(0.001, 0.02), loss=self.dice.uniform(0.005, 0.03))
        self._later(lossy_s, lambda: host in self.living() and self.net_fleet.net.slow(host, 0))
        return f"a lossy link of {host} for {lossy_s:.1f} s"


class WireWorld(NetworkWorld):
    def begin(self, say: Callable[[str], None]) -> None:
        super().begin(say)
        self.strokes = WireStrokes(self.fleet, say)


def test_partitions_and_loss_change_no_bit(tmp_path: Path, attack, seed: int):
    with attack("K4 partitions, loss and delay between machines") as tally:
        if why := why_not():
            pytest.skip(why)
        (tmp_path / "work").mkdir()
        bursts = plan(seed, strokes(3, 60), {**HERE, **SOON} if LONG else SOON)
        with NetworkFleet(tmp_path / "fleet", LEAST) as fleet:
            world = WireWorld(fleet, tmp_path / "work")
            chaos(world, bursts)  # type: ignore[arg-type]
        tally.none("all workers train again after a burst", (), len(bursts))
        tally.none("each sample counts once in each epoch; weights, Adam and statistics are plain torch's", (), 2)
        tally.note(f"faults: {dict(world.strokes.done)}, without a victim: {dict(world.strokes.missed)}")
