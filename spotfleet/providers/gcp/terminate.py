"""End of hosts; interruption for exercises; restart of hosts that the cloud has stopped.

Nobody starts a preempted machine again for its user. A host with `interruption_behavior: stop` is therefore started by
the fleet's dispatcher, each time it lists the hosts, until there is room or RETURN_S have passed. Then the planner
replaces it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.providers.gcp import describe
from spotfleet.providers.gcp.describe import Machine
from spotfleet.providers.gcp.mapping import errors, listing, names
from spotfleet.providers.gcp.mapping.listing import Life
from spotfleet.providers.gcp.session import GcpAccount

log = logging.getLogger(__name__)
RETURN_S = 600.0  # from the preemption; after that the planner replaces the host (Wanted.restart_after_s)
AGAIN_S = 20.0  # between two attempts to start a machine
NOT_NOW = ("resourceNotReady", "RESOURCE_NOT_READY")  # it still stops


def terminate(account: GcpAccount, request_id: str) -> None:
    """Delete the host's machines; returns when Compute Engine has accepted."""
    for found in describe.find(account, request_id):
        account.pace("end", names.region_of(found.zone))
        delete(account, found)


def delete(account: GcpAccount, machine: Machine) -> None:
    """Delete one machine; no error if it is gone, or is being deleted."""
    try:
        account.change("instances", "delete", machine.name, zone=machine.zone, instance=machine.name)
    except SpotfleetError as error:
        if not errors.gone(error):
            raise


def interrupt(account: GcpAccount, request_id: str, notice_s: float | None) -> None:
    """Have a Spot machine preempted by a simulated maintenance event, with the notice that it was launched with.

    Source: Compute Engine, "Create and use Spot VMs", "Simulate preemption".
    """
    living = describe.find(account, request_id)
    if not living:
        raise describe.unknown(request_id)
    for found in living:
        model = ((found.instance or {}).get("scheduling") or {}).get("provisioning_model", "")
        if model != "SPOT":
            raise UsageError(f"gcp takes no on-demand machine back, so {request_id} cannot be interrupted",
                             hint="`spotfleet drain` takes it out of the fleet")
        account.change("instances", "simulate_maintenance_event", found.name, zone=found.zone, instance=found.name)


def start_preempted(account: GcpAccount, instances: Sequence[dict[str, Any]], lives: dict[str, Life]) -> None:
    """Start the machines that the cloud has stopped, as far as they are due. A listing never fails by it."""
    now = time.time()
    for instance in instances:
        life = lives.get(str(instance.get("id", "")))
        if life is not None and due(instance, life, now):
            _start(account, instance, life)


def due(instance: dict[str, Any], life: Life, now: float) -> bool:
    """Return whether a machine is to be started: the cloud has stopped it, lately, and nothing else goes on."""
    waits = any(not step.at for step in life.steps)
    stopped = instance.get("status") in listing.STOPPED
    return stopped and not waits and bool(life.preempted_at) and now - life.preempted_at < RETURN_S


def _start(account: GcpAccount, instance: dict[str, Any], life: Life) -> None:
    def ask() -> bool:
        account.change("instances", "start", instance["name"], zone=listing.zone_of(instance),
                       instance=instance["name"], request_id=str(uuid.uuid4()))
        return True

    try:
        account.cached(("start", life.id, life.preempted_at), AGAIN_S, ask, failed_s=AGAIN_S)
    except SpotfleetError as error:
        if errors.code(error) not in NOT_NOW:
            log.warning("%s is not started yet: %s", instance["name"], error)
