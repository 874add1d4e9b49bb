"""Access to AWS: settings, clients per region, credentials. botocore is imported on first use.

One Account exists per configuration and process; everything it caches can be requested again. Its clients raise our
errors, by the table in `errors`, with botocore's as the cause.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, TypeVar

from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.plugins import Sdk
from spotfleet.providers.aws.mapping import errors, names
from spotfleet.providers.aws.section.spec import AwsSpec, current, spec_in, unreadable
from spotfleet.providers.kit import images
from spotfleet.providers.kit.cache import AnswerCache
from spotfleet.providers.kit.requests import Paces, each
from spotfleet.providers.kit.settings import CloudSettings, read_settings
from spotfleet.providers.kit.userdata import MachineSetup
from spotfleet.version import __version__, install
from spotfleet.words import did_you_mean

DEFAULT_REGION = "us-east-1"
SDK = Sdk(("aws",), ("boto3",))
CONNECT_S = 5
READ_S = 30
LAUNCH_READ_S = 60  # CreateFleet tries its pools before it answers
ATTEMPTS = 4  # for calls that change nothing, or are idempotent
LEISURE = {"pricing": (2, 3, 10)}  # attempts, seconds to connect and to read: a fleet works without its answer
POOL = 32  # connections per client, shared by many threads
IDENTITY_S = 3600.0
REGIONS_S = 24 * 3600.0
AT_METADATA = {"metadata_service_num_attempts": 4, "metadata_service_timeout": 3}  # for a machine that has just booted
SKEW_S = 240.0  # AWS accepts signatures up to five minutes old
INSTALL = install("aws")

CHANGES_PER_S, CHANGES_AT_ONCE = 5.0, 10  # our launches, and our ends, of one region: EC2 takes 5 of a call a second
RUNS_PER_S, RUNS_AT_ONCE = 2.0, 5  # EC2's rate of RunInstances

A = TypeVar("A")
T = TypeVar("T")


@dataclass(frozen=True)
class Settings(CloudSettings):
    """The configuration of provider aws, parsed."""

    spec: AwsSpec = field(default_factory=AwsSpec)

    @property
    def machine(self) -> MachineSetup:
        """Return what user data of a machine holds besides its launch request."""
        return MachineSetup(images.environment(self.environment, self.spec.image),
                            bool(self.spec.image) and not self.spec.dispatcher_image,
                            self.spec.dispatcher_image == images.OURS, self.public_key, self.secret, self.spec.user,
                            bool(self.spec.key_pair), names.METADATA_URL, *self.sdks(SDK))


def settings_of(config: Mapping[str, Any]) -> Settings:
    """Parse the configuration. Raises UsageError for an invalid value."""
    return read_settings(Settings, spec_in(config), config, current(config).get("environment"), unreadable)


class AwsClient:
    """boto3's client that raises our errors. Threads may share it."""

    def __init__(self, account: Account, raw: Any, where: str) -> None:
        self.raw, self.where, self._account = raw, where, account

    def __getattr__(self, operation: str) -> Callable[..., dict[str, Any]]:
        call = getattr(self.raw, operation)

        def asked(**parameters: Any) -> dict[str, Any]:
            with self._translated(operation):
                return call(**parameters)

        return asked

    def pages(self, operation: str, key: str, **parameters: Any) -> Iterator[Any]:
        """Yield the items under `key` in all pages of the answer."""
        paginator = self.raw.get_paginator(operation)
        pages = iter(paginator.paginate(**parameters))
        while True:
            with self._translated(operation):
                page = next(pages, None)
            if page is None:
                return
            yield from page.get(key) or []

    @contextmanager
    def _translated(self, operation: str) -> Iterator[None]:
        from botocore import exceptions, parsers

        try:
            yield
        except exceptions.ClientError as error:
            raise self._account.refused(error, self.where, self._action(operation)) from error
        except (exceptions.BotoCoreError, parsers.ResponseParserError) as error:
            raise self._account.connection_error(error, self.where) from error

    def _action(self, operation: str) -> str:
        """Return the operation's name in a policy: "ec2:RunInstances"."""
        meta = self.raw.meta
        return f"{meta.service_model.signing_name}:{meta.method_to_api_mapping.get(operation, operation)}"


