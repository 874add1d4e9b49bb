"""`attach`: folder on this machine for a fleet that another machine has made.

    the provider's listing --dispatcher's machine--> its boot files --keys, certificate, spec--> a folder here

The boot files hold every secret of the fleet; only the account's owner can read them. They do not hold the user's own
secrets: each job carries those from the machine that submits it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spotfleet import providers
from spotfleet.api import cloud
from spotfleet.api.home import FleetDir, FleetRecord, Home, Keys
from spotfleet.api.machine import DispatcherMachine, provider_config, record_machine
from spotfleet.codec import from_json
from spotfleet.config.values import NAME
from spotfleet.errors import DispatcherUnreachable, NeedsPerson, NoSuchFleet, SpotfleetError, UsageError
from spotfleet.model import CloudHost, CloudState, FleetSpec, Nodes, Role
from spotfleet.plugins import Machines
from spotfleet.providers import Provider
from spotfleet.providers.plugin import Config, plugin_of
from spotfleet.transport.boot import DispatcherBoot

PATIENCE_S = 8.0


@dataclass(frozen=True)
class Attached:
    """Result of `attach`."""

    fleet: str
    hosts: int  # number of running machines, including the dispatcher's
    note: str = ""  # why its dispatcher could not be reached; "" if it answered


def attach(home: Home, name: str, provider_name: str, asked: FleetSpec | None = None) -> Attached:
    """Create a folder here for the fleet `name`, so that every command works from this machine.

    `asked`: the fleet's file on this machine; machines over SSH are found by it. A damaged folder is moved to `old/`.
    Raises NoSuchFleet, naming the fleets found; UsageError for a running fleet that is here already; SpotfleetError for
    one without a dispatcher.
    """
    asked = asked or FleetSpec(name or "any", provider=provider_name)
    plugin = plugin_of(provider_name)
    if plugin.traits.machines is Machines.EXISTING and not asked.section:
        raise UsageError("machines over SSH are found by the fleet's file only",
                         hint=f"spotfleet attach NAME --provider {provider_name} --file FLEET.yaml")
    near = provider_config(home, asked)
    provider = providers.load(provider_name, near)
    if (everywhere := plugin.everywhere(provider, near)) != near:
        provider = providers.load(provider_name, everywhere)
    listed = provider.hosts("")
    host, boot = _choose(provider, listed, name)
    folder = home.folder(boot.spec.name)
    with folder.locked():
        _refuse_living(folder)
        spec, config = _from_here(home, boot, asked)
        if folder.exists:
            home.move_to_old(folder)
        keys = Keys(boot.admin_token, boot.fleet_secret, boot.cert, boot.key,
                    ssh_private=boot.provider_config.get("private_key", ""),
                    ssh_public=boot.provider_config.get("public_key", ""), webhook=boot.webhook)
        folder.make(FleetRecord(spec, boot.fleet, _since(host), config, reached=True), keys, boot.ca)
        machine = DispatcherMachine(folder)
        record_machine(machine, time.time())
        cloud.allow_access(machine.provider, boot.fleet)
        note = _greet(folder, machine)
    return Attached(folder.name, sum(_lives(h) for h in listed if h.fleet == boot.fleet), note)


def _from_here(home: Home, boot: DispatcherBoot, asked: FleetSpec) -> tuple[FleetSpec, Config]:
    """Return the fleet's spec and its provider's configuration, with this machine's access settings."""
    plugin = plugin_of(boot.spec.provider)
    spec = plugin.with_access(boot.spec, asked)
    if plugin.traits.machines is Machines.EXISTING:
        return spec, provider_config(home, spec)
    return spec, plugin.moved(cloud.without_keys(boot.provider_config), spec)


