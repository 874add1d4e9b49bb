"""Metadata server of one emulated host: AWS IMDSv2 paths on the host's own address.

Times carry milliseconds, which EC2's do not: notices here may be as short as a second.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote

from spotfleet.providers.local.market.book import LocalHost

MAX_TTL_S = 21600
TAGS = "/latest/meta-data/tags/instance/"
READ_S = 10.0  # a silent connection is closed after this


class MetadataServer:
    """Metadata server for the host that `get_host()` returns, until `close`."""

    def __init__(self, address: str, port: int, get_host: Callable[[], LocalHost | None]) -> None:
        self._server = _Server((address, port), _Handler)
        self._server.get_host = get_host
        self.port: int = self._server.server_address[1]
        Thread(target=self._server.serve_forever, args=(0.05,), name=f"metadata {address}", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    get_host: Callable[[], LocalHost | None]

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.tokens: dict[str, float] = {}  # token -> its end, on the monotonic clock


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = READ_S
    server: _Server

    def do_PUT(self) -> None:
        ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if self.path != "/latest/api/token":
            self._answer(404)
        elif not ttl.isdigit() or not 1 <= int(ttl) <= MAX_TTL_S:
            self._answer(400)
        else:
            token, now = secrets.token_urlsafe(24), time.monotonic()
            valid = {t: end for t, end in self.server.tokens.items() if end > now}
            self.server.tokens = valid | {token: now + int(ttl)}
            self._answer(200, token)

    def do_GET(self) -> None:
        token = self.headers.get("X-aws-ec2-metadata-token", "")
        if self.server.tokens.get(token, 0.0) <= time.monotonic():
            self._answer(401)
            return
        body = _document(self.path, self.server.get_host())
        self._answer(404 if body is None else 200, body or "")

    def _answer(self, status: int, body: str = "") -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Suppress request logs: every agent sends a request every second."""


def _document(path: str, host: LocalHost | None) -> str | None:
    if host is None:
        return None
    match path:
        case "/latest/meta-data/instance-id":
            return host.provider_id
        case "/latest/meta-data/placement/availability-zone":
            return host.offer.zone
        case "/latest/meta-data/spot/instance-action" if host.notice is not None:
            return json.dumps({"action": host.notice.action, "time": _iso(host.notice.ends_at)})
        case "/latest/meta-data/events/recommendations/rebalance" if host.rebalance_at is not None:
            return json.dumps({"noticeTime": _iso(host.rebalance_at)})
        case _ if path.startswith(TAGS):
            return host.order.tags.get(unquote(path.removeprefix(TAGS)))
    return None


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
