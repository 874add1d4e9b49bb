"""Whatever is thrown at the dispatcher: never a 500, nothing changes without a token, and its loops live on."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Iterator

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.dispatcher import fuzzing
from tests.support.dispatcher.fake_fleet import ADMIN
from tests.support.dispatcher.fuzzing import Target

QUIET = {"max_examples": 60,  # ten times as many with --long
         "deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    made = Target(tmp_path_factory.mktemp("fuzz") / "dispatcher")
    yield made
    made.close()


def throw(target: Target, data: st.DataObject, headers: dict[str, str], names: dict[str, list[str]]) -> int:
    """One request; its status, once the answer has been found to be in order."""
    method, path, body = data.draw(fuzzing.requests(names))
    return asked(target, method, path, {**data.draw(fuzzing.HEADERS), **headers}, body)


def asked(target: Target, method: str, path: str, headers: dict[str, str], body: bytes) -> int:
    status, kind, said = target.ask(method, path, headers, body)
    assert status < 500, (method, path, status, said[:500])
    if status >= 400 and method != "HEAD":
        assert kind == "application/json", (status, said[:500])
        assert set(json.loads(said)) == {"error", "hint", "kind"} and json.loads(said)["error"]
    return status


def asked_of_each_route(target: Target, authorization: str) -> dict[str, int]:
    """The status of each route's own request, so that no route is left to chance."""
    headers, found = {"Content-Type": "application/json", "Authorization": authorization}, {}
    for route in fuzzing.AIMED:
        method, path, body = fuzzing.aimed(route, target.names)
        found[f"{method} {route.path}"] = asked(target, method, path, headers, body)
    return found


def test_nothing_changes_without_a_token(target):
    before, nobodies = target.digest(), fuzzing.strangers(target.host, target.stage.token)
    for nobody in ("", f"Bearer {target.host}.{'0' * 64}"):
        found = asked_of_each_route(target, nobody)
        assert {route: status for route, status in found.items() if status != 401} == {"GET /healthz": 200}

    @settings(**QUIET)
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        status = throw(target, data, {"Authorization": data.draw(nobodies)}, target.names)
        # 200: to be alive; 400: an agent that speaks no WebSocket; 415: a member of a gang, which has no token yet
        assert status in (200, 400, 401, 404, 405, 415), status

    attack()
    assert target.digest() == before
    target.check_alive()


def test_a_host_without_a_job_changes_nothing(target):
    before = target.digest()
    asked_of_each_route(target, fuzzing.bearer(target.stage.token(target.other))["Authorization"])
    assert target.digest() == before

    @settings(**QUIET)
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        throw(target, data, fuzzing.bearer(target.stage.token(target.other)), target.names)

    attack()
    assert target.digest() == before
    target.check_alive()


def test_a_host_with_a_job_gets_no_500_for_anything(target):
    asked_of_each_route(target, fuzzing.bearer(target.stage.token(target.host))["Authorization"])

    @settings(**QUIET)
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        throw(target, data, fuzzing.bearer(target.stage.token(target.host)), target.names)

    attack()
    target.check_alive()


def test_no_frame_of_an_agent_ends_the_dispatcher(target):
    async def say(frames: list[str | bytes]) -> None:
        stage = target.stage
        async with stage.http.ws_connect(stage.url + "/v1/agent", headers=fuzzing.bearer(stage.token(target.other)),
                                         ssl=target.tls) as ws:
            for frame in frames:
                if isinstance(frame, bytes):
                    await ws.send_bytes(frame)
                else:
                    await ws.send_str(frame.replace("HOST", target.other).replace("JOB", target.job))

    @settings(**QUIET)
    @given(st.lists(fuzzing.FRAMES, min_size=1, max_size=3))
    def attack(frames: list[str | bytes]) -> None:
        try:
            target.do(say(frames))
        except aiohttp.ClientConnectionError:
            return  # closed while we still spoke: that is what it is for

    attack()
    target.check_alive()


@pytest.mark.parametrize("said", [
    b"GET", b"GET / HTTP/1.1\r\nHost: x\r\n", b"\x00\x01\x02\r\n\r\n", b"GET /healthz HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\n" + b"X: y\r\n" * 500 + b"\r\n",
    b"PUT /v1/nodes HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\nContent-Length: -1\r\n\r\n",
    b"PUT /v1/nodes HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\nContent-Length: 100\r\n\r\n{",
    b"PUT /v1/nodes HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    b"PUT /v1/bundles/" + b"0" * 64 + b" HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n-1\r\n",
    b"GET /v1/agent HTTP/1.1\r\nAuthorization: Bearer HOSTS\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    b"GET /v1/status HTTP/1.1\r\n\r\n",
])
def test_what_is_no_request_is_no_trouble(target, said):
    """Half a request, or bytes that mean nothing, on a connection that is then closed."""
    async def send() -> bytes:
        stage = target.stage
        told = said.replace(b"TOKEN", ADMIN.encode()).replace(b"HOSTS", stage.token(target.other).encode())
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port, ssl=target.tls)
        writer.write(told)
        try:
            return await asyncio.wait_for(reader.read(4096), 0.2)
        except (TimeoutError, ConnectionError, ssl.SSLError):
            return b""
        finally:
            writer.close()

    before = target.digest()
    answer = target.do(send())
    assert not answer.startswith(b"HTTP/1.1 5"), answer
    assert target.ask("GET", "/healthz", {}, b"")[0] == 200
    assert target.digest() == before


def test_the_admin_gets_no_500_for_anything(target):
    """The last of this file: it changes the fleet."""
    names = {**target.names, "host": [target.other], "job": ["t-2"]}

    @settings(**QUIET)
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        throw(target, data, fuzzing.bearer(ADMIN), names)

    attack()
    target.check_alive()
