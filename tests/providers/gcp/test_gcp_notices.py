"""The notice source of Google Cloud, on a metadata server that behaves as the documentation says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from spotfleet.errors import NoticeFormat
from spotfleet.interruptions.gcp import BEHAVIOR, GOING, GOING_S, LEAST_S, NOTICE_S, GcpSource
from spotfleet.providers.gcp.mapping import machine, names

BASE = "/computeMetadata/v1"


class Metadata:
    """Values by path; a request that waits for a change is held until the value has another ETag."""

    def __init__(self) -> None:
        self.values = {"/instance/preempted": "FALSE", "/instance/maintenance-event": "NONE",
                       "/instance/attributes/team": "vision"}
        self.flavor = "Google"
        self.status = 200
        self.held = 0
        metadata = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                metadata.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}{BASE}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        split = urlsplit(request.path)
        path, asked = split.path.removeprefix(BASE), parse_qs(split.query)
        if request.headers.get("Metadata-Flavor") != "Google":
            return self.send(request, 403, "")
        if path not in self.values:
            return self.send(request, 404, "")
        if "wait_for_change" in asked:
            self.held += 1
            until = time.monotonic() + float(asked["timeout_sec"][0])
            while self.values[path] == asked["last_etag"][0].removeprefix("e-") and time.monotonic() < until:
                time.sleep(0.01)
        self.send(request, self.status, self.values[path])

    def send(self, request: BaseHTTPRequestHandler, status: int, body: str) -> None:
        request.send_response(status)
        if self.flavor:
            request.send_header("Metadata-Flavor", self.flavor)
        request.send_header("ETag", f"e-{body}")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body.encode())


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    made = Metadata()
    yield made
    made.server.shutdown()
    made.server.server_close()
    made.thread.join()


class Clock:
    at = 1000.0

    def __call__(self) -> float:
        return self.at


def test_a_preemption_counts_down_from_the_first_answer(metadata):
    clock = Clock()
    source = GcpSource(metadata.url, clock)
    assert source.poll() is None
    metadata.values["/instance/preempted"] = "TRUE"
    first = source.poll()
    assert (first.seconds_left, first.kind, first.action) == (NOTICE_S, "interruption", "terminate")
    clock.at += 50
    assert source.poll().seconds_left == NOTICE_S - 50
    clock.at += 200
    assert source.poll().seconds_left == 0.0


def test_a_notice_names_whether_the_host_will_be_stopped(metadata):
    metadata.values[f"/instance/attributes/{BEHAVIOR}"] = "stop"
    metadata.values["/instance/preempted"] = "TRUE"
    assert GcpSource(metadata.url, Clock()).poll().action == "stop" and BEHAVIOR == names.BEHAVIOR


def test_a_process_that_began_during_a_notice_assumes_the_least_time(metadata):
    metadata.values["/instance/preempted"] = "TRUE"
    assert GcpSource(metadata.url, Clock()).poll().seconds_left == LEAST_S


def test_a_poll_is_held_until_the_value_changes(metadata):
    source = GcpSource(metadata.url)
    source.poll()
    threading.Timer(0.2, metadata.values.update, [{"/instance/preempted": "TRUE"}]).start()
    assert source.poll() is not None and metadata.held == 1


def test_a_machine_that_was_started_again_has_no_notice(metadata):
    clock = Clock()
    source = GcpSource(metadata.url, clock)
    metadata.values["/instance/preempted"] = "TRUE"
    assert source.poll() is not None
    metadata.values["/instance/preempted"] = "FALSE"
    assert source.poll() is None
    metadata.values["/instance/preempted"] = "TRUE"
    assert source.poll().seconds_left == NOTICE_S


def test_the_shutdown_script_is_a_second_witness(metadata, tmp_path):
    clock, going = Clock(), tmp_path / "going"
    source = GcpSource(metadata.url, clock, str(going))
    assert source.poll() is None
    going.touch()
    assert source.poll().seconds_left == GOING_S
    clock.at += 4
    assert source.poll().seconds_left == GOING_S - 4
    assert str(GOING) in machine.GOING


def test_maintenance_is_a_hint_until_it_is_near(metadata):
    clock = Clock()
    source = GcpSource(metadata.url, clock)
    assert source.poll() is None
    metadata.values["/instance/maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    clock.at += 60
    assert source.poll().kind == "maintenance"
    clock.at += 3600 - 300
    near = source.poll()
    assert (near.kind, near.seconds_left) == ("interruption", 300.0)
    metadata.values["/instance/maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
    clock.at += 60
    assert source.poll().kind == "maintenance"
    metadata.values["/instance/maintenance-event"] = "A_WORD_OF_NEXT_YEAR"
    clock.at += 60
    assert source.poll() is None


def test_tags_are_items_of_the_metadata(metadata):
    source = GcpSource(metadata.url)
    assert source.tag("team") == "vision" and source.tag("none") == ""


def test_another_server_at_the_address_is_no_metadata_server(metadata):
    metadata.flavor = ""
    with pytest.raises(NoticeFormat, match="not Google's"):
        GcpSource(metadata.url).poll()


@pytest.mark.parametrize("status, word", [(503, "FALSE"), (200, "MAYBE")])
def test_an_answer_that_cannot_be_read_is_an_error_and_the_next_poll_works(metadata, status, word):
    source = GcpSource(metadata.url)
    metadata.status, metadata.values["/instance/preempted"] = status, word
    with pytest.raises(NoticeFormat):
        source.poll()
    metadata.status, metadata.values["/instance/preempted"] = 200, "TRUE"
    assert source.poll() is not None