def _choose(provider: Provider, listed: Sequence[CloudHost], name: str) -> tuple[CloudHost, DispatcherBoot]:
    """Return the dispatcher's machine of the fleet `name`, its own or its name in the cloud; of the only fleet for "".
    """
    dispatchers = [(h, boot) for h in listed if _lives(h) and h.role is Role.DISPATCHER
                   and (boot := _boot(provider, h)) is not None]
    found = [(h, boot) for h, boot in dispatchers if name in ("", boot.fleet)] or [
        (h, boot) for h, boot in dispatchers if name == boot.spec.name]
    if len({boot.fleet for _, boot in found}) > 1:
        raise UsageError("there are several fleets; say which one" if not name else
                         f"there are several fleets named '{name}'; give the name in the cloud",
                         hint=f"one of: {', '.join(sorted({boot.fleet for _, boot in found}))}")
    if found:
        return max(found, key=lambda pair: _since(pair[0]))
    raise _nothing(listed, name, sorted({boot.spec.name for _, boot in dispatchers}))


def _boot(provider: Provider, host: CloudHost) -> DispatcherBoot | None:
    """Read the machine's boot files; None if it has just ended."""
    try:
        text = provider.boot_files(host.request_id).get("boot.json", "")
        boot = from_json(DispatcherBoot, json.loads(text)) if text else None
    except UsageError:
        return None
    except ValueError as error:
        raise NeedsPerson(f"{host.request_id} was started by another version of spotfleet: {error}",
                          hint="attach with the version that made the fleet") from None
    if boot is not None and not NAME.fullmatch(boot.spec.name):  # it becomes a folder here
        raise NeedsPerson(f"{host.request_id} says that its fleet is named {boot.spec.name[:80]!r}, which none is",
                          hint="spotfleet did not start this machine: find out who did")
    return boot


def _nothing(listed: Sequence[CloudHost], name: str, there: Sequence[str]) -> SpotfleetError:
    """Return the error that explains why no dispatcher of `name` was found."""
    others = f"fleets found: {', '.join(there)}" if there else "`spotfleet up FILE` makes one"
    own = [h for h in listed if h.fleet == name]
    left = [h.request_id for h in own if _lives(h)]
    if left:
        return SpotfleetError(
            f"fleet '{name}' has no dispatcher, and {len(left)} of its machines live: {', '.join(left)}",
            hint="`spotfleet up FILE` on the machine that made it gives it another dispatcher; "
                 "`spotfleet leaks` shows what would be ended, `spotfleet leaks --fix` ends it")
    if own:
        return NoSuchFleet(f"fleet '{name}' has ended: nothing of it is left", hint=others)
    return NoSuchFleet(f"the account has no fleet '{name}'" if name else "the account has no fleet", hint=others)


def _refuse_living(folder: FleetDir) -> None:
    if folder.exists and folder.readable and not folder.record.down_at:
        raise UsageError(f"fleet '{folder.name}' is here already", hint=f"spotfleet status {folder.name}")


def _greet(folder: FleetDir, machine: DispatcherMachine) -> str:
    """Update the fleet's size from its dispatcher; return why that failed, "" if it worked."""
    try:
        url = machine.locate()
        if not url:
            raise DispatcherUnreachable("its dispatcher's machine does not run yet")
        folder.update(url=url)
        status = machine.client(url, PATIENCE_S).status()
    except (DispatcherUnreachable, NeedsPerson) as error:
        return str(error)
    ranges = {g.group: Nodes(g.min, g.target, g.max, g.idle_s) for g in status.groups}
    groups = tuple(replace(g, nodes=ranges.get(g.name, g.nodes)) for g in folder.record.spec.groups)
    nodes = Nodes(status.min, status.target, status.max, status.idle_s)
    spec = replace(folder.record.spec, nodes=nodes, groups=groups)
    folder.update(spec=spec)
    return ""


def _lives(host: CloudHost) -> bool:
    return host.state is not CloudState.TERMINATED


def _since(host: CloudHost) -> float:
    return host.runs[0].started_at if host.runs else time.time()
