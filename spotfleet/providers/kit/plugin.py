"""Plugin of a cloud with regions: its section lists candidates under `regions`, and a new fleet stays in one of them.

Imports neither an SDK nor pydantic when it is loaded: an agent loads the plugin for the notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from spotfleet.model import FleetSpec, Need
from spotfleet.providers import Provider
from spotfleet.providers.plugin import BasePlugin, Config, RegionRow

if TYPE_CHECKING:
    from spotfleet.providers.kit.offers import RegionChoice


@runtime_checkable
class HasRegions(Protocol):
    """Extra methods of a provider whose plugin is a `RegionalPlugin`."""

    def cheapest_region(self, any_of: Sequence[Need], dispatcher: Need, hosts: int = 1) -> RegionChoice:
        """Choose the region of the configuration for a new fleet; see `kit/offers.py`."""

    def all_regions(self) -> tuple[str, ...]:
        """List the regions that are enabled for the account."""


class RegionalPlugin(BasePlugin):
    """Base of such plugins. A cloud whose networks or images belong to a region overrides `in_region`."""

    scored = "its capacity is scored"  # words before a region's score, if the cloud has scores

    def regions_in(self, config: Config) -> tuple[str, ...]:
        """Return the regions of a configuration; () if it names none."""
        return tuple((config.get("section") or {}).get("regions") or ())

    def usual_regions(self) -> tuple[str, ...]:
        """Return the candidates of a fleet that names no region, as far as they are known without an account; () for
        all."""
        return ()

    def with_regions(self, config: Config, regions: Sequence[str]) -> Config:
        return {**config, "section": {**(config.get("section") or {}), "regions": list(regions)}}

    def in_region(self, config: Config, region: str) -> Config:
        """Return the configuration for a fleet that stays in `region`."""
        return self.with_regions(config, [region])

    def region_of(self, zone: str) -> str:
        """Return the region of a zone; "" if its name holds none."""
        return ""

    def settle(self, provider: Provider, config: Config, spec: FleetSpec, hosts: int,
               region: str) -> tuple[Config, tuple[RegionRow, ...]]:
        from spotfleet.providers.kit.offers import in_turn, region_rows

        if region:
            return self.in_region(config, region), ()
        assert isinstance(provider, HasRegions)
        choice = in_turn(spec.any_of, lambda needs: provider.cheapest_region(needs, spec.dispatcher, hosts))
        return self.in_region(config, choice.region), region_rows(choice, self.scored)

    def moved(self, config: Config, spec: FleetSpec) -> Config:
        """Return the configuration with the present file's settings. The region stays."""
        return self.with_regions(super().moved(config, spec), self.regions_in(config))

    def region(self, config: Config) -> str:
        regions = self.regions_in(config)
        return regions[0] if len(regions) == 1 else ""

    def everywhere(self, provider: Provider, config: Config) -> Config:
        if self.regions_in(config):
            return config
        assert isinstance(provider, HasRegions)
        return self.with_regions(config, provider.all_regions())

    def narrowed(self, config: Config, need: Need) -> Config:
        region = need.region or self.region_of(need.zone)
        return self.with_regions(config, [region] if region else [])
