"""What the cloud says by itself counts like what an agent says, and only of our machines."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from dataclasses import replace

import pytest

from spotfleet.dispatcher.cloud import events
from spotfleet.dispatcher.cloud.events import EXPIRE_S, MOST, CloudEventListener, merge_notices
from spotfleet.errors import SpotfleetError
from spotfleet.fleet.domain.state import Host
from spotfleet.model import HostState, Market, Notice, Offer, Role
from spotfleet.providers import CloudEvent
from tests.support.dispatcher.fake_fleet import Cloud, Stage, spec
from tests.support.dispatcher.fake_workers import Script

OFFER = Offer("aws", "r", "r-a", "g5", Market.SPOT, 1, 1_000_000, 3_000_000)
HINT = Notice(0.0, kind="rebalance")


def host(n: int) -> Host:
    return Host(f"f-{n}", Role.WORKER, OFFER, HostState.UP, 0.0, 0.0, 0.0, provider_id=f"i-{n}")


class Talk:
    """Says what a test puts in."""

    def __init__(self) -> None:
        self.words: queue.Queue[list[CloudEvent] | Exception] = queue.Queue()

    def has_events(self) -> bool:
        return True

    def poll_events(self, fleet: str, wait_s: float) -> list[CloudEvent]:
        try:
            said = self.words.get(timeout=0.05)
        except queue.Empty:
            return []
        if isinstance(said, Exception):
            raise said
        return said


@pytest.fixture
def listening() -> tuple[CloudEventListener, list[str]]:
    poked: list[str] = []
    return CloudEventListener(Talk(), "f", lambda: [host(0), host(1)], lambda: poked.append("x")), poked


def test_a_notice_counts_down_for_the_host_whose_machine_it_names(listening):
    heard, poked = listening
    heard.receive([CloudEvent("i-1", Notice(120.0, "stop"))], now=1000.0)
    assert heard.notices(now=1020.0) == {"f-1": Notice(100.0, "stop")} and poked == ["x"]
    assert heard.notices(now=1130.0) == {"f-1": Notice(-10.0, "stop")}
    assert heard.notices(now=1120.0 + EXPIRE_S) == {}


def test_machines_of_others_wake_nobody_and_what_is_said_of_them_is_bounded(listening):
    heard, poked = listening
    heard.receive([CloudEvent("i-foreign", Notice(120.0)), CloudEvent("i-other")], now=0.0)
    assert poked == [] and heard.notices(now=1.0) == {}
    heard.receive([CloudEvent("i-0", Notice(120.0))], now=0.0)
    heard.receive([CloudEvent(f"i-x{n}", Notice(120.0)) for n in range(MOST)], now=0.0)
    assert heard.notices(now=1.0) == {} and len(heard._held) == MOST


def test_a_word_of_a_machine_that_is_not_listed_yet_counts_once_it_is():
    ours: list[Host] = []
    heard = CloudEventListener(Talk(), "f", lambda: ours, lambda: None)
    heard.receive([CloudEvent("i-0", Notice(120.0))], now=0.0)
    ours.append(host(0))
    assert heard.notices(now=20.0) == {"f-0": Notice(100.0)}


def test_a_change_of_state_is_a_reason_to_look_and_takes_no_notice_back(listening):
    heard, poked = listening
    heard.receive([CloudEvent("i-0", Notice(120.0)), CloudEvent("i-0")], now=0.0)
    assert heard.notices(now=0.0) == {"f-0": Notice(120.0)} and poked == ["x", "x"]


def test_a_hint_that_comes_after_a_notice_hides_it_not_and_a_notice_replaces_a_hint(listening):
    heard, _ = listening
    heard.receive([CloudEvent("i-0", HINT), CloudEvent("i-0", Notice(120.0)), CloudEvent("i-0", HINT)], now=0.0)
    assert heard.notices(now=0.0) == {"f-0": Notice(120.0)}


def test_an_agent_knows_its_notice_best_but_its_hint_is_less_than_the_clouds_notice():
    mine, theirs = Notice(110.0, why="agent"), Notice(105.0, why="cloud")
    assert merge_notices({"a": mine}, {"a": theirs}) == {"a": mine}
    assert merge_notices({"a": HINT}, {"a": theirs}) == {"a": theirs}
    assert merge_notices({"a": mine}, {"a": HINT}) == {"a": mine}
    assert merge_notices({"a": HINT}, {"b": theirs}) == {"a": HINT, "b": theirs}
    assert merge_notices({"a": replace(HINT, why="agent")}, {"a": HINT}) == {"a": replace(HINT, why="agent")}


class TalkingCloud(Talk, Cloud):
    """A cloud that says by itself what a test wants."""

    def __init__(self) -> None:
        Cloud.__init__(self)
        Talk.__init__(self)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(events, "AGAIN_S", 0.05)
    yield


def test_errors_end_nothing_and_are_told_until_something_is_heard_again(quick):
    async def story() -> None:
        talk, taken = Talk(), []
        heard = CloudEventListener(talk, "f", lambda: [host(0)], lambda: taken.append(1))
        task = asyncio.create_task(heard.run())
        talk.words.put(SpotfleetError("there is no queue"))
        while heard.problem != "there is no queue":
            await asyncio.sleep(0.01)
        talk.words.put([CloudEvent("i-0", Notice(60.0))])
        while not taken:
            await asyncio.sleep(0.01)
        assert heard.problem == ""
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(story(), 30))


def test_a_host_whose_agent_says_nothing_of_a_notice_is_replaced_before_it_goes(play, quick, monkeypatch):
    monkeypatch.setattr("tests.support.dispatcher.fake_fleet.Cloud", TalkingCloud)

    async def scene(stage: Stage) -> None:
        _, second = await stage.up(2)
        job = await stage.submit(Script(steps=10_000), (2, 2))
        await stage.at_version(job, 5)
        listed = {h.request_id: h.provider_id for h in stage.cloud.hosts("")}
        stage.cloud.words.put([CloudEvent("i-foreign", Notice(120.0)), CloudEvent(listed[second], Notice(120.0))])

        def replaced() -> bool:
            members = stage.world.history[-1][2]
            return len(members) == 2 and not any(name.startswith(f"{second}/") for name in members)

        await stage.until("another host trains in its place", replaced)
        await stage.until("it is released", lambda: second not in stage.cloud.living())
        told = [e for e in await stage.events() if e.get("request_id") == second or e["kind"] == "GenerationFormed"]
        kinds = [e["kind"] for e in told]
        formed = [n for n, kind in enumerate(kinds) if kind == "GenerationFormed"]
        assert kinds.index("HostDraining") < formed[-1] < kinds.index("TerminateIntended")
        assert [e["seconds_left"] > 100 for e in told if e["kind"] == "HostNoticed"] == [True]
        assert (await stage.job(job)).repeated == 0

    play(scene, spec(2))


def test_that_nothing_is_heard_stands_in_the_status(play, quick, monkeypatch):
    monkeypatch.setattr("tests.support.dispatcher.fake_fleet.Cloud", TalkingCloud)

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        monkeypatch.setattr(stage.cloud, "poll_events", _deaf)

        async def told() -> bool:
            why = (await stage.call("GET", "/v1/status"))[1]["why"]
            return why.endswith("the cloud's own events about its machines cannot be read: there is no queue")

        await stage.until("it is told", told)

    play(scene, spec(2))


def _deaf(fleet: str, wait_s: float) -> list[CloudEvent]:
    raise SpotfleetError("there is no queue")
