"""User data of a machine that a launch makes: made for the launch, and read back from it."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from spotfleet.bootstrap import HostPlan, cloud_init, gang, image, script, wheel
from spotfleet.errors import UsageError
from spotfleet.model import EnvironmentSpec, Role, is_ray
from spotfleet.providers import LaunchRequest
from spotfleet.providers.kit.mapping import names
from spotfleet.ssh.keys import derived_host_key, pinned

SAME_ON_EVERY_HOST = {*script.SCRIPTS, script.SETTINGS, "packages.txt"}  # no files of its Boot


@dataclass(frozen=True)
class MachineSetup:
    """Contents of user data besides the launch request."""

    environment: EnvironmentSpec = field(default_factory=EnvironmentSpec)
    plain_dispatcher: bool = False  # the hosts' image is the user's, the dispatcher's is not
    ready_dispatcher: bool = False  # the dispatcher's image is one of `spotfleet image build`
    public_key: str = ""  # the fleet's; may log in
    secret: str = field(default="", repr=False)  # the fleet's; makes the host key
    user: str = "ubuntu"
    key_pair: bool = False  # the cloud installs a key of the user's, too
    metadata_url: str = ""
    extras: tuple[str, ...] = ()  # extras of our wheel on the dispatcher, which calls the cloud
    modules: tuple[str, ...] = ()  # modules of these extras: a ready image must have them


def user_data(setup: MachineSetup, requests: Sequence[LaunchRequest]) -> bytes:
    """Return the user data of one machine, or of a gang, packed; UsageError if it is too large."""
    plans = [_plan(setup, request) for request in requests]
    keys = [derived_host_key(setup.secret, r.request_id) if setup.secret else None for r in requests]
    admitted, pair = [setup.public_key] if setup.public_key else [], setup.key_pair
    if len(plans) > 1:
        fetched = setup.secret and all(r.boot.token for r in requests)
        text = gang.user_data(plans, user=setup.user, authorized_keys=admitted, host_keys=keys, key_pair=pair,
                              tokens=[r.boot.token for r in requests] if fetched else (), secret=setup.secret)
        return gang.packed(text, len(plans))
    text = cloud_init.user_data(plans[0], user=setup.user, authorized_keys=admitted, host_key=keys[0],
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


def _of_dispatcher(setup: MachineSetup) -> EnvironmentSpec:
    """Return the environment of a dispatcher, which runs no job, but the head of a Ray cluster. `python` and `inherit`
    are about the hosts' image."""
    environment = replace(setup.environment, packages=tuple(filter(is_ray, setup.environment.packages)))
    if setup.ready_dispatcher:
        return replace(environment, python=image.environment().python, inherit=True)
    if setup.plain_dispatcher:
        return replace(environment, python=EnvironmentSpec().python, inherit=False)
    return environment


def _plan(setup: MachineSetup, request: LaunchRequest) -> HostPlan:
    code, dispatcher = wheel.running(), request.role is Role.DISPATCHER
    environment = _of_dispatcher(setup) if dispatcher else setup.environment
    return HostPlan(
        request.request_id, request.fleet, request.role, request.boot.module, request.boot.files, code.name,
        code.sha256, environment, port=names.DISPATCHER_PORT if dispatcher else 0,
        metadata_url=setup.metadata_url, power_off=True,
        gpus=request.offer.slots if request.offer.accelerator and not dispatcher else 0,
        extras=setup.extras if dispatcher else (), modules=setup.modules if dispatcher else ())
