"""Web server of the page, on 127.0.0.1. Whoever has the address may read, and with a second secret also act.

    /SECRET/               the page; page.css and page.js beside it
    /SECRET/live           server-sent events: `whole`, then `changed`, and `trouble` while the dispatcher is away
    /SECRET/log?job=&rank=&offset=     a piece of a log, long poll; without an offset its newest part
    POST /SECRET/cancel?job=, /SECRET/drain?host=     with the header X-Spotfleet-Action: the second secret
    /TICKET                leads to the page, once: the command line of a browser is readable for other users

Anything else is 404. A name other than the server's own in `Host` is refused, so that no foreign page reaches it under
a name of its own.
"""

from __future__ import annotations

import hmac
import json
import queue
import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from spotfleet.cli.page.feed import Feed
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.transport.client import LogChunk

ADDRESS = "127.0.0.1"
ACTION = "X-Spotfleet-Action"
TYPES = {"": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
          "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
HEADERS = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff",
           "Cache-Control": "no-store", "Cross-Origin-Opener-Policy": "same-origin",
           "Cross-Origin-Resource-Policy": "same-origin"}
IDLE_S = 15.0  # a comment is sent after so long without news, which shows a closed connection
LOG_WAIT_S = 10.0
REQUEST_S = 30.0  # for the head of a request
MOST_CONNECTIONS = 64


class Actions(Protocol):
    """What the page may ask of the fleet besides its state."""

    def log(self, job: str, rank: int, offset: int | None, wait_s: float) -> LogChunk: ...

    def cancel(self, job: str) -> None: ...

    def drain(self, host: str) -> None: ...


class PageServer:
    """The running server; `address` is what the user opens."""

    def __init__(self, feed: Feed, actions: Actions, port: int = 0, *, may_act: bool = False) -> None:
        """Raises UsageError if the port is taken. `may_act`: the page may cancel and drain."""
        self._feed = feed
        self.secret, self.ticket = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self.action_secret = secrets.token_urlsafe(24) if may_act else ""
        handler = type("_Handler", (_PageHandler,), {"page": self, "feed": feed, "actions": actions})
        try:
            self._server = _Server((ADDRESS, port), handler)
        except OSError as error:
            raise UsageError(f"--port: {port} cannot be used on {ADDRESS}: {error.strerror or error}",
                             hint="leave --port out for a free one") from None
        self.port = self._server.server_address[1]
        self._threads = [threading.Thread(target=run, daemon=True)
                         for run in (feed.run, lambda: self._server.serve_forever(0.02))]

    @property
    def address(self) -> str:
        fragment = f"#act={self.action_secret}" if self.action_secret else ""  # a browser sends no fragment
        return f"http://{ADDRESS}:{self.port}/{self.secret}/{fragment}"

    @property
    def address_once(self) -> str:
        return f"http://{ADDRESS}:{self.port}/{self.ticket}"

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._feed.close()
        self._server.shutdown()
        self._server.server_close()

    def takes_ticket(self, given: str) -> bool:
        """Return whether this is the ticket, which is no longer valid then."""
        if not (self.ticket and _same(given, self.ticket)):
            return False
        self.ticket = ""
        return True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a viewer's connection is open until it closes the page

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that has disconnected, which is no error of ours."""


class _PageHandler(BaseHTTPRequestHandler):
    page: PageServer
    feed: Feed
    actions: Actions
    timeout = REQUEST_S
    server_version, sys_version = "spotfleet", ""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a line would contain the secret."""

    def do_GET(self) -> None:
        name, query = self._asked()
        if name is None:
            return
        match name:
            case "" | "page.css" | "page.js":
                data = files("spotfleet.cli.page").joinpath(name or "page.html").read_bytes()
                self._answer(200, data, f"{TYPES[name]}; charset=utf-8")
            case "live":
                self._stream()
            case "log":
                self._try(lambda: self._send_log(query))
            case _:
                self._answer(404)

    def do_POST(self) -> None:
        name, query = self._asked()
        if name is None:
            return
        if not (self.page.action_secret and _same(self.headers.get(ACTION, ""), self.page.action_secret)):
            self._answer(403, b'{"error": "read-only: `spotfleet page --allow-actions` lets the page act"}')
            return
        match name:
            case "cancel":
                self._try(lambda: self._done(self.actions.cancel(_text(query, "job"))))
            case "drain":
                self._try(lambda: self._done(self.actions.drain(_text(query, "host"))))
            case _:
                self._answer(404)

    def _asked(self) -> tuple[str | None, dict[str, list[str]]]:
        """Return the name under the secret and the query; None once the request is refused or answered."""
        parts = urlsplit(self.path)
        secret, slash, name = parts.path.removeprefix("/").partition("/")
        own = {f"{host}:{self.page.port}" for host in (ADDRESS, "localhost")}
        if self.headers.get("Host", "") not in own or self._is_foreign():
            self._answer(404)
        elif slash and _same(secret, self.page.secret):
            return name, parse_qs(parts.query)
        elif self.command == "GET" and not slash and self.page.takes_ticket(secret):
            self._answer(303, more={"Location": self.page.address})
        else:
            self._answer(404)
        return None, {}

    def _is_foreign(self) -> bool:
        """Return whether a page of another site asks, other than by a link that the user follows."""
        of = {name: self.headers.get(f"Sec-Fetch-{name}", "") for name in ("Site", "Mode", "Dest")}
        follows = self.command == "GET" and (of["Mode"], of["Dest"]) == ("navigate", "document")
        return of["Site"] not in ("", "none", "same-origin") and not follows

    def _stream(self) -> None:
        self.connection.settimeout(REQUEST_S)  # for a browser that takes nothing
        self._head(200, "text/event-stream", {})
        with self.feed.viewing() as viewer:
            text: str | None = "retry: 2000\n\n"
            while text is not None:
                self.wfile.write(text.encode())
                try:
                    text = viewer.get(timeout=IDLE_S)
                except queue.Empty:
                    text = ": nothing new\n\n"

    def _send_log(self, query: dict[str, list[str]]) -> None:
        offset = _number(query, "offset") if "offset" in query else None
        chunk = self.actions.log(_text(query, "job"), _number(query, "rank"), offset,
                                 0.0 if offset is None else LOG_WAIT_S)
        self._answer(200, chunk.data, "text/plain; charset=utf-8",
                     {"X-Offset": str(chunk.offset), "X-End": str(int(chunk.end))})

    def _done(self, _: None) -> None:
        self._answer(200, b"{}")

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except SpotfleetError as error:
            self._answer(400 if isinstance(error, UsageError) else 502,
                         json.dumps({"error": str(error), "hint": error.hint}).encode())

    def _answer(self, status: int, data: bytes = b"", kind: str = "application/json",
                more: dict[str, str] | None = None) -> None:
        self._head(status, kind, {"Content-Length": str(len(data)), **(more or {})})
        self.wfile.write(data)

    def _head(self, status: int, kind: str, more: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Connection": "close", **more}.items():
            self.send_header(name, value)
        self.end_headers()


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), secret.encode())


def _text(query: dict[str, list[str]], name: str) -> str:
    value = query.get(name, [""])[0]
    if not value:
        raise UsageError(f"{name}: missing")
    return value


def _number(query: dict[str, list[str]], name: str) -> int:
    value = query.get(name, [""])[0]
    if not (value.isascii() and value.isdecimal() and len(value) < 16):
        raise UsageError(f"{name}: expected a number from 0 on, got {value[:20]!r}")
    return int(value)
