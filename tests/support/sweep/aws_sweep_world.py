"""The world of the sweep on AWS: botocore's requests reach the fake, where the dispatcher may what the policy of its
role says and no more. See `cloud_world`.
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs, unquote, urlsplit

from botocore.awsrequest import AWSResponse, HeadersDict
from botocore.exceptions import ConnectionClosedError
from botocore.httpsession import URLLib3Session
from moto.core.base_backend import BackendDict

from spotfleet.bootstrap.gang_place import TAG_S, ZERO_S
from spotfleet.dispatcher.cloud.events import CloudEventListener
from spotfleet.errors import SpotfleetError
from spotfleet.providers.aws import describe, images, launch, offers, prices, session, terminate, types
from spotfleet.providers.aws.account import check, identity, network, queue, resources, ssh_ingress
from spotfleet.providers.aws.mapping import listing, names, policies, template
from spotfleet.transport.boot import DispatcherBoot
from tests.support.fakes.aws import AwsCloud
from tests.support.fakes.aws.rights import OWNER_KEY, Key
from tests.support.fakes.aws.state import Machine as Instance
from tests.support.sweep.cloud_world import CloudNow, CloudWorld
from tests.support.sweep.sweep_fuse import DISPATCHER, LAPTOP, NOBODY, Killed

PENDING_S, ENDING_S = 1.0, 4.0  # times of instances: what uses a group uses it a while longer
PROFILE_S = 2.0
HEAR_S = 2.0
ROLE_KEY = ("ASIA000ADISPATCHER00", "the-secret-of-a-dispatcher")
STOPPED_AGAIN_S = 5.0  # how often EC2 looks for room for a stopped host
NOW = CloudNow()


@cache
def server() -> AwsCloud:
    cloud = AwsCloud(clock=NOW)
    cloud.__enter__()
    return cloud


@cache
def _client(cloud: AwsCloud, key: tuple[str, str], service: str, region: str, patient: bool) -> Any:
    """As the provider makes them, once: nothing of theirs is a process's memory."""
    attempts = 4 if patient else 1
    return cloud.client(service, region, key, retries={"mode": "standard", "total_max_attempts": attempts})


class AwsWorld(CloudWorld):
    plugin, session = "aws", session
    modules = (*CloudWorld.modules, resources, types, check, ssh_ingress, terminate, identity, images, launch, listing,
               describe, network, offers, policies, prices, queue, session, template)
    no_state = ("gate", "clock", "lock", "_clients", "_server", "_app", "_threads", "_wake", "_orders")

    def __init__(self, lag_s: float = 0.0) -> None:
        super().__init__(lag_s, server(), NOW)
        self.aws = self.fake
        self.become: dict[str, str] = {}  # instance of a worker -> its host
        self.aws.pending_s, self.aws.ending_s, self.aws.profile_lag_s = PENDING_S, ENDING_S, PROFILE_S
        self.aws.retry_s = STOPPED_AGAIN_S

    def patches(self) -> Iterable[Any]:
        yield patch.object(session.Account, "_made", lambda account, *which: _client(
            self.aws, OWNER_KEY if account.settings.laptop else ROLE_KEY, *which))
        yield patch.object(URLLib3Session, "send", self._tapped_send())
        yield patch.object(CloudEventListener, "run", _listen)

    def _tapped_send(self) -> Callable[..., Any]:
        """What carries a request, without a socket: the fake's door is called."""
        gate, fuse = self.aws.gate, self.fuse

        def send(_http: URLLib3Session, request: Any) -> AWSResponse:
            return fuse.burn(f"aws {_action(request)}", lambda: carry(gate, request))

        return send

    def further_state(self) -> tuple[Any, ...]:
        return BackendDict._instances, self.become

    def running(self) -> list[tuple[str, Instance, bool]]:
        """(name, instance, does it run) of each host, by the state of the cloud."""
        found = []
        for region in self.aws.regions.values():
            for instance in region.machines.values():
                tags = instance.tags
                if names.HOST in tags:
                    place = tags.get(names.MEMBER, names.BY_INDEX)
                    host = names.members(tags[names.HOST])[int(place) if place.isdigit() else instance.launch_index]
                    found.append((host, instance, instance.state == "running"))
        return found

    def became(self, host: str, instance: Instance) -> str:
        """The host that the machine has become, for good, as `bootstrap/gang_place.py` decides; "" while it waits."""
        if instance.id not in self.become:
            members, tag = names.members(instance.tags[names.HOST]), instance.tags.get(names.MEMBER, "")
            index, waited_s = instance.launch_index, self.clock.now - instance.launched
            if tag.isdigit():
                self.become[instance.id] = members[int(tag)]
            elif len(members) == 1 or tag or waited_s > (TAG_S if index else ZERO_S):
                self.become[instance.id] = members[index]
        return self.become.get(instance.id, "")

    def labels(self, instance: Instance) -> dict[str, str]:
        return instance.tags

    def address(self, instance: Instance) -> str:
        return instance.nics[0].private_ip_address if instance.nics else ""

    def user_data(self, instance: Instance) -> bytes:
        return self.aws.instance(instance.id).user_data

    def boots(self, instance: Instance, told: DispatcherBoot) -> None:
        role = instance.order.profile.roles[0].name
        self.aws.rights.keys[ROLE_KEY[0]] = Key(f"role/{role}", ROLE_KEY[1])  # it may what its role's policy says


