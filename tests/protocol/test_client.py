"""The client against a dispatcher that dies, returns, and is impersonated."""

from __future__ import annotations

import errno
import hashlib
import io
import threading
import time
from http.client import HTTPMessage, HTTPResponse, IncompleteRead
from types import SimpleNamespace
from typing import Any

import pytest

from spotfleet.api import Fleet
from spotfleet.errors import DispatcherUnreachable, NoCapacity, SpotfleetError, UsageError
from spotfleet.model import JobSpec
from spotfleet.storage.mirror import Piece
from spotfleet.transport import certs
from spotfleet.transport.client import DOWNLOADS, DispatcherClient, Endpoint, _body, _error, _Reply
from tests.support.cli.cli_cloud import FakeHandler


@pytest.fixture
def client(up) -> DispatcherClient:
    return Fleet("digits").client


def test_a_call_waits_for_a_dispatcher_that_restarts(up, client):
    up.dispatcher.stop()
    threading.Timer(0.5, up.dispatcher.start).start()
    client.patience_s = 20
    assert client.status().state == "up"


def test_after_its_patience_it_says_who_does_not_answer(up, client):
    up.dispatcher.stop()
    client.patience_s = 0.5
    began = time.monotonic()
    with pytest.raises(DispatcherUnreachable, match=f"no answer from the dispatcher at {client.endpoint.url}"):
        client.status()
    assert time.monotonic() - began >= 0.5
    assert not client.healthy()


def test_an_impostor_is_not_spoken_to(up, client):
    other = certs.make("digits", time.time()).ca
    impostor = DispatcherClient(Endpoint(client.endpoint.url, client.endpoint.token, other), patience_s=5)
    with pytest.raises(DispatcherUnreachable, match="not this fleet's dispatcher"):
        impostor.status()
    assert not impostor.healthy()


def test_a_wrong_token_is_refused(up, client):
    stranger = DispatcherClient(Endpoint(client.endpoint.url, "wrong", client.endpoint.ca))
    with pytest.raises(SpotfleetError, match="the token is wrong"):
        stranger.status()


def test_errors_keep_their_class_and_hint(up, client):
    with pytest.raises(NoCapacity, match="needs 9 workers") as caught:
        client.submit(JobSpec("a", min_workers=9, max_workers=9), {}, wait=False)
    assert caught.value.hint == "add --wait"


def test_a_job_is_submitted_once_even_if_the_answer_is_lost(up, client, monkeypatch):
    """A second try would train twice; whoever asked is told to look instead."""
    submit = up.dispatcher.submit

    def submit_and_die(*args):
        submit(*args)
        raise ConnectionResetError

    monkeypatch.setattr(up.dispatcher, "submit", submit_and_die)
    client.patience_s = 5
    with pytest.raises(DispatcherUnreachable) as caught:
        client.submit(JobSpec("a", run="true"), {}, wait=False)
    assert "the job may have been accepted" in caught.value.hint
    assert len(up.dispatcher.jobs) == 1


def test_logs_go_on_at_the_offset_where_they_broke_off(up, client):
    up.ok("train hello.py", "x" * 100)
    chunks = list(client.stream("hello-1"))
    whole = b"".join(c.data for c in chunks)
    assert len(chunks) > 5 and whole == b"hello " + b"x" * 100 + b" \n"
    assert b"".join(c.data for c in client.stream("hello-1", chunks[2].offset)) == whole[chunks[2].offset:]


def test_a_full_disk_here_is_not_blamed_on_the_dispatcher_and_not_tried_again(client):
    tries = []

    class Full(io.BytesIO):
        def write(self, data):
            tries.append(data)
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(SpotfleetError, match="cannot be written here: No space left") as caught:
        client.archive(Full())
    assert len(tries) == 1 and not isinstance(caught.value, DispatcherUnreachable)


def test_a_transfer_that_breaks_off_each_time_is_given_up(client, monkeypatch):
    begun = []

    def send_half(handler):
        begun.append(True)
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b"half")
        handler.close_connection = True

    monkeypatch.setattr(FakeHandler, "_archive", send_half)
    client.patience_s = 60
    with pytest.raises(DispatcherUnreachable):
        client.archive(io.BytesIO())
    assert len(begun) == DOWNLOADS


def test_an_aborted_client_sends_nothing_more(up, client):
    sender = client.persistent()
    sender.put_blob(hashlib.sha256(b"first").hexdigest(), b"first")
    sent = up.dispatcher.uploads
    sender.abort()
    with pytest.raises(DispatcherUnreachable, match="the transfer was given up"):
        sender.put_blob(hashlib.sha256(b"second").hexdigest(), b"second")
    assert up.dispatcher.uploads == sent
    sender.close()


def test_a_url_that_is_none_is_refused():
    with pytest.raises(UsageError, match="is not https://ADDRESS:PORT"):
        DispatcherClient(Endpoint("http://1.2.3.4:5", "t", certs.make("a", 0).ca))


class Scripted(DispatcherClient):
    """A client whose every call is answered with `body`."""

    def __init__(self, body: bytes) -> None:
        super().__init__(Endpoint("https://127.0.0.1:1", "token", certs.make("digits", time.time()).ca))
        self.body, self.headers = body, HTTPMessage()

    def _call(self, *_: Any, **__: Any) -> _Reply:
        return _Reply(200, self.headers, self.body)


@pytest.mark.parametrize("body", [b"<html>", b"\xff", b"[" * 200_000, b'{"hosts": [1]}', b'{"hosts": 1}', b"[]",
                                  b'{"unsent": [{}]}'], ids=lambda body: repr(body[:20]))
def test_an_answer_that_cannot_be_read_is_an_error_with_a_next_step(body: bytes):
    client = Scripted(body)
    for ask in (client.ending, client.status):
        with pytest.raises(SpotfleetError, match="sends an answer that cannot be read") as caught:
            ask()
        assert "--discard" in caught.value.hint


def test_an_answer_that_cannot_be_inflated_is_an_error_with_a_next_step():
    client = Scripted(b"not deflated")
    client.headers["Content-Encoding"] = "deflate"
    with pytest.raises(SpotfleetError, match="sends an answer that cannot be read"):
        client.archive_pieces([Piece("ledger.db", 0, 4)], packed=True)


@pytest.mark.parametrize("body", [b"<html>", b"\xff", b"[" * 200_000])
def test_a_refusal_that_cannot_be_read_is_a_refusal(body: bytes):
    assert str(_error(_Reply(500, HTTPMessage(), body))) == "the dispatcher answered 500"


def answered(data: bytes) -> HTTPResponse:
    found = HTTPResponse(SimpleNamespace(makefile=lambda _mode: io.BytesIO(data)))  # type: ignore[arg-type]
    found.begin()
    return found


HEAD, CHUNKED = b"HTTP/1.1 200 OK\r\n", b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("data", [b"Content-Length: 10\r\n\r\n0123456789", CHUNKED + b"a\r\n0123456789\r\n0\r\n\r\n",
                                  b"\r\n0123456789"], ids=["length", "chunks", "to the end"])
def test_an_answer_is_read_up_to_its_limit(data: bytes):
    assert _body(answered(HEAD + data), 10) == b"0123456789"
    with pytest.raises(SpotfleetError, match="an answer of more than 9 bytes"):
        _body(answered(HEAD + data), 9)


@pytest.mark.parametrize("data", [b"Content-Length: 10\r\n\r\n012345678", CHUNKED + b"a\r\n012345678"])
def test_an_answer_that_breaks_off_is_incomplete(data: bytes):
    with pytest.raises(IncompleteRead):
        _body(answered(HEAD + data), 10)
