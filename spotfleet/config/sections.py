"""Schema of the fleet file, section by section. An unlisted key is an error."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from spotfleet.config import machine_values, notifications, values
from spotfleet.model import NOTIFY_ON, RaySpec

NOT_OURS = {  # SkyPilot's and dstack's keys that we refuse, with what to do instead
    "max_budget": "use `max_cost`", "max_price": "use `max_hourly_cost`", "cluster_name": "use `name`",
    "max_duration": "use `max_lifetime`", "idle_duration": "use `autostop: {idle_minutes: ...}`",
    "env": "use `envs`", "labels": "use `tags`", "cloud": "use `resources.infra`", "commands": "use `run`",
    "backends": "use `provider`", "regions": "use `any_of` with one `region` each",
    "min_workers": "use `nodes: {min: ...}`", "max_workers": "use `nodes: {max: ...}`", "gpu": "use `accelerators`",
    "idle_timeout_minutes": "use `autostop: {idle_minutes: ...}`", "setup_commands": "use `setup`",
    "spot_recovery": "jobs always recover", "on": "use `notify: {events: [...]}`",
}

Count = Annotated[int, BeforeValidator(values.count)]
Text = Annotated[str, BeforeValidator(values.text)]
Duration = Annotated[float, BeforeValidator(values.duration)]
Deadline = Annotated[float, BeforeValidator(values.deadline)]
Flag = Annotated[bool, BeforeValidator(values.flag)]
Price = Annotated[int, BeforeValidator(values.price)]
Money = Annotated[int, BeforeValidator(values.money)]
MachineName = Annotated[str, BeforeValidator(machine_values.name)]
User = Annotated[str, BeforeValidator(machine_values.user)]
Port = Annotated[int, BeforeValidator(machine_values.port)]
Slots = Annotated[int, BeforeValidator(machine_values.slots)]
HostFolder = Annotated[str, BeforeValidator(machine_values.folder)]
Variables = Annotated[dict[str, str | None], BeforeValidator(values.variables)]


class Section(BaseModel):
    """Base of all sections, plugins' included: an unlisted key is an error."""

    model_config = ConfigDict(extra="forbid")


class NodesSection(Section):
    min: Annotated[int, BeforeValidator(values.whole)] | None = None
    target: Count | None = None
    max: Count | None = None
    idle_after: Duration = 300.0


class PlaceSection(Section):
    """Requirements for the dispatcher's machine."""

    infra: Annotated[tuple[str, str, str], BeforeValidator(values.infra)] | None = None
    region: Text | None = None
    zone: Text | None = None
    instance_type: Text | None = None
    cpus: Annotated[tuple[float, float], BeforeValidator(values.amount)] | None = None
    memory: Annotated[tuple[float, float], BeforeValidator(values.memory)] | None = None
    max_hourly_cost: Price | None = None


class AlternativeSection(PlaceSection):
    accelerators: Annotated[list[tuple[str, int]], BeforeValidator(values.accelerators)] | None = None
    use_spot: Flag | None = None
    disk_size: Annotated[int, BeforeValidator(values.disk_size)] | None = None
    image_id: Text | dict[str, str] | None = None
    network_tier: Literal["standard", "best"] | None = None


class AutostopSection(Section):
    idle_minutes: Annotated[float, BeforeValidator(values.positive)] = 0.0
    down: Flag = True


class ResourcesSection(AlternativeSection):
    any_of: list[AlternativeSection] | None = Field(default=None, min_length=1)
    in_order: Flag = False
    autostop: Annotated[AutostopSection, BeforeValidator(values.autostop)] | None = None


class GroupSection(AlternativeSection):
    nodes: Annotated[NodesSection, BeforeValidator(values.nodes)] | None = None
    any_of: list[AlternativeSection] | None = Field(default=None, min_length=1)
    in_order: Flag = False


