"""Launches: one request has everything that a machine needs, and its operation shows whether there is room.

    one zone                     instances.insert
    several zones of one type    regionInstances.bulkInsert of one machine: Compute Engine chooses the zone
    a gang                       regionInstances.bulkInsert of all of them in one zone, or none

All go under the host's token as request id, so that a repeated request is the same one. `kit/launching.py` has the
order of the steps.

The laptop waits for the operation. The dispatcher waits a moment only, as its tick handles no notice meanwhile: its
listing lacks a host in the making, so a later tick requests the host again and gets the same operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError, UsageError
from spotfleet.model import Role
from spotfleet.providers import LaunchRequest
from spotfleet.providers.gcp import describe, images, network, terminate
from spotfleet.providers.gcp.mapping import errors, listing, machine, names
from spotfleet.providers.gcp.mapping.machine import MachineOrder
from spotfleet.providers.gcp.session import LAUNCH_S, MOMENT_S, GcpAccount
from spotfleet.providers.kit import launching, userdata
from spotfleet.providers.kit.launching import LaunchSteps
from spotfleet.providers.kit.mapping import names as kit_names
from spotfleet.providers.kit.mapping.errors import worst
from spotfleet.providers.kit.mapping.listing import pools_text

ASKED_BEFORE = ("invalid", "400", "alreadyExists", "409", "RESOURCE_ALREADY_EXISTS")
POOLS_LENGTH = 2000  # a metadata value may be longer; a listing of many hosts should not be


def launch(account: GcpAccount, request: LaunchRequest) -> None:
    launch_together(account, [request])


def launch_together(account: GcpAccount, requests: Sequence[LaunchRequest]) -> None:
    """Launch all or none. A reader of one host's user data sees that of all."""
    first = requests[0]
    if any(replace(r, request_id="", boot=first.boot) != replace(first, request_id="") for r in requests):
        raise UsageError("hosts that are launched together must be alike", hint="launch them one by one")
    account.pace("launch", first.offer.region)
    launching.launch(_Launching(account, requests))


class _Launching(LaunchSteps):
    """One order, from its facts to the end of its operation."""

    order: MachineOrder

    def __init__(self, account: GcpAccount, requests: Sequence[LaunchRequest]) -> None:
        self.account, self.requests, first = account, requests, requests[0]
        self.pools = listing.pools([first.offer, *first.alternatives], first.role)
        offer = first.offer
        self.machines = [names.machine(r.request_id, offer.instance_type, offer.market) for r in requests]
        self.where = f"{offer.region} {' '.join(o.zone for o in self.pools)} {offer.instance_type} {offer.sold}"

    @property
    def zones(self) -> list[str]:
        return [o.zone for o in self.pools]

    def exists(self) -> bool:
        """Return whether all hosts are listed, or have been; those in the making are waited for in `ask`."""
        operations = self._operations()
        lives = listing.lives(operations)
        made = {names.host_of(life.name) for life in lives.values() if life.made and not life.in_the_making}
        return made.issuperset(r.request_id for r in self.requests) or (
            not operations and bool(describe.find(self.account, self.requests[0].request_id, self.zones)))

    def begin(self) -> None:
        spec, first = self.account.settings.spec, self.requests[0]
        dispatcher = first.role is Role.DISPATCHER
        where = network.place(self.account, first.offer.region)
        own = spec.service_account or ("default" if self.account.settings.target.startswith("gs://") else "")
        self.order = MachineOrder(
            first.fleet, first.role, first.offer, first.interruption_behavior, first.tags,
            userdata.user_data(self.account.settings.machine, self.requests), pools_text(self.pools, POOLS_LENGTH),
            images.image(self.account, first.role, first.offer),
            spec.dispatcher_disk_gib if dispatcher else spec.disk_gib, where.network, where.subnetwork,
            spec.public_addresses, spec.disk_type, spec.local_ssds,
            (spec.dispatcher_service_account or "default") if dispatcher else own, userdata.lifetime_s(first),
            spec.network_tags + (spec.dispatcher_network_tags if dispatcher else ()), spec.disk_key)

    def ask(self) -> None:
        """Send the request. An earlier one of this host, with other files in its body, is waited for instead."""
        try:
            self._send()
        except SpotfleetError as error:
            if errors.code(error) not in ASKED_BEFORE or not self._awaited():
                raise

    def _awaited(self) -> bool:
        """Wait for the operation of an earlier request for this host; False if there is none."""
        found = [o for o in self._operations() if o.get("operation_type") == "insert"]
        for operation in sorted(found, key=lambda o: listing.instant(o.get("insert_time", "")))[-1:]:
            self._wait(operation, "instances.insert")
        return bool(found)

    def _operations(self) -> list[dict[str, Any]]:
        """List the operations on the machines of all hosts, which can be in the zones of this request only."""
        hosts = [r.request_id for r in self.requests]
        found = describe.operations(self.account, f"({'|'.join(map(names.pattern, hosts))})",
                                    zones=self.zones)
        return [o for o in found if names.host_of(names.last(o.get("target_link", ""))) in hosts]

    def _wait(self, operation: Mapping[str, Any], name: str) -> None:
        """Wait for an operation: on the dispatcher for a moment only, see the module.

        A bulk request that made too few machines does not give the cause. The operations of its machines do.
        """
        try:
            if self.account.settings.laptop:
                self.account.wait(operation, name, self.where, LAUNCH_S)
            else:
                self.account.ended(operation, name, self.where, MOMENT_S)
        except NoCapacity as error:
            if errors.code(error) != errors.TOO_FEW:
                raise
            causes = [self.account.failure(o, name, self.where) for o in self._operations()
                      if o.get("operation_type") == "insert"]
            raise worst([cause for cause in causes if cause is not None] or [error]) from error

    def _send(self) -> None:
        account, offer = self.account, self.order.offer
        host = kit_names.together([r.request_id for r in self.requests])
        token = names.token_uuid(account.settings.secret, host)
        if len(self.pools) == 1 and len(self.machines) == 1:
            operation = account.change(
                "instances", "insert", self.where, limit_s=LAUNCH_S, zone=offer.zone, request_id=token,
                instance_resource=machine.instance(self.order, self.machines[0], offer.zone))
            return self._wait(operation, "instances.insert")
        closed = [z for z in account.zones() if names.region_of(z) == offer.region and z not in self.zones]
        operation = account.change(
            "region_instances", "bulk_insert", self.where, limit_s=LAUNCH_S, region=offer.region, request_id=token,
            bulk_insert_instance_resource_resource=machine.bulk(
                self.order, self.machines, self.zones, closed, together=len(self.machines) > 1))
        self._wait(operation, "regionInstances.bulkInsert")

    def explained(self, error: NoCapacity | NeedsPerson) -> SpotfleetError:
        """Name all pools of a bulk request: none of them has room."""
        if isinstance(error, NoCapacity) and error.scope == "pool":
            error.pools = tuple(o.pool for o in self.pools)
        return error

    def clean_up(self, refusal: SpotfleetError) -> None:
        """Delete what a failed operation has left. If that fails, the launch counts as unknown and is repeated."""
        try:
            for request in self.requests:
                for found in describe.find(self.account, request.request_id, self.zones):
                    terminate.delete(self.account, found)
        except SpotfleetError as error:
            raise SpotfleetError(f"{refusal}; and what is left of it cannot be removed: {error}",
                                 hint=error.hint) from error
