"""A fake of Lambda Cloud's public API 1.10 over loopback, as far as `examples/lambda-cloud` uses it.

Instances boot at once. Ended ones stay in the list; how long the real cloud lists them is not documented.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

KEY, SSH_KEY = "a-key-of-the-fake", "laptop"
TYPES = {  # name -> GPUs, their description, cents per hour
    "gpu_1x_a10": (1, "A10 (24 GB PCIe)", 75), "gpu_8x_h100_sxm5": (8, "H100 (80 GB SXM5)", 2392)}  # fmt: skip
REGIONS = ("us-east-1", "us-west-1")
ERRORS = {  # code -> status
    "instance-operations/launch/insufficient-capacity": 400, "global/invalid-parameters": 400,
    "global/object-does-not-exist": 404, "global/invalid-api-key": 401, "global/account-inactive": 403,
    "global/quota-exceeded": 400}  # fmt: skip
NEEDED, TAG = ("region_name", "instance_type_name", "ssh_key_names"), re.compile(r"[a-z][a-z0-9-:]+")


class LambdaError(Exception):
    """An answer with an error code of the API."""


@dataclass
class LambdaInstance:
    body: dict[str, Any]
    user_data: str
    began_at: float
    ended_at: float | None = None
    end: str = "terminated"


@dataclass
class LambdaCloud:
    """The account. `lost`: path -> "before" or "after" it took effect, for one request."""

    clock: Callable[[], float]
    instances: list[LambdaInstance] = field(default_factory=list)
    full: set[tuple[str, str]] = field(default_factory=set)  # type and region
    cents: dict[str, int] = field(default_factory=dict)
    inactive: bool = False
    lag_s: float = 0.0  # by which the status of instances is behind
    lost: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> LambdaCloud:
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_args: Any) -> None:
                pass

            def do_GET(self) -> None:
                cloud.answer(self, {})

            def do_POST(self) -> None:
                cloud.answer(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/api/v1"

    def living(self) -> list[LambdaInstance]:
        return [i for i in self.instances if i.ended_at is None]

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        path = urlsplit(handler.path).path.removeprefix("/api/v1")
        with self.lock:
            fate = self.lost.pop(path, "")
            if fate != "before":
                status, said = self._act(path, body, handler.headers.get("Authorization", ""))
        if fate:
            handler.close_connection = True  # without an answer
            return
        text = json.dumps(said).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)

    def _act(self, path: str, body: dict[str, Any], key: str) -> tuple[int, dict[str, Any]]:
        routes = {"/instance-types": self._types, "/instances": self._list, "/audit-events": self._events,
                  "/instance-operations/launch": lambda: self._launch(body),
                  "/instance-operations/terminate": lambda: self._terminate(body)}  # fmt: skip
        try:
            if key != f"Bearer {KEY}":
                raise LambdaError("global/invalid-api-key")
            return 200, routes[path]()
        except LambdaError as error:
            return ERRORS[str(error)], {"error": {"code": str(error), "message": f"the fake: {error}"}}

    def _kind(self, name: str) -> dict[str, Any]:
        gpus, text, cents = TYPES[name]
        return {"name": name, "description": f"{gpus}x {text}", "gpu_description": text,
                "price_cents_per_hour": self.cents.get(name, cents),
                "specs": {"vcpus": 30, "memory_gib": 200, "storage_gib": 1400, "gpus": gpus}}  # fmt: skip

    def _types(self) -> dict[str, Any]:
        return {"data": {name: {
            "instance_type": self._kind(name),
            "regions_with_capacity_available": [{"name": r, "description": r} for r in REGIONS
                                                if (name, r) not in self.full]} for name in TYPES}}  # fmt: skip

    def _list(self) -> dict[str, Any]:
        at = self.clock() - self.lag_s
        return {"data": [{**i.body, "status": "active" if i.ended_at is None or i.ended_at > at else i.end}
                         for i in self.instances]}

    def _events(self) -> dict[str, Any]:
        times = [(i.body["id"], at) for i in self.instances for at in (i.began_at, i.ended_at) if at is not None]
        return {"page_token": None, "data": [
            {"service_name": "cloud", "resource_name": "instance", "action": "of the fake",
             "event_time": datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z"),
             "resource_lrns": [f"lrn:cloud:instance:{id}"]}
            for id, at in sorted(times, key=lambda t: t[1])]}  # fmt: skip

    def _launch(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.inactive:
            raise LambdaError("global/account-inactive")
        tags = body.get("tags", [])
        if (any(not body.get(key) for key in NEEDED) or len(body["ssh_key_names"]) != 1
                or len(body.get("name", "")) > 64 or len(body.get("user_data", "")) > 1_000_000
                or any(not TAG.fullmatch(t["key"]) or len(t["key"]) > 55 or len(t["value"]) > 128 for t in tags)):
            raise LambdaError("global/invalid-parameters")
        kind, region = body["instance_type_name"], body["region_name"]
        if body["ssh_key_names"] != [SSH_KEY] or kind not in TYPES or region not in REGIONS:
            raise LambdaError("global/object-does-not-exist")
        if (kind, region) in self.full:
            raise LambdaError("instance-operations/launch/insufficient-capacity")
        number = len(self.instances)
        self.instances.append(LambdaInstance({
            "id": f"{number:032x}", "name": body.get("name", ""), "ip": f"198.51.100.{number + 1}",
            "private_ip": f"10.0.2.{number + 1}", "ssh_key_names": [SSH_KEY], "file_system_names": [], "tags": tags,
            "region": {"name": region, "description": region}, "instance_type": self._kind(kind), "actions": {},
        }, body.get("user_data", ""), self.clock()))  # fmt: skip
        return {"data": {"instance_ids": [f"{number:032x}"]}}

    def _terminate(self, body: dict[str, Any]) -> dict[str, Any]:
        known = {i.body["id"]: i for i in self.instances}
        if any(id not in known for id in body["instance_ids"]):
            raise LambdaError("global/object-does-not-exist")
        for id in body["instance_ids"]:
            if known[id].ended_at is None:
                known[id].ended_at = self.clock()
        return {"data": {"terminated_instances": [known[id].body for id in body["instance_ids"]]}}
