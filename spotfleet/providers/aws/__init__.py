"""Provider `aws`: EC2 spot fleets with an on-demand dispatcher.

    session.py     clients per region, retries, credentials    types.py      facts about instance types
    prices.py      spot and on-demand prices                   offers.py     pools for a need
    plugin.py      the plugin; what the core may ask before it opens the provider
    section/       section `aws` of the fleet file, and the configuration
    price_list.py  prices of all regions, for the catalog      images.py     choice of the machine image; ready images
    launch.py      fleet, persistent request, on demand, gang  terminate.py  cancel before terminate; interruption
    describe.py    reads the listings; tags                    base.py       a base: Terraform's data, its contract
    mapping/       between our terms and EC2's, all pure:
        names.py         tags and names                        errors.py     error code -> reaction, one table
        template.py      launch template and calls             listing.py    EC2's answers -> hosts
        policies.py      IAM policies of the user, the dispatcher and its hosts
    account/       what a fleet needs besides machines:
        network.py       VPC, subnets, groups, placement groups
        ssh_ingress.py   SSH access to the dispatcher          identity.py   roles and profiles
        resources.py     other resources with our tag; removal
        queue.py         EventBridge -> SQS                    event_parser.py  its events about machines (pure)
        check.py         can a fleet be made here?             permissions.py   does the caller have them?
        disk_key.py      a customer's key of the disks         bucket.py        the bucket for checkpoints
        quotas.py        vCPU quotas, their use, and whether they suffice for a fleet

The parts that any cloud needs are in `providers/kit`. EC2's listing by tag is the truth. This process caches only what
it can request again: clients, facts about types, prices for minutes. Methods import what they need, so that a caller of
names or the policy imports nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spotfleet.model import BillingRules, CloudHost, FleetSpec, Need, Offer, PricePoint, Rates
from spotfleet.providers import CloudEvent, Finding, LaunchRequest, MachineImage, Resource
from spotfleet.providers.aws.section.spec import with_spec
from spotfleet.providers.aws.session import Account, account_of

if TYPE_CHECKING:
    from spotfleet.providers.kit.offers import RegionChoice


class AwsProvider:
    """AWS provider: Provider, ManagedResources, CloudClock, GroupLaunch, InterruptionEvents, MachineImages and
    OfferValidation.

    Its only state is the access to AWS.
    """

    name = "aws"

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._config = dict(config or {})
        self.account: Account = account_of(self._config)

    def check(self) -> None:
        from spotfleet.providers.aws import offers

        offers.check(self.account)

    def billing(self) -> BillingRules:
        """Return per-second billing, a minute at least. A run that EC2 interrupts in its first hour is free.

        Source: EC2 User Guide, "Billing for interrupted Spot Instances" (Linux other than SUSE).
        """
        return BillingRules(minimum_s=60, free_if_taken_within_s=3600)

    def rates(self, region: str) -> Rates:
        """Return the rates of the catalog; unknown ones stay unknown."""
        from spotfleet.catalog import load

        return load().rates("aws", region)

    def cloud_time(self) -> float:
        return self.account.time()

    def offers(self, need: Need) -> list[Offer]:
        from spotfleet.providers.aws import offers

        return offers.offers(self.account, need)

    def prices(self, pools: Sequence[str], since: float) -> list[PricePoint]:
        from spotfleet.providers.aws import prices

        return prices.prices(self.account, pools, since)

    def launch(self, request: LaunchRequest) -> None:
        from spotfleet.providers.aws import launch

        launch.launch(self.account, request)

    def launch_together(self, requests: Sequence[LaunchRequest]) -> None:
        from spotfleet.providers.aws import launch

        launch.launch_together(self.account, requests)

    def hosts(self, fleet: str) -> list[CloudHost]:
        from spotfleet.providers.aws import describe, launch

        return describe.hosts(self.account, fleet, None if self.account.settings.laptop else launch.place_untagged)

    def terminate(self, request_id: str) -> None:
        from spotfleet.providers.aws.terminate import terminate

        terminate(self.account, request_id)

    def interrupt(self, request_id: str, notice_s: float | None) -> None:
        from spotfleet.providers.aws.terminate import interrupt

        interrupt(self.account, request_id, notice_s)

    def tag(self, request_id: str, tags: dict[str, str]) -> None:
        from spotfleet.providers.aws import describe

        describe.tag(self.account, request_id, tags)

    def boot_files(self, request_id: str) -> dict[str, str]:
        from spotfleet.providers.aws import describe

        return describe.boot_files(self.account, request_id)

    def prepare(self, fleet: str, tags: Mapping[str, str], progress: Callable[[str], None]) -> None:
        from spotfleet.providers.aws import images
        from spotfleet.providers.aws.account import identity, network, queue, ssh_ingress

        images.report(self.account, progress)
        network.prepare(self.account, fleet, tags, progress)
        ssh_ingress.refresh(self.account, fleet, progress, tags)
        identity.prepare(self.account, fleet, tags, progress)
        queue.prepare(self.account, fleet, tags, progress)

    def images(self) -> list[MachineImage]:
        from spotfleet.providers.aws import images

        return images.listed(self.account)

    def delete_image(self, image: MachineImage) -> None:
        from spotfleet.providers.aws import images

        images.delete(self.account, image)

    def allow_ssh_from_here(self, fleet: str, progress: Callable[[str], None]) -> None:
        from spotfleet.providers.aws.account import ssh_ingress

        ssh_ingress.refresh(self.account, fleet, progress)

    def has_events(self) -> bool:
        spec = self.account.settings.spec
        return spec.event_queue or bool(spec.interruption_queue)

    def poll_events(self, fleet: str, wait_s: float) -> list[CloudEvent]:
        from spotfleet.providers.aws.account import queue

        return queue.receive(self.account, fleet, wait_s)

    def list_resources(self, fleet: str, everywhere: bool = False) -> list[Resource]:
        from spotfleet.providers.aws.account import resources

        return resources.listed(self.account, fleet, everywhere)

    def regions(self, everywhere: bool = False) -> list[str]:
        return list(self.account.all_regions() if everywhere else self.account.regions)

    def in_regions(self, regions: Sequence[str]) -> AwsProvider:
        return AwsProvider(with_spec(self._config, replace(self.account.settings.spec, regions=tuple(regions))))

    def resource_kinds(self) -> list[str]:
        from spotfleet.providers.aws.account import resources

        return list(resources.KINDS)

    def delete_resource(self, resource: Resource) -> None:
        from spotfleet.providers.aws.account import resources

        resources.delete(self.account, resource)

    def findings(self, spec: FleetSpec | None) -> Iterable[Finding]:
        from spotfleet.providers.aws.account import check

        return check.findings(self.account, spec)

    def cheapest_region(self, any_of: Sequence[Need], dispatcher: Need, hosts: int = 1) -> RegionChoice:
        """Choose the region of the configuration for a new fleet of `hosts` hosts; see `offers`."""
        from spotfleet.providers.aws import offers

        return offers.cheapest_region(self.account, any_of, dispatcher, hosts)

    def unknown(self, needs: Sequence[Need]) -> str:
        from spotfleet.providers.aws import types

        return types.unknown(self.account, needs)

    def all_regions(self) -> tuple[str, ...]:
        """List the regions that are enabled for the account."""
        return self.account.all_regions()
