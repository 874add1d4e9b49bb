"""Sections of the fleet file that belong to plugins: each plugin's under its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, create_model

from spotfleet import plugins
from spotfleet.config.document import Document
from spotfleet.config.sections import FileSection
from spotfleet.errors import UsageError
from spotfleet.model import Need
from spotfleet.plugins import FileFacts, Machines, NamedPlace, SectionPlugin

OURS = ("skypilot:", "docker:")  # images that are no machine's: another program's tags, and containers


def of_every_plugin() -> type[FileSection]:
    """Return the schema of the file with the sections of all plugins: it explains unknown keys. A plugin that cannot be
    loaded is left out: it must not hide the file's own problems."""
    return _with_sections(tuple(_loadable()))


def _loadable() -> list[str]:
    found = []
    for name in plugins.names():
        with suppress(UsageError):
            plugins.load(name)
            found.append(name)
    return found


def clouds() -> list[str]:
    """List the plugins that make machines in a cloud, sorted: the choice of a file for real machines."""
    return [name for name in _loadable() if plugins.load(name).traits.machines is Machines.MADE]


def schema_for(data: Mapping[str, Any]) -> type[FileSection]:
    """Return the schema of a file with these keys: only the plugins of its sections are loaded.
    UsageError for one that cannot be."""
    return _with_sections(tuple(name for name in plugins.names() if name in data))


@cache
def _with_sections(names: tuple[str, ...]) -> type[FileSection]:
    found: dict[str, Any] = {}
    for name in names:
        plugin: SectionPlugin = plugins.load(name)
        if name not in FileSection.model_fields and (section := plugin.section()) is not None:
            found[name] = (section | None, None)
    return create_model("FileSection", __base__=FileSection, **found) if found else FileSection


def given(file: FileSection, name: str) -> BaseModel | None:
    """Return the section of plugin `name` in the file; None if there is none."""
    return None if name in FileSection.model_fields else getattr(file, name, None)


def read(document: Document, file: FileSection, provider: str, facts: FileFacts) -> dict[str, Any]:
    """Return the section of the fleet's provider, as its plugin reads it. Notes every problem, also sections and keys
    that only other providers have."""
    plugin: SectionPlugin = plugins.load(provider)
    clouds = provider.split(plugins.JOINED)
    for name in plugins.names():
        if name not in clouds and given(file, name) is not None:
            document.add((name,), f"is for provider {name}, but the fleet's is '{provider}'; write "
                                  f"`provider: {name}`, or remove the section")
    if not plugin.traits.placement:
        _refuse_placement(document, file, provider)
    if file.environment is not None and plugin.traits.machines is Machines.HERE:
        document.add(("environment",), f"means nothing for provider {provider}, whose hosts use the Python that runs "
                                       "spotfleet; remove it")
    own: Any = given(file, provider) if len(clouds) == 1 else {name: given(file, name) for name in clouds}
    return dict(plugin.read_section(own, facts, document.add))


def _refuse_placement(document: Document, file: FileSection, provider: str) -> None:
    for key, is_set in (("placement", file.placement != "spread"), ("all_or_nothing", file.all_or_nothing)):
        if is_set:
            able = [name for name in _loadable() if plugins.load(name).traits.placement]
            document.add((key,), f"is for provider {' or '.join(able)}, but the fleet's is '{provider}'; write "
                                 f"`provider: {able[0]}`, or remove this")


def facts(file: FileSection, needs: Sequence[Need], local: Callable[[str], Path], *, check_files: bool) -> FileFacts:
    """Return what a plugin may check besides its section. `local` resolves a path of the file."""
    sections = [(("resources",), file.resources), (("dispatcher",), file.dispatcher),
                *((("resources", "any_of", i), a) for i, a in enumerate(file.resources.any_of or [])),
                *((("groups", name), group) for name, group in file.groups.items()),
                *((("groups", name, "any_of", i), a) for name, group in file.groups.items()
                  for i, a in enumerate(group.any_of or []))]
    places = tuple(NamedPlace(at, *((one.infra[1], one.infra[2]) if one.infra else (one.region or "", one.zone or "")),
                              one.infra[0] if one.infra else "") for at, one in sections)
    markets = [(("resources", "use_spot"), file.resources.use_spot),
               *((("resources", "any_of", i, "use_spot"), a.use_spot)
                 for i, a in enumerate(file.resources.any_of or [])),
               *((("groups", name, "use_spot"), group.use_spot) for name, group in file.groups.items())]
    image = file.resources.image_id
    nodes_at = ("nodes", "min") if file.nodes is not None else ("num_nodes",) if file.num_nodes is not None else ()
    return FileFacts(
        tuple(needs), places, file.interruption_behavior, file.placement, file.all_or_nothing, file.max_lifetime,
        file.tags, nodes_at, tuple(file.dispatcher.model_fields_set), tuple(at for at, use_spot in markets if use_spot),
        file.resources.disk_size or 0, image if isinstance(image, str) and not image.startswith(OURS) else "",
        local, check_files)
