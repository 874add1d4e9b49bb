"""`attach`: make this machine know a fleet that another one has made.

    the provider's listing --dispatcher's machine--> its boot files --keys, certificate, spec--> a folder here

The boot files hold every secret of the fleet, and only who owns the account may read them. The user's own secrets are
not among them: they travel with each job, from the machine that submits it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spotfleet import providers
from spotfleet.api import cloud
from spotfleet.api.house import Folder, House, Keys, Record
from spotfleet.api.machine import Machine, provider_config, watch
from spotfleet.codec import from_json
from spotfleet.config.values import NAME
from spotfleet.dispatcher.boot import DispatcherBoot
from spotfleet.errors import DispatcherUnreachable, NeedsPerson, NoSuchFleet, SpotfleetError, UsageError
from spotfleet.model import CloudHost, CloudState, FleetSpec, Nodes, Role
from spotfleet.providers import Provider

PATIENCE_S = 8.0


@dataclass(frozen=True)
class Attached:
    fleet: str
    hosts: int  # that live, the dispatcher's machine among them
    note: str = ""  # why its dispatcher could not be spoken to; "" if it was


def attach(house: House, name: str, provider_name: str, asked: FleetSpec | None = None) -> Attached:
    """A folder here for the fleet `name`; from then on every command works from this machine.

    `asked`: the fleet's file as it is here, which names the machines where they are over SSH. A folder that is damaged
    is put away. Raises NoSuchFleet, naming what there is; UsageError for a living fleet that is here already;
    SpotfleetError for one without a dispatcher.
    """
    asked = asked or FleetSpec(name or "any", provider=provider_name)
    if provider_name == "ssh" and asked.ssh is None:
        raise UsageError("machines over SSH are found by the fleet's file only",
                         hint="spotfleet attach NAME --provider ssh --file FLEET.yaml")
    provider = providers.load(provider_name, provider_config(house, asked))
    if provider_name == "aws" and not (asked.aws and asked.aws.regions):
        provider = providers.load(provider_name, cloud.everywhere(provider, provider_config(house, asked)))
    listed = provider.hosts("")
    host, boot = _choose(provider, listed, name)
    folder = house.folder(boot.spec.name)
    with folder.locked():
        _refuse_living(folder)
        spec, config = _from_here(house, boot, asked)
        if folder.exists:
            house.put_away(folder)
        keys = Keys(boot.admin_token, boot.fleet_secret, boot.cert, boot.key,
                    ssh_private=boot.provider_config.get("private_key", ""),
                    ssh_public=boot.provider_config.get("public_key", ""))
        folder.make(Record(spec, boot.fleet, _since(host), config, reached=True), keys, boot.ca)
        machine = Machine(folder)
        watch(machine, time.time())
        cloud.open_door(machine.provider, boot.fleet)
        note = _greet(folder, machine)
    return Attached(folder.name, sum(_lives(h) for h in listed if h.fleet == boot.fleet), note)


def _from_here(house: House, boot: DispatcherBoot, asked: FleetSpec) -> tuple[FleetSpec, dict[str, str]]:
    """The fleet's spec and what its provider is told, with the ways in from here."""
    if boot.spec.aws is not None:
        spec = cloud.entered_as(boot.spec, asked)
        return spec, cloud.moved(boot.provider_config, spec)
    spec = replace(boot.spec, ssh=asked.ssh)
    return spec, boot.provider_config if spec.provider == "local" else provider_config(house, spec)


def _choose(provider: Provider, listed: Sequence[CloudHost], name: str) -> tuple[CloudHost, DispatcherBoot]:
    """The dispatcher's machine of the fleet `name`, by its own name or that in the cloud; of the only one for ""."""
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
    """What the machine was told at its birth; None if it has just ended."""
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
    """Why no dispatcher of `name` was found."""
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


def _refuse_living(folder: Folder) -> None:
    if folder.exists and folder.readable and not folder.record.down_at:
        raise UsageError(f"fleet '{folder.name}' is here already", hint=f"spotfleet status {folder.name}")


def _greet(folder: Folder, machine: Machine) -> str:
    """Learn the size it has by now; the answer says why that was not possible, "" if it was."""
    try:
        url = machine.locate()
        if not url:
            raise DispatcherUnreachable("its dispatcher's machine does not run yet")
        folder.update(url=url)
        status = machine.client(url, PATIENCE_S).status()
    except (DispatcherUnreachable, NeedsPerson) as error:
        return str(error)
    spec = replace(folder.record.spec, nodes=Nodes(status.min, status.target, status.max))
    folder.update(spec=spec)
    return ""


def _lives(host: CloudHost) -> bool:
    return host.state is not CloudState.TERMINATED


def _since(host: CloudHost) -> float:
    return host.runs[0].started_at if host.runs else time.time()
