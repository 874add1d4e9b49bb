"""Rules of section `ssh`, and its effect on the rest of the file: machines that exist are on no market."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from spotfleet.model import Need, Nodes
from spotfleet.plugins import FileFacts, Note
from spotfleet.providers.ssh.section.schema import MachineSection, SshSection
from spotfleet.providers.ssh.section.spec import DISPATCHER_TYPE, WORKER_TYPE, SshMachine, SshSpec


def read(given: SshSection | None, facts: FileFacts, note: Note) -> SshSpec | None:
    """Convert the section to a spec, paths of the laptop's files absolute. None without the section.

    Notes every problem; with `facts.check_files`, also files that are missing or unusable.
    """
    if given is None:
        note(("ssh",), "is missing: it lists the machines, such as `ssh: {dispatcher: head, hosts: [node1, node2:8]}`")
        return None
    _refuse_cloud_keys(facts, note)
    if given.dispatcher is None:
        note(("ssh", "dispatcher"), "is missing: the machine that runs the dispatcher, and no workers; any small one "
                                    "that all others can reach")
    if not given.hosts and not given.discovery_script:
        note(("ssh", "hosts"), "lists no machine; write `hosts: [node1, node2:8]`, or name a `discovery_script` that "
                               "prints such lines")
    spec = SshSpec(
        dispatcher=_machine(given.dispatcher) if given.dispatcher else None,
        hosts=tuple(_machine(m) for m in given.hosts),
        user=given.user, port=given.port, identity_file=given.identity_file, known_hosts=given.known_hosts,
        discovery_script=given.discovery_script, discovery_timeout_s=given.discovery_timeout,
        slots=given.slots, folder=given.folder,
    )
    if spec.slots > 1 and not spec.discovery_script:
        note(("ssh", "slots"), "is for the hosts of a `discovery_script`; write them in the list: [node1:8, node2:8]")
    _refuse_duplicates(spec, note)
    return _with_paths(spec, facts, note)


def _machine(given: MachineSection) -> SshMachine:
    return SshMachine(given.host, given.slots, given.port, given.user, given.host_key, given.address,
                      given.accelerator, given.hourly_cost, given.folder)


def _refuse_cloud_keys(facts: FileFacts, note: Note) -> None:
    for key in facts.dispatcher_keys:
        note(("dispatcher", key), "means nothing for machines over SSH; name the machine under `ssh.dispatcher`")
    for place in facts.spot_at:
        note(place, "machines over SSH are on no spot market; remove this")
    if facts.interruption_behavior == "stop":
        note(("interruption_behavior",), "machines over SSH are never stopped; remove this")


def _refuse_duplicates(spec: SshSpec, note: Note) -> None:
    """Note machines listed twice: a machine runs one host, and the dispatcher's machine runs none."""
    seen: dict[tuple[str, int], str] = {}
    if spec.dispatcher is not None:
        seen[_identity(spec, spec.dispatcher)] = "runs the dispatcher, and so no workers; remove it here, or name " \
                                                 "another machine under `ssh.dispatcher`"
    for index, machine in enumerate(spec.hosts):
        found = _identity(spec, machine)
        if found in seen:
            note(("ssh", "hosts", index), f"{machine.host} {seen[found]}")
        seen.setdefault(found, "is in the list already; its workers are counted by its `slots`")


def _identity(spec: SshSpec, machine: SshMachine) -> tuple[str, int]:
    return machine.host.casefold(), machine.port or spec.port


def nodes(spec: SshSpec, asked: Nodes, facts: FileFacts, note: Note) -> Nodes:
    """Return `asked`; without a number in the file, all machines of the list. Notes impossible numbers."""
    listed = len(spec.hosts)
    if spec.discovery_script:
        if not facts.nodes_at:
            note(("nodes",), "is missing: write how many of the machines that the script finds shall work, such as "
                             "`nodes: 1..8`")
        return asked
    if not facts.nodes_at and listed:
        return Nodes(1, listed, listed)
    if facts.nodes_at and listed and asked.min > listed:
        note(facts.nodes_at, f"asks for {asked.min} hosts, but ssh.hosts lists {listed}; list more machines, or ask "
                             "for fewer")
    return asked


def workers(needs: tuple[Need, ...]) -> tuple[Need, ...]:
    """Return the needs for workers' machines, without spot: no market reclaims these machines."""
    return tuple(Need(n.region, n.zone, n.instance_type or WORKER_TYPE, n.accelerator, n.accelerator_count, False,
                      n.max_micros_h) for n in needs)


def dispatcher() -> Need:
    return Need(instance_type=DISPATCHER_TYPE, use_spot=False)


def _with_paths(spec: SshSpec, facts: FileFacts, note: Note) -> SshSpec:
    changed = {}
    for key in ("identity_file", "known_hosts", "discovery_script"):
        if (text := getattr(spec, key)) and facts.local is not None:
            changed[key] = str(facts.local(text))
            if facts.check_files and (problem := _file_problem(key, Path(changed[key]))):
                note(("ssh", key), problem)
    return replace(spec, **changed)


def _file_problem(key: str, path: Path) -> str:
    """Explain why the file of `key` cannot be used; "" if it can."""
    if not path.is_file():
        return f"expected a file, but there is none at {path}"
    if not os.access(path, os.R_OK):
        return f"{path} cannot be read by you; `chmod u+r {path}`"
    if key == "discovery_script" and not os.access(path, os.X_OK):
        return f"{path} is not executable; `chmod +x {path}`"
    if key == "identity_file" and path.suffix == ".pub":
        return f"{path} is the public half; name the private key, {path.with_suffix('')}"
    if key == "identity_file" and path.stat().st_mode & 0o077:
        return f"{path} can be read by others, and ssh refuses such keys; `chmod 600 {path}`"
    return ""
