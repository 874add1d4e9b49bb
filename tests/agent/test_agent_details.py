"""Parts of the agent in moments that whole processes show only now and then."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import aiohttp
import pytest

from spotfleet.agent.boot import AgentBoot
from spotfleet.agent.endpoint import DispatcherEndpoint
from spotfleet.agent.link import DispatcherLink
from spotfleet.agent.processes.child import ChildSpec, cut
from spotfleet.agent.processes.zygote_client import ZygoteClient
from spotfleet.model import JobSpec
from spotfleet.protocol.messages import WorkerLaunch


def test_a_process_that_comes_in_the_moment_in_which_nobody_wants_it_any_more_is_ended():
    class Client(ZygoteClient):
        def __init__(self) -> None:
            super().__init__(lambda: None)
            self.killed: list[tuple[str, int]] = []

        def kill(self, id_: str, signum: int) -> None:
            self.killed.append((id_, signum))

    async def scene() -> None:
        client = Client()
        waiting = asyncio.create_task(client.spawn(ChildSpec("setup", "/", "/dev/null", run="sleep 1000")))
        await asyncio.sleep(0)
        client._started("setup", 1 << 22)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled() and client.killed == [("setup", signal.SIGKILL)]

    asyncio.run(scene())


def test_a_connection_that_is_closed_as_soon_as_it_is_open_is_tried_again_and_ends_no_agent():
    class Closed:
        def get_extra_info(self, _name: str) -> Any:
            return None

    class Session:
        async def ws_connect(self, *_: Any, **__: Any) -> Closed:
            return Closed()

    link = DispatcherLink(Session(), DispatcherEndpoint("https://127.0.0.1:1"), lambda _address: None,
                          lambda _orders: None)  # type: ignore[arg-type]
    with pytest.raises(aiohttp.ClientConnectionError):
        asyncio.run(link._once())


def test_an_error_that_names_an_odd_file_can_be_told():
    assert cut("no such file: \udc80.txt") == "no such file: \\udc80.txt"


@pytest.mark.parametrize("value", [
    WorkerLaunch("j", JobSpec("j"), {"KEY": "hidden"}),
    ChildSpec("w", "/", "/log", {"KEY": "hidden"}),
    AgentBoot("f", "h", "local", 1, "https://a:1", "", "hidden"),
])
def test_what_holds_secrets_does_not_show_them_in_a_log_or_traceback(value: object):
    assert "hidden" not in repr(value)