class Account(AnswerCache):
    """An AWS account under one configuration."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self._lock = threading.RLock()
        self._session: Any = None
        self._clients: dict[tuple[str, str, bool], Any] = {}
        self._paces, self._runs = Paces(CHANGES_AT_ONCE, CHANGES_PER_S), Paces(RUNS_AT_ONCE, RUNS_PER_S)

    @property
    def regions(self) -> tuple[str, ...]:
        """Return the regions for launches and listings."""
        return self.settings.spec.regions or (self.home_region,)

    @property
    def home_region(self) -> str:
        """Return the region for calls without one of their own, such as a first query."""
        if self.settings.spec.regions:
            return self.settings.spec.regions[0]
        configured = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        return configured or self._boto().region_name or DEFAULT_REGION

    def client(self, service: str, region: str = "", where: str = "") -> AwsClient:
        """Return a client for queries and idempotent changes: it retries after throttling and lost answers.

        `where` begins the message of an error: "us-east-1 us-east-1a g5.xlarge spot".
        """
        return self._client(service, region or self.home_region, where, patient=True)

    def launching(self, region: str, where: str = "") -> AwsClient:
        """Return an EC2 client for launches, with one attempt: botocore would repeat calls refused for no capacity."""
        return self._client("ec2", region, where, patient=False)

    def pace(self, what: str, region: str) -> None:
        """Wait until another one of `what` ("launch", "end", or "run" for RunInstances) is due in `region`."""
        (self._runs if what == "run" else self._paces).wait((what, region))

    def all_regions(self) -> tuple[str, ...]:
        """List the account's enabled regions, sorted. Any enabled one answers; a disabled one rejects every caller."""
        def ask() -> tuple[str, ...]:
            first: SpotfleetError | None = None
            for region in dict.fromkeys((*self.regions, DEFAULT_REGION)):
                try:
                    answer = self.client("ec2", region).describe_regions()
                    return tuple(sorted(r["RegionName"] for r in answer["Regions"]))
                except SpotfleetError as error:
                    first = first or error
            assert first is not None
            raise first

        return self.cached("regions", REGIONS_S, ask)

    def identity(self) -> tuple[str, str]:
        """Return the account's number and the caller's ARN."""
        def ask() -> tuple[str, str]:
            answer = self.client("sts").get_caller_identity()
            return answer["Account"], answer["Arn"]

        return self.cached("identity", IDENTITY_S, ask)

    def time(self) -> float:
        """Return AWS's time: the date of an answer, to the second. A refusal, as for a wrong clock, has one too."""
        try:
            found = _date(self.client("ec2").describe_vpcs(MaxResults=5))
        except SpotfleetError as error:
            found = _date(getattr(error.__cause__, "response", {}))
            if found is None:
                raise
        if found is None:
            raise SpotfleetError("aws: an answer without a date", hint="try again")
        return found

    def each(self, do: Callable[[A], T], things: Sequence[A]) -> list[T]:
        return each(do, things)

    def _client(self, service: str, region: str, where: str, patient: bool) -> AwsClient:
        with self._lock:
            raw = self._clients.get((service, region, patient))
            if raw is None:
                raw = self._clients[service, region, patient] = self._made(service, region, patient)
        return AwsClient(self, raw, f"aws {where or region}")

    def refused(self, error: Any, where: str, action: str) -> SpotfleetError:
        """Convert botocore's ClientError. After refused credentials, the next call searches for new ones."""
        fields = error.response.get("Error", {})
        code, message = str(fields.get("Code", "")), str(fields.get("Message", ""))
        converted = errors.refusal(where, code, self._decoded(message, action), action, self.origin)
        if code in errors.CREDENTIALS and isinstance(converted, NeedsPerson):
            self._renew()
            date = _date(error.response)
            ahead_s = time.time() - date if date is not None else 0.0
            if abs(ahead_s) > SKEW_S:
                return errors.skewed(where, ahead_s)
        return converted

    def connection_error(self, error: Exception, where: str) -> SpotfleetError:
        """Convert a botocore error that is no answer."""
        if misspelt := self._misspelt(str(error), where):
            return SpotfleetError(f"{where}: AWS does not answer, and no region of that name is known{misspelt}",
                                  hint="correct the region, in the fleet file or in AWS_REGION")
        converted = errors.connection_error(where, type(error).__name__, str(error), self.origin)
        if isinstance(converted, NeedsPerson):
            self._renew()
        return converted

    def _misspelt(self, message: str, where: str) -> str:
        """Suggest the nearest region, or all, if the host of an unknown region was not found; else ""."""
        region = next(iter(where.split()[1:]), "")
        if not region or f".{region}.amazonaws.com" not in message:
            return ""
        boto = self._boto()
        known = [r for p in boto.get_available_partitions() for r in boto.get_available_regions("ec2", p)]
        return "" if region in known else did_you_mean(region, known) or f": {', '.join(known)}"

    @property
    def origin(self) -> errors.RequestOrigin:
        return errors.RequestOrigin(self.settings.laptop, self.settings.spec.profile)

    def _decoded(self, message: str, action: str) -> str:
        """Decode AWS's encoded part of a message, if permitted and not in clear text already."""
        encoded = errors.encoded(message)
        if not encoded or "perform: " in message or action.startswith("sts:"):
            return message
        try:
            answer = self.client("sts").decode_authorization_message(EncodedMessage=encoded)
            context = json.loads(answer["DecodedMessage"])["context"]
            return (f"User: {context['principal']['arn']} is not authorized to perform: {context['action']} "
                    f"on resource: {context['resource']}")
        except (SpotfleetError, ValueError, KeyError, TypeError):
            return message

    def _renew(self) -> None:
        """Make the next call search for credentials as a new process would."""
        with self._lock:
            self._session, self._clients = None, {}
            self._remembered.pop("identity", None)

    def _made(self, service: str, region: str, patient: bool) -> Any:
        boto = self._boto()  # first: without boto3 installed its error says what to install
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        attempts, connect_s, read_s = LEISURE.get(
            service, (ATTEMPTS, CONNECT_S, READ_S) if patient else (1, CONNECT_S, LAUNCH_READ_S))
        config = Config(
            connect_timeout=connect_s, read_timeout=read_s, max_pool_connections=POOL,
            retries={"mode": "standard", "total_max_attempts": attempts},
            user_agent_extra=f"spotfleet/{__version__}", tcp_keepalive=True)
        try:
            return boto.client(service, region_name=region, endpoint_url=self.settings.endpoint_url or None,
                                       config=config)
        except (BotoCoreError, ValueError) as error:
            raise self.connection_error(error, f"aws {region}") from error

    def _boto(self) -> Any:
        with self._lock:
            if self._session is None:
                self._session = self._new_session()
            return self._session

    def _new_session(self) -> Any:
        try:
            import boto3
            import botocore.session
            from botocore.exceptions import BotoCoreError
        except ImportError as error:
            raise NeedsPerson(f"provider aws needs boto3: {error}", hint=INSTALL) from error
        try:
            if self.settings.credentials:
                return boto3.Session(**self.settings.credentials)
            if self.settings.laptop:
                return boto3.Session(profile_name=self.settings.spec.profile or None)
            core = botocore.session.Session()
            for name, value in AT_METADATA.items():
                core.set_config_variable(name, value)
            return boto3.Session(botocore_session=core)
        except BotoCoreError as error:
            raise self.connection_error(error, "aws") from error


def _date(answer: Any) -> float | None:
    """Return the date in the HTTP header of AWS's answer, Unix seconds; None without one."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError):
        return None


@lru_cache(maxsize=64)
def _account(config: str) -> Account:
    return Account(settings_of(json.loads(config)))


def account_of(config: Mapping[str, Any]) -> Account:
    """Return the Account of this configuration; the same one as long as the process lives."""
    return _account(json.dumps(config, sort_keys=True))


def reset() -> None:
    """Forget every Account of this process, as a new process would begin; those in use stay usable."""
    _account.cache_clear()
