"""Provider `gcp`: fleets of Spot VMs on Google Cloud, with an on-demand dispatcher.

    session.py     clients, credentials, project, operations   describe.py    reads the listings; tags
    launch.py      one machine, one of several zones, a gang   terminate.py   end, interruption, restart
    offers.py      pools for a need, prices                    images.py      choice of the image; ready images
    network.py     network, subnet, firewall rules             resources.py   other resources of fleets; removal
    check.py       can a fleet be made here?                   plugin.py      the plugin
    spec.py        section `gcp` as values                     section.py     its keys and rules
    price_list.py  prices of all regions, for the catalog      base.py        contract of a base, from its bucket
    mapping/       between our terms and Google's, all pure:
        names.py       names, labels, codes                      errors.py      error code -> reaction, one table
        machine.py     bodies of launches                        listing.py     Google's answers -> hosts
        quotas.py      which quota counts a machine              roles.py       custom roles for `check --policy`
        cost_export.py the billing export of BigQuery

The parts that any cloud needs are in `providers/kit`. The lists of instances and of operations are the truth. This
process caches only what it can request again: clients, zones, prices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spotfleet.model import BillingRules, CloudHost, FleetSpec, Need, Offer, PricePoint, Rates
from spotfleet.providers import Finding, LaunchRequest, MachineImage, Resource
from spotfleet.providers.gcp.session import GcpAccount, account_of
from spotfleet.providers.gcp.spec import with_spec

if TYPE_CHECKING:
    from spotfleet.providers.kit.offers import RegionChoice


class GcpProvider:
    """Google Cloud provider: Provider, ManagedResources, CloudClock, GroupLaunch, MachineImages, RateSource and
    OfferValidation.

    Its only state is the access to Google Cloud.
    """

    name = "gcp"

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._config = dict(config or {})
        self.account: GcpAccount = account_of(self._config)

    def check(self) -> None:
        from spotfleet.providers.gcp import offers

        offers.check(self.account)

    def billing(self) -> BillingRules:
        """Return per-second billing, a minute at least. A run that is preempted in its first minute is free.

        Source: Compute Engine, "VM instance pricing" and "Spot VMs".
        """
        return BillingRules(minimum_s=60, free_if_taken_within_s=60)

    def rates(self, region: str) -> Rates:
        """Return the rates of the catalog; unknown ones stay unknown."""
        from spotfleet.catalog import load

        return load().rates("gcp", region)

    def cloud_time(self) -> float:
        return self.account.time()

    def offers(self, need: Need) -> list[Offer]:
        from spotfleet.providers.gcp import offers

        return offers.offers(self.account, need)

    def prices(self, pools: Sequence[str], since: float) -> list[PricePoint]:
        from spotfleet.providers.gcp import offers

        return offers.prices(self.account, pools, since)

    def launch(self, request: LaunchRequest) -> None:
        from spotfleet.providers.gcp import launch

        launch.launch(self.account, request)

    def launch_together(self, requests: Sequence[LaunchRequest]) -> None:
        from spotfleet.providers.gcp import launch

        launch.launch_together(self.account, requests)

    def hosts(self, fleet: str) -> list[CloudHost]:
        from spotfleet.providers.gcp import describe, terminate

        return describe.hosts(self.account, fleet, None if self.account.settings.laptop else terminate.start_preempted)

    def terminate(self, request_id: str) -> None:
        from spotfleet.providers.gcp.terminate import terminate

        terminate(self.account, request_id)

    def interrupt(self, request_id: str, notice_s: float | None) -> None:
        from spotfleet.providers.gcp.terminate import interrupt

        interrupt(self.account, request_id, notice_s)

    def tag(self, request_id: str, tags: dict[str, str]) -> None:
        from spotfleet.providers.gcp import describe

        describe.tag(self.account, request_id, tags)

    def boot_files(self, request_id: str) -> dict[str, str]:
        from spotfleet.providers.gcp import describe

        return describe.boot_files(self.account, request_id)

    def prepare(self, fleet: str, tags: Mapping[str, str], progress: Callable[[str], None]) -> None:
        from spotfleet.providers.gcp import images, network

        images.report(self.account, progress)
        network.prepare(self.account, fleet, progress)

    def images(self) -> list[MachineImage]:
        from spotfleet.providers.gcp import images

        return images.listed(self.account)

    def delete_image(self, image: MachineImage) -> None:
        from spotfleet.providers.gcp import images

        images.delete(self.account, image)

    def allow_ssh_from_here(self, fleet: str, progress: Callable[[str], None]) -> None:
        from spotfleet.providers.gcp import network

        network.allow_ssh_from_here(self.account, fleet, progress)

    def list_resources(self, fleet: str, everywhere: bool = False) -> list[Resource]:
        """List a fleet's resources; the lists of Google Cloud always have every region."""
        from spotfleet.providers.gcp import resources

        return resources.listed(self.account, fleet)

    def regions(self, everywhere: bool = False) -> list[str]:
        return list(self.account.all_regions() if everywhere else self.account.regions)

    def in_regions(self, regions: Sequence[str]) -> GcpProvider:
        return GcpProvider(with_spec(self._config, replace(self.account.settings.spec, regions=tuple(regions))))

    def resource_kinds(self) -> list[str]:
        from spotfleet.providers.gcp import resources

        return list(resources.KINDS)

    def delete_resource(self, resource: Resource) -> None:
        from spotfleet.providers.gcp import resources

        resources.delete(self.account, resource)

    def findings(self, spec: FleetSpec | None) -> Iterable[Finding]:
        from spotfleet.providers.gcp import check

        return check.findings(self.account, spec)

    def cheapest_region(self, any_of: Sequence[Need], dispatcher: Need, hosts: int = 1) -> RegionChoice:
        """Choose the region of the configuration for a new fleet of `hosts` hosts; see `offers`."""
        from spotfleet.providers.gcp import offers

        return offers.cheapest_region(self.account, any_of, dispatcher, hosts)

    def unknown(self, needs: Sequence[Need]) -> str:
        from spotfleet.providers.gcp import offers

        return offers.unknown(self.account, needs)

    def all_regions(self) -> tuple[str, ...]:
        """List the project's regions."""
        return self.account.all_regions()
