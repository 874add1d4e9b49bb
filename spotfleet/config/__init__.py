"""Parser of the fleet file: YAML in; `FleetSpec` and secrets out, or all problems at once with their lines.

    name: digits                  # default: the file's name
    provider: local               # or resources.infra: PROVIDER/REGION/ZONE
    workdir: .                    # relative to this file; shipped by `train`
    nodes: {min: 2, target: 3}    # or N, or "2..3"; num_nodes: N is SkyPilot's word for N
    resources:
      accelerators: A10G:1        # or a list of them; instance_type, region, zone, use_spot, max_hourly_cost
      any_of: [{zone: a}, {use_spot: false}]      # alternatives, each on top of the lines above
    dispatcher: {instance_type: t3.small}         # always on demand
    interruption_behavior: terminate              # or stop
    checkpoint: {interval: 60s, keep: 2, target: /mnt/shared}   # outlives its machine; or s3:// gs:// az://
    resize: {policy: scale-lr, warmup_steps: 100, growth: {0: 2, 30: 4}, max_join: 1, max_leave: 1, every: 60s}
    autostop: {idle_minutes: 10, down: true}
    max_lifetime: 12h
    orphan_after: 1h              # hosts without a dispatcher for this long end themselves; 20s or more, 0s: never
    envs: {EPOCHS: 3}             # no value: read from your environment
    secrets: {HF_TOKEN: }         # the same; kept apart from everything else
    file_mounts: {data: ../data, more: s3://bucket/more}  # name in the working directory: file, folder or bucket
    setup: pip install -r requirements.txt        # once per host, before a job's first worker
    setup_timeout: 30m            # for one try; 0s: no limit
    run: python train.py          # run by `train` without a script
    tags: {team: vision}
    provider: ssh                 # existing machines; with sections `ssh` and `environment`: docs/machines.md
    ssh: {dispatcher: head, hosts: [node1, "node2:8"], user: ubuntu, identity_file: ~/.ssh/id_ed25519}
    environment: {python: /usr/bin/python3.11, packages: [torch==2.13.0]}
    provider: aws                 # with sections `aws` (every key has a default) and `environment`
    aws: {regions: [us-east-1, us-west-2], profile: research, disk: 200}   # uses the cheapest region
    provider: [NAME, aws]         # several clouds; `infra: NAME` under `any_of` and `dispatcher` names one of them
    placement: cluster            # over pools (spread), in one zone (zone), or there in a placement group
    all_or_nothing: true          # at its first launch, all hosts at once in one pool, or none
    spot_policy: auto             # on-demand hosts fill in for spot ones; or spot, on-demand: docs/policy.md
    on_demand_base: 1             # number of hosts of the target that are always on demand
    deadline: 60h                 # of each job, from its submission: adds on-demand hosts as needed
    work: 48h                     # of each job, at full target; or "100000 steps"
    max_cost: 250                 # dollars, whole fleet: it shuts down cleanly before that is spent
    max_hourly_cost: 4.5          # dollars, whole fleet
    notify: {webhook: $SLACK_WEBHOOK, events: [preempted, failed, succeeded, budget]}   # or a command

Keys have SkyPilot's names where it has one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from spotfleet import plugins
from spotfleet.config import plugin_sections
from spotfleet.config.document import EXPECTED, Document, Place, read
from spotfleet.config.money import policy_spec
from spotfleet.config.notifications import notify_spec, resolve
from spotfleet.config.sections import (
    NOT_OURS,
    AlternativeSection,
    AutostopSection,
    EnvironmentSection,
    FileSection,
    PlaceSection,
)
from spotfleet.config.values import NAME
from spotfleet.errors import UsageError
from spotfleet.model import Autostop, CheckpointSpec, EnvironmentSpec, FleetSpec, Need, Nodes, ResizeSpec
from spotfleet.plugins import SectionPlugin
from spotfleet.words import did_you_mean


@dataclass(frozen=True)
class FleetFile:
    """Contents of a checked fleet file."""

    spec: FleetSpec
    webhook: str = field(default="", repr=False, kw_only=True)  # URL of `notify`
    secrets: dict[str, str] = field(repr=False)


def load(path: Path, environ: Mapping[str, str] | None = None) -> FleetFile:
    """Read and check a fleet file. UsageError lists every problem as `FILE:LINE: KEY: ...`."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        near = did_you_mean(path.name, sorted(p.name for p in path.parent.glob("*.y*ml")))
        raise UsageError(f"there is no file {path}{near}", hint="give the path of a fleet file (YAML)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="give the path of a fleet file (YAML text)") from None
    return parse(text, path, os.environ if environ is None else environ, check_files=True)


def parse(text: str, path: Path, environ: Mapping[str, str], *, check_files: bool = False) -> FleetFile:
    """Check the text of a fleet file, as `load` does; relative paths in it start at the folder of `path`.

    With `check_files`, the named files must exist.
    """
    document = read(text, path)
    section = _check(document)
    if section is None:
        document.raise_problems()
        raise AssertionError("a section is missing, yet no problem was found")
    spec = _spec(document, section, environ, lambda text: _local(path, text), check_files=check_files)
    secrets = _resolve_values(document, "secrets", section.secrets, environ)
    for name in sorted(section.secrets.keys() & section.envs.keys()):
        document.add(("secrets", name), "is also under envs; keep it here only")
    webhook = resolve(document, section.notify, environ)
    spec = replace(spec, notify=notify_spec(section.notify, webhook))
    workdir = _local(path, spec.workdir)
    if check_files and not workdir.is_dir():
        document.add(("workdir",), f"expected a folder, but there is none at {workdir}")
    mounts = {name: source if "://" in source else _local(path, source) for name, source in spec.file_mounts.items()}
    for name, source in ((n, s) for n, s in mounts.items() if isinstance(s, Path)):
        if check_files and not source.exists():
            document.add(("file_mounts", name), f"expected a file or folder, but there is none at {source}")
    document.raise_problems()
    mounted = {name: str(source) for name, source in mounts.items()}
    return FleetFile(replace(spec, workdir=str(workdir), file_mounts=mounted), secrets, webhook=webhook)


def _local(file: Path, text: str) -> Path:
    """Resolve a path of the fleet file; relative ones start at its folder."""
    return (file.parent / Path(text).expanduser()).resolve()


# --- the schema: pydantic's problems as messages to users


def _check(document: Document) -> FileSection | None:
    try:
        given = {k: v for k, v in document.data.items() if v is not None}
        return plugin_sections.schema_for(given).model_validate(given)
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            document.add(*_explain(document, problem))
    return None


def _explain(document: Document, problem: dict[str, Any]) -> tuple[Place, str]:
    place: Place = tuple(problem["loc"])
    known = place
    while known and known not in document.lines:  # a section built from a short form, such as nodes: 2..1
        known = known[:-1]
    match problem["type"]:
        case "extra_forbidden":
            return place, _unknown_key(place)
        case "literal_error":
            words, given = re.findall(r"'([^']*)'", problem["ctx"]["expected"]), problem["input"]
            return place, f"expected {' or '.join(words)}, got {given!r}{did_you_mean(given, words)}"
        case "value_error":
            return known, str(problem["ctx"]["error"])
        case "model_type" | "model_attributes_type" | "dict_type":
            return place, f"expected `key: value` lines{_keys_hint(place)}"
        case "list_type":
            return place, "expected a list"
        case "too_short":
            return place, "expected at least one alternative"
        case _:
            return place, problem["msg"]


def _unknown_key(place: Place) -> str:
    if place == ("dispatcher", "use_spot"):
        return "the dispatcher is always on demand; remove this"
    word, section = str(place[-1]), _section(place[:-1])
    known = list(section.model_fields) if section else []
    if near := did_you_mean(word, known):
        return "unknown key" + near
    here = _dotted(place[:-1])
    if other := next((path for path, keys in _sections_by_place() if word in keys and path != here), ""):
        return f"unknown key; it belongs under `{other}`"
    if word in NOT_OURS:
        return f"unknown key; {NOT_OURS[word]}"
    if any(word in keys for path, keys in _sections_by_place() if path == ""):
        return "unknown key; it belongs to the top of the file"
    return f"unknown key{EXPECTED}{', '.join(known)}"


def _keys_hint(place: Place) -> str:
    section = _section(place)
    return f" with {', '.join(section.model_fields)}" if section else ""


def _section(place: Place) -> type[BaseModel] | None:
    """Return the section class at `place`, through optionals, annotations and lists."""
    section: type[BaseModel] = plugin_sections.of_every_plugin()
    by_name = False  # the next part is a name chosen by the user
    for part in place:
        if isinstance(part, int) or by_name:
            by_name = False
            continue
        held = section.model_fields.get(part)
        inner = next(_sections_in(held.annotation), None) if held else None
        if held is None or inner is None:
            return None
        section, by_name = inner, get_origin(held.annotation) is dict
    return None if by_name else section


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_in(argument)


def _sections_by_place() -> Iterator[tuple[str, list[str]]]:
    """Yield (dotted place, its keys) for every section, the top last."""
    top = plugin_sections.of_every_plugin()
    for name, held in top.model_fields.items():
        for section in _sections_in(held.annotation):
            yield name, list(section.model_fields)
    yield "", list(top.model_fields)


def _dotted(place: Place) -> str:
    return ".".join(str(p) for p in place if not isinstance(p, int))


# --- the spec: rules that involve several keys


def _spec(document: Document, file: FileSection, environ: Mapping[str, str], local: Callable[[str], Path], *,
          check_files: bool) -> FleetSpec:
    provider = _provider(document, file)
    clouds = provider.split(plugins.JOINED)
    nodes, needs = _nodes(document, file), _needs(file, several=len(clouds) > 1)
    facts = plugin_sections.facts(file, needs, local, check_files=check_files)
    spec = FleetSpec(
        name=_name(document, file),
        provider=provider,
        any_of=needs,
        nodes=nodes,
        interruption_behavior=file.interruption_behavior,
        dispatcher=_dispatcher(file, clouds),
        checkpoint=CheckpointSpec(file.checkpoint.interval, file.checkpoint.keep, file.checkpoint.target),
        resize=_resize(document, file),
        autostop=_autostop(file.autostop or file.resources.autostop),
        max_lifetime_s=file.max_lifetime,
        orphan_after_s=file.orphan_after,
        workdir=file.workdir,
        envs=_resolve_values(document, "envs", file.envs, environ),
        file_mounts=file.file_mounts,
        setup=file.setup, setup_timeout_s=file.setup_timeout,
        run=file.run,
        tags=file.tags,
        environment=_environment(file.environment),
        placement=file.placement,
        all_or_nothing=file.all_or_nothing,
        section=plugin_sections.read(document, file, provider, facts),
        policy=policy_spec(document, file, provider, nodes, needs),
    )
    plugin: SectionPlugin = plugins.load(provider)
    return plugin.adjusted(spec, facts, document.add)


def _environment(given: EnvironmentSection | None) -> EnvironmentSpec:
    if given is None:
        return EnvironmentSpec()
    return EnvironmentSpec(given.python, given.packages, given.inherit, given.index_url, given.installer)


def _name(document: Document, file: FileSection) -> str:
    if file.name:
        return file.name
    stem = re.sub(r"[^a-z0-9-]+", "-", Path(document.file).stem.lower()).strip("-")
    if not NAME.fullmatch(stem):
        document.add((), f"name: is missing, and '{Path(document.file).stem}' makes none; write `name: my-fleet`")
    return stem


def _provider(document: Document, file: FileSection) -> str:
    infra = file.resources.infra[0] if file.resources.infra else ""
    chosen = file.provider or infra or "local"
    others = [(("resources", "infra"), file.resources.infra), (("dispatcher", "infra"), file.dispatcher.infra)]
    others += [(("resources", "any_of", i, "infra"), a.infra) for i, a in enumerate(file.resources.any_of or [])]
    for other, named in others:
        if named and named[0] and named[0] not in chosen.split(plugins.JOINED):
            document.add(other, f"names provider '{named[0]}', but the fleet's is '{chosen}'; for a fleet on several "
                                f"clouds write `provider: [{chosen.replace(plugins.JOINED, ', ')}, {named[0]}]`")
    return chosen


def _nodes(document: Document, file: FileSection) -> Nodes:
    if file.nodes is None:
        return Nodes(file.num_nodes or 1, file.num_nodes or 1, file.num_nodes or 1)
    if file.num_nodes is not None:
        document.add(("num_nodes",), "nodes means the same; keep one of them")
    given = file.nodes
    target = given.target or given.max or given.min or 1
    nodes = Nodes(given.min or 1, target, given.max or target)
    if nodes.min > nodes.target:
        document.add(("nodes", "min"), f"expected 1 <= min <= target <= max, but min {nodes.min} is above "
                                       f"{'target' if given.target else 'max'} {nodes.target}")
    if nodes.target > nodes.max:
        document.add(("nodes", "target"), f"expected 1 <= min <= target <= max, but target {nodes.target} is above "
                                          f"max {nodes.max}")
    return nodes


def _dispatcher(file: FileSection, clouds: Sequence[str]) -> Need:
    """Return the need of the dispatcher; of several clouds it is on the first, or on the one that the file names."""
    need = _need(PlaceSection(), file.dispatcher, use_spot=False, several=len(clouds) > 1)
    return replace(need, provider=need.provider or clouds[0]) if len(clouds) > 1 else need


def _needs(file: FileSection, *, several: bool) -> tuple[Need, ...]:
    """Return every alternative: `any_of` on top of the common lines, times the accelerators of each."""
    found: list[Need] = []
    for alternative in file.resources.any_of or [AlternativeSection()]:
        use_spot = next((v for v in (alternative.use_spot, file.resources.use_spot) if v is not None), True)
        base = _need(file.resources, alternative, use_spot=use_spot, several=several)
        for name, count in alternative.accelerators or file.resources.accelerators or [("", 0)]:
            need = replace(base, accelerator=name, accelerator_count=count)
            found += [] if need in found else [need]
    return tuple(found)


def _need(base: PlaceSection, over: PlaceSection, *, use_spot: bool, several: bool) -> Need:
    infra = over.infra or base.infra or ("", "", "")
    return Need(
        region=over.region or infra[1] or base.region or "",
        zone=over.zone or infra[2] or base.zone or "",
        instance_type=over.instance_type or base.instance_type or "",
        use_spot=use_spot,
        max_micros_h=over.max_hourly_cost or base.max_hourly_cost or 0,
        provider=infra[0] if several else "",
    )


def _autostop(section: AutostopSection | None) -> Autostop:
    return Autostop(section.idle_minutes * 60, section.down) if section else Autostop()


def _resize(document: Document, file: FileSection) -> ResizeSpec:
    given = file.resize
    if given.warmup_steps and given.policy != "scale-lr":
        document.add(("resize", "warmup_steps"),
                     "is the way of policy scale-lr; write `policy: scale-lr`, or remove it")
    return ResizeSpec(given.policy, given.warmup_steps, given.growth, given.max_join, given.max_leave, given.every)


def _resolve_values(document: Document, section: str, values: Mapping[str, str | None], environ: Mapping[str, str],
                    ) -> dict[str, str]:
    """Return the values; an empty one is read from the environment."""
    found = {}
    for name, value in values.items():
        held = environ.get(name) if value is None else value
        if held is None:
            document.add((section, name), f"has no value here and none in your environment; `export {name}=...`")
        else:
            found[name] = held
    return found
