"""Dispatcher, metadata server and agent: what passes, and what goes on while one of them is away."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest

from spotfleet.agent.__main__ import main
from spotfleet.agent.notices import PendingNotice, hold
from spotfleet.model import Notice
from spotfleet.protocol.messages import AgentOrders, Exit
from tests.support.agent.agent_stage import HOST, Stage, all_gone, eventually

FIRST, SECOND = f"{HOST}/0/1", f"{HOST}/1/1"
COUNT = "import time\nn = 0\nwhile True:\n    print(n, flush=True)\n    n += 1\n    time.sleep(0.02)\n"


@pytest.mark.processes
def test_workers_go_on_while_the_dispatcher_is_away_and_nothing_they_say_is_lost(stage: Stage):
    stage.boot()
    stage.job(COUNT)
    stage.order(FIRST)
    pid = stage.dispatcher.wait_worker(FIRST, lambda w: w.pid).pid
    eventually(lambda: stage.log().count("\n") > 5)
    stage.dispatcher.stop()
    held, before = stage.log(), stage.dispatcher.reported_at
    time.sleep(1.0)  # an absence, not a wait for something
    stage.dispatcher.start()
    stage.dispatcher.wait(lambda _: stage.dispatcher.reported_at > before)
    eventually(lambda: stage.log().count("\n") > held.count("\n") + 50)
    assert stage.dispatcher.wait_worker(FIRST, lambda w: w.pid).pid == pid
    lines = stage.log().splitlines()[:-1]
    assert lines == [str(n) for n in range(len(lines))]


@pytest.mark.processes
def test_an_end_while_the_dispatcher_is_away_is_reported_when_it_is_back(stage: Stage):
    stage.boot()
    stage.job("import os, time\nwhile not os.path.exists('leave'): time.sleep(0.02)\nprint('left')\n")
    stage.order(FIRST)
    pid = stage.dispatcher.wait_worker(FIRST, lambda w: w.pid).pid
    stage.dispatcher.stop()
    (stage.home / "jobs/job/source/leave").touch()
    eventually(lambda: not os.path.exists(f"/proc/{pid}"))
    stage.dispatcher.start()
    assert stage.dispatcher.wait_worker(FIRST, lambda w: w.exit).exit == Exit(0, done=True)
    assert stage.log() == "left\n"


@pytest.mark.processes
def test_a_log_arrives_once_though_answers_are_lost(stage: Stage):
    stage.boot()
    stage.dispatcher.lose_log_answers = 5
    ended = stage.run("import time\nfor n in range(40):\n    print(n, 'x' * 20000)\n    time.sleep(0.03)\n")
    assert ended.exit == Exit(0, done=True) and stage.dispatcher.lose_log_answers == 0
    assert stage.log() == "".join(f"{n} {'x' * 20000}\n" for n in range(40))


@pytest.mark.processes
def test_the_hosts_clock_is_reported_while_the_dispatcher_wants_it(stage: Stage):
    stage.boot()
    assert stage.dispatcher.wait(lambda _: True).clock == 0.0
    stage.dispatcher.order(AgentOrders(HOST, clock=True))
    began = time.time()
    clock = stage.dispatcher.wait(lambda report: report.clock).clock
    assert began - 1.0 <= clock <= time.time() + 1.0
    stage.dispatcher.order(AgentOrders(HOST))
    stage.dispatcher.wait(lambda report: not report.clock)


@pytest.mark.processes
def test_reports_repeat_each_second_without_any_change(stage: Stage):
    stage.boot()
    stage.job(COUNT)
    stage.order(FIRST)
    stage.dispatcher.wait_worker(FIRST, lambda w: w.pid)
    before = len(stage.dispatcher.seen)
    eventually(lambda: len(stage.dispatcher.seen) > before + 3)
    times = [at for at, _ in stage.dispatcher.seen[before:]]
    assert times[-1] - times[0] > 1.0  # a period, not a flood in which each report's orders cause the next


@pytest.mark.processes
def test_a_refused_agent_stops_its_workers_says_why_and_powers_its_host_off(stage: Stage):
    stage.boot()
    stage.job(COUNT)
    stage.order(FIRST)
    eventually(lambda: stage.log())
    family = stage.processes()
    stage.dispatcher.order(AgentOrders(HOST, refuse="protocol 1 is too old: install spotfleet 9"))
    assert stage.agent.wait(60) == 0
    eventually(lambda: all_gone(family))
    assert "protocol 1 is too old: install spotfleet 9" in stage.agent_log.read_text()


@pytest.mark.processes
def test_a_dispatcher_that_does_not_know_the_token_counts_as_none(stage: Stage):
    stage.token = "stolen"
    stage.told = {"orphan_after_s": 2.0}
    stage.boot(wait=False)
    assert stage.agent.wait(60) == 0
    log = stage.agent_log.read_text()
    assert "401" in log and "heard from no dispatcher for 2 s" in log


@pytest.mark.processes
def test_an_agent_trusts_no_dispatcher_but_its_fleets(stage: Stage, tmp_path):
    from tests.support.agent.agent_dispatcher import FakeDispatcher

    (tmp_path / "other").mkdir()
    other = FakeDispatcher(tmp_path / "other")
    stage.dispatcher.ca = other.ca
    other.close()
    stage.boot(wait=False)
    eventually(lambda: "certificate verify failed" in stage.agent_log.read_text())
    assert stage.dispatcher.report is None


@pytest.mark.parametrize(("text", "names"), [
    ("{", "boot.json"), ('{"fleet": "f"}', "Boot.host is missing"),
    ('{"fleet":"f","host":"h","provider":"local","slots":0,"dispatcher":"https://a:1","ca":"","token":""}', "slots"),
    ('{"fleet":"f","host":"h","provider":"local","slots":1,"dispatcher":"a:1","ca":"","token":""}', "dispatcher"),
])
def test_a_wrong_boot_file_names_the_field(tmp_path, text: str, names: str, monkeypatch, capsys):
    (tmp_path / "boot.json").write_text(text)
    monkeypatch.setattr(sys, "argv", ["agent", "--home", str(tmp_path)])
    before = os.umask(0o077)
    try:
        assert main() == 2
    finally:
        os.umask(before)
    assert names in capsys.readouterr().err


@pytest.mark.processes
def test_an_agent_whose_boot_file_is_damaged_once_it_has_run_names_the_field(stage: Stage):
    """A process of its own shows that it ends with that status, and prints no traceback at its end."""
    stage.boot(wait=True)
    stage.end()
    (stage.home / "boot.json").write_text('{"fleet": "f"}')
    done = subprocess.run([sys.executable, "-m", "spotfleet.agent", "--home", str(stage.home)], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 2 and "Boot.host is missing" in done.stderr and "Traceback" not in done.stderr


def instant(seconds_from_now: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds_from_now)).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.mark.processes
def test_a_notice_passes_with_the_seconds_left_now_and_vanishes_when_withdrawn(stage: Stage, metadata):
    stage.env["SPOTFLEET_METADATA_URL"] = metadata.url
    stage.boot()
    assert stage.dispatcher.report.notice is None
    metadata.answers["instance-action"] = f'{{"action": "terminate", "time": "{instant(110)}"}}'
    first = stage.dispatcher.wait(lambda r: r.notice).notice
    assert first.kind == "interruption" and 60 < first.seconds_left <= 110
    stage.dispatcher.wait(lambda r: r.notice and r.notice.seconds_left < first.seconds_left - 0.5)
    metadata.answers.clear()
    stage.dispatcher.wait(lambda r: r.notice is None)


@pytest.mark.processes
def test_a_rebalance_hint_passes_as_what_it_is(stage: Stage, metadata):
    stage.env["SPOTFLEET_METADATA_URL"] = metadata.url
    metadata.answers["rebalance"] = f'{{"noticeTime": "{instant(0)}"}}'
    stage.boot()
    assert stage.dispatcher.wait(lambda r: r.notice).notice.kind == "rebalance"


@pytest.mark.processes
def test_an_unreadable_metadata_server_stops_nothing(stage: Stage, metadata):
    stage.env["SPOTFLEET_METADATA_URL"] = metadata.url
    metadata.answers["instance-action"] = "<html>"
    stage.boot()
    eventually(lambda: "expected a JSON object" in stage.agent_log.read_text())
    assert stage.run("print('trained')").exit == Exit(0, done=True)


def test_a_notice_keeps_its_deadline_through_polls_that_jitter():
    held = hold(None, Notice(60.0), at=100.0)
    assert held == PendingNotice(Notice(60.0), 160.0)
    assert hold(held, Notice(59.2), at=101.0) is held
    assert held.now(130.0).seconds_left == 30.0


def test_a_moved_deadline_another_action_and_a_withdrawal_are_news():
    held = hold(None, Notice(60.0), at=100.0)
    assert hold(held, Notice(10.0), at=101.0).deadline == 111.0
    assert hold(held, Notice(59.0, action="stop"), at=101.0).notice.action == "stop"
    assert hold(held, None, at=101.0) is None


def test_a_hint_that_is_told_at_every_poll_is_news_once():
    held = hold(None, Notice(0.0, kind="rebalance", why="leave"), at=100.0)
    assert hold(held, Notice(0.0, kind="rebalance", why="leave"), at=160.0) is held
    assert hold(held, Notice(60.0), at=160.0).deadline == 220.0
