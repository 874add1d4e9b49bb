"""The page's server: for the holder of the address alone, read-only unless allowed, on loopback."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import pytest

from spotfleet.cli.page.feed import Feed
from spotfleet.cli.page.server import ACTION, HEADERS, PageServer
from spotfleet.errors import SpotfleetError, UsageError
from tests.support.cli.page_world import PageWorld

FILES = {"": "text/html", "page.css": "text/css", "page.js": "text/javascript"}


def made(world: PageWorld, **more: bool) -> PageServer:
    server = PageServer(Feed(world.poll, 0.01), world, **more)
    server.start()
    return server


@pytest.fixture
def world() -> PageWorld:
    return PageWorld(2)


@pytest.fixture
def server(world: PageWorld) -> Iterator[PageServer]:
    server = made(world)
    yield server
    server.close()


@pytest.fixture
def acting(world: PageWorld) -> Iterator[PageServer]:
    server = made(world, may_act=True)
    yield server
    server.close()


def asked(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


def test_the_files_come_with_a_policy_that_lets_nothing_be_loaded_from_elsewhere(server):
    for name, kind in FILES.items():
        status, headers, data = asked(server, f"/{server.secret}/{name}")
        assert status == 200 and headers["Content-Type"] == f"{kind}; charset=utf-8" and data
        assert {name: headers[name] for name in HEADERS} == HEADERS
        assert b"http://" not in data.replace(b"http://www.w3.org/2000/svg", b"") and b"https://" not in data
    assert "default-src 'none'" in HEADERS["Content-Security-Policy"]


def test_without_the_secret_nothing_is_there(server):
    for path in ("/", "/live", "/page.js", f"/{server.secret}", f"/{server.secret[:-1]}/", f"/x{server.secret}/live",
                 f"/{server.secret}/other", f"/{server.secret}/../page.html", "//", f"/{server.ticket}/"):
        assert asked(server, path)[0] == 404, path


def test_another_name_in_host_and_a_foreign_pages_request_are_refused(server):
    path = f"/{server.secret}/"
    assert asked(server, path, Host="collector.invalid")[0] == 404
    assert asked(server, path, Host=f"collector.invalid:{server.port}")[0] == 404
    assert asked(server, path, **{"Sec-Fetch-Site": "cross-site"})[0] == 404
    framed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
    assert asked(server, path, **framed)[0] == 404
    link = {**framed, "Sec-Fetch-Dest": "document"}  # in a terminal that is a web page
    assert asked(server, path, **link)[0] == 200
    assert asked(server, f"{path}drain?host=lab-0", "POST", **link)[0] == 404
    assert asked(server, path, Host=f"localhost:{server.port}", **{"Sec-Fetch-Site": "same-origin"})[0] == 200


def test_the_address_for_a_browsers_command_line_is_good_once(server):
    status, headers, _ = asked(server, f"/{server.address_once.rpartition('/')[2]}")
    assert (status, headers["Location"]) == (303, server.address)
    assert asked(server, f"/{headers['Location'].split('/')[-2]}/")[0] == 200
    ticket = server.ticket or "spent"
    assert ticket == "spent" and asked(server, f"/{ticket}")[0] == 404


def test_nothing_can_be_changed_unless_it_is_allowed(server, world):
    for path in ("cancel?job=gpt-2", "drain?host=lab-0"):
        for secret in ("", server.secret):
            assert asked(server, f"/{server.secret}/{path}", "POST", **{ACTION: secret})[0] == 403
    assert (world.cancelled, world.drained) == ([], []) and "#" not in server.address


def test_an_action_takes_the_second_secret_which_is_in_no_request_for_the_page(acting, world):
    path, secret = f"/{acting.secret}/", acting.address.partition("#act=")[2]
    assert asked(acting, f"{path}drain?host=lab-0", "POST")[0] == 403
    assert asked(acting, f"{path}drain?host=lab-0", "POST", **{ACTION: acting.secret})[0] == 403
    assert asked(acting, f"{path}drain?host=lab-0", **{ACTION: secret})[0] == 404
    assert asked(acting, f"{path}drain?host=lab-0", "POST", **{ACTION: secret})[0] == 200
    assert asked(acting, f"{path}cancel?job=gpt-2", "POST", **{ACTION: secret})[0] == 200
    assert asked(acting, f"{path}cancel", "POST", **{ACTION: secret})[0] == 400
    assert (world.cancelled, world.drained) == (["gpt-2"], ["lab-0"])


def test_an_error_of_the_dispatcher_is_the_answer_with_its_hint(acting, world, monkeypatch):
    def refuse(_job: str) -> None:
        raise SpotfleetError("no job 'x'", hint="see jobs")

    monkeypatch.setattr(world, "cancel", refuse)
    secret = acting.address.partition("#act=")[2]
    status, _, data = asked(acting, f"/{acting.secret}/cancel?job=x", "POST", **{ACTION: secret})
    assert (status, json.loads(data)) == (502, {"error": "no job 'x'", "hint": "see jobs"})


def test_a_log_begins_with_its_newest_part_and_goes_on_from_the_offset(server):
    status, headers, data = asked(server, f"/{server.secret}/log?job=gpt-2&rank=3")
    assert status == 200 and data.startswith(b"step 0") and headers["X-Offset"] == "70001"
    assert asked(server, f"/{server.secret}/log?job=gpt-2&rank=3&offset=70001")[2] == b""
    for bad in ("rank=3", "job=x&rank=-1", "job=x&rank=1&offset=1e9"):
        assert asked(server, f"/{server.secret}/log?{bad}")[0] == 400, bad


def test_news_come_as_server_sent_events(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", f"/{server.secret}/live")
    answer = connection.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"
    lines = [answer.readline().decode().rstrip("\n") for _ in range(8)]
    assert lines[0].startswith("retry: ") and lines[2] == "event: whole" and lines[5] == "event: changed"
    assert len(json.loads(lines[3].removeprefix("data: "))["hosts"]) == 3
    answer.close()
    connection.close()


def test_a_port_that_is_taken_is_named(server, world):
    with pytest.raises(UsageError, match=f"--port: {server.port} cannot be used on 127.0.0.1: Address already in use"):
        PageServer(Feed(world.poll), world, server.port)
