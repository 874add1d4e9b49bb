"""`AwsCloud`: the fake as tests hold it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")

from tests.support.aws.quick_clients import make_clients_quickly
from tests.support.aws.quick_moto import make_moto_quickly
from tests.support.fakes.aws import (  # noqa: F401 - they register their operations
    about,
    catalog,
    changes,
    facts,
    fleets,
    imds,
    instances,
    keys,
    ordering,
    tagging,
    templates,
)
from tests.support.fakes.aws.bus import Bus
from tests.support.fakes.aws.catalog import ACCOUNT, REGIONS, Image
from tests.support.fakes.aws.controls import Controls
from tests.support.fakes.aws.errors import AwsError
from tests.support.fakes.aws.gate import Gate
from tests.support.fakes.aws.inventory import everything
from tests.support.fakes.aws.life import Life
from tests.support.fakes.aws.market import CapacityReservation, Market
from tests.support.fakes.aws.operations import Context
from tests.support.fakes.aws.rights import OWNER, OWNER_KEY, Rights
from tests.support.fakes.aws.state import Machine, RegionState, when
from tests.support.fakes.aws.waiting import look_again
from tests.support.fakes.kit.cloud import FiniteCloud
from tests.support.fakes.kit.requests import Call

SPOT_ROLE = "AWSServiceRoleForEC2Spot"


class AwsCloud(Controls, FiniteCloud):
    ACCOUNT, UBUNTU, DEEP_LEARNING = catalog.ACCOUNT, catalog.UBUNTU, catalog.DEEP_LEARNING
    owner = OWNER
    _latest: AwsCloud  # that was reset last: moto's state is one for all

    def __init__(self, address: str = "127.0.0.1", clock: Callable[[], float] = time.time) -> None:
        _limit_moto()
        make_clients_quickly()
        make_moto_quickly()
        super().__init__(clock)
        self.address = address
        self._server: Any = None
        self._clients: dict[Any, Any] = {}
        self.gate = Gate(self, lambda environ, start: self._moto(environ, start))
        self._app: Any = None
        self.reset()

    # ---- being there

    def __enter__(self) -> AwsCloud:
        from moto.moto_server.werkzeug_app import MotoRequestHandler
        from werkzeug.serving import make_server

        class Quiet(MotoRequestHandler):
            protocol_version = "HTTP/1.1"

            def log(self, *_: Any) -> None:
                pass

            def send_response(self, code: int, message: str | None = None) -> None:
                self.send_response_only(code, message)  # without a Date of its own: the gate says it

        self._server = make_server(self.address, 0, self.gate, threaded=True, request_handler=Quiet)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.start(lambda: self._server.serve_forever(poll_interval=0.05))
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.end()
        _forget_moto()

    def _moto(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if self._app is None:
            from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

            self._app = DomainDispatcherApplication(create_backend_app)
        return self._app(environ, start)

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self._server.server_address[1]}"

    def reset(self) -> None:
        """As new. Settings go back too."""
        with self.lock:
            AwsCloud._latest = self
            _forget_moto()
            self.notice_s, self.pending_s, self.ending_s = 120.0, 0.0, 0.0
            self.new_lag_s = self.lag_s = self.profile_lag_s = self.retry_s = 0.0
            self.gone_s, self.credentials_s, self.skew_s = 3600.0, 3600.0, 0.0
            self.relaunched_tagged = (
                False  # has what a persistent request launches anew the instance's tags? Nobody says
            )
            self.spot_index_zero = True  # launch index of each spot machine of one launch: 0, or numbered? Nobody says
            self.fleet_throttles = 0  # pools that an instant fleet tries next, and that are refused in its answer
            self.spot_role = True  # the account has used spot before
            self.template_ends_s = 0.0  # 604800 as botocore's model has it: persistent requests by a template end then
            self.score_limit = 10
            self.score_questions: set[Any] = set()
            self.forget_time()
            self.bugs: list[str] = []  # tracebacks of the fake's own
            self.findings: list[str] = []  # what botocore's models refuse in requests and answers that went well
            self.before: Callable[[Call], None] | None = None
            self.after: Callable[[Call], None] | None = None
            self.rights, self.market = Rights(), Market(self.clock())
            self.life, self.bus = Life(self), Bus(self)
            self.reservations: dict[str, CapacityReservation] = {}
            self.regions = {name: RegionState(name) for name in REGIONS}
            self.furnished: set[str] = set()
            self.images: dict[str, Image] = dict(catalog.IMAGES)
            self.image_gone: dict[str, set[str]] = {}
            self.snapshots: set[str] = set()  # those whose images are gone
            self.parameters = dict(catalog.PARAMETERS)
            self.profile_ready: dict[str, float] = {}
            self.gate.reset()
            self.throttles = False
            self._roles_furnished = False

    def used(self, service: str) -> bool:
        """Has anything of moto's `service` been used?"""
        return any(c.service == service for c in self.gate.calls) or service in self._services

    _services: frozenset[str] = frozenset()

    # ---- time

    def server_time(self) -> float:
        return time.time() + self.skew_s

    def tick(self) -> None:
        """Let happen what is due. What another fake has begun stays as it is: moto's state is ours now."""
        with self.lock:
            if AwsCloud._latest is not self:
                return
            self.run_due()
            for state in self.regions.values():
                if state.requests:
                    look_again(self.life, state)
                self._forget(state)

    def _forget(self, state: RegionState) -> None:
        now = self.now()
        for machine in [
            m for m in state.machines.values() if m.ended_at is not None and now - m.ended_at > self.gone_s
        ]:
            state.ended[machine.id] = state.machines.pop(machine.id).ended_at or now
            backend = self.backend(state.name)
            backend.reservations.pop(machine.id, None)
            backend.tags.pop(machine.id, None)
        for request in [r for r in state.requests.values() if not r.live and now - r.now.at > self.gone_s]:
            machine = self.find(request.instance_id)
            if machine is None or not machine.living:
                del state.requests[request.id]

    def waits(self) -> bool:
        return any(r.state in ("open", "disabled") for s in self.regions.values() for r in list(s.requests.values()))

    # ---- moto

    def backend(self, region: str) -> Any:
        """moto's EC2 there, with what a region of every account has."""
        from moto.ec2.models import ec2_backends

        backend = ec2_backends[ACCOUNT][region]
        if region not in self.furnished:
            with self.lock:
                if region not in self.furnished:
                    self._furnish(backend, region)
        return backend

    def _furnish(self, backend: Any, region: str) -> None:
        backend.default_kms_key_id = keys.default(self, region)
        vpc = backend.get_default_vpc()
        vpc.enable_dns_hostnames = True
        for by_zone in backend.subnets.values():
            for subnet in by_zone.values():
                subnet.map_public_ip_on_launch = True
        gateway = backend.create_internet_gateway()
        backend.attach_internet_gateway(gateway.id, vpc.id)
        for table in backend.route_tables.values():
            backend.create_route(table.id, "0.0.0.0/0", gateway_id=gateway.id)
        self.furnished.add(region)
        self.regions[region].usual = {t.id for t in everything(self, usual=True) if t.region == region}

    def show_to_moto(self, machine: Machine) -> None:
        """So that moto's volumes, interfaces and addresses find it."""
        from moto.ec2.models.instances import Reservation

        kept = Reservation(machine.id, ACCOUNT)
        kept.instances = [machine]
        machine.ec2_backend.reservations[machine.id] = kept

    def need_spot_role(self, ctx: Context) -> None:
        """The service-linked role of spot, made at the first use by whoever may make it."""
        self.furnish_roles()
        from moto.iam.models import iam_backends

        backend = iam_backends[ACCOUNT]["aws"]
        if any(r.name == SPOT_ROLE for r in backend.roles.values()):
            return
        if not ctx.may("iam:CreateServiceLinkedRole"):
            raise AwsError(
                "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
                "The provided credentials do not have "
                "permission to create the service-linked role for EC2 Spot Instances.",
            )
        backend.create_service_linked_role("spot.amazonaws.com", "", "")

    def furnish_roles(self) -> None:
        if not self._roles_furnished:
            self._roles_furnished = True
            if self.spot_role:
                from moto.iam.models import iam_backends

                iam_backends[ACCOUNT]["aws"].create_service_linked_role("spot.amazonaws.com", "", "")

    def noted(self, call: Call) -> None:
        """After a request that went well."""
        if call.action in ("iam:CreateInstanceProfile", "iam:AddRoleToInstanceProfile"):
            self.profile_ready[call.params["InstanceProfileName"]] = self.now() + self.profile_lag_s

    def answers(self, call: Call) -> bool:
        """Is this parameter of SSM ours?"""
        names = call.params.get("Names") or [call.params.get("Name", "")]
        return any(n.startswith("/aws/service/") for n in names)

    # ---- rights

    def principal_of(self, key: str) -> str:
        known = self.rights.keys.get(key)
        return known.principal if known else ""

    def has_expired(self, key: str) -> bool:
        known = self.rights.keys[key]
        return known.principal in self.rights.expired or (known.ends_at is not None and known.ends_at < self.now())

    def rights_asked(self, call: Call) -> None:
        if call.service == "iam":
            self.furnish_roles()
        for action, known in about.questions(self, call):
            if not self.rights.may(call.principal, action, known):
                code = {
                    "ec2": "UnauthorizedOperation",
                    "iam": "AccessDenied",
                    "sts": "AccessDenied",
                    "s3": "AccessDenied",
                }.get(call.service, "AccessDeniedException")
                raise AwsError(code, self.rights.refusal(call.principal, action, known))

    # ---- clients

    def environ(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": OWNER_KEY[0],
            "AWS_SECRET_ACCESS_KEY": OWNER_KEY[1],
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def client(self, service: str, region: str = "us-east-1", key: tuple[str, str] = OWNER_KEY, **config: Any) -> Any:
        """The real boto3's, as the owner; `config` is botocore's. Kept, for making one is slow."""
        config.setdefault("retries", {"total_max_attempts": 1})
        asked = (service, region, key, repr(sorted(config.items())))
        if asked not in self._clients:
            import boto3
            from botocore.config import Config

            session = boto3.session.Session(*key, region_name=region)
            self._clients[asked] = session.client(service, endpoint_url=self.url, config=Config(**config))
        return self._clients[asked]


def _limit_moto() -> None:
    """moto must be the version whose insides are known here; its regions get our zones."""
    from importlib.metadata import version

    have = version("moto")
    if not have.startswith("5.2."):
        raise RuntimeError(f"the AWS fake knows the insides of moto 5.2, not of {have}: pip install 'moto>=5.2,<5.3'")
    with _without_offerings():
        from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend, Zone

    for region in REGIONS:
        RegionsAndZonesBackend.zones[region] = [Zone(z, region, catalog.zone_id(z)) for z in catalog.zones(region)]
    from moto.ec2.models.security_groups import SecurityGroupRule
    from moto.iam.models import SERVICE_NAME_CONVERSION

    SecurityGroupRule.description = property(  # type: ignore[assignment,method-assign]  # moto: of CIDRs alone
        lambda rule: rule.ip_range.get("Description") or rule.source_group.get("Description"))

    SERVICE_NAME_CONVERSION.update({"spot": "EC2Spot", "ec2fleet": "EC2Fleet"})
    import moto.ec2.models.elastic_block_store as volumes
    import moto.ec2.models.key_pairs as keys
    import moto.iam.models as roles

    for module in (volumes, keys, roles):
        module.utcnow = lambda: when(AwsCloud._latest.now())  # type: ignore[attr-defined]


@contextmanager
def _without_offerings() -> Iterator[None]:
    """moto does not read what is sold where, which takes it a third of a second: `facts` knows."""
    import moto.utilities.utils as files

    plain = files.load_resource
    files.load_resource = lambda name: [] if "instance_type_offerings" in name else plain(name)
    try:
        yield
    finally:
        files.load_resource = plain


def _forget_moto() -> None:
    from moto.core.base_backend import BackendDict

    BackendDict.reset()
