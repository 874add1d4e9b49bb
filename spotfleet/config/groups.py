"""Reader of `groups`: each group of hosts is read like a fleet file of its own."""

from __future__ import annotations

import re

from spotfleet import plugins
from spotfleet.config.document import Document
from spotfleet.config.sections import AlternativeSection, FileSection, GroupSection, ResourcesSection
from spotfleet.model import DISPATCHERS, GROUP_NAME
from spotfleet.plugins import Machines

LONGEST = 40  # characters of FLEET-GROUP, as of a fleet's name: clouds limit the names of machines
WHOLE_FLEET = ("disk_size", "image_id", "network_tier")


def split(document: Document, file: FileSection, fleet: str) -> dict[str, FileSection]:
    """Return each group's name, and the file as if it were of that group alone; {"": file} without groups. Notes
    problems of the names, and keys that do not go together with groups."""
    if not file.groups:
        if "groups" in file.model_fields_set:
            document.add(("groups",), "names no group; write `cpu: {nodes: 0..4}`, or remove it")
        return {"": file}
    for key, asked in (("nodes", file.nodes), ("num_nodes", file.num_nodes)):
        if asked is not None:
            document.add((key,), "stands in each group of `groups`; remove it here")
    if file.on_demand_base:
        document.add(("on_demand_base",), "does not go together with `groups`; write `use_spot: false` in a group "
                                          "whose hosts are to be on demand")
    for name, group in file.groups.items():
        _check(document, name, group)
        if len(fleet) + len(name) >= LONGEST:
            document.add(("groups", name), f"is too long beside the fleet's name '{fleet}': hosts have names of both, "
                                           f"at most {LONGEST - 1} characters together")
    return {name: _alone(file, group) for name, group in file.groups.items()}


def refuse_existing(document: Document, file: FileSection, provider: str, traits: plugins.Traits) -> None:
    """Note groups of machines that exist before the fleet: nothing tells yet which of them belongs to which group."""
    if file.groups and traits.machines is Machines.EXISTING:
        document.add(("groups",), f"are of machines that are launched, and those of {provider} exist; make a fleet for "
                                  "each kind of machine")


def _check(document: Document, name: str, group: GroupSection) -> None:
    at = ("groups", name)
    if not re.fullmatch(GROUP_NAME, name) or name == DISPATCHERS:
        document.add(at, "expected a name of small letters and digits, a letter first, at most 12, not "
                         f"'{DISPATCHERS}', got '{name}'")
    if group.nodes is None:
        document.add(at, "names no range; add `nodes: 0..4`")
    for one, place in ((group, at), *((a, (*at, "any_of", i)) for i, a in enumerate(group.any_of or []))):
        for key in WHOLE_FLEET:
            if getattr(one, key):
                document.add((*place, key), "is of the whole fleet; write it under `resources`")


def _alone(file: FileSection, group: GroupSection) -> FileSection:
    """Return the file with the group's range, and its resources on top of the file's."""
    over = {key: value for key in AlternativeSection.model_fields
            if key not in WHOLE_FLEET and (value := getattr(group, key)) is not None}
    if group.any_of is not None:
        over |= {"any_of": group.any_of, "in_order": group.in_order}
    resources: ResourcesSection = file.resources.model_copy(update=over)
    return file.model_copy(update={"nodes": group.nodes, "num_nodes": None, "resources": resources})
