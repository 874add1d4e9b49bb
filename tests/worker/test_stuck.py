"""Workers whose communicators behave as NCCL's (stuck_group.py): a peer dies, and only the dispatcher says so."""

from __future__ import annotations

import pytest

from spotfleet.protocol.messages import STUCK_EXIT, Stage
from tests.support.train.train_scripts import COUNT
from tests.train.test_recovery import RICH

pytestmark = pytest.mark.processes

STUCK = '''
import os
from spotfleet.train.comm import backends, nccl
from stuck_group import StuckGroup
hangs = os.environ.get("HANGS") == os.environ["SPOTFLEET_WORKER"]
if hangs:
    nccl.END_LIMIT_S = 0.5

def make_group(*args, **options):
    return StuckGroup(*args, holder=nccl.HOLDER, garbage=True, abort_hangs=hangs)

backends.make_group = make_group
'''
FOUNDERS = ["h0/0/1", "h1/0/1", "h2/0/1"]


def train(fleets, script: str, spares: int, **env: str):
    """A fleet that trains with spares ready; workers that die do so only then."""
    fleet = fleets(script)
    fleet.hold = True
    for _ in range(len(FOUNDERS) + spares):
        fleet.start(**env)
    fleet.wait(lambda: all(fleet.report(n).stage is Stage.INIT for n in FOUNDERS), what="founders")
    fleet.form(tuple(FOUNDERS), "start")
    others = [n for n in fleet.workers if n not in FOUNDERS]
    fleet.wait(lambda: all(fleet.report(n).stage is Stage.READY for n in others), what="spares")
    fleet.hold = False
    return fleet


def digests(fleet) -> set[str]:
    fleet.wait_end()
    return set(fleet.lines("DIGEST"))


def test_spares_take_the_slots_of_the_dead_and_of_one_that_cannot_get_free_and_the_bits_stay(fleets):
    undisturbed = digests(train(fleets, RICH, spares=0))
    fleet = train(fleets, STUCK + RICH, spares=2, DIE="h1/0/1:begin:30", HANGS="h0/0/1")
    assert digests(fleet) == undisturbed and len(undisturbed) == 1
    assert fleet.workers["h0/0/1"].exit == STUCK_EXIT
    assert fleet.members == ("h4/0/1", "h3/0/1", "h2/0/1")
    last = fleet.report("h0/0/1")
    assert "abort took more than 0.5 s" in last.error and last.blame_peer


@pytest.mark.parametrize("point", ["forward:40", "stepped:40"])
def test_a_step_whose_reduction_may_have_failed_is_neither_counted_nor_applied(fleets, point):
    """What an abort leaves behind is garbage here, and every event is reached."""
    fleet = train(fleets, STUCK + COUNT, spares=1, DIE=f"h1/0/1:{point}", EPOCHS="2", BATCHES="40")
    fleet.wait_end()
    assert set(fleet.lines("WEIGHT")) == {"-80.0"}, fleet.story()
    assert [fleet.workers[n].exit for n in ("h0/0/1", "h2/0/1", "h3/0/1")] == [0, 0, 0], fleet.story()


def test_planned_changes_go_from_one_communicator_to_the_next_without_a_repeated_step(fleets):
    fleet = train(fleets, STUCK + COUNT, spares=1, EPOCHS="2", BATCHES="40", NAP="0.01")
    fleet.wait_version(20)
    fleet.drain("h1/0/1")
    fleet.wait_end()
    assert set(fleet.lines("WEIGHT")) == {"-80.0"}, fleet.story()
    assert [fleet.report(n).repeated for n in ("h0/0/1", "h2/0/1", "h3/0/1")] == [0, 0, 0]
    assert fleet.history[-1][1] == ("h0/0/1", "h3/0/1", "h2/0/1")