class CheckpointSection(Section):
    interval: Duration = 60.0
    keep: Count = 2
    target: Annotated[str, BeforeValidator(values.target)] = ""


class ResizeSection(Section):
    policy: Literal["none", "keep-global-batch", "scale-lr"] = "none"
    warmup_steps: Annotated[int, BeforeValidator(values.whole)] = 0
    growth: Annotated[tuple[tuple[int, int], ...], BeforeValidator(values.growth)] = ()
    max_join: Annotated[int, BeforeValidator(values.whole)] = 0
    max_leave: Annotated[int, BeforeValidator(values.whole)] = 0
    every: Duration = 0.0


class EnvironmentSection(Section):
    python: Annotated[str, BeforeValidator(machine_values.python)] = "python3"
    packages: Annotated[tuple[str, ...], BeforeValidator(machine_values.packages)] = ()
    inherit: Flag = False
    index_url: Annotated[str, BeforeValidator(machine_values.index_url)] = ""
    installer: Literal["auto", "uv", "pip"] = "auto"


class ContainerSection(Section):
    image: Annotated[str, BeforeValidator(values.image)] = ""
    engine: Literal["auto", "docker", "podman", "runc"] = "auto"
    mounts: Annotated[tuple[str, ...], BeforeValidator(values.host_mounts)] = ()


class NotifySection(Section):
    webhook: Annotated[str, BeforeValidator(notifications.webhook)] = ""
    command: Text = ""
    events: Annotated[tuple[str, ...], BeforeValidator(notifications.chosen)] = NOTIFY_ON


class RaySection(Section):
    version: Annotated[str, BeforeValidator(values.ray_version)] = RaySpec.version
    object_store: Annotated[float, BeforeValidator(values.object_store)] = RaySpec.object_store
    port: Port = 0


class FileSection(Section):
    name: Annotated[str, BeforeValidator(values.name)] | None = None
    workdir: Text = "."
    num_nodes: Count | None = None
    nodes: Annotated[NodesSection, BeforeValidator(values.nodes)] | None = None
    provider: Annotated[str, BeforeValidator(values.providers)] | None = None
    resources: ResourcesSection = Field(default_factory=ResourcesSection)
    groups: dict[str, GroupSection] = Field(default_factory=dict)
    interruption_behavior: Literal["terminate", "stop"] = "terminate"
    dispatcher: PlaceSection = Field(default_factory=PlaceSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    resize: ResizeSection = Field(default_factory=ResizeSection)
    autostop: Annotated[AutostopSection, BeforeValidator(values.autostop)] | None = None
    max_lifetime: Duration = 0.0
    orphan_after: Annotated[float, BeforeValidator(values.orphan_after)] = 3600.0
    envs: Variables = Field(default_factory=dict)
    secrets: Variables = Field(default_factory=dict)
    file_mounts: Annotated[dict[str, str], BeforeValidator(values.mounts)] = Field(default_factory=dict)
    mounted: Annotated[dict[str, str], BeforeValidator(values.mounted)] = Field(default_factory=dict)
    setup: Text = ""
    setup_timeout: Duration = 1800.0
    run: Text = ""
    container: Annotated[ContainerSection, BeforeValidator(values.container)] | None = None
    ray: Annotated[RaySection, BeforeValidator(values.ray)] | None = None
    tags: Annotated[dict[str, str], BeforeValidator(values.tags)] = Field(default_factory=dict)
    placement: Literal["spread", "zone", "cluster"] = "spread"
    all_or_nothing: Flag = False
    environment: EnvironmentSection | None = None
    spot_policy: Literal["spot", "auto", "on-demand"] | None = None
    on_demand_base: Annotated[int, BeforeValidator(values.whole)] = 0
    deadline: Deadline = 0.0
    work: Annotated[tuple[float, int], BeforeValidator(values.work)] = (0.0, 0)
    notify: NotifySection | None = None
    max_cost: Money = 0
    max_hourly_cost: Price = 0
    replace_slow: Flag = False
