"""Provider `ssh`: existing machines, from a list or a host-discovery script.

    machines.py    existing machines and their offers (pure)      discovery.py   the script
    transport.py   one persistent connection per machine          diagnosis.py   connection errors, explained (pure)
    scripts.py     scripts run on a machine (texts)               listing.py     their output -> hosts (pure)
    poller.py      the last report of each machine                launch.py      turns a machine into a host
    inventory.py   all machines, with this process's memory       keys.py        installs the fleet's key
    channels.py    one channel of a connection

The truth is on the machines (see `spotfleet.bootstrap`). A host whose machine does not answer is listed as
STOPPED once that is sure, and with its real state when the machine answers again. Only a process that has seen the host
lists it then; another process does not list it at all. On the laptop, `hosts` raises when the dispatcher's machine does
not answer, as for an unreachable cloud: the state of the fleet is then unknown.

Configuration: `ssh` (SshSpec), `environment` (EnvironmentSpec), `known_hosts`, `script`,
`side` ("laptop" or "dispatcher"), `private_key` and `public_key`. Without `ssh` there is no machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from spotfleet.errors import NeedsPerson, NoCapacity, UsageError
from spotfleet.model import BillingRules, CloudHost, Need, Offer, PricePoint, Role
from spotfleet.providers import LaunchRequest
from spotfleet.providers.ssh import keys, launch, listing, scripts
from spotfleet.providers.ssh.diagnosis import Diagnosis, MachineError
from spotfleet.providers.ssh.inventory import MachineInventory, inventory_of
from spotfleet.providers.ssh.listing import ListedHost
from spotfleet.providers.ssh.machines import ResolvedMachine, offers
from spotfleet.providers.ssh.poller import MachineView

UNCONFIGURED = "provider ssh: no machines are named"
NAME_THEM = "name them under `ssh` in the fleet file: `ssh: {dispatcher: head, hosts: [node1, node2:8]}`"
WHY_TAKEN = "interrupted"


class SshProvider:
    """The ssh plugin: Provider and ExistingMachines over the machines of the configuration."""

    name = "ssh"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._inventory = inventory_of(config) if config.get("ssh") else None

    def check(self) -> None:
        inventory = self._needed()
        head = inventory.head()
        if inventory.discovery.trouble:
            raise NeedsPerson(inventory.discovery.trouble, hint="run it by hand: each line is HOST or HOST:SLOTS")
        if inventory.laptop:
            try:
                inventory.transport(head).run("exit 0")
            except MachineError as error:
                raise NeedsPerson(f"the dispatcher's machine cannot be entered: {error.machine}: {error.trouble.what}",
                                  hint=error.trouble.fix) from error

    def billing(self) -> BillingRules:
        return BillingRules(minimum_s=0)

    def offers(self, need: Need) -> list[Offer]:
        """List machines without a host. One with an error is offered once, so that a launch reports the error."""
        if self._inventory is None:
            return []
        views = [v for v in self._inventory.views() if v.machine.name not in self._inventory.extra]
        return offers([v.machine for v in views if _free(v)], need)

    def prices(self, pools: Sequence[str], since: float) -> list[PricePoint]:
        """Return constant prices: they never change."""
        found = {m.offer.zone: m.price_micros_h for m in self._inventory.machines()} if self._inventory else {}
        return [PricePoint(pool, since, found.get(_zone(pool), 0)) for pool in pools]

    def launch(self, request: LaunchRequest) -> None:
        inventory = self._needed()
        if request.request_id in inventory.gone:
            return
        machine = inventory.machine(request.offer.zone)
        if machine is None:
            raise NoCapacity(f"{request.offer.zone}: it is no machine of this fleet any more",
                             hint="name it under `ssh.hosts` in the fleet file")
        try:
            self._launch(inventory, machine, request)
            inventory.refused.pop(machine.name, None)
        except launch.LaunchUnknown:
            raise
        except MachineError as error:
            if not error.trouble.away:
                inventory.refused[machine.name] = str(error)
            raise _refusal(request.role, error) from error
        finally:
            inventory.poller.stale(machine)

    def _launch(self, inventory: MachineInventory, machine: ResolvedMachine, request: LaunchRequest) -> None:
        if request.role is Role.WORKER:
            self._spare(inventory, machine)
        for again in (True, False):
            taken = launch.launch(inventory.transport(machine), machine, request, inventory.environment)
            if taken is None:
                return
            if not (again and taken.held is not None and listing.ended(taken.held.line)):
                raise MachineError(machine.name, _held_by(taken))
            inventory.end(MachineView(machine), taken.held)  # it has ended, but its leftovers are still on the machine

    @staticmethod
    def _spare(inventory: MachineInventory, machine: ResolvedMachine) -> None:
        """Raise MachineError at once if another try would fail as the last one did."""
        view = next((v for v in inventory.views() if v.machine.name == machine.name), None)
        if view is not None and view.trouble is not None:
            inventory.poller.mark_reported(view)
            raise view.trouble
        failed = inventory.failed.get(machine.name)
        if failed is not None and time.monotonic() < failed.until:
            raise MachineError(machine.name, failed.trouble)

    def hosts(self, fleet: str) -> list[CloudHost]:
        inventory = self._inventory
        if inventory is None:
            return []
        views = inventory.views()
        for view in views:
            if inventory.laptop and view.machine.role is Role.DISPATCHER and view.trouble is not None:
                inventory.poller.poll(view.machine)  # one lost answer is no error
        inventory.take_delisted(views)
        return [line for line in inventory.listed(views) if fleet in ("", line.fleet)]

    def terminate(self, request_id: str) -> None:
        """End the host. If its machine does not answer, the request is kept and carried out when it answers."""
        inventory = self._inventory
        if inventory is None or request_id in inventory.gone:
            return
        try:
            view, held = inventory.find(request_id)
            inventory.end(view, held)
        except UsageError:
            return
        except MachineError as error:
            if not error.trouble.away:
                raise
            inventory.unwanted.setdefault(request_id, time.monotonic())

    def tag(self, request_id: str, tags: dict[str, str]) -> None:
        inventory, view, _ = self._host(request_id)
        transport, path = inventory.transport(view.machine), _path(view, request_id, "tags.json")
        with inventory.tagging:  # concurrent calls must not lose tags
            there = json.loads(transport.get([path])[0])
            script = scripts.tag(view.machine.root, request_id, json.dumps({**there, **tags}))
            answers = inventory.run_change(view.machine, script)
        if "unknown" in answers:
            raise _unknown(request_id)

    def boot_files(self, request_id: str) -> dict[str, str]:
        inventory, view, held = self._host(request_id)
        texts = inventory.transport(view.machine).get([_path(view, request_id, name) for name in held.files])
        return {name: text.decode() for name, text in zip(held.files, texts, strict=True)}

    def interrupt(self, request_id: str, notice_s: float | None) -> None:
        inventory, view, held = self._host(request_id)
        if listing.ended(held.line):
            raise _unknown(request_id)
        script = scripts.interrupt(view.machine.root, request_id, notice_s or 0.0, WHY_TAKEN)
        answers = inventory.run_change(view.machine, script)
        if "unknown" in answers:
            raise _unknown(request_id)

    def machines(self) -> list[str]:
        return [machine.name for machine in self._inventory.machines()] if self._inventory is not None else []

    def install_key(self, fleet: str, public_key: str) -> dict[str, str]:
        return keys.install_key(self._needed(), fleet, public_key)

    def remove_fleet(self, fleet: str) -> dict[str, str]:
        return keys.remove_fleet(self._inventory, fleet) if self._inventory is not None else {}

    def problems(self) -> list[str]:
        return self._inventory.problems() if self._inventory is not None else []

    def _needed(self) -> MachineInventory:
        if self._inventory is None:
            raise NeedsPerson(UNCONFIGURED, hint=NAME_THEM)
        return self._inventory

    def _host(self, request_id: str) -> tuple[MachineInventory, MachineView, ListedHost]:
        if self._inventory is None:
            raise _unknown(request_id)
        return self._inventory, *self._inventory.find(request_id)


def _free(view: MachineView) -> bool:
    if view.trouble is not None:
        return not view.reported and (view.report is None or view.report.free)
    return view.report is not None and view.report.free


def _zone(pool: str) -> str:
    return pool.split("/")[1] if pool.count("/") >= 3 else ""


def _path(view: MachineView, request_id: str, name: str) -> str:
    assert view.report is not None
    return f"{view.report.answers['root']}/{request_id}/{name}"


def _refusal(role: Role, error: MachineError) -> NoCapacity | NeedsPerson:
    """Convert an error: the fleet goes on without a worker's machine, but needs the dispatcher's."""
    if role is Role.DISPATCHER:
        return NeedsPerson(f"the dispatcher's machine cannot be used: {error.machine}: {error.trouble.what}",
                           hint=error.trouble.fix or "`spotfleet up` again once that is fixed")
    return NoCapacity(str(error), hint=error.trouble.fix or "another machine is tried", scope="pool")


def _held_by(taken: launch.MachineTaken) -> Diagnosis:
    if taken.held is None:
        return Diagnosis(f"a launch of {taken.host} is under way there",
                       f"one that died is cleared {scripts.DEAD_CLAIM_MIN} min after its beginning")
    if listing.ended(taken.held.line):
        return Diagnosis(f"what is left of {taken.host} is being removed from it", "it is asked again")
    return Diagnosis(f"it runs {taken.host} of fleet {taken.held.line.fleet}",
                   f"`spotfleet down {taken.held.line.fleet}` frees it")


def _unknown(request_id: str) -> UsageError:
    return UsageError(f"there is no host '{request_id}' on any machine", hint="`spotfleet status` lists the hosts")
