"""Logs of daemons stay small, however much is written into them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from spotfleet.storage import daemon_logs

MALFORMED = type("BadStatusLine", (Exception,), {"__module__": "aiohttp.http_exceptions"})


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(daemon_logs.LogFormatter("%(name)s %(message)s"))
        self.addFilter(daemon_logs.KindFilter())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("spotfleet.storage.daemon_logs.time.monotonic", lambda: now[0])
    return now


def send(handler: Lines, name: str, message: str, *args: object, error: Exception | None = None) -> None:
    info = (type(error), error, None) if error else None
    record = logging.LogRecord(name, logging.ERROR, "", 0, message, args, info)
    if handler.filter(record):
        handler.emit(record)


def test_malformed_requests_leave_one_short_line_a_minute(clock):
    handler = Lines()
    for number in range(200):
        send(handler, "aiohttp.server", "Error handling request from %s", f"10.0.0.{number}",
             error=MALFORMED("BREW /" + "x" * 8000 + "\n\x1b[2J"))
    assert len(handler.lines) == 1 and len(handler.lines[0]) < 600 and "\n" not in handler.lines[0]
    assert "BadStatusLine: BREW /xxx" in handler.lines[0]
    clock[0] += 61.0
    send(handler, "aiohttp.server", "Error handling request from %s", "10.0.0.1", error=MALFORMED("GET"))
    assert handler.lines[1].endswith("BadStatusLine: GET (199 more of this kind were left out)")


def test_another_kind_has_a_line_of_its_own_and_all_kinds_together_are_few(clock):
    handler = Lines()
    for host in ("w-0", "w-1", "w-0"):
        send(handler, "spotfleet.dispatcher.http.agents", "%s: unreadable report: %s", host, "x")
    send(handler, "spotfleet.dispatcher.http.agents", "%s: no report to begin with: %s", "w-0", "x")
    assert len(handler.lines) == 3
    for number in range(10 * daemon_logs.MOST_KINDS):
        send(handler, "asyncio", f"error {number}")
    assert len(handler.lines) == daemon_logs.MOST_KINDS


def test_our_own_lines_and_the_tracebacks_of_our_own_faults_are_kept_whole(clock):
    handler = Lines()
    for _ in range(3):
        send(handler, "spotfleet.dispatcher.dispatcher", "a line\nwith a second one")
    send(handler, "aiohttp.server", "Unhandled exception", error=KeyError("our fault"))
    assert handler.lines[:3] == ["spotfleet.dispatcher.dispatcher a line\nwith a second one"] * 3
    assert handler.lines[3].endswith("Unhandled exception\nKeyError: 'our fault'")


def test_a_daemons_output_is_set_aside_when_it_is_too_long_and_all_who_append_go_on(tmp_path: Path):
    path = tmp_path / "console.log"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    ours, childs = os.open(path, flags, 0o600), os.open(path, flags, 0o600)
    try:
        os.write(ours, b"x" * 100)
        assert not daemon_logs.rotate_output(ours, 100)
        os.write(childs, b"y")
        assert daemon_logs.rotate_output(ours, 100)
        os.write(childs, b"after\n")
        os.write(ours, b"again\n")
    finally:
        os.close(ours)
        os.close(childs)
    assert path.read_bytes() == b"after\nagain\n"
    older = tmp_path / "console.log.1"
    assert older.read_bytes() == b"x" * 100 + b"y" and older.stat().st_mode & 0o777 == 0o600


def test_output_that_is_not_appended_to_stays_as_it_is(tmp_path: Path):
    with open(tmp_path / "out", "wb") as file:  # a user's own redirection
        file.write(b"x" * 100)
        file.flush()
        assert not daemon_logs.rotate_output(file.fileno(), 10)
    reader, writer = os.pipe()
    try:
        assert not daemon_logs.rotate_output(writer, 0)
    finally:
        os.close(reader)
        os.close(writer)
