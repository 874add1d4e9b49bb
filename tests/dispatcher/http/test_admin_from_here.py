"""Where people come through sshd, the admin token counts on the dispatcher's own machine alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import aiohttp
import pytest

from spotfleet.dispatcher.http.app import is_loopback
from spotfleet.transport.certs import client_context
from spotfleet.transport.client import DispatcherClient, Endpoint
from tests.support.dispatcher.fake_fleet import ADMIN, Stage, spec


async def asked(stage: Stage, source: str, token: str, path: str = "/v1/status") -> tuple[int, str]:
    """Status and error of a request whose sender has the address `source`."""
    connector = aiohttp.TCPConnector(local_addr=(source, 0), ssl=client_context(stage.ca))
    async with aiohttp.ClientSession(connector=connector) as http:
        async with http.get(stage.url + path, headers={"Authorization": f"Bearer {token}"}) as answer:
            return answer.status, (await answer.json()).get("error", "") if answer.status != 200 else ""


@pytest.fixture
def no_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.2 plays another machine than 127.0.0.1."""
    monkeypatch.setattr("spotfleet.dispatcher.http.app.is_loopback", lambda _address: False)


def test_the_admin_token_is_refused_from_elsewhere_on_every_route_that_takes_it(play, no_loopback):
    async def scene(stage: Stage) -> None:
        stage.daemon.dispatcher.core.boot = replace(stage.boot, admin_from_here=True)
        for path in ("/v1/status", "/v1/archive", "/v1/bundles/" + "0" * 64):
            status, error = await asked(stage, "127.0.0.2", ADMIN, path)
            assert (status, error) == (403, "the admin token is taken from the dispatcher's own machine only"), path
        assert (await asked(stage, "127.0.0.1", ADMIN))[0] == 200
        assert (await asked(stage, "127.0.0.2", "wrong"))[0] == 401  # a guess learns nothing
        assert (await asked(stage, "127.0.0.2", "", "/healthz"))[0] == 200

    play(scene, spec(1))


def test_hosts_are_heard_from_wherever_they_are(play, no_loopback):
    async def scene(stage: Stage) -> None:
        stage.daemon.dispatcher.core.boot = replace(stage.boot, admin_from_here=True)
        (host,) = await stage.up(1)
        assert (await asked(stage, "127.0.0.2", stage.token(host), "/v1/jobs/none-1/launch"))[0] == 404

    play(scene, spec(1))


def test_without_the_rule_and_on_loopback_the_token_counts(play, no_loopback, monkeypatch):
    async def scene(stage: Stage) -> None:
        assert (await asked(stage, "127.0.0.2", ADMIN))[0] == 200
        monkeypatch.undo()
        stage.daemon.dispatcher.core.boot = replace(stage.boot, admin_from_here=True)
        assert (await asked(stage, "127.0.0.2", ADMIN))[0] == 200  # an sshd's own address is none of ours
        mine = DispatcherClient(Endpoint(stage.url, ADMIN, stage.ca), patience_s=10.0)
        assert (await asyncio.to_thread(mine.status)).fleet == "f"

    play(scene, spec(1))


@pytest.mark.parametrize(("address", "here"), [
    ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::1%lo", True), ("::ffff:127.0.0.1", True),
    ("10.0.0.1", False), ("fe80::1%eth0", False), ("::ffff:10.0.0.1", False), ("", False), ("somewhere", False)])
def test_loopback_is_known_in_both_families(address, here):
    assert is_loopback(address) == here
