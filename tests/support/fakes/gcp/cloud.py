"""`GcpCloud`: the fake as tests hold it."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from tests.support.fakes.gcp import about, account, catalog, instances, resources  # noqa: F401 - they register
from tests.support.fakes.gcp.controls import Controls
from tests.support.fakes.gcp.errors import Lost
from tests.support.fakes.gcp.gate import Gate
from tests.support.fakes.gcp.life import GcpLife
from tests.support.fakes.gcp.quotas import ENDLESS, PROJECT_WIDE, disk_metric, needed
from tests.support.fakes.gcp.rights import Rights
from tests.support.fakes.gcp.state import Instance, Operation, last, number, relative
from tests.support.fakes.kit.cloud import FiniteCloud
from tests.support.fakes.kit.market import Pools

ROOM = 10**6
WAITS_S = 0.5  # how much a clock is moved at once while a request waits


class Addresses:
    """Addresses in the order of their subnets, each only once."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def private(self, network: str) -> str:
        self._next[network] = self._next.get(network, 1) + 1
        return str(ipaddress.ip_network(network)[self._next[network]])

    def public(self) -> str:
        return self.private("203.0.113.0/24")


class GcpCloud(Controls, FiniteCloud):
    project, owner = catalog.PROJECT, "owner@example.com"

    def __init__(self, address: str = "127.0.0.1", clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self.address = address
        self.gate = Gate(self)
        self.changed = threading.Condition()
        self._server: ThreadingHTTPServer | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._clients: dict[Any, Any] = {}
        self.reset()

    # ---- being there

    def __enter__(self) -> GcpCloud:
        self._server = _Server((self.address, 0), _handler(self.gate))
        self.start(lambda: self._server.serve_forever(0.05))  # type: ignore[union-attr]
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()
        self.noise_of(None)
        self.end()
        self._folder.cleanup()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://{self.address}:{self._server.server_address[1]}"

    def reset(self) -> None:
        """As new. Settings go back too."""
        with self.lock:
            self.forget_time()
            self.pending_s = self.ending_s = self.operation_s = 0.0
            self.lag_s = self.new_lag_s = self.account_lag_s = 0.0
            self.wait_s = 120.0
            self.quota_at_once = self.plain_stockouts = self.no_external_ips = self.throttles = False
            self.anonymous = self.owner
            self.unreachable: set[str] = set()
            self.unreachable_warns = False
            self.services = set(catalog.SERVICES)
            self.market = Pools(self.clock(), lambda zone, kind: catalog.usd_h(kind, True, region=catalog.ZONES[zone]),
                                ROOM)
            self.quotas: dict[tuple[str, str], float] = {}  # region ("" for the project) and metric
            self.life, self.rights, self.addresses = GcpLife(self), Rights(self), Addresses()
            self.instances_by_path: dict[str, Instance] = {}
            self.gone: list[Instance] = []  # that late listings still show
            self.ended: list[Instance] = []
            self.operations: list[Operation] = []
            self.by_request_id: dict[str, tuple[str, dict[str, Any]]] = {}
            self.things: dict[str, dict[str, Any]] = {}
            self.accounts: dict[str, tuple[dict[str, Any], float]] = {}
            self.policy: dict[str, Any] = {"version": 1, "etag": "BwX0", "bindings": [
                {"role": "roles/editor", "members": [f"serviceAccount:{self.default_account}"]}]}
            self.common_metadata: dict[str, str] = {}
            self.images = list(catalog.IMAGES)
            self.bugs: list[str] = []
            self.findings: list[str] = []
            self.gate.reset()
            self.before = self.after = self.passing = None
            resources.furnish(self)
            account.furnish(self)

    # ---- paths

    def path(self, instance: Instance) -> str:
        return f"projects/{self.project}/zones/{instance.zone}/instances/{instance.name}"

    def path_of(self, text: str, project: str) -> str:
        """The whole path of a full or partial link."""
        text = relative(text)
        return text if text.startswith("projects/") else f"projects/{project}/{text}"

    def collection(self, name: str, project: str = "") -> list[dict[str, Any]]:
        """All resources of a kind, as "firewalls"."""
        return [t for path, t in self.things.items() if path.split("/")[-2] == name
                and (not project or path.startswith(f"projects/{project}/"))]

    def image(self, path: str) -> catalog.Image | None:
        """Of "projects/P/global/images/NAME" or ".../images/family/F"."""
        project, name, family = path.split("/")[1], last(path), "/images/family/" in path
        known = [i for i in self.images if i.project == project and name == (i.family if family else i.name)]
        return known[-1] if known else None

    def number(self) -> str:
        return number()

    # ---- operations

    def operate(self, scope: str, kind: str, target: Instance | str, user: str, group: str = "") -> Operation:
        path = self.path(target) if isinstance(target, Instance) else target
        made = Operation(scope, kind, path, user, self.now(), group=group,
                         target_id=target.id if isinstance(target, Instance) else "")
        self.operations.append(made)
        return made

    def done(self, scope: str, kind: str, target: Instance | str, user: str) -> dict[str, Any]:
        """An operation that needs `operation_s` and cannot fail."""
        made = self.operate(scope, kind, target, user)
        self.later(self.now() + self.operation_s, lambda: made.finish(self.now()))
        return made.shown(self.project, accepted=True)

    # ---- time

    def tick(self) -> None:
        with self.lock:
            self.run_due()
            keep = self.now() - self.lag_s
            self.gone = [i for i in self.gone if i.ended_at is not None and i.ended_at >= keep]
        self.noise_of(None)

    def noise_of(self, _instance: Instance | None) -> None:
        """Wake whatever waits for an operation or a value of the metadata."""
        with self.changed:
            self.changed.notify_all()

    def wait_until(self, true: Callable[[], bool], limit_s: float) -> None:
        """Wait in real time; with a clock of its own the fake waits by `passing`, or not at all."""
        if self.clock is not time.time:
            ends = self.now() + limit_s
            while self.passing is not None and not true() and self.now() < ends:
                self.passing(WAITS_S)
                self.tick()
            return
        ends = time.monotonic() + limit_s
        while not true() and not self._closing and time.monotonic() < ends:  # `true` may want the cloud's lock,
            with self.changed:  # whose holder may want this one
                self.changed.wait(min(0.05, max(0.0, ends - time.monotonic())))

    # ---- quotas

    def limit(self, region: str, metric: str) -> float:
        return self.quotas.get(("" if metric in PROJECT_WIDE else region, metric), ENDLESS)

    def needed(self, instance: Instance) -> dict[str, float]:
        return needed(instance, lambda metric: self.limit(instance.region, metric))

    def quota_usage(self, region: str) -> dict[str, float]:
        """Metric -> what is used; of the project for ""."""
        used: dict[str, float] = {}
        for instance in self.instances_by_path.values():
            if region in ("", instance.region) and instance.room_held:
                for metric, amount in self.needed(instance).items():
                    used[metric] = used.get(metric, 0.0) + amount
        for disk in self.collection("disks"):
            if region in ("", catalog.ZONES[last(disk["zone"])]):
                used[disk_metric(disk)] = used.get(disk_metric(disk), 0.0) + float(disk["sizeGb"])
        return used

    def quota_exceeded(self, region: str, wanted: dict[str, float]) -> tuple[str, float, str] | None:
        """(metric, limit, region) of the first quota that does not hold `wanted` more."""
        regional, everywhere = self.quota_usage(region), self.quota_usage("")
        for metric, amount in wanted.items():
            used = (everywhere if metric in PROJECT_WIDE else regional).get(metric, 0.0)
            if used + amount > self.limit(region, metric):
                return metric, self.limit(region, metric), "" if metric in PROJECT_WIDE else region
        return None

    def quota_holds(self, instance: Instance) -> int:
        """How many like it the quotas hold."""
        one, count = self.needed(instance), 0
        while count < 64 and not self.quota_exceeded(instance.region, {k: v * (count + 1) for k, v in one.items()}):
            count += 1
        return count

    # ---- accounts

    @property
    def default_account(self) -> str:
        return f"{catalog.NUMBER}-compute@developer.gserviceaccount.com"

    def account_known(self, email: str) -> bool:
        if email not in self.accounts:
            return email == self.default_account
        return self.now() - self.accounts[email][1] >= self.account_lag_s

    def may_act_as(self, principal: str, _email: str) -> bool:
        return self.rights.may(principal, "iam.serviceAccounts.actAs")

    # ---- clients

    def environ(self, principal: str = "") -> dict[str, str]:
        """For a laptop: a service account's key file, by which the real google-auth gets its tokens here."""
        return {"SPOTFLEET_GCP_ENDPOINT": self.url, "GOOGLE_CLOUD_PROJECT": self.project,
                "GOOGLE_APPLICATION_CREDENTIALS": str(self.key_file(principal or self.owner))}

    def key_file(self, principal: str) -> Path:
        path = Path(self._folder.name) / f"{principal}.json"
        path.write_text(json.dumps({
            "type": "service_account", "project_id": self.project, "private_key_id": "1", "private_key": _key(),
            "client_email": principal, "client_id": "1", "token_uri": f"{self.url}/token",
            "universe_domain": "googleapis.com"}))
        os.chmod(path, 0o600)
        return path

    def client(self, name: str, principal: str = "") -> Any:
        """The real google-cloud-compute's, as "InstancesClient"."""
        asked = (name, principal or self.owner)
        if asked not in self._clients:
            from google.api_core.client_options import ClientOptions
            from google.cloud import compute_v1
            from google.oauth2.credentials import Credentials

            token = self.rights.token(principal or self.owner)
            self._clients[asked] = getattr(compute_v1, name)(
                credentials=Credentials(token), client_options=ClientOptions(api_endpoint=self.url))
        return self._clients[asked]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks a name server for its own name


def _handler(gate: Gate) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                status, headers, answer = gate.serve(self.command, self.path, dict(self.headers.items()), body)
            except Lost:
                self.close_connection = True
                return
            self.send_response_only(status)  # without a Date of its own
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer)))
            with contextlib.suppress(ConnectionError):  # who asked may have gone
                self.end_headers()
                self.wfile.write(answer)

        do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@cache
def _key() -> str:
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    made = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()

