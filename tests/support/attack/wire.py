"""Requests, frames and bytes at a live dispatcher, as any program could send them."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from spotfleet.api.home import Home
from spotfleet.dispatcher.http.auth import host_token
from spotfleet.transport.certs import client_context
from tests.support.attack.live import LiveFleet

ANSWER_S = 30.0
FRAME_S = 1.0  # for the answer to a frame; there may be none
CLOSED = 0  # instead of a status: the connection was closed without an answer


class Wire:
    """What reaches the dispatcher of a fleet with one job."""

    def __init__(self, live: LiveFleet, job: str, worker: str) -> None:
        folder = Home(live.stage.home).find(live.fleet.name)
        self.live, self.job, self.worker = live, job, worker
        self.url, self.admin = folder.record.url, folder.keys.admin_token
        self.host = worker.partition("/")[0]
        self.other = next(host for host in live.up() if host != self.host)
        self._secret = folder.keys.fleet_secret
        self._tls = client_context((folder.path / "ca.pem").read_text())

    def token(self, host: str) -> str:
        return host_token(self._secret, host)

    @property
    def names(self) -> dict[str, list[str]]:
        """What is real here, for each kind of place in a path."""
        return {"host": [self.host, self.other], "job": [self.job, self.job, "none-2"], "sha256": ["0" * 64],
                "version": ["5", "900"], "name": [".metadata", "__R_0.distcp"], "driver": ["d1"],
                "worker": [quote(self.worker, safe=""), self.worker, f"{self.other}%2F0%2F1"],
                "key": ["ledger.db", f"jobs/{self.job}/logs/rank-0.log", f"jobs/{self.job}/secrets.json"]}

    def ask(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        """Return status and body; CLOSED if there was none."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=ANSWER_S, context=self._tls)
        raw = {name: value.encode("utf-8", "surrogateescape") for name, value in headers.items()}
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
                connection.request(method, path, body or None, raw)  # type: ignore[arg-type]
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (http.client.HTTPException, ConnectionError):
            return CLOSED, b""
        finally:
            connection.close()

    def frames(self, host: str, frames: Sequence[str | bytes]) -> None:
        """Send frames as the agent of `host`, whose real agent lives."""

        async def send() -> None:
            async with aiohttp.ClientSession() as session, session.ws_connect(
                    self.url + "/v1/agent", headers={"Authorization": f"Bearer {self.token(host)}"}, ssl=self._tls,
                    timeout=aiohttp.ClientWSTimeout(ws_close=1.0)) as ws:  # type: ignore[call-arg]
                for frame in frames:
                    if isinstance(frame, bytes):
                        await ws.send_bytes(frame)
                    else:
                        await ws.send_str(frame.replace("HOST", host).replace("JOB", self.job))
                with suppress(TimeoutError):
                    await ws.receive(timeout=FRAME_S)

        with suppress(aiohttp.ClientConnectionError):  # closed while we still sent
            asyncio.run(send())

    def socket_bytes(self, data: bytes) -> None:
        """Open the agent's WebSocket and send bytes that need not be frames."""
        parts = urlsplit(self.url)
        request = (f"GET /v1/agent HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.token(self.other)}\r\n"
                   "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                   "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
        with suppress(OSError), socket.create_connection((parts.hostname or "", parts.port or 443), ANSWER_S) as raw, \
                self._tls.wrap_socket(raw, server_hostname=parts.hostname) as tls:
            tls.settimeout(FRAME_S)
            tls.sendall(request.encode())
            tls.recv(4096)
            tls.sendall(data)
            with suppress(TimeoutError, ssl.SSLError):
                tls.recv(100)


def thrown(seed: int, count: int, drawn: st.SearchStrategy[Any], work: Callable[[Any], object]) -> None:
    """Call `work` with `count` examples that the seed chooses; ten times as many in the long form."""

    @hypothesis.seed(seed)
    @settings(max_examples=count, phases=[Phase.generate], database=None, deadline=None,
              suppress_health_check=list(HealthCheck))
    @given(drawn)
    def go(example: Any) -> None:
        work(example)

    go()
