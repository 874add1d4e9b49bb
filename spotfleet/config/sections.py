"""The shape of the fleet file, section by section. A key that is not here is an error."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from spotfleet.config import values

NOT_OURS = {  # SkyPilot's and dstack's keys that we refuse, with what to do instead
    "cpus": "choose the size by `instance_type`", "memory": "choose the size by `instance_type`",
    "ordered": "use `any_of`; the cheapest that is available wins", "spot_policy": "use `use_spot`, or `any_of`",
    "job_recovery": "jobs always recover", "max_price": "use `max_hourly_cost`", "cluster_name": "use `name`",
    "max_duration": "use `max_lifetime`", "idle_duration": "use `autostop: {idle_minutes: ...}`",
    "env": "use `envs`", "labels": "use `tags`", "cloud": "use `provider`", "commands": "use `run`",
    "backends": "use `provider`", "regions": "use `any_of` with one `region` each",
}

Count = Annotated[int, BeforeValidator(values.count)]
Text = Annotated[str, BeforeValidator(values.text)]
Duration = Annotated[float, BeforeValidator(values.duration)]
Flag = Annotated[bool, BeforeValidator(values.flag)]
Price = Annotated[int, BeforeValidator(values.price)]
Variables = Annotated[dict[str, str | None], BeforeValidator(values.variables)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NodesSection(_Section):
    min: Count | None = None
    target: Count | None = None
    max: Count | None = None


class PlaceSection(_Section):
    """What the dispatcher's machine may be."""

    infra: Annotated[tuple[str, str, str], BeforeValidator(values.infra)] | None = None
    region: Text | None = None
    zone: Text | None = None
    instance_type: Text | None = None
    max_hourly_cost: Price | None = None


class AlternativeSection(PlaceSection):
    accelerators: Annotated[list[tuple[str, int]], BeforeValidator(values.accelerators)] | None = None
    use_spot: Flag | None = None


class AutostopSection(_Section):
    idle_minutes: Annotated[float, BeforeValidator(values.positive)] = 0.0
    down: Flag = True


class ResourcesSection(AlternativeSection):
    any_of: list[AlternativeSection] | None = Field(default=None, min_length=1)
    autostop: Annotated[AutostopSection, BeforeValidator(values.autostop)] | None = None


class CheckpointSection(_Section):
    interval: Duration = 60.0
    keep: Count = 2
    target: Annotated[str, BeforeValidator(values.target)] = ""


class ResizeSection(_Section):
    policy: Literal["none", "keep-global-batch", "scale-lr"] = "none"
    warmup_steps: Annotated[int, BeforeValidator(values.whole)] = 0
    growth: Annotated[tuple[tuple[int, int], ...], BeforeValidator(values.growth)] = ()
    max_join: Annotated[int, BeforeValidator(values.whole)] = 0
    max_leave: Annotated[int, BeforeValidator(values.whole)] = 0
    every: Duration = 0.0


class FileSection(_Section):
    name: Annotated[str, BeforeValidator(values.name)] | None = None
    workdir: Text = "."
    num_nodes: Count | None = None
    nodes: Annotated[NodesSection, BeforeValidator(values.nodes)] | None = None
    provider: Annotated[str, BeforeValidator(values.provider)] | None = None
    resources: ResourcesSection = Field(default_factory=ResourcesSection)
    interruption_behavior: Literal["terminate", "stop"] = "terminate"
    dispatcher: PlaceSection = Field(default_factory=PlaceSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    resize: ResizeSection = Field(default_factory=ResizeSection)
    autostop: Annotated[AutostopSection, BeforeValidator(values.autostop)] | None = None
    max_lifetime: Duration = 0.0
    orphan_after: Duration = 3600.0
    envs: Variables = Field(default_factory=dict)
    secrets: Variables = Field(default_factory=dict)
    file_mounts: Annotated[dict[str, str], BeforeValidator(values.mounts)] = Field(default_factory=dict)
    setup: Text = ""
    run: Text = ""
    tags: Annotated[dict[str, str], BeforeValidator(values.tags)] = Field(default_factory=dict)
