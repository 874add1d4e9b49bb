"""Where spot costs as much as on demand, simulator and dispatcher go on demand alike."""

from __future__ import annotations

import pytest

from spotfleet.model import PolicySpec
from tests.simulate.test_same_as_dispatcher import decided
from tests.support.simulate import dispatcher_loop
from tests.support.simulate.dispatcher_loop import FULL, History, Loop, simulated

ROOMY = History(2, (((0, 2), (400, 0), (800, 2)),), PolicySpec("auto"))


@pytest.mark.parametrize(("spot", "first"), [(FULL, (0, 2)), (FULL - 10_000, (2, 0))], ids=["as-dear", "cheaper"])
def test_simulator_and_dispatcher_decide_alike_whether_spot_is_worth_it(spot, first):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher_loop, "SPOT", spot)
        loop, world = Loop(ROOMY, patch).run(), simulated(ROOMY)
    found = decided(world.ledger.rows)
    assert found == decided(loop.ledger.rows)
    assert next(line[2:4] for line in found if line[1] == "policy") == first
    bought = {line[3].rpartition("/")[2] for line in found if line[1] == "launch"}
    assert ("spot" in bought) == (first == (2, 0))
