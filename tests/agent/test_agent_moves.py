"""A dispatcher that comes up elsewhere, with an empty disk: how an agent finds it, and what it gives back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.agent.endpoint import AWAY_S, TAG_PERIOD_S, DispatcherEndpoint
from spotfleet.protocol.messages import AgentOrders, Assignment, WorkerOrders
from spotfleet.providers import DISPATCHER_TAG
from tests.agent.workers.test_agent_sockets import TALK
from tests.support.agent.agent_dispatcher import FakeDispatcher
from tests.support.agent.agent_stage import HOST, Stage, eventually

BIRTH, TAG = "https://10.0.0.1:1", "https://10.0.0.2:2"
FIRST, SECOND = f"{HOST}/0/1", f"{HOST}/1/1"


class Host:
    """A host whose dispatcher does not answer, with a clock that passes when told."""

    def __init__(self, *tags: str | Exception) -> None:
        self.tags, self.reads, self.now = list(tags), 0, 100.0
        self.where = DispatcherEndpoint(BIRTH, self.read, lambda: self.now)

    def read(self) -> str:
        self.reads += 1
        said = self.tags.pop(0) if len(self.tags) > 1 else self.tags[0]
        if isinstance(said, Exception):
            raise said
        return said

    def tries(self, count: int, seconds: float = TAG_PERIOD_S) -> list[str]:
        """Where it was tried, with `seconds` between two failures."""
        tried = []
        for _ in range(count):
            tried.append(self.where.next())
            asyncio.run(self.where.failed())
            self.now += seconds
        return tried


def test_a_short_absence_makes_nobody_look_elsewhere():
    host = Host(TAG)
    assert host.tries(4, AWAY_S / 5) == [BIRTH] * 4 and host.reads == 0


def test_who_is_away_longer_is_looked_for_where_the_tag_says_and_at_the_old_place():
    host = Host(TAG)
    assert host.tries(6)[2:] == [TAG, BIRTH, TAG, BIRTH]


def test_where_it_answered_last_is_tried_first_and_all_else_follows_there():
    host = Host(TAG)
    host.tries(3)
    before = host.where.answers
    host.where.answered(TAG)
    assert (host.where.url, host.where.next(), host.where.answers) == (TAG, TAG, before + 1)


def test_a_tag_that_changes_is_followed_and_the_metadata_server_is_not_asked_too_often():
    host = Host("", TAG, "https://10.0.0.3:3")
    tried = host.tries(40, TAG_PERIOD_S / 10)
    assert "https://10.0.0.3:3" in tried and host.reads <= 40 / 10


@pytest.mark.parametrize("forged", ["http://10.0.0.2:2", "10.0.0.2", "ftp://x", "", OSError("nobody answers")])
def test_what_is_no_https_url_is_never_tried(forged: str | Exception):
    assert set(Host(forged).tries(6)) == {BIRTH}


@pytest.fixture
def successor(dispatcher: FakeDispatcher, tmp_path: Path) -> Iterator[FakeDispatcher]:
    """The same fleet's dispatcher elsewhere, on an empty disk."""
    (tmp_path / "elsewhere").mkdir()
    fake = FakeDispatcher(tmp_path / "elsewhere", twin=dispatcher)
    fake.start()
    yield fake
    fake.close()


@pytest.mark.processes
def test_a_successor_gets_everything_back_and_no_worker_notices(stage: Stage, metadata: SimpleNamespace,
                                                                successor: FakeDispatcher):
    stage.env["SPOTFLEET_METADATA_URL"] = metadata.url
    stage.boot()
    stage.job(TALK + "say(checkpoint=checkpoint(5))\nprint('once', flush=True)\ntime.sleep(1000)\n",
              secrets={"KEY": "s3cr3t"})
    place = Assignment(7, 0, (FIRST, SECOND), "store:1")
    stage.order(FIRST, SECOND, orders=WorkerOrders(place))
    before = stage.dispatcher
    pids = [before.wait_worker(name, lambda w: w.pid).pid for name in (FIRST, SECOND)]
    eventually(lambda: stage.log() == "once\n" and stage.log(SECOND) == "once\n" and 5 in before.checkpoints)
    launch = before.launches["job"]
    stranger = FakeDispatcher(stage.home)  # somebody who has forged the tag, and has not the fleet's certificate
    stranger.start()
    metadata.answers[DISPATCHER_TAG] = stranger.url
    before.stop()
    eventually(lambda: "certificate verify failed" in stage.agent_log.read_text())
    metadata.answers[DISPATCHER_TAG] = successor.url

    successor.orders = AgentOrders(HOST, tell=("job",))
    told = successor.wait(lambda r: r.held)
    assert stranger.report is None
    stranger.close()
    held = told.held[0]
    assert (held.launch.spec, held.launch.secrets, held.assignments, held.bundle) == (
        launch.spec, launch.secrets, (place,), True)
    assert [w.pid for w in told.workers] == pids
    successor.order(AgentOrders(HOST, tell=("job",), send=(launch.spec.bundle,)))
    eventually(lambda: successor.bundles == before.bundles)  # the manifest and its piece
    assert launch.spec.bundle in successor.bundles and len(successor.bundles) == 2
    eventually(lambda: successor.logs == {FIRST: b"once\n", SECOND: b"once\n"})  # though nothing more is written

    stage.dispatcher = successor
    stage.order(FIRST)  # by now it knows the job, and wants one worker of it
    left = successor.wait(lambda r: not r.held and len(r.workers) == 1)
    assert [(w.report.worker, w.pid) for w in left.workers] == [(FIRST, pids[0])]
    eventually(lambda: not os.path.exists(f"/proc/{pids[1]}"))
    eventually(lambda: successor.checkpoints == before.checkpoints)
