"""Parser of sections `ssh` and `environment`: existing machines, and their Python."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from spotfleet.config.document import Document, Place
from spotfleet.config.sections import EnvironmentSection, FileSection, MachineSection
from spotfleet.model import DISPATCHER_TYPE, WORKER_TYPE, EnvironmentSpec, Need, Nodes, SshMachine, SshSpec


def ssh_spec(document: Document, file: FileSection, provider: str) -> SshSpec | None:
    """Convert the section to a spec, paths as written; None for another provider. Notes every problem."""
    given = file.ssh
    if provider != "ssh":
        if given is not None:
            document.add(("ssh",), f"is for provider ssh, but the fleet's is '{provider}'; write `provider: ssh`, "
                                   "or remove the section")
        return None
    if given is None:
        document.add(("ssh",), "is missing: it lists the machines, such as "
                               "`ssh: {dispatcher: head, hosts: [node1, node2:8]}`")
        return None
    _refuse_cloud_keys(document, file)
    if given.dispatcher is None:
        document.add(("ssh", "dispatcher"), "is missing: the machine that runs the dispatcher, and no workers; any "
                                            "small one that all others can reach")
    if not given.hosts and not given.discovery_script:
        document.add(("ssh", "hosts"), "lists no machine; write `hosts: [node1, node2:8]`, or name a "
                                       "`discovery_script` that prints such lines")
    spec = SshSpec(
        dispatcher=_machine(given.dispatcher) if given.dispatcher else None,
        hosts=tuple(_machine(m) for m in given.hosts),
        user=given.user, port=given.port, identity_file=given.identity_file, known_hosts=given.known_hosts,
        discovery_script=given.discovery_script, discovery_timeout_s=given.discovery_timeout, folder=given.folder,
    )
    _refuse_duplicates(document, spec)
    return spec


def _machine(given: MachineSection) -> SshMachine:
    return SshMachine(given.host, given.slots, given.port, given.user, given.host_key, given.address,
                      given.accelerator, given.hourly_cost, given.folder)


def _refuse_cloud_keys(document: Document, file: FileSection) -> None:
    for key in file.dispatcher.model_fields_set:
        document.add(("dispatcher", key), "means nothing for machines over SSH; name the machine under "
                                          "`ssh.dispatcher`")
    markets = [(("resources", "use_spot"), file.resources.use_spot)]
    markets += [(("resources", "any_of", i, "use_spot"), a.use_spot) for i, a in enumerate(file.resources.any_of or [])]
    for place, use_spot in markets:
        if use_spot:
            document.add(place, "machines over SSH are on no spot market; remove this")
    if file.interruption_behavior == "stop":
        document.add(("interruption_behavior",), "machines over SSH are never stopped; remove this")


def _refuse_duplicates(document: Document, spec: SshSpec) -> None:
    """Note machines listed twice: a machine runs one host, and the dispatcher's machine runs none."""
    seen: dict[tuple[str, int], str] = {}
    if spec.dispatcher is not None:
        seen[_identity(spec, spec.dispatcher)] = "runs the dispatcher, and so no workers; remove it here, or name " \
                                                 "another machine under `ssh.dispatcher`"
    for index, machine in enumerate(spec.hosts):
        found = _identity(spec, machine)
        if found in seen:
            document.add(("ssh", "hosts", index), f"{machine.host} {seen[found]}")
        seen.setdefault(found, "is in the list already; its workers are counted by its `slots`")


def _identity(spec: SshSpec, machine: SshMachine) -> tuple[str, int]:
    return machine.host.casefold(), machine.port or spec.port


def ssh_nodes(document: Document, file: FileSection, nodes: Nodes) -> Nodes:
    """Return `nodes`; without a number in the file, all machines of the list. Notes impossible numbers."""
    given = file.ssh
    is_given = file.nodes is not None or file.num_nodes is not None
    if given is None:
        return nodes
    listed = len(given.hosts)
    if given.discovery_script:
        if not is_given:
            document.add(("nodes",), "is missing: write how many of the machines that the script finds shall work, "
                                     "such as `nodes: 1..8`")
        return nodes
    if not is_given and listed:
        return Nodes(1, listed, listed)
    if is_given and listed and nodes.min > listed:
        document.add(("nodes", "min") if file.nodes is not None else ("num_nodes",),
                     f"asks for {nodes.min} hosts, but ssh.hosts lists {listed}; list more machines, or ask for fewer")
    return nodes


def ssh_needs(needs: tuple[Need, ...]) -> tuple[Need, ...]:
    """Return the needs for workers' machines, without spot: no market reclaims these machines."""
    return tuple(Need(n.region, n.zone, n.instance_type or WORKER_TYPE, n.accelerator, n.accelerator_count, False,
                      n.max_micros_h) for n in needs)


def ssh_dispatcher() -> Need:
    return Need(instance_type=DISPATCHER_TYPE, use_spot=False)


def environment_spec(given: EnvironmentSection | None) -> EnvironmentSpec:
    if given is None:
        return EnvironmentSpec()
    return EnvironmentSpec(given.python, given.packages, given.inherit, given.index_url, given.installer)


def ssh_paths(document: Document, spec: SshSpec, local: Callable[[str], Path], *, check_files: bool) -> SshSpec:
    """Return `spec` with absolute paths of the laptop's files.

    With `check_files`, notes those that are missing or unusable.
    """
    changed = {}
    for key in ("identity_file", "known_hosts", "discovery_script"):
        text = getattr(spec, key)
        if text:
            changed[key] = str(local(text))
            if check_files and (problem := _file_problem(key, Path(changed[key]))):
                place: Place = ("ssh", key)
                document.add(place, problem)
    return SshSpec(**{**spec.__dict__, **changed})


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