async def _listen(listener: CloudEventListener) -> None:
    """`CloudEventListener.run` without its thread."""
    while True:
        try:
            listener.receive(listener._provider.poll_events(listener._fleet, 0.0), NOW.world.time.monotonic())
        except SpotfleetError as error:
            listener.problem = str(error)
        await asyncio.sleep(HEAR_S)


def carry(gate: Callable[..., Any], request: Any) -> AWSResponse:
    """The answer of a WSGI application to botocore's request."""
    at, body, held = urlsplit(request.url), request.body or b"", []
    body = body.encode() if isinstance(body, str) else body.read() if hasattr(body, "read") else body
    environ = {"REQUEST_METHOD": request.method, "PATH_INFO": unquote(at.path) or "/", "QUERY_STRING": at.query,
               "SERVER_NAME": at.hostname, "SERVER_PORT": str(at.port), "SERVER_PROTOCOL": "HTTP/1.1",
               "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(body), "wsgi.errors": sys.stderr,
               "CONTENT_LENGTH": str(len(body)), "HTTP_HOST": at.netloc, "wsgi.version": (1, 0),
               "wsgi.multithread": False, "wsgi.multiprocess": False, "wsgi.run_once": False}
    for name, value in request.headers.items():
        key = name.upper().replace("-", "_")
        if key != "CONTENT_LENGTH":
            said = value.decode() if isinstance(value, bytes) else str(value)
            environ[key if key == "CONTENT_TYPE" else f"HTTP_{key}"] = said
    answered = b"".join(gate(environ, lambda status, headers, *_: held.append((status, headers))))
    if not held:
        raise ConnectionClosedError(endpoint_url=request.url)
    status, headers = held[0]
    return AWSResponse(request.url, int(status.split()[0]), HeadersDict(headers), Raw(answered))


class Raw(io.BytesIO):
    def stream(self, *_: object, **__: object) -> Iterator[bytes]:
        yield self.read()


def _action(request: Any) -> str:
    """As "ec2:RunInstances"."""
    authorization = request.headers.get("Authorization", b"")
    text = authorization.decode() if isinstance(authorization, bytes) else authorization
    service = text.partition("Credential=")[2].split("/")[3]
    target = request.headers.get("X-Amz-Target", b"")
    if target:
        return f"{service}:{(target.decode() if isinstance(target, bytes) else target).rpartition('.')[2]}"
    body = request.body.decode() if isinstance(request.body, bytes) else request.body or ""
    return f"{service}:{parse_qs(body).get('Action', [request.method])[0]}"


__all__ = ["DISPATCHER", "LAPTOP", "NOBODY", "AwsWorld", "Killed"]
