"""Given the same history, the simulator and a dispatcher on the local provider decide the same, second by second."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from spotfleet.fleet.cost.meter import report
from spotfleet.fleet.domain.events import (
    HostDraining,
    HostJoined,
    HostListed,
    HostNoticed,
    LaunchIntended,
    LaunchRefused,
    PolicyDecided,
    TerminateIntended,
)
from spotfleet.model import CloudState, PolicySpec
from tests.support.simulate.dispatcher_loop import BEGAN, History, Loop, simulated

DEADLINE = PolicySpec("auto", deadline_s=1600.0)


def decided(rows) -> list[tuple]:
    """What was decided and what came of it, with the second."""
    found: list[tuple] = []
    for row in rows:
        at = row.at - BEGAN
        match row:
            case LaunchIntended():
                found.append((at, "launch", row.request_id, row.offer.pool, row.why))
            case LaunchRefused():
                found.append((at, "refused", row.request_id, row.scope))
            case HostJoined():
                found.append((at, "joined", row.request_id))
            case HostNoticed():
                found.append((at, "notice", row.request_id, row.seconds_left))
            case HostDraining():
                found.append((at, "drain", row.request_id, row.why))
            case TerminateIntended():
                found.append((at, "end", row.request_id, row.why))
            case PolicyDecided():
                found.append((at, "policy", row.spot, row.on_demand, row.rule))
            case HostListed(state=CloudState.TERMINATED):
                found.append((at, "gone", row.request_id, row.runs[-1].taken))
    return found


@st.composite
def histories(draw) -> History:
    hosts = draw(st.integers(1, 4))
    pools = []
    for _ in range(draw(st.integers(1, 2))):
        times = sorted(draw(st.sets(st.integers(1, 1500), max_size=5)))
        pools.append(tuple((at, draw(st.integers(0, hosts + 1))) for at in (0, *times)))
    policy = draw(st.sampled_from([DEADLINE, DEADLINE, PolicySpec("auto"), PolicySpec("spot"),
                                   PolicySpec("spot", on_demand_base=1), PolicySpec("on-demand")]))
    return History(hosts, tuple(pools), policy, boot_s=draw(st.sampled_from([10, 30, 90])),
                   notice_s=draw(st.sampled_from([0, 25, 120])))


LOST_AND_BACK = History(2, (((0, 2), (400, 0), (800, 2), (1100, 1)),), DEADLINE)
TAKEN_IN_TWO_POOLS = History(4, (((0, 3), (428, 0)), ((0, 3), (428, 0))), PolicySpec("auto"), boot_s=10, notice_s=0)
TWO_JOINS_IN_A_SECOND = History(4, (((0, 1), (561, 0), (1316, 3)), ((0, 1),)), DEADLINE, boot_s=10, notice_s=0)

WARNED_AND_GONE_AT_ONCE = History(4, (((0, 5), (327, 3), (551, 5), (552, 1)), ((0, 0), (324, 2), (905, 0), (906, 2))),
                                  PolicySpec("auto"), boot_s=10)


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(histories())
@example(LOST_AND_BACK)
@example(History(3, (((0, 1), (300, 3)), ((0, 0), (150, 2), (700, 0))), PolicySpec("auto")))
@example(History(1, (((0, 0), (1400, 1)),), DEADLINE))
@example(History(1, (((0, 0), (39, 1), (200, 0)),), PolicySpec("auto"), boot_s=10, notice_s=25))
@example(TAKEN_IN_TWO_POOLS)
@example(TWO_JOINS_IN_A_SECOND)
@example(WARNED_AND_GONE_AT_ONCE)
def test_the_simulator_decides_what_a_dispatcher_decides(history):
    with pytest.MonkeyPatch.context() as patch:
        loop, world = Loop(history, patch).run(), simulated(history)
    assert decided(world.ledger.rows) == decided(loop.ledger.rows)
    assert world.now == loop.clock()
    knows, known = world.state.history, loop.ledger.state().history
    assert (knows.availability, knows.boots, knows.stalls) == (known.availability, known.boots, known.stalls)
    own, real = world.cloud.invoice(), loop.market.invoice(loop.clock())
    assert own == real
    assert report(world.ledger.rows, world.now).micros == own.micros


def test_such_a_history_holds_all_that_can_happen():
    """Else the comparison would compare little."""
    kinds = {line[1] for line in decided(simulated(LOST_AND_BACK).ledger.rows)}
    assert kinds == {"launch", "refused", "joined", "notice", "drain", "end", "policy", "gone"}
