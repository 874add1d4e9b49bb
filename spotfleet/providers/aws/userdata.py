"""What a machine of EC2 is told at its birth, and what it was told, read back."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from spotfleet.bootstrap import HostPlan, cloud_init, gang, script, wheel
from spotfleet.errors import UsageError
from spotfleet.model import Role
from spotfleet.providers import LaunchRequest
from spotfleet.providers.aws import names
from spotfleet.providers.aws.session import Settings
from spotfleet.ssh.keys import derived_host_key, pinned

NOT_TOLD = {*script.SCRIPTS, script.SETTINGS, "packages.txt"}  # of every host: no files of its Boot


def user_data(settings: Settings, requests: Sequence[LaunchRequest]) -> bytes:
    """Of one machine, or of several that are launched together, as EC2 takes it; UsageError where it is too much."""
    plans = [_plan(settings, request) for request in requests]
    keys = [derived_host_key(settings.secret, r.request_id) if settings.secret else None for r in requests]
    admitted, pair = [settings.public_key] if settings.public_key else [], bool(settings.spec.key_pair)
    if len(plans) > 1:
        text = gang.user_data(plans, user=settings.spec.user, authorized_keys=admitted, host_keys=keys,
                              key_pair=pair)
        return gang.packed(text, len(plans))
    text = cloud_init.user_data(plans[0], user=settings.spec.user, authorized_keys=admitted, host_key=keys[0],
                                key_pair=pair)
    return cloud_init.packed(text)


def files(data: bytes, request_id: str) -> dict[str, str]:
    """`Boot.files` of this host. UsageError for user data that is not its."""
    try:
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageError(f"the user data of {request_id} is damaged: {error}", hint="end that host") from error
    found = gang.files_of(text, request_id)
    if not found:
        raise UsageError(f"the user data of {request_id} is that of another host", hint="end that host")
    return {name: content for name, content in found.items() if name not in NOT_TOLD}


@lru_cache(maxsize=8192)  # each tick asks for those of all hosts
def host_keys(secret: str, request_id: str) -> tuple[str, ...]:
    """As `SshDoor.host_keys`; () for whoever does not know the fleet's secret."""
    return (pinned(derived_host_key(secret, request_id).public),) if secret else ()


def lifetime_s(request: LaunchRequest) -> float:
    """After so long its agent ends the host, whatever becomes of the fleet; 0 if it does not."""
    try:
        told = json.loads(request.boot.files.get("boot.json", "{}"))
        return float(told.get("lifetime_s", 0.0)) if isinstance(told, dict) else 0.0
    except (ValueError, TypeError):
        return 0.0


def _plan(settings: Settings, request: LaunchRequest) -> HostPlan:
    code, dispatcher = wheel.running(), request.role is Role.DISPATCHER
    environment = replace(settings.environment, packages=()) if dispatcher else settings.environment  # it runs no job
    return HostPlan(
        request.request_id, request.fleet, request.role, request.boot.module, request.boot.files, code.name,
        code.sha256, environment, port=names.DISPATCHER_PORT if dispatcher else 0,
        metadata_url=names.METADATA_URL, power_off=True, extras=("aws",) if dispatcher else ())
