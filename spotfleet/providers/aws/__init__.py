"""Provider `aws`: EC2 spot fleets with an on-demand dispatcher.

    names.py     tags and names (pure)                     session.py    clients per region, retries, credentials
    errors.py    error code -> reaction, one table (pure)  catalog.py    what instance types are
    prices.py    spot and on-demand prices                 offers.py     pools of a need
    template.py  what EC2 is told of a host (pure)         launch.py     fleet, persistent request, on demand, gang
    images.py    which image a machine starts from         userdata.py   what a machine is told, and was told
    listing.py   what EC2 says of hosts (pure)             look.py       asks for it; tags
    ending.py    cancel before terminate
    network.py   VPC, subnets, groups, placement groups    door.py       who may enter the dispatcher over SSH
    identity.py  roles and profiles                        policy.py     what each may do (pure)
    belongings.py  what else bears our tag; its removal
    check.py     may a fleet be made here?                 rights.py     may whoever asks do what policy.py lists?
    quotas.py    vCPU quotas and what is used of them      room.py       do they hold a fleet?
    queue.py     EventBridge -> SQS                        signals.py    what it says of machines (pure)

The truth is what EC2 lists by tag. Nothing is remembered here but what may be asked for again: clients, facts of
types, prices for minutes. Methods import what they need: who wants a name or the policy alone pays for no more.

Configuration, all text: `aws` (AwsSpec as JSON; of a fleet that is made, `regions` are settled), `environment`
(EnvironmentSpec as JSON), `placement`, `target` (CheckpointSpec.target), `side` ("laptop" or "dispatcher"),
`endpoint_url` (of AWS_ENDPOINT_URL on the laptop; every machine of the fleet takes the same), `public_key` and `secret`
of the fleet, for those who launch or enter its machines. Each may be missing; others are ignored here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from spotfleet.codec import to_json
from spotfleet.model import BillingRules, CloudHost, FleetSpec, Need, Offer, PricePoint, Rates
from spotfleet.providers import Belonging, Finding, Heard, LaunchRequest
from spotfleet.providers.aws.session import Account, account_of

if TYPE_CHECKING:
    from spotfleet.providers.aws.offers import Choice


class AwsProvider:
    """Provider, Furnished, Gangs, Hears and Sells. Holds nothing but how AWS is reached."""

    name = "aws"

    def __init__(self, config: dict[str, str] | None = None) -> None:
        self._config = dict(config or {})
        self.account: Account = account_of(self._config)

    def check(self) -> None:
        from spotfleet.providers.aws import offers

        offers.check(self.account)

    def billing(self) -> BillingRules:
        """Per second, a minute at least; an instance that EC2 takes is billed for what it ran."""
        return BillingRules(minimum_s=60, free_if_taken_within_s=0)

    def rates(self, region: str) -> Rates:
        """From the catalog; what it does not know is unknown, and nothing is made up."""
        from spotfleet.catalog import load

        return load().rates("aws", region)

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
        from spotfleet.providers.aws import look

        return look.hosts(self.account, fleet)

    def terminate(self, request_id: str) -> None:
        from spotfleet.providers.aws import ending

        ending.terminate(self.account, request_id)

    def interrupt(self, request_id: str, notice_s: float | None) -> None:
        from spotfleet.providers.aws import ending

        ending.interrupt(self.account, request_id, notice_s)

    def tag(self, request_id: str, tags: dict[str, str]) -> None:
        from spotfleet.providers.aws import look

        look.tag(self.account, request_id, tags)

    def boot_files(self, request_id: str) -> dict[str, str]:
        from spotfleet.providers.aws import look

        return look.boot_files(self.account, request_id)

    def prepare(self, fleet: str, tags: Mapping[str, str], tell: Callable[[str], None]) -> None:
        from spotfleet.providers.aws import door, identity, network, queue

        network.prepare(self.account, fleet, tags, tell)
        door.refresh(self.account, fleet, tell, tags)
        identity.prepare(self.account, fleet, tags, tell)
        queue.prepare(self.account, fleet, tags, tell)

    def open_door(self, fleet: str, tell: Callable[[str], None]) -> None:
        from spotfleet.providers.aws import door

        door.refresh(self.account, fleet, tell)

    def hears(self) -> bool:
        return self.account.settings.spec.event_queue

    def hear(self, fleet: str, wait_s: float) -> list[Heard]:
        from spotfleet.providers.aws import queue

        return queue.hear(self.account, fleet, wait_s)

    def belongings(self, fleet: str, everywhere: bool = False) -> list[Belonging]:
        from spotfleet.providers.aws import belongings

        return belongings.listed(self.account, fleet, everywhere)

    def regions(self, everywhere: bool = False) -> list[str]:
        return list(self.account.everywhere() if everywhere else self.account.regions)

    def within(self, regions: Sequence[str]) -> AwsProvider:
        return AwsProvider({**self._config, "aws": json.dumps(to_json(
            replace(self.account.settings.spec, regions=tuple(regions))))})

    def kinds(self) -> list[str]:
        from spotfleet.providers.aws import belongings

        return list(belongings.KINDS)

    def discard(self, belonging: Belonging) -> None:
        from spotfleet.providers.aws import belongings

        belongings.discard(self.account, belonging)

    def findings(self, spec: FleetSpec | None) -> Iterable[Finding]:
        from spotfleet.providers.aws import check

        return check.findings(self.account, spec)

    def cheapest_region(self, any_of: Sequence[Need], dispatcher: Need, hosts: int = 1) -> Choice:
        """Of the regions of the configuration, the one for a new fleet of so many hosts; see `offers`."""
        from spotfleet.providers.aws import offers

        return offers.cheapest_region(self.account, any_of, dispatcher, hosts)

    def unknown(self, needs: Sequence[Need]) -> str:
        from spotfleet.providers.aws import catalog

        return catalog.unknown(self.account, needs)

    def everywhere(self) -> tuple[str, ...]:
        """Every region that is enabled for the account."""
        return self.account.everywhere()
