"""The configuration of a cloud's provider, parsed: what is the same for every cloud."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from spotfleet.codec import from_json
from spotfleet.model import EnvironmentSpec
from spotfleet.plugins import Sdk


@dataclass(frozen=True, kw_only=True)
class CloudSettings:
    """Base of a cloud's settings, which add the values of its section as `spec`."""

    environment: EnvironmentSpec = field(default_factory=EnvironmentSpec)
    placement: str = "spread"
    target: str = ""  # CheckpointSpec.target
    side: str = "laptop"  # or "dispatcher"
    endpoint_url: str = ""  # for every service; empty: the cloud's own
    public_key: str = ""
    secret: str = field(default="", repr=False)
    credentials: dict[str, str] = field(default_factory=dict, repr=False)  # {}: those of this machine
    beside: Sdk = field(default_factory=Sdk)  # SDKs of the fleet's other clouds, for its dispatcher

    @property
    def laptop(self) -> bool:
        return self.side == "laptop"

    def sdks(self, own: Sdk) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the extras and modules for the dispatcher, which calls every cloud of the fleet."""
        return (*own.extras, *self.beside.extras), (*own.modules, *self.beside.modules)


C = TypeVar("C", bound=CloudSettings)


def read_settings(kind: Callable[..., C], spec: object, config: Mapping[str, Any], environment: object,
                  unreadable: Callable[[Exception], Exception]) -> C:
    """Return the settings of a configuration; `environment` is its environment as JSON. Raises what `unreadable` makes
    of an invalid value."""
    try:
        wanted = from_json(EnvironmentSpec, environment or {})
    except (ValueError, TypeError, KeyError) as error:
        raise unreadable(error) from error
    return kind(spec, environment=wanted, placement=config.get("placement") or "spread",
                target=config.get("target", ""), side=config.get("side") or "laptop",
                endpoint_url=config.get("endpoint_url", ""), public_key=config.get("public_key", ""),
                secret=config.get("secret", ""), credentials=config.get("credentials") or {},
                beside=from_json(Sdk, config.get("beside") or {}))
