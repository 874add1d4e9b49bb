"""The feed: everything first, then only what changed; trouble is shown and ends."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from spotfleet.cli.page import feed as feed_module
from spotfleet.cli.page.feed import Feed, ViewedFleet, thinned
from spotfleet.codec import to_json
from spotfleet.errors import DispatcherUnreachable
from spotfleet.fleet.domain.events import HostNoticed, JobProgress, event_to_json
from spotfleet.protocol.messages import FleetStatus, HostStatus, JobStatus, WorkerStatus
from tests.support.cli.page_world import PageWorld

STATUS = FleetStatus(
    "f", "up", "", 1, 2, 2, age_s=50.0,
    hosts=(HostStatus("f-0", "worker", "up", "local/a/t/spot", 1, 1, 1, since_s=30.0),
           HostStatus("f-1", "worker", "up", "local/a/t/spot", 1, 1, 1, since_s=30.0)),
    jobs=(JobStatus("a-1", "a", "running", "", world_size=1, version=5, age_s=20.0,
                    workers=(WorkerStatus("f-0/0/1", "f-0", 0, "ready", 5),)),))


def answer(now: float, status: FleetStatus = STATUS, *events: Any, series: Any = None, seq: int = 10) -> dict[str, Any]:
    rows = [{"seq": seq + n, **event_to_json(e)} for n, e in enumerate(events, 1)]
    return {"now": now, "status": to_json(status), "events": rows, "last": seq + len(events), "series": series or {}}


def later(status: FleetStatus, s: float, **job: Any) -> FleetStatus:
    hosts = tuple(replace(h, since_s=h.since_s + s) for h in status.hosts)
    (one,) = status.jobs
    workers = tuple(replace(w, version=w.version + 1) for w in one.workers)
    return replace(status, age_s=status.age_s + s, hosts=hosts,
                   jobs=(replace(one, age_s=one.age_s + s, workers=workers, **job),))


def test_a_host_that_did_nothing_is_no_news_though_it_grows_older():
    state = ViewedFleet()
    assert set(state.update(answer(1000.0))["hosts"]) == {"f-0", "f-1"}
    changed = state.update(answer(1001.3, later(STATUS, 1.2, version=6)))
    assert (changed["hosts"], changed["workers"], changed["gone"]) == ({}, {}, [])
    assert set(changed["jobs"]) == {"a-1"} and changed["jobs"]["a-1"]["since"] == 980.0
    assert changed["fleet"]["since"] == 950.0


def test_what_changed_and_what_is_gone_is_sent():
    state = ViewedFleet()
    state.update(answer(1000.0))
    drained = replace(STATUS, hosts=(replace(STATUS.hosts[0], state="draining", seconds_left=90.0),))
    changed = state.update(answer(1001.0, drained))
    assert changed["hosts"]["f-0"]["state"] == "draining" and changed["hosts"]["f-0"]["until"] == 1091.0
    assert changed["gone"] == ["f-1"] and set(state.whole()["hosts"]) == {"f-0"}


def test_events_are_sentences_and_routine_ones_are_left_out():
    state = ViewedFleet()
    changed = state.update(answer(1000.0, STATUS, JobProgress(990.0, "a-1", 5, 0.1),
                                  HostNoticed(995.0, "f-1", 120.0, "terminate", why="\u202egnp")))
    (shown,) = changed["events"]
    assert " ".join(shown["text"].split()) == "f-1 got an interruption notice: it will be terminated in 120 s"
    assert (shown["seq"], shown["at"], state.after) == (12, 995.0, 12)


def test_control_characters_of_foreign_texts_are_replaced():
    state = ViewedFleet()
    hostile = replace(STATUS, why="a\x1b[2J\u202e")
    assert state.update(answer(1.0, hostile))["fleet"]["why"] == "a\ufffd[2J\ufffd"


def test_series_are_joined_and_a_mark_whose_pause_is_known_by_now_replaces_the_earlier_one():
    state, mark = ViewedFleet(), {"generation": 2, "cause": "death", "at": 5.0, "pause_s": None}
    state.update(answer(10.0, series={"a-1": {"points": [[4.0, 1, 2]], "marks": [mark], "forgotten": 0}}))
    assert state.since == 4.0
    state.update(answer(11.0, series={"a-1": {"points": [[6.0, 2, 1]], "marks": [{**mark, "pause_s": 0.5}],
                                              "forgotten": 1}}))
    assert state.whole()["series"]["a-1"] == {"points": [[4.0, 1, 2], [6.0, 2, 1]],
                                              "marks": [{**mark, "pause_s": 0.5}], "forgotten": 1}


def test_points_are_bounded_and_the_newest_stays():
    points = list(range(feed_module.MOST_POINTS + 1))
    assert len(thinned(points)) <= feed_module.MOST_POINTS // 2 + 2 and thinned(points)[-1] == points[-1]


@contextmanager
def running(poll: Any) -> Iterator[Feed]:
    feed = Feed(poll, period_s=0.001)
    thread = threading.Thread(target=feed.run)
    thread.start()
    try:
        yield feed
    finally:
        feed.close()
        thread.join(10)
        assert not thread.is_alive()


def read(viewer: queue.Queue[str | None]) -> tuple[str, Any]:
    text = viewer.get(timeout=10)
    assert text is not None and text.endswith("\n\n")
    name, data = text.strip().split("\n", 1)
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_a_viewer_gets_all_and_then_what_changed_and_nobody_is_asked_without_viewers():
    world = PageWorld(3)
    with running(world.poll) as feed:
        assert world.polls == 0
        with feed.viewing() as viewer:
            name, whole = read(viewer)
            assert name == "whole" and len(whole["hosts"]) == 4
            assert read(viewer)[0] == "changed"
            with feed.viewing() as second:
                name, whole = read(second)
                assert name == "whole" and len(whole["hosts"]) == 4


def test_a_dispatcher_that_is_away_is_reported_once_and_so_is_its_return():
    world = PageWorld(1, fails=DispatcherUnreachable("no answer", hint="try again"))
    with running(world.poll) as feed, feed.viewing() as viewer:
        assert read(viewer) == ("trouble", "no answer. try again")
        assert viewer.empty() or read(viewer)[0] != "trouble"
        world.fails = None
        assert [read(viewer)[0] for _ in range(2)] == ["trouble", "whole"]


def test_a_viewer_that_takes_nothing_is_ended(monkeypatch):
    monkeypatch.setattr(feed_module, "MOST_WAITING", 3)
    with running(PageWorld(1).poll) as feed, feed.viewing() as viewer:
        while viewer.qsize() < 4:
            time.sleep(0.001)
        assert [viewer.get(timeout=10) is None for _ in range(4)] == [False, False, False, True]
