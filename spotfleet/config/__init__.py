"""Parser of the fleet file: YAML in; `FleetSpec` and secrets out, or all problems at once with their lines.

    name: digits                  # default: the file's name
    provider: local               # or resources.infra: PROVIDER/REGION/ZONE
    workdir: .                    # relative to this file; shipped by `train`
    nodes: {min: 2, target: 3}    # or N, or "2..3"; num_nodes: N is SkyPilot's word for N
    nodes: {min: 0, max: 4, idle_after: 5m}       # hosts come when a job needs them, and go when they are idle
    groups: {cpu: {nodes: 0..4}, gpu: {nodes: 0..2, accelerators: T4:1}}   # each on top of `resources`, below
    resources:
      accelerators: A10G:1        # or a list of them; instance_type, region, zone, use_spot, max_hourly_cost
      cpus: 8+                    # or 8, exactly; memory: 32+ (GiB), disk_size: 200, image_id: ami-...
      any_of: [{zone: a}, {use_spot: false}]      # alternatives, each on top of the lines above
      in_order: true              # the first of them that is available; else the cheapest that is
    dispatcher: {instance_type: t3.small}         # always on demand
    interruption_behavior: terminate              # or stop
    checkpoint: {interval: 60s, keep: 2, target: /mnt/shared}   # outlives its machine; or s3:// gs:// az://
    resize: {policy: scale-lr, warmup_steps: 100, growth: {0: 2, 30: 4}, max_join: 1, max_leave: 1, every: 60s}
    autostop: {idle_minutes: 10, down: true}
    max_lifetime: 12h
    orphan_after: 1h              # hosts without a dispatcher for this long end themselves; 20s or more, 0s: never
    envs: {EPOCHS: 3}             # no value: read from your environment
    secrets: {HF_TOKEN: }         # the same; kept apart from everything else
    file_mounts: {data: ../data, /more: s3://bucket/more} # name in the working directory, or path: file, folder, bucket
    setup: pip install -r requirements.txt        # once per host, before a job's first worker
    setup_timeout: 30m            # for one try; 0s: no limit
    run: python train.py          # run by `train` without a script
    ray: {version: "2.60.*"}      # machines get Ray, for `spotfleet ray start`; or true: docs/ray.md
    container: pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime  # jobs run in it; or {image, engine, mounts}
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
    replace_slow: true            # hosts of workers that are 30 % slower than the median for 50 steps
    notify: {webhook: $SLACK_WEBHOOK, events: [preempted, failed, succeeded, budget]}   # or a command

Keys have SkyPilot's names where it has one. Its other keys are put into our words first: `skypilot.py`. A base that
Terraform made sets some keys: `base.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from spotfleet import plugins
from spotfleet.config import base, foreign, groups, plugin_sections, skypilot, values
from spotfleet.config.document import EXPECTED, Document, Place, read
from spotfleet.config.money import policy_spec
from spotfleet.config.notifications import notify_spec, resolve
from spotfleet.config.sections import (
    NOT_OURS,
    AlternativeSection,
    AutostopSection,
    ContainerSection,
    EnvironmentSection,
    FileSection,
    PlaceSection,
)
from spotfleet.config.values import NAME
from spotfleet.errors import UsageError
from spotfleet.model import (
    Autostop,
    CheckpointSpec,
    ContainerSpec,
    EnvironmentSpec,
    FleetSpec,
    GroupSpec,
    Need,
    Nodes,
    RaySpec,
    ResizeSpec,
    all_nodes,
    is_ray,
)
from spotfleet.plugins import Base, SectionPlugin
from spotfleet.words import did_you_mean

CONTAINER = "docker:"  # in front of a container's image in `image_id`
PLACE = ("infra", "cloud", "region", "zone")  # keys that --infra replaces


@dataclass(frozen=True)
class FleetFile:
    """Contents of a checked fleet file."""

    spec: FleetSpec
    webhook: str = field(default="", repr=False, kw_only=True)  # URL of `notify`
    secrets: dict[str, str] = field(repr=False)
    notes: tuple[str, ...] = ()  # a line each about keys that change nothing
    before_up: tuple[str, ...] = ()  # what must be done before `up`: only a file that was read as a draft has any
    chosen: bool = False  # the provider is one of several that are possible, and the file names none


@dataclass(frozen=True)
class Given:
    """What a command line adds to a fleet file."""

    infra: str = ""  # PROVIDER[/REGION[/ZONE]], instead of the file's
    envs: Mapping[str, str] = field(default_factory=dict)  # over the file's
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    name: str = ""  # the fleet's name, instead of the file's
    resources: Mapping[str, Any] = field(default_factory=dict)  # over the file's, and over each alternative's
    num_nodes: int = 0  # instead of the file's `nodes` or `num_nodes`
    base: Base | None = None  # it sets what lasts longer than a run: `base.py`
    draft: bool = False  # for a plan: what is only missing before `up` is no problem yet


def load(path: Path, environ: Mapping[str, str] | None = None, given: Given = Given()) -> FleetFile:
    """Read and check a fleet file. UsageError lists every problem as `FILE:LINE: KEY: ...`."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        near = did_you_mean(path.name, sorted(p.name for p in path.parent.glob("*.y*ml")))
        raise UsageError(f"there is no file {path}{near}", hint="give the path of a fleet file (YAML)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="give the path of a fleet file (YAML text)") from None
    return parse(text, path, os.environ if environ is None else environ, check_files=True, given=given)


def parse(text: str, path: Path, environ: Mapping[str, str], *, check_files: bool = False,
          given: Given = Given()) -> FleetFile:
    """Check the text of a fleet file, as `load` does; relative paths in it start at the folder of `path`.

    With `check_files`, the named files must exist.
    """
    document = read(text, path)
    if program := foreign.kind_of(document.data):
        raise UsageError(f"{path} is a file of {program}, not a fleet file",
                         hint=f"`spotfleet convert {path} > fleet.yaml` makes one, and lists what it leaves out")
    if given.name:
        document.data["name"] = given.name
    _put_over(document.data, given)
    if given.base is not None:
        base.merge(document, given.base)
    chosen = _with_infra(document, given.infra)
    if chosen and not given.draft:
        document.add((), no_provider(plugin_sections.clouds()))
    skypilot.adapt(document, _texts(document, environ, given), plugins.names)
    section = _check(document)
    if section is None:
        document.raise_problems()
        raise AssertionError("a section is missing, yet no problem was found")
    spec = _spec(document, section, {**environ, **given.envs}, lambda text: _local(path, text),
                 check_files=check_files)
    plain = {k: v for k, v in given.envs.items() if k not in section.secrets and k not in given.secrets}
    of_base = given.base.tags if given.base is not None else {}
    spec = replace(spec, envs={**spec.envs, **plain}, tags={**spec.tags, **of_base})
    secrets = _resolve_values(document, "secrets", section.secrets, {**environ, **given.envs, **given.secrets})
    secrets |= given.secrets
    for name in sorted(section.secrets.keys() & section.envs.keys()):
        document.add(("secrets", name), "is also under envs; keep it here only")
    webhook = resolve(document, section.notify, environ)
    spec = replace(spec, notify=notify_spec(section.notify, webhook))
    workdir = _local(path, spec.workdir)
    if check_files and not workdir.is_dir():
        document.later(("workdir",), f"expected a folder, but there is none at {workdir}")
    mounts = {name: source if "://" in source else _local(path, source) for name, source in spec.file_mounts.items()}
    for name, source in ((n, s) for n, s in mounts.items() if isinstance(s, Path)):
        if check_files and not source.exists():
            document.later(("file_mounts", name), f"expected a file or folder, but there is none at {source}")
    document.before_up.sort(key=lambda p: p.line)
    if not given.draft:
        document.problems += document.before_up
    document.raise_problems()
    found = {name: str(source) for name, source in mounts.items()}
    return FleetFile(replace(spec, workdir=str(workdir), file_mounts=found), secrets, tuple(document.notes),
                     tuple(f"{path}:{p}" for p in document.before_up), chosen, webhook=webhook)


def _put_over(data: dict[str, Any], given: Given) -> None:
    """Put the sizes of the command line over those of the file."""
    if given.num_nodes:
        data.pop("nodes", None)
        data["num_nodes"] = given.num_nodes
    resources = data.get("resources") or {}
    if not given.resources or not isinstance(resources, dict):
        return
    replaced = {*given.resources} | ({"gpus"} if "accelerators" in given.resources else set())
    data["resources"] = {k: v for k, v in resources.items() if k not in replaced} | dict(given.resources)
    for key in ("any_of", "ordered"):
        if isinstance(some := resources.get(key), list):
            data["resources"][key] = [{k: v for k, v in one.items() if k not in replaced} if isinstance(one, dict)
                                      else one for one in some]


def _with_infra(document: Document, infra: str) -> bool:
    """Put a provider into a file that names none and needs real machines, or the one of the command line into any.
    Return whether it was our choice."""
    data = document.data
    resources = data.get("resources")
    if infra:
        rest = resources if isinstance(resources, dict) else {}
        data["resources"] = {**{k: v for k, v in rest.items() if k not in PLACE}, "infra": infra}
        for key in ("any_of", "ordered"):
            if isinstance(rest.get(key), list):
                data["resources"][key] = [{k: v for k, v in one.items() if k not in PLACE}
                                          if isinstance(one, dict) else one for one in rest[key]]
        for name, group in data["groups"].items() if isinstance(data.get("groups"), dict) else ():
            data["groups"][name] = {k: v for k, v in group.items() if k not in PLACE} if isinstance(group, dict) \
                else group
        data.pop("provider", None)
        return False
    asked = [resources, *(one for key in ("any_of", "ordered") for one in (resources.get(key) or ()))] \
        if isinstance(resources, dict) else []
    named = any(isinstance(one, dict) and (one.get("infra") or one.get("cloud")) for one in asked)
    if data.get("provider") or named or not skypilot.is_task(data) or not (clouds := plugin_sections.clouds()):
        return False
    data["provider"] = clouds[0]
    return True


def no_provider(clouds: Sequence[str]) -> str:
    """Return the problem of a file that names none of the clouds that it may be for."""
    there = " or ".join(f"`infra: {name}`" for name in clouds)
    return (f"names no provider; write {there} under `resources`, or `--infra {clouds[0]}` on the command line "
            f"({FleetSpec('').provider} only emulates a cloud on this machine)")


def _texts(document: Document, environ: Mapping[str, str], given: Given) -> dict[str, str]:
    """Return the variables that texts of the file may name: no secrets, as records hold those texts."""
    found: dict[str, str] = {}
    held = document.data.get("envs")
    for name, value in held.items() if isinstance(held, dict) else ():
        value = environ.get(str(name)) if value is None else value
        found |= {} if value is None else {str(name): str(value)}
    secret = document.data.get("secrets")
    hidden = {*given.secrets, *(secret if isinstance(secret, dict) else ())}
    return {name: value for name, value in {**found, **given.envs}.items() if name not in hidden}


def _local(file: Path, text: str) -> Path:
    """Resolve a path of the fleet file; relative ones start at its folder. One that is not there, and is in the
    current directory, is that one: SkyPilot's start there."""
    found = (file.parent / Path(text).expanduser()).resolve()
    here = Path(text).resolve()
    return here if not found.exists() and here.exists() else found


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
    if word == "on":  # as in a workflow of GitHub
        return f"unknown key; {NOT_OURS[word]}"
    if near := _near_key(word, known):
        return f"unknown key; did you mean '{near}'?"
    here = _dotted(place[:-1])
    if other := next((path for path, keys in _sections_by_place() if word in keys and path != here), ""):
        return f"unknown key; it belongs under `{other}`"
    if word in NOT_OURS:
        return f"unknown key; {NOT_OURS[word]}"
    if any(word in keys for path, keys in _sections_by_place() if path == ""):
        return "unknown key; it belongs to the top of the file"
    return f"unknown key{EXPECTED}{', '.join(known)}"


NEAR = 0.76  # difflib's ratio of a mistyped key; "task" and "tags" have 0.75


def _near_key(word: str, known: Sequence[str]) -> str:
    """Return the key that `word` most likely means; "" if none is near enough: a wrong guess is worse than none."""
    parts = set(word.split("_"))
    longer = [key for key in known if parts < set(key.split("_"))]  # mounts: file_mounts
    return next(iter(get_close_matches(word, known, 1, NEAR) or longer), "")


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
    name = _name(document, file)
    parts = groups.split(document, file, name)
    found = tuple(GroupSpec(group, _nodes(document, part, ("groups", group) if group else ()),
                            _needs(part, several=len(clouds) > 1)) for group, part in parts.items())
    named = found if file.groups else ()
    nodes = all_nodes(g.nodes for g in named) if named else found[0].nodes
    needs = tuple(dict.fromkeys(need for group in found for need in group.any_of))
    groups.refuse_existing(document, file, provider, plugins.load(provider).traits)
    facts = plugin_sections.facts(file, needs, local, check_files=check_files)
    ray = RaySpec(**file.ray.model_dump()) if file.ray is not None else None
    spec = FleetSpec(
        name=name,
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
        file_mounts=file.file_mounts, mounted=file.mounted,
        setup=file.setup, setup_timeout_s=file.setup_timeout,
        run=file.run,
        container=_container(document, file),
        tags=file.tags,
        environment=_environment(file.environment, ray),
        placement=_placement(file, nodes, plugins.load(provider).traits),
        all_or_nothing=file.all_or_nothing,
        section=plugin_sections.read(document, file, provider, facts),
        policy=policy_spec(document, file, provider, nodes, needs),
        ray=ray,
        groups=named,
    )
    plugin: SectionPlugin = plugins.load(provider)
    _note_resources(document, file, provider, plugin.traits)
    return plugin.adjusted(spec, facts, document.add)


def _note_resources(document: Document, file: FileSection, provider: str, traits: plugins.Traits) -> None:
    """Note keys of `resources` that the provider's machines do not follow."""
    resources, image = file.resources, file.resources.image_id
    if isinstance(image, dict) or (image and image.startswith("skypilot:")):
        document.note("`image_id`: an image of SkyPilot, or one for each region, is not used; hosts get the provider's "
                      "usual image")
    elif image and not image.startswith(CONTAINER) and "image_id" not in traits.takes:
        document.note(f"`image_id` changes nothing with provider {provider}")
    if resources.disk_size and "disk_size" not in traits.takes:
        document.note(f"`disk_size` changes nothing with provider {provider}")
    for index, one in enumerate(resources.any_of or []):
        if one.disk_size or one.image_id or one.network_tier:
            document.add(("resources", "any_of", index), "disk_size, image_id and network_tier are of the whole fleet; "
                                                         "write them above `any_of`")
    if any(one.cpus or one.memory for one in (resources, *(resources.any_of or []))) and \
            traits.machines is not plugins.Machines.MADE:
        document.note(f"`cpus` and `memory` change nothing with provider {provider}: its machines are as they are")


def _container(document: Document, file: FileSection) -> ContainerSpec:
    """Return the jobs' container: that of `container`, or of SkyPilot's `image_id: docker:IMAGE`."""
    asked, given = file.resources.image_id, file.container or ContainerSection()
    named, at = given.image, ("container", "image")
    if isinstance(asked, str) and asked.startswith(CONTAINER):
        at = ("resources", "image_id")
        if named:
            document.add(at, "container.image means the same; keep one of them")
        try:
            named = values.image(asked)
        except ValueError as error:
            document.add(at, str(error))
    elif file.container is not None and not named:
        document.add(("container",), "names no image; write `image: pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime`")
    if named.startswith("/") and given.engine not in ("auto", "runc"):
        document.add(at, f"is a folder, and engine {given.engine} takes images of a registry; write `engine: runc`")
    elif named and not named.startswith("/") and given.engine == "runc":
        document.add(at, "engine runc takes the absolute path of a folder that holds a root file system; for an image "
                         "of a registry write `engine: auto`")
    return ContainerSpec(named, given.engine, given.mounts)


def _placement(file: FileSection, nodes: Nodes, traits: plugins.Traits) -> str:
    """Return the placement; several hosts with `network_tier: best` belong close together."""
    best = file.resources.network_tier == "best" and nodes.max > 1 and traits.placement
    return "cluster" if best and "placement" not in file.model_fields_set else file.placement


def _environment(given: EnvironmentSection | None, ray: RaySpec | None) -> EnvironmentSpec:
    """Return the environment of the machines. A fleet with `ray` has that among its packages, unless the file names it
    there."""
    given = given or EnvironmentSection()
    packages = given.packages
    if ray is not None and not any(map(is_ray, packages)):
        packages = (*packages, f"ray=={ray.version}")
    return EnvironmentSpec(given.python, packages, given.inherit, given.index_url, given.installer)


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
    others += [(("groups", name, "infra"), group.infra) for name, group in file.groups.items()]
    for other, named in others:
        if named and named[0] and named[0] not in chosen.split(plugins.JOINED):
            document.add(other, f"names provider '{named[0]}', but the fleet's is '{chosen}'; for a fleet on several "
                                f"clouds write `provider: [{chosen.replace(plugins.JOINED, ', ')}, {named[0]}]`")
    return chosen


def _nodes(document: Document, file: FileSection, group: Place = ()) -> Nodes:
    """Return the range of a file, or of its group at `group`."""
    if file.nodes is None:
        return Nodes(file.num_nodes or 1, file.num_nodes or 1, file.num_nodes or 1)
    if file.num_nodes is not None:
        document.add(("num_nodes",), "nodes means the same; keep one of them")
    given = file.nodes
    target = given.target or given.max or given.min or 1
    nodes = Nodes(1 if given.min is None else given.min, target, given.max or target, given.idle_after)
    if nodes.min > nodes.target:
        document.add((*group, "nodes", "min"), f"expected 0 <= min <= target <= max, but min {nodes.min} is above "
                                               f"{'target' if given.target else 'max'} {nodes.target}")
    if nodes.target > nodes.max:
        document.add((*group, "nodes", "target"), f"expected 0 <= min <= target <= max, but target {nodes.target} is "
                                                  f"above max {nodes.max}")
    return nodes


def _dispatcher(file: FileSection, clouds: Sequence[str]) -> Need:
    """Return the need of the dispatcher; of several clouds it is on the first, or on the one that the file names."""
    need = _need(PlaceSection(), file.dispatcher, use_spot=False, several=len(clouds) > 1)
    return replace(need, provider=need.provider or clouds[0]) if len(clouds) > 1 else need


def _needs(file: FileSection, *, several: bool) -> tuple[Need, ...]:
    """Return every alternative: `any_of` on top of the common lines, times the accelerators of each."""
    found: list[Need] = []
    for place, alternative in enumerate(file.resources.any_of or [AlternativeSection()]):
        use_spot = next((v for v in (alternative.use_spot, file.resources.use_spot) if v is not None), True)
        base = _need(file.resources, alternative, use_spot=use_spot, several=several)
        for name, count in alternative.accelerators or file.resources.accelerators or [("", 0)]:
            need = replace(base, accelerator=name, accelerator_count=count)
            known = need in (replace(other, turn=0) for other in found)
            found += [] if known else [replace(need, turn=place if file.resources.in_order else 0)]
    return tuple(found)


def _need(base: PlaceSection, over: PlaceSection, *, use_spot: bool, several: bool) -> Need:
    infra = over.infra or base.infra or ("", "", "")
    cpus, memory = over.cpus or base.cpus or (0.0, 0.0), over.memory or base.memory or (0.0, 0.0)
    return Need(
        region=over.region or infra[1] or base.region or "",
        zone=over.zone or infra[2] or base.zone or "",
        instance_type=over.instance_type or base.instance_type or "",
        use_spot=use_spot,
        max_micros_h=over.max_hourly_cost or base.max_hourly_cost or 0,
        min_vcpus=cpus[0], max_vcpus=cpus[1], min_memory_gib=memory[0], max_memory_gib=memory[1],
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
            document.later((section, name), f"has no value here and none in your environment; `export {name}=...`")
        else:
            found[name] = held
    return found
