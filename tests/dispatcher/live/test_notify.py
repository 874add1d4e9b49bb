"""Notifications arrive at a webhook and a command, again after failures and restarts, and hold nothing up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from spotfleet.dispatcher.disk.damage import DamagedFiles
from spotfleet.dispatcher.journal import Journal
from spotfleet.dispatcher.live import notify
from spotfleet.dispatcher.live.notify import Notifier
from spotfleet.fleet.domain.events import BudgetReached
from spotfleet.fleet.ledger import Ledger
from spotfleet.model import NOTIFY_ON, FleetSpec, NotifySpec
from spotfleet.transport.boot import DispatcherBoot
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.file_table import DISPATCHER, unknown

SECRET = "T0-very-secret"
LIMIT_S = 30.0


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


@dataclass
class Process:
    """What a dispatcher's process has of notifications, on a home that outlives it."""

    home: Path
    webhook: str = ""
    command: str = ""

    async def __aenter__(self) -> Process:
        told = NotifySpec(NOTIFY_ON, self.command, "digest" if self.webhook else "")
        boot = DispatcherBoot("f", "f-d-0", FleetSpec("f", notify=told), "secret", "admin", "", "", "",
                              webhook=self.webhook)
        self.journal = Journal(Ledger(self.home / "ledger.db"))
        self.notifier = Notifier(SimpleNamespace(boot=boot, home=self.home, journal=self.journal,
                                                 damage=DamagedFiles(self.home)))
        self.task = asyncio.create_task(self.notifier.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.journal.close()
        self.journal.ledger.close()

    async def reach(self, *percents: int) -> None:
        self.journal.note(*(BudgetReached(1.0, "max_cost", percent, 8, 10, "spent") for percent in percents))
        await self.journal.flush()

    async def until(self, what: str, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                assert not self.task.done(), (what, self.task.result())
                await asyncio.sleep(0.005)


def kept(home: Path) -> int:
    """The number of the last event whose delivery to the webhook is recorded; a later one is delivered again."""
    return json.loads((home / notify.FILE).read_text())["webhook"]


def text(percent: int) -> dict[str, str]:
    return {"text": f"spotfleet f: {percent} % of max_cost: spent"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "FIRST_S", 0.01)
    monkeypatch.setattr(notify, "LAST_S", 0.02)


def test_a_webhook_gets_slacks_json_again_until_it_takes_it_and_each_event_once(tmp_path: Path, caplog):
    async def main() -> None:
        async with hooked(Hook([500, 429, 503])) as hook:
            async with Process(tmp_path, hook.url) as process:
                await process.reach(80, 95)
                await process.until("both", lambda: len(hook.got) == 2)
                assert hook.got == [("application/json", text(80)), ("application/json", text(95))]
                assert hook.tries == 5 and process.notifier.why == ""
                last = process.journal.last
                await process.until("the position on disk",
                                    lambda: json.loads((tmp_path / notify.FILE).read_text())["webhook"] == last)
            async with Process(tmp_path, hook.url) as process:
                await process.reach(100)
                await process.until("the third", lambda: len(hook.got) == 3)
                assert hook.got[2][1] == text(100)
        everything = "".join(p.read_text(errors="replace") for p in tmp_path.rglob("*") if p.is_file())
        assert SECRET not in everything + caplog.text

    asyncio.run(main())


def test_what_happened_while_no_dispatcher_was_there_to_deliver_it_is_delivered_by_the_next(tmp_path: Path):
    async def main() -> None:
        async with hooked(Hook([500] * 10_000)) as hook:
            async with Process(tmp_path, hook.url) as process:
                await process.reach(80)
                await process.until("a try", lambda: hook.tries > 0)
            hook.statuses = [500] * 3
            async with Process(tmp_path, hook.url) as process:
                await process.until("the delivery", lambda: hook.got)
                assert hook.got[0][1] == text(80)

    asyncio.run(main())


def test_a_webhook_that_refuses_is_named_without_its_secret_and_holds_nothing_up(tmp_path: Path):
    async def main() -> None:
        async with hooked(Hook([404, 404])) as hook, Process(tmp_path, hook.url) as process:
            await process.reach(80, 95)
            lost = "the webhook of `notify` fails: 127.0.0.1 answers 404, 2 notifications given up"
            await process.until("both given up", lambda: process.notifier.why == lost)
            assert hook.tries == 2
            await process.reach(100)
            await process.until("the third", lambda: hook.got)
            await process.until("no trouble", lambda: process.notifier.why == "")

    asyncio.run(main())


def test_a_webhook_that_nobody_answers_does_not_delay_the_command(tmp_path: Path):
    said = tmp_path / "said"
    command = f'{{ cat; echo; echo "$SPOTFLEET_EVENT|$SPOTFLEET_TEXT|$SPOTFLEET_FLEET"; }} > {said}.new; ' \
              f"env > {said}.env; mv {said}.new {said}"

    async def main() -> None:
        async with Process(tmp_path, "http://127.0.0.1:1/nobody", command) as process:
            await process.reach(80)
            await process.until("the command", said.exists)
            await process.until("the failure", lambda: "cannot be reached" in process.notifier.why)

    asyncio.run(main())
    first, second = said.read_text().splitlines()
    assert json.loads(first)["event"] == "budget" and second == f"budget|{text(80)['text']}|f"
    assert "TEST_RUN_OF_SPOTFLEET" not in Path(f"{said}.env").read_text()  # the dispatcher's own environment


def test_a_command_that_fails_is_tried_again(tmp_path: Path):
    tries = tmp_path / "tries"

    async def main() -> None:
        async with Process(tmp_path, command=f"echo x >> {tries}; [ $(wc -l < {tries}) = 3 ]") as process:
            await process.reach(80)
            await process.until("the third try", lambda: tries.exists() and tries.read_text() == "x\n" * 3)
            await process.until("success", lambda: process.notifier.why == "")

    asyncio.run(main())


def test_a_command_that_does_not_end_is_ended_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(notify, "COMMAND_S", 0.05)
    pids = tmp_path / "pids"

    def is_over() -> bool:
        try:
            return Path(f"/proc/{pids.read_text().strip()}/stat").read_text().rpartition(") ")[2][:1] == "Z"
        except OSError:
            return pids.exists()

    async def main() -> None:
        async with Process(tmp_path, command=f"sleep 600 & echo $! > {pids}; wait") as process:
            await process.reach(95)
            await process.until("it is given up", lambda: "did not end within" in process.notifier.why)
            await process.until("its child's end", lambda: is_over() or not pids.exists())

    asyncio.run(main())


def test_notifications_change_while_the_fleet_is_up_and_stay_changed_after_a_restart(tmp_path: Path):
    async def main() -> None:
        async with hooked(Hook()) as first, hooked(Hook()) as second:
            async with Process(tmp_path, first.url) as process:
                await process.reach(80)
                await process.until("the first", lambda: first.got and kept(tmp_path) == 1)
                process.notifier.change(NotifySpec(("budget",), "", "other"), second.url)
                await process.reach(95)
                await process.until("the second", lambda: second.got and kept(tmp_path) == 2)
            async with Process(tmp_path, first.url) as process:
                await process.reach(100)
                await process.until("the third", lambda: len(second.got) == 2)
                process.notifier.change(NotifySpec(), "")
                await process.reach(100)
                await asyncio.sleep(0.02)
            assert (first.tries, second.tries) == (1, 2)
        assert (tmp_path / notify.CHANGED).stat().st_mode & 0o777 == 0o600

    asyncio.run(main())


def test_a_damaged_change_is_set_aside_and_the_first_one_counts(tmp_path: Path):
    async def main() -> None:
        (tmp_path / notify.CHANGED).write_text('{"notify": 7}')
        async with hooked(Hook()) as hook, Process(tmp_path, hook.url) as process:
            await process.reach(80)
            await process.until("it", lambda: hook.got)
        assert [p.name for p in tmp_path.glob(f"{notify.CHANGED}.damaged-*")]

    asyncio.run(main())


def test_a_damaged_position_is_set_aside_and_the_next_event_is_delivered(tmp_path: Path):
    async def main() -> None:
        (tmp_path / notify.FILE).write_text("{")
        async with hooked(Hook()) as hook, Process(tmp_path, hook.url) as process:
            await process.reach(80)
            await process.until("it", lambda: hook.got)
        assert [p.name for p in tmp_path.glob(f"{notify.FILE}.damaged-*")]

    asyncio.run(main())


def test_a_dispatcher_takes_notifications_and_its_status_names_a_failing_webhook(play):
    async def scene(stage: Stage) -> None:
        async with hooked(Hook([404])) as hook:
            for bad in ({}, {"notify": {"events": ["x"]}}, {"notify": {}, "webhook": "no address"}, {"notify": 3}):
                status, said = await stage.call("PUT", "/v1/notify", bad, ok=False)
                assert status == 400 and "no address" not in said["error"], said
            await stage.call("PUT", "/v1/notify", {"notify": {"webhook": "digest"}, "webhook": hook.url})
            stage.daemon.dispatcher.core.journal.note(BudgetReached(1.0, "max_cost", 80, 8, 10, "spent"))
            await stage.until("a failure", lambda: stage.daemon.dispatcher.notifier.why)
            why = (await stage.call("GET", "/v1/status"))[1]["why"]
            assert "the webhook of `notify` fails: 127.0.0.1 answers 404" in why and SECRET not in why
            assert unknown(stage.home, DISPATCHER) == []

    play(scene, spec(1))
