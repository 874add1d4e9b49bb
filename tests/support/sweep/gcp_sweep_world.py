"""The world of the sweep on Google Cloud: the requests of `requests` reach the fake, where the laptop and the
dispatcher may what their roles have and no more. See `cloud_world`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch
from urllib.parse import unquote, urlsplit

from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from requests.exceptions import ConnectionError as NoConnection

from spotfleet.codec import to_json
from spotfleet.model import FleetSpec, Need, Nodes
from spotfleet.providers.gcp import session
from spotfleet.providers.gcp.mapping import names, roles
from spotfleet.providers.gcp.spec import GcpSpec
from tests.support.fakes.gcp import GcpCloud, Lost
from tests.support.fakes.gcp.state import Instance
from tests.support.sweep.cloud_world import CloudNow, CloudWorld
from tests.support.sweep.sweep_clock import MovedTime
from tests.support.sweep.sweep_flows import NAME
from tests.support.sweep.sweep_fuse import DISPATCHER, LAPTOP, NOBODY, Killed

PENDING_S, ENDING_S = 2.0, 4.0  # until an instance runs, and until it is gone
OPERATION_S = 0.5
GCP = GcpSpec(regions=("us-central1",), ssh_from=("192.0.2.0/24",))
KIND, DISPATCHERS, GANG = "g2-standard-4", "e2-small", "g2-standard-48"
SPEC = FleetSpec(NAME, provider="gcp", nodes=Nodes(2, 2, 2), any_of=(Need(instance_type=KIND),), section=to_json(GCP),
                 dispatcher=Need(instance_type=DISPATCHERS, use_spot=False), tags={"team": "vision"})
NOW = CloudNow()


@cache
def server() -> GcpCloud:
    cloud = GcpCloud(clock=NOW)
    cloud.__enter__()
    return cloud


@cache
def _client(service: str, principal: str) -> Any:
    """As the provider makes them, once: nothing of theirs is a process's memory."""
    return server().client("".join(word.capitalize() for word in service.split("_")) + "Client", principal)


class GcpSweepWorld(CloudWorld):
    plugin, session = "gcp", session
    no_state = ("gate", "clock", "lock", "changed", "passing", "_clients", "_server", "_folder", "_threads", "_wake")
    started_s = PENDING_S

    def __init__(self, lag_s: float = 0.0) -> None:
        super().__init__(lag_s, server(), NOW)
        self.gcp = self.fake
        self.gcp.pending_s, self.gcp.ending_s, self.gcp.operation_s = PENDING_S, ENDING_S, OPERATION_S
        self.gcp.passing = self.clock.advance
        self.gcp.allow(self.gcp.owner, roles.LAPTOP)
        self.gcp.allow(self.gcp.default_account, roles.DISPATCHER)

    def patches(self) -> Iterable[Any]:
        yield patch.object(session, "time", MovedTime(self.clock, self.clock.advance))  # polls between two requests
        yield patch.object(session.GcpAccount, "_client", lambda account, service: _client(service, self._who(account)))
        yield patch.object(session.GcpAccount, "_found_credentials", lambda account: self._credentials(account))
        yield patch.object(HTTPAdapter, "send", self._tapped_send())

    def _who(self, account: session.GcpAccount) -> str:
        """The laptop is a person, the dispatcher the service account of its machine."""
        return self.gcp.owner if account.settings.laptop else self.gcp.default_account

    def _credentials(self, account: session.GcpAccount) -> tuple[Any, str]:
        from google.oauth2.credentials import Credentials

        return Credentials(self.gcp.rights.token(self._who(account))), self.gcp.project

    def _tapped_send(self) -> Callable[..., Response]:
        """Carries a request without a socket: the fake's gate is called."""
        def send(_adapter: HTTPAdapter, request: PreparedRequest, **_: Any) -> Response:
            return self.fuse.burn(f"gcp {action(self.gcp, request)}", lambda: carry(self.gcp, request))

        return send

    def running(self) -> list[tuple[str, Instance, bool]]:
        """(host, instance, does it run) of each, by the state of the cloud."""
        return [(names.host_of(i.name), i, i.state == "running") for i in list(self.gcp.instances_by_path.values())
                if names.FLEET in i.labels]

    def labels(self, instance: Instance) -> dict[str, str]:
        return instance.labels

    def address(self, instance: Instance) -> str:
        return instance.network_ip()

    def user_data(self, instance: Instance) -> bytes:
        return base64.b64decode(instance.metadata[names.USER_DATA])


def action(cloud: GcpCloud, request: PreparedRequest) -> str:
    """As "compute.instances.insert"."""
    path = unquote(urlsplit(request.url or "").path)
    found = cloud.gate.routes.find(request.method or "", path)
    return found[0].id if found else path


def carry(cloud: GcpCloud, request: PreparedRequest) -> Response:
    at = urlsplit(request.url or "")
    body = request.body or b""
    try:
        status, headers, answered = cloud.gate.serve(
            request.method or "", f"{at.path}?{at.query}", {k: str(v) for k, v in request.headers.items()},
            body.encode() if isinstance(body, str) else bytes(body))
    except Lost:
        raise NoConnection("the connection was closed without an answer") from None
    made = Response()
    made.status_code, made.url, made.request, made.raw = status, request.url or "", request, io.BytesIO(answered)
    made.headers.update(headers)
    made._content = answered
    return made


def spec(**changed: Any) -> FleetSpec:
    return replace(SPEC, **changed)


__all__ = ["DISPATCHER", "LAPTOP", "NOBODY", "GcpSweepWorld", "Killed", "spec"]
