"""Which notices of agents count: not one of a run that is over."""

from __future__ import annotations

from spotfleet.dispatcher.hosts import LAST_WORD_S, AgentConnection
from spotfleet.fleet.domain.events import Event, HostJoined, HostListed, HostNoticed, LaunchIntended
from spotfleet.fleet.domain.host import Host
from spotfleet.fleet.domain.state import fold
from spotfleet.model import CloudState, Market, Notice, Offer, Role, Run
from spotfleet.protocol.messages import AgentReport

OFFER = Offer("p", "r", "z", "t", Market.SPOT, 1, 10, 20)
NOTICED: list[Event] = [
    LaunchIntended(0.0, "f-0", Role.WORKER, OFFER, "why"), HostListed(1.0, "f-0", "i", CloudState.RUNNING, (Run(1.0),)),
    HostJoined(2.0, "f-0", "first"), HostNoticed(100.0, "f-0", 10.0, "stop")]
TAKEN_AND_BACK = HostListed(102.5, "f-0", "i", CloudState.RUNNING, (Run(1.0, 101.2, True), Run(101.9)))


def host(*events: Event) -> Host:
    return fold([*NOTICED, *events]).hosts[0]


def connection(incarnation: str = "first", **more: float) -> AgentConnection:
    """Of an agent that reports at 100 by a monotonic clock that its host is taken in 10 s."""
    report = AgentReport("f-0", incarnation, "127.0.0.1", 1, notice=Notice(10.0, "stop"))
    made = AgentConnection("f-0", report, lambda: None)
    made.receive(report, 100.0)
    made.connected, made.away_since = not more, more.get("away_since", 0.0)
    return made


def test_a_notice_outlives_its_connection_for_a_moment():
    away = connection(away_since=101.0)
    assert away.valid_notice(host(), 102.0) == Notice(8.0, "stop")
    assert away.valid_notice(host(), 101.0 + LAST_WORD_S) is None


def test_a_host_that_is_taken_early_and_back_within_the_second_gets_no_notice_of_its_agent_of_before():
    for before in (connection(), connection(away_since=101.2)):  # the loss of the connection takes seconds to be seen
        assert before.valid_notice(host(TAKEN_AND_BACK), 103.0) is None
    assert connection("second").valid_notice(host(TAKEN_AND_BACK), 103.0) == Notice(7.0, "stop")


def test_an_agent_that_has_joined_again_is_heard_also_if_it_is_the_same_process():
    assert connection().valid_notice(host(TAKEN_AND_BACK, HostJoined(103.0, "f-0", "first")), 103.0) is not None
