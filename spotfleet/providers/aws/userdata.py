"""User data of an EC2 machine: made for a launch, and read back."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from spotfleet.bootstrap import HostPlan, cloud_init, gang, script, wheel
from spotfleet.errors import UsageError
from spotfleet.model import EnvironmentSpec, Role
from spotfleet.providers import LaunchRequest
from spotfleet.providers.aws.mapping import names
from spotfleet.providers.aws.session import Settings
from spotfleet.ssh.keys import derived_host_key, pinned

SAME_ON_EVERY_HOST = {*script.SCRIPTS, script.SETTINGS, "packages.txt"}  # no files of its Boot


def user_data(settings: Settings, requests: Sequence[LaunchRequest]) -> bytes:
    """Return the user data of one machine, or of a gang, in EC2's format; UsageError if it is too large."""
    plans = [_plan(settings, request) for request in requests]
    keys = [derived_host_key(settings.secret, r.request_id) if settings.secret else None for r in requests]
    admitted, pair = [settings.public_key] if settings.public_key else [], bool(settings.spec.key_pair)
    if len(plans) > 1:
        fetched = settings.secret and all(r.boot.token for r in requests)
        text = gang.user_data(plans, user=settings.spec.user, authorized_keys=admitted, host_keys=keys, key_pair=pair,
                              tokens=[r.boot.token for r in requests] if fetched else (), secret=settings.secret)
        return gang.packed(text, len(plans))
    text = cloud_init.user_data(plans[0], user=settings.spec.user, authorized_keys=admitted, host_key=keys[0],
                                key_pair=pair)
    return cloud_init.packed(text)


def files(data: bytes, request_id: str) -> dict[str, str]:
    """Return `Boot.files` of this host. UsageError for user data of another one."""
    try:
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageError(f"the user data of {request_id} is damaged: {error}", hint="end that host") from error
    found = gang.files_of(text, request_id)
    if not found:
        raise UsageError(f"the user data of {request_id} is that of another host", hint="end that host")
    return {name: content for name, content in found.items() if name not in SAME_ON_EVERY_HOST}


@lru_cache(maxsize=8192)  # each tick reads those of all hosts
def host_keys(secret: str, request_id: str) -> tuple[str, ...]:
    """Return `SshAccess.host_keys`; () without the fleet's secret."""
    return (pinned(derived_host_key(secret, request_id).public),) if secret else ()


def lifetime_s(request: LaunchRequest) -> float:
    """Return the lifetime after which the agent ends its host, even without the fleet; 0 for none."""
    try:
        boot = json.loads(request.boot.files.get("boot.json", "{}"))
        return float(boot.get("lifetime_s", 0.0)) if isinstance(boot, dict) else 0.0
    except (ValueError, TypeError):
        return 0.0


def _of_dispatcher(settings: Settings) -> EnvironmentSpec:
    """Return the environment of a dispatcher, which runs no job. Where hosts alone have an image that the user named,
    `python` and `inherit` are about that image, and the dispatcher's is plain Ubuntu."""
    environment, spec = replace(settings.environment, packages=()), settings.spec
    if spec.image and not spec.dispatcher_image:
        return replace(environment, python=EnvironmentSpec().python, inherit=False)
    return environment


def _plan(settings: Settings, request: LaunchRequest) -> HostPlan:
    code, dispatcher = wheel.running(), request.role is Role.DISPATCHER
    environment = _of_dispatcher(settings) if dispatcher else settings.environment
    return HostPlan(
        request.request_id, request.fleet, request.role, request.boot.module, request.boot.files, code.name,
        code.sha256, environment, port=names.DISPATCHER_PORT if dispatcher else 0,
        metadata_url=names.METADATA_URL, power_off=True,
        gpus=request.offer.slots if request.offer.accelerator and not dispatcher else 0,
        extras=("aws",) if dispatcher else (), modules=("boto3",) if dispatcher else ())
