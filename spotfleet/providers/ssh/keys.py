"""Installation of the fleet's key on every machine, and removal of the fleet from it. Runs on the laptop."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from spotfleet.model import Role
from spotfleet.providers import UNLISTED
from spotfleet.providers.ssh import diagnosis, listing, scripts
from spotfleet.providers.ssh.diagnosis import Diagnosis, MachineError
from spotfleet.providers.ssh.inventory import MachineInventory
from spotfleet.providers.ssh.machines import ResolvedMachine
from spotfleet.providers.ssh.transport import Keyring, SshTransport, Transport

AT_ONCE = 32
PASSES = 40  # polls for the removal of a slow host
MARK = "spotfleet:{}"  # last word of the key's line


def install_key(inventory: MachineInventory, fleet: str, public_key: str) -> dict[str, str]:
    """Install the key; return the failures, machine -> why.

    The dispatcher's machine is first, as jump host of the others.
    """
    line = " ".join([*public_key.split()[:2], MARK.format(fleet)])

    def work(machine: ResolvedMachine) -> None:
        transport = inventory.transport(machine)
        _run(transport, machine, scripts.install_key(line, MARK.format(fleet)))
        if isinstance(transport, SshTransport) and inventory.keys.private:
            _opens(inventory, machine, transport)

    head, others = _split(inventory.machines())
    failed = _each(work, head)
    return {**failed, **_each(work, others)}


def _opens(inventory: MachineInventory, machine: ResolvedMachine, transport: SshTransport) -> None:
    """Test that the fleet's key alone gives access: the dispatcher has no other."""
    alone = SshTransport(machine, Keyring(inventory.keys.private), transport.through)
    try:
        alone.run("exit 0")
    finally:
        alone.close()


def remove_fleet(inventory: MachineInventory, fleet: str) -> dict[str, str]:
    """Remove the fleet; return the leftovers, machine -> why.

    The dispatcher's machine is last, as jump host of the others.
    """
    def work(machine: ResolvedMachine) -> None:
        transport = inventory.transport(machine)
        _remove_hosts(transport, machine, fleet)
        _run(transport, machine, scripts.remove_key(MARK.format(fleet)))

    head, others = _split(inventory.machines())
    unlisted = {UNLISTED: inventory.discovery.trouble} if inventory.discovery.trouble else {}
    left = _each(work, others)
    return {**unlisted, **left, **_each(work, head)}


def _remove_hosts(transport: Transport, machine: ResolvedMachine, fleet: str) -> None:
    """Remove the hosts of `fleet`, also ended and half-launched ones; and files that no host uses."""
    left = ""
    for _ in range(PASSES):
        report = _run(transport, machine, scripts.probe(machine.root))
        remaining = [h.request_id for h in report.hosts if h.line.fleet == fleet]
        of_launch = report.claim not in [h.request_id for h in report.hosts]  # otherwise the host names its fleet
        if of_launch and re.fullmatch(rf"{re.escape(fleet)}(-d)?-\d+", report.claim):
            remaining.append(report.claim)
        if not remaining:
            if not report.hosts and not report.claim:
                _run(transport, machine, scripts.remove(machine.root, ""))
            return
        for request_id in remaining:
            left = _run(transport, machine, scripts.remove(machine.root, request_id)).answers.get("left", request_id)
    raise MachineError(machine.name, Diagnosis(f"something could not be removed: {left}", "remove it there"))


def _run(transport: Transport, machine: ResolvedMachine, text: str) -> listing.Report:
    result = transport.run(text)
    if result.status:
        raise MachineError(machine.name, diagnosis.of_output(result.status, result.err, machine.root))
    return listing.read(result.out)


def _split(machines: Sequence[ResolvedMachine]) -> tuple[list[ResolvedMachine], list[ResolvedMachine]]:
    return ([m for m in machines if m.role is Role.DISPATCHER], [m for m in machines if m.role is Role.WORKER])


def _each(work: Callable[[ResolvedMachine], None], machines: Sequence[ResolvedMachine]) -> dict[str, str]:
    """Return the machines on which `work` failed, name -> why.

    A broken connection is replaced once: `work` may be repeated.
    """
    def attempt(machine: ResolvedMachine, *, again: bool = True) -> str:
        try:
            work(machine)
        except MachineError as error:
            if error.trouble.broken and again:
                return attempt(machine, again=False)
            return str(replace_name(error, machine.name).trouble)
        return ""

    if not machines:
        return {}
    with ThreadPoolExecutor(min(AT_ONCE, len(machines)), "machines") as pool:
        return {m.name: why for m, why in zip(machines, pool.map(attempt, machines), strict=True) if why}


def replace_name(error: MachineError, name: str) -> MachineError:
    """Return the error under the machine's `name`; it may stem from the jump host."""
    if error.machine == name:
        return error
    return MachineError(name, replace(error.trouble, what=f"{error.machine}, on the way to it: {error.trouble.what}"))
