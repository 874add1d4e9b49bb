"""Notifications arrive at a webhook and a command, again after failures and restarts, and hold nothing up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from spotfleet.dispatcher.live import notify
from spotfleet.fleet.domain.events import BudgetReached
from spotfleet.model import NOTIFY_ON, NotifySpec
from tests.support.dispatcher.fake_fleet import Stage, spec

SECRET = "T0-very-secret"


@dataclass
class Hook:
    """A webhook on loopback that fails when it is told to."""

    statuses: list[int] = field(default_factory=list)  # the next answers'; then 200
    got: list[Any] = field(default_factory=list)
    tries: int = 0
    url: str = ""

    async def take(self, request: web.Request) -> web.Response:
        self.tries += 1
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 200:
            self.got.append((request.content_type, await request.json()))
        return web.Response(status=status)


@asynccontextmanager
async def hooked(hook: Hook) -> AsyncIterator[Hook]:
    app = web.Application()
    app.router.add_post(f"/services/{SECRET}", hook.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    hook.url = f"http://127.0.0.1:{runner.addresses[0][1]}/services/{SECRET}"
    try:
        yield hook
    finally:
        await runner.cleanup()


async def restarted(stage: Stage, webhook: str = "", command: str = "") -> None:
    """Start the dispatcher anew, with these ways of delivery."""
    await stage.stop_dispatcher()
    told = NotifySpec(NOTIFY_ON, command, "digest" if webhook else "")
    stage.boot = replace(stage.boot, webhook=webhook, spec=replace(stage.boot.spec, notify=told))
    await stage.start_dispatcher()


def reach(stage: Stage, percent: int) -> None:
    stage.daemon.dispatcher.core.journal.note(BudgetReached(1.0, "max_cost", percent, 8, 10, "spent"))


def text(percent: int) -> dict[str, str]:
    return {"text": f"spotfleet f: {percent} % of max_cost: spent"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "FIRST_S", 0.01)
    monkeypatch.setattr(notify, "LAST_S", 0.02)


def test_a_webhook_gets_slacks_json_again_until_it_takes_it_and_each_event_once(play, caplog):
    async def scene(stage: Stage) -> None:
        async with hooked(Hook([500, 429, 503])) as hook:
            await restarted(stage, hook.url)
            for percent in (80, 95):
                reach(stage, percent)
            await stage.until("both", lambda: len(hook.got) == 2)
            assert hook.got == [("application/json", text(80)), ("application/json", text(95))]
            assert hook.tries == 5 and stage.daemon.dispatcher.notifier.why == ""
            last = (await stage.events("BudgetReached"))[-1]["seq"]
            await stage.until("the position on disk",
                              lambda: json.loads((stage.home / notify.FILE).read_text())["webhook"] == last)
            await restarted(stage, hook.url)
            reach(stage, 100)
            await stage.until("the third", lambda: len(hook.got) == 3)
            assert hook.got[2][1] == text(100)
        everything = "".join(p.read_text(errors="replace") for p in stage.home.rglob("*") if p.is_file())
        assert SECRET not in everything + caplog.text + json.dumps(await stage.events())

    play(scene, spec(1))


def test_what_happened_while_no_dispatcher_was_there_to_deliver_it_is_delivered_by_the_next(play):
    async def scene(stage: Stage) -> None:
        async with hooked(Hook([500] * 10_000)) as hook:
            await restarted(stage, hook.url)
            reach(stage, 80)
            await stage.until("a try", lambda: hook.tries > 0)
            hook.statuses.clear()
            hook.statuses += [500] * 3
            await restarted(stage, hook.url)
            await stage.until("the delivery", lambda: hook.got)
            assert hook.got[0][1] == text(80)

    play(scene, spec(1))


def test_a_webhook_that_refuses_is_named_in_the_status_without_its_secret_and_holds_nothing_up(play):
    async def scene(stage: Stage) -> None:
        async with hooked(Hook([404, 404])) as hook:
            await restarted(stage, hook.url)
            reach(stage, 80)
            reach(stage, 95)
            await stage.until("both tries", lambda: hook.tries == 2)
            await stage.until("both given up", lambda: stage.daemon.dispatcher.notifier._channels[0].lost == 2)
            why = (await stage.call("GET", "/v1/status"))[1]["why"]
            assert ("the webhook of `notify` fails: 127.0.0.1 answers 404, 2 notifications given up" in why
                    and SECRET not in why)
            reach(stage, 100)
            await stage.until("the third", lambda: hook.got)
            await stage.until("no trouble", lambda: stage.daemon.dispatcher.notifier.why == "")

    play(scene, spec(1))


def test_a_webhook_that_nobody_answers_delays_neither_the_command_nor_the_dispatcher(play, tmp_path: Path):
    async def scene(stage: Stage) -> None:
        said = tmp_path / "said"
        command = f'{{ cat; echo; echo "$SPOTFLEET_EVENT|$SPOTFLEET_TEXT|$SPOTFLEET_FLEET"; }} > {said}.new; ' \
                  f"env >> {said}.env; mv {said}.new {said}"
        await restarted(stage, "http://127.0.0.1:1/nobody", command)
        reach(stage, 80)
        await stage.until("the command", said.exists)
        first, second = said.read_text().splitlines()
        assert json.loads(first)["event"] == "budget" and second == f"budget|{text(80)['text']}|f"
        assert "TEST_RUN_OF_SPOTFLEET" not in Path(f"{said}.env").read_text()  # the dispatcher's own environment
        await stage.until("the failure", lambda: "cannot be reached" in stage.daemon.dispatcher.notifier.why)
        assert (await stage.call("GET", "/healthz"))[0] == 200

    play(scene, spec(1))


def test_a_command_that_fails_is_tried_again_and_one_that_does_not_end_is_ended_with_all_it_started(
        play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def scene(stage: Stage) -> None:
        tries, pids = tmp_path / "tries", tmp_path / "pids"
        await restarted(stage, command=f"echo x >> {tries}; [ $(wc -l < {tries}) = 3 ]")
        reach(stage, 80)
        await stage.until("the third try", lambda: tries.exists() and tries.read_text() == "x\n" * 3)
        await stage.until("success", lambda: stage.daemon.dispatcher.notifier.why == "")
        monkeypatch.setattr(notify, "COMMAND_S", 0.1)
        await restarted(stage, command=f"sleep 600 & echo $! > {pids}; wait")
        reach(stage, 95)
        await stage.until("it is given up", lambda: "did not end within" in stage.daemon.dispatcher.notifier.why)
        child = Path(f"/proc/{pids.read_text().strip()}/stat")

        def is_over() -> bool:
            try:
                return child.read_text().rpartition(") ")[2][:1] == "Z"
            except OSError:
                return True

        await stage.until("its child's end", is_over)

    play(scene, spec(1))


def test_a_damaged_position_is_set_aside_and_the_next_event_is_delivered(play):
    async def scene(stage: Stage) -> None:
        async with hooked(Hook()) as hook:
            (stage.home / notify.FILE).write_text("{")
            await restarted(stage, hook.url)
            reach(stage, 80)
            await stage.until("it", lambda: hook.got)
            assert [p.name for p in stage.home.glob(f"{notify.FILE}.damaged-*")]
            await asyncio.sleep(0)

    play(scene, spec(1))
