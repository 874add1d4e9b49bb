"""A dispatcher that gives the orders a test writes and keeps what the agent says. Real TLS, sockets and files."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import WSMsgType, web

from spotfleet.codec import to_json
from spotfleet.dispatcher.disk.outputs import Outputs
from spotfleet.protocol.messages import AgentOrders, AgentReport, WorkerLaunch, WorkerState, dump, load, unpack_pieces
from spotfleet.transport import certs

TOKEN = "token-of-the-host"


class FakeDispatcher:
    """Runs in a thread of its own. `orders` may be set at any time; `stop` and `start` restart it on its port."""

    def __init__(self, folder: Path, twin: FakeDispatcher | None = None) -> None:
        """`twin`: of the same fleet, so that both hold its certificate."""
        made = twin.certificates if twin else certs.make("fleet", time.time())
        self.certificates = made
        self.ca = made.ca
        (folder / "cert.pem").write_text(made.cert)
        (folder / "key.pem").write_text(made.key)
        self._tls = certs.server_context(folder / "cert.pem", folder / "key.pem")
        self.port = 0
        self.orders: AgentOrders | None = None
        self.report: AgentReport | None = None
        self.reported_at = 0.0
        self.seen: list[tuple[float, AgentReport]] = []
        self.connections = 0
        self.launches: dict[str, WorkerLaunch] = {}
        self.bundles: dict[str, bytes] = {}
        self.logs: dict[str, bytes] = {}
        self.lose_log_answers = 0
        self.checkpoints: dict[int, tuple[int, bytes]] = {}
        self.refuse_checkpoints = False
        self.uploads: list[int] = []
        self.outputs = Outputs(folder / "outputs")
        self.lose_output_answers = 0
        self.output_bytes = 0  # that came over the wire
        self.full = False
        self.hold_checkpoints = threading.Event()
        self.hold_checkpoints.set()
        self._socket: web.WebSocketResponse | None = None
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._call(self._start())

    def stop(self) -> None:
        self._call(self._stop())

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def order(self, orders: AgentOrders) -> None:
        self.orders = orders
        self._call(self._send())

    def wait(self, what: Callable[[AgentReport], object], limit_s: float = 60.0) -> AgentReport:
        """The first report, the current one included, of which `what` holds."""
        with self._changed:
            met = self._changed.wait_for(lambda: self.report is not None and what(self.report), limit_s)
            assert met, f"never came; last report: {self.report}; logs: {self.logs}"
            assert self.report is not None
            return self.report

    def worker(self, name: str) -> WorkerState | None:
        return next((w for w in self.report.workers if w.report.worker == name), None) if self.report else None

    def wait_worker(self, name: str, what: Callable[[WorkerState], object], limit_s: float = 60.0) -> WorkerState:
        self.wait(lambda _: (w := self.worker(name)) and what(w), limit_s)
        worker = self.worker(name)
        assert worker is not None
        return worker

    def _call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([
            web.get("/v1/agent", self._agent),
            web.get("/v1/jobs/{job}/launch", self._launch),
            web.get("/v1/bundles/{digest}", self._bundle),
            web.put("/v1/bundles/{digest}", self._put_bundle),
            web.post("/v1/bundles/missing", self._missing_bundles),
            web.post("/v1/jobs/{job}/logs/{worker}", self._log),
            web.put("/v1/jobs/{job}/checkpoints/{version}", self._put_checkpoint),
            web.get("/v1/jobs/{job}/checkpoints/{version}", self._get_checkpoint),
            web.post("/v1/jobs/{job}/outputs/{worker}", self._output),
        ])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._tls).start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        if self._runner is not None:
            if self._socket is not None and self._socket._req.transport is not None:
                self._socket._req.transport.abort()  # as a killed process would
            await self._runner.cleanup()
            self._runner = None

    async def _send(self) -> None:
        if self._socket is not None and not self._socket.closed and self.orders is not None:
            await self._socket.send_str(dump(self.orders))

    def _check(self, request: web.Request) -> None:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise web.HTTPUnauthorized

    async def _agent(self, request: web.Request) -> web.WebSocketResponse:
        self._check(request)
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        self._socket = ws
        self.connections += 1
        async for message in ws:
            if message.type is WSMsgType.TEXT:
                with self._changed:
                    self.report = load(AgentReport, message.data)
                    self.reported_at = time.monotonic()
                    self.seen.append((self.reported_at, self.report))
                    self._changed.notify_all()
                await self._send()
        return ws

    async def _launch(self, request: web.Request) -> web.Response:
        self._check(request)
        return web.json_response(to_json(self.launches[request.match_info["job"]]))

    async def _bundle(self, request: web.Request) -> web.Response:
        self._check(request)
        return web.Response(body=self.bundles[request.match_info["digest"]])

    async def _missing_bundles(self, request: web.Request) -> web.Response:
        self._check(request)
        asked = (await request.json())["digests"]
        return web.json_response({"missing": [digest for digest in asked if digest not in self.bundles]})

    async def _put_bundle(self, request: web.Request) -> web.Response:
        self._check(request)
        self.bundles[request.match_info["digest"]] = await request.read()
        return web.json_response({})

    async def _log(self, request: web.Request) -> web.Response:
        self._check(request)
        worker, offset, data = request.match_info["worker"], int(request.query["offset"]), await request.read()
        held = self.logs.get(worker, b"")
        if offset == len(held):
            self.logs[worker] = held + data
        if self.lose_log_answers > 0:
            self.lose_log_answers -= 1
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"size": len(self.logs.get(worker, b""))})

    async def _put_checkpoint(self, request: web.Request) -> web.Response:
        self._check(request)
        data, version = await request.read(), int(request.match_info["version"])
        self.uploads.append(version)
        await asyncio.to_thread(self.hold_checkpoints.wait, 30)
        if self.refuse_checkpoints:
            raise web.HTTPConflict
        assert hashlib.sha256(data).hexdigest() == request.query["digest"]
        self.checkpoints[version] = (int(request.query["generation"]), data)
        return web.json_response({})

    async def _get_checkpoint(self, request: web.Request) -> web.Response:
        self._check(request)
        held = self.checkpoints.get(int(request.match_info["version"]))
        return web.Response(body=held[1]) if held else web.Response(status=404)

    async def _output(self, request: web.Request) -> web.Response:
        self._check(request)
        body = await request.read()
        if self.full:
            raise web.HTTPInsufficientStorage
        self.output_bytes += len(body)
        held = self.outputs.apply(request.match_info["worker"], unpack_pieces(body))
        if self.lose_output_answers > 0:
            self.lose_output_answers -= 1
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"held": held})

    def output(self, worker: str) -> dict[str, bytes]:
        """The files that have been collected of this worker."""
        folder = self.outputs.folder / worker.replace("/", "@")
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
