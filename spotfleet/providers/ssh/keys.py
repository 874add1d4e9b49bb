"""From the laptop: the fleet's own key is let into every machine, and nothing of the fleet is left on any."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from spotfleet.model import Role
from spotfleet.providers.ssh import listing, scripts, trouble
from spotfleet.providers.ssh.connect import Door, Keyring, SshDoor
from spotfleet.providers.ssh.machines import Machine
from spotfleet.providers.ssh.trouble import Trouble, Troubled
from spotfleet.providers.ssh.yard import Yard

AT_ONCE = 32
PASSES = 40  # a host that takes long to remove is looked at so often
MARK = "spotfleet:{}"  # the last word of the key's line


def admit(yard: Yard, fleet: str, public_key: str) -> list[str]:
    """What went wrong, a line per machine. The dispatcher's machine is first: the others are entered through it."""
    line = " ".join([*public_key.split()[:2], MARK.format(fleet)])

    def work(machine: Machine) -> None:
        door = yard.door(machine)
        _run(door, machine, scripts.admit(line, MARK.format(fleet)))
        if isinstance(door, SshDoor) and yard.keys.private:
            _opens(yard, machine, door)

    head, others = _split(yard.machines())
    failed = _each(work, head)
    return failed + _each(work, others)


def _opens(yard: Yard, machine: Machine, door: SshDoor) -> None:
    """The fleet's key alone must open it: the dispatcher has no other."""
    alone = SshDoor(machine, Keyring(yard.keys.private), door.through)
    try:
        alone.run("exit 0")
    finally:
        alone.close()


def part(yard: Yard, fleet: str) -> list[str]:
    """What is left, a line per machine. The dispatcher's machine is last: the others are entered through it."""
    def work(machine: Machine) -> None:
        door = yard.door(machine)
        _remove_hosts(door, machine, fleet)
        _run(door, machine, scripts.part(MARK.format(fleet)))

    head, others = _split(yard.machines())
    unknown = [f"machines that nobody names: {yard.discovery.trouble}"] if yard.discovery.trouble else []
    left = _each(work, others)
    return unknown + left + _each(work, head)


def _remove_hosts(door: Door, machine: Machine, fleet: str) -> None:
    """Those of `fleet`, whether they live, have ended, or were never quite launched; and what no host uses."""
    left = ""
    for _ in range(PASSES):
        report = _run(door, machine, scripts.probe(machine.root))
        theirs = [h.request_id for h in report.hosts if h.line.fleet == fleet]
        of_launch = report.claim not in [h.request_id for h in report.hosts]  # else the host says whose it is
        if of_launch and re.fullmatch(rf"{re.escape(fleet)}(-d)?-\d+", report.claim):
            theirs.append(report.claim)
        if not theirs:
            if not report.hosts and not report.claim:
                _run(door, machine, scripts.remove(machine.root, ""))
            return
        for request_id in theirs:
            left = _run(door, machine, scripts.remove(machine.root, request_id)).answers.get("left", request_id)
    raise Troubled(machine.name, Trouble(f"something could not be removed: {left}", "remove it there"))


def _run(door: Door, machine: Machine, text: str) -> listing.Report:
    said = door.run(text)
    if said.status:
        raise Troubled(machine.name, trouble.of_output(said.status, said.err, machine.root))
    return listing.read(said.out)


def _split(machines: Sequence[Machine]) -> tuple[list[Machine], list[Machine]]:
    return ([m for m in machines if m.role is Role.DISPATCHER], [m for m in machines if m.role is Role.WORKER])


def _each(work: Callable[[Machine], None], machines: Sequence[Machine]) -> list[str]:
    """What `work` said of each machine that it could not do."""
    def attempt(machine: Machine) -> str:
        try:
            work(machine)
        except Troubled as error:
            return str(replace_name(error, machine.name))
        return ""

    if not machines:
        return []
    with ThreadPoolExecutor(min(AT_ONCE, len(machines)), "machines") as pool:
        return [line for line in pool.map(attempt, machines) if line]


def replace_name(error: Troubled, name: str) -> Troubled:
    """As an error of the machine `name`: it may be that of the one between."""
    if error.machine == name:
        return error
    return Troubled(name, replace(error.trouble, what=f"{error.machine}, on the way to it: {error.trouble.what}"))
