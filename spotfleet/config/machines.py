"""The meaning of sections `ssh` and `environment`: machines that exist, and the Python that they get."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from spotfleet.config.document import Document, Place
from spotfleet.config.sections import EnvironmentSection, FileSection, MachineSection
from spotfleet.model import EnvironmentSpec, Need, Nodes, SshMachine, SshSpec

DISPATCHER, WORKER = "dispatcher", "machine"  # instance types of what provider ssh offers: a machine's one use


def ssh_spec(document: Document, file: FileSection, provider: str) -> SshSpec | None:
    """The section as a spec, paths as they are written; None where the fleet has none. Notes every problem."""
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
    _refuse_what_clouds_have(document, file)
    if given.dispatcher is None:
        document.add(("ssh", "dispatcher"), "is missing: the machine that bears the dispatcher, and no workers; any "
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
    _refuse_twins(document, spec)
    return spec


def _machine(given: MachineSection) -> SshMachine:
    return SshMachine(given.host, given.slots, given.port, given.user, given.host_key, given.address,
                      given.accelerator, given.hourly_cost, given.folder)


def _refuse_what_clouds_have(document: Document, file: FileSection) -> None:
    for key in file.dispatcher.model_fields_set:
        document.add(("dispatcher", key), "means nothing for machines over SSH; name the machine under "
                                          "`ssh.dispatcher`")
    asked = [(("resources", "use_spot"), file.resources.use_spot)]
    asked += [(("resources", "any_of", i, "use_spot"), a.use_spot) for i, a in enumerate(file.resources.any_of or [])]
    for place, use_spot in asked:
        if use_spot:
            document.add(place, "machines over SSH are on no spot market; remove this")
    if file.interruption_behavior == "stop":
        document.add(("interruption_behavior",), "machines over SSH are never stopped; remove this")


def _refuse_twins(document: Document, spec: SshSpec) -> None:
    """One machine has one host on it, and the dispatcher's has none."""
    seen: dict[tuple[str, int], str] = {}
    if spec.dispatcher is not None:
        seen[_identity(spec, spec.dispatcher)] = "bears the dispatcher, and so no workers; remove it here, or name " \
                                                 "another machine under `ssh.dispatcher`"
    for index, machine in enumerate(spec.hosts):
        found = _identity(spec, machine)
        if found in seen:
            document.add(("ssh", "hosts", index), f"{machine.host} {seen[found]}")
        seen.setdefault(found, "is in the list already; its workers are counted by its `slots`")


def _identity(spec: SshSpec, machine: SshMachine) -> tuple[str, int]:
    return machine.host.casefold(), machine.port or spec.port


def ssh_nodes(document: Document, file: FileSection, nodes: Nodes) -> Nodes:
    """`nodes`, which are all machines of the list where the file does not say how many. Notes what cannot be."""
    given = file.ssh
    said = file.nodes is not None or file.num_nodes is not None
    if given is None:
        return nodes
    listed = len(given.hosts)
    if given.discovery_script:
        if not said:
            document.add(("nodes",), "is missing: say how many of the machines that the script finds shall work, such "
                                     "as `nodes: 1..8`")
        return nodes
    if not said and listed:
        return Nodes(1, listed, listed)
    if said and listed and nodes.min > listed:
        document.add(("nodes", "min") if file.nodes is not None else ("num_nodes",),
                     f"asks for {nodes.min} hosts, but ssh.hosts lists {listed}; list more machines, or ask for fewer")
    return nodes


def ssh_needs(needs: tuple[Need, ...]) -> tuple[Need, ...]:
    """The same, of machines for workers: nobody takes them away, as a spot market would."""
    return tuple(Need(n.region, n.zone, n.instance_type or WORKER, n.accelerator, n.accelerator_count, False,
                      n.max_micros_h) for n in needs)


def ssh_dispatcher() -> Need:
    return Need(instance_type=DISPATCHER, use_spot=False)


def environment_spec(document: Document, given: EnvironmentSection | None, provider: str) -> EnvironmentSpec:
    if given is None:
        return EnvironmentSpec()
    if provider == "local":
        document.add(("environment",), "means nothing for provider local, whose hosts use the Python that runs "
                                       "spotfleet; remove it")
    return EnvironmentSpec(given.python, given.packages, given.inherit, given.index_url, given.installer)


def ssh_paths(document: Document, spec: SshSpec, local: Callable[[str], Path], *, look: bool) -> SshSpec:
    """`spec` with absolute paths of what lies on this machine. `look`: must it be there, and of use?"""
    changed = {}
    for key in ("identity_file", "known_hosts", "discovery_script"):
        text = getattr(spec, key)
        if text:
            changed[key] = str(local(text))
            if look and (trouble := _trouble(key, Path(changed[key]))):
                place: Place = ("ssh", key)
                document.add(place, trouble)
    return SshSpec(**{**spec.__dict__, **changed})


def _trouble(key: str, path: Path) -> str:
    """Why that file cannot be used; "" if it can."""
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
