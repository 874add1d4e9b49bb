"""Both sides speak TLS 1.3 with this fleet's own certificate, or not at all: the real server, client and session."""

from __future__ import annotations

import asyncio
import ssl
import time

import aiohttp
import pytest

from spotfleet.agent.boot import AgentBoot
from spotfleet.agent.transfer import open_session
from spotfleet.errors import DispatcherUnreachable
from spotfleet.transport import certs
from spotfleet.transport.client import DispatcherClient, Endpoint
from tests.support.dispatcher.fake_fleet import ADMIN, Stage, spec

ANOTHER = certs.make("f", time.time()).ca  # a fleet of the same name


def test_the_command_line_speaks_only_to_the_dispatcher_whose_certificate_it_pins(play):
    async def scene(stage: Stage) -> None:
        mine = DispatcherClient(Endpoint(stage.url, ADMIN, stage.ca), patience_s=10.0)
        assert (await asyncio.to_thread(mine.status)).fleet == "f"
        other = DispatcherClient(Endpoint(stage.url, ADMIN, ANOTHER), patience_s=0.0)
        with pytest.raises(DispatcherUnreachable, match="not this fleet's dispatcher"):
            await asyncio.to_thread(other.status)
        assert not await asyncio.to_thread(other.healthy)

    play(scene, spec(1))


def test_an_agent_speaks_only_to_the_dispatcher_whose_certificate_it_pins(play):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)

        async def status(ca: str) -> int:
            boot = AgentBoot("f", host, "local", 1, stage.url, ca, stage.token(host))
            async with open_session(boot, "127.0.0.1") as session:
                async with session.get(f"{stage.url}/v1/jobs/none-1/launch") as answer:
                    return answer.status

        assert await status(stage.ca) == 404  # it is known there; there is no such job
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await status(ANOTHER)

    play(scene, spec(1))


def test_neither_plain_http_nor_an_older_tls_gets_an_answer(play):
    async def scene(stage: Stage) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in await asyncio.wait_for(reader.read(), 10.0)
        writer.close()
        old = certs.client_context(stage.ca)
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", stage.port, ssl=old)

    play(scene, spec(1))


def test_a_request_that_does_not_come_to_an_end_is_given_up(play, monkeypatch):
    async def scene(stage: Stage) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port, ssl=certs.client_context(stage.ca))
        writer.write(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
        assert await asyncio.wait_for(reader.read(), 10.0) == b""  # closed, without a word
        writer.close()
        body = f"PUT /v1/nodes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ADMIN}\r\nContent-Length: 9\r\n\r\n{{"
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port, ssl=certs.client_context(stage.ca))
        writer.write(body.encode())
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 10.0)
        writer.close()

    monkeypatch.setattr("spotfleet.dispatcher.daemon.IDLE_S", 0.2)
    monkeypatch.setattr("spotfleet.dispatcher.http.requests.BODY_S", 0.2)
    play(scene, spec(1))
