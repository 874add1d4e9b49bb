"""What callers get from a dispatcher that cannot start: the reason, if they have the fleet's token."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from spotfleet.dispatcher import __main__ as entry
from spotfleet.dispatcher.http import failed_start
from spotfleet.dispatcher.http.auth import host_token
from spotfleet.errors import DispatcherUnreachable, UsageError
from spotfleet.transport import certs
from spotfleet.transport.boot import DispatcherBoot
from spotfleet.transport.client import DispatcherClient, Endpoint
from tests.support.dispatcher.fake_fleet import ADMIN, SECRET, spec


@pytest.fixture
def boot() -> DispatcherBoot:
    made = certs.make("f", time.time())
    return DispatcherBoot("f", "f-d-0", spec(1), SECRET, ADMIN, made.ca, made.cert, made.key)


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def client(boot: DispatcherBoot, port: int, token: str = ADMIN) -> DispatcherClient:
    return DispatcherClient(Endpoint(f"https://127.0.0.1:{port}", token, boot.ca), patience_s=0.0)


def asked_while(serving, ask):
    """The result of the blocking `ask`, while `serving` runs."""

    async def main():
        server = asyncio.create_task(serving)
        try:
            for _ in range(3000):
                try:
                    return await asyncio.to_thread(ask)
                except DispatcherUnreachable as error:
                    if "refused" not in str(error):
                        raise
                await asyncio.sleep(0.01)
        finally:
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)

    return asyncio.run(main())


def test_each_command_is_given_the_reason_and_the_next_step(boot: DispatcherBoot, port: int):
    error = UsageError("the disk is read-only", hint="make it writable")
    with pytest.raises(DispatcherUnreachable, match=r"^the dispatcher cannot start: the disk is read-only$") as caught:
        asked_while(failed_start.explain(boot, "127.0.0.1", port, error), client(boot, port).status)
    assert caught.value.hint.startswith("make it writable; hosts train on meanwhile, until `orphan_after` ends them")


def test_up_and_check_are_given_the_reason_too(boot: DispatcherBoot, port: int):
    def why() -> str:
        found = client(boot, port).why_unreachable()
        if "nothing answers" in found:
            raise DispatcherUnreachable("refused")
        return found

    error = IsADirectoryError(21, "Is a directory", "boots.json")
    found = asked_while(failed_start.explain(boot, "127.0.0.1", port, error), why)
    assert found == "the dispatcher cannot start: IsADirectoryError: [Errno 21] Is a directory: 'boots.json'"


@pytest.mark.parametrize("token", ["", "another", host_token(SECRET, "f-1")])
def test_nobody_else_is_given_the_reason(boot: DispatcherBoot, port: int, token: str):
    with pytest.raises(DispatcherUnreachable, match=r"it answers 503$"):
        asked_while(failed_start.explain(boot, "127.0.0.1", port, UsageError("a name")),
                    client(boot, port, token).status)


def test_a_port_that_is_taken_ends_the_explanation(boot: DispatcherBoot, caplog: pytest.LogCaptureFixture):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        asyncio.run(failed_start.explain(boot, "127.0.0.1", other.getsockname()[1], UsageError("it")))
    assert "the reason cannot be given to callers" in caplog.text


def test_a_process_whose_start_fails_gives_the_reason_before_it_ends(boot: DispatcherBoot, port: int, tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(failed_start, "EXPLAIN_S", 0.5)
    monkeypatch.setattr(entry, "read_boot", lambda home: boot)
    monkeypatch.setattr(entry, "listen_at", lambda: ("127.0.0.1", port))
    monkeypatch.setattr(entry.providers, "load", lambda name, config: None)
    (tmp_path / "ballast").mkdir()  # a folder where a file must be

    async def served() -> None:
        with pytest.raises(IsADirectoryError):
            await entry.serve(tmp_path)

    with pytest.raises(DispatcherUnreachable, match=r"^the dispatcher cannot start: IsADirectoryError"):
        asked_while(served(), client(boot, port).status)
    asyncio.run(served())  # it ends by itself


def test_a_refused_connection_says_that_no_dispatcher_runs_there(boot: DispatcherBoot, port: int):
    with pytest.raises(DispatcherUnreachable, match=r"no dispatcher runs there now$") as caught:
        client(boot, port).status()
    assert "the last lines of console.log in its home say why" in caught.value.hint
