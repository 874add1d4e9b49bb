"""Machines that a cloud makes, seen from the laptop: what their provider is told, where a new fleet goes, what it needs
besides machines.

A fleet with candidate regions settles on one of them when it is made; from then on it stays there, whatever prices do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spotfleet.api.house import Folder, Keys
from spotfleet.codec import from_json, to_json
from spotfleet.errors import SpotfleetError
from spotfleet.fleet.size import first_workers, hosts_wanted
from spotfleet.model import AwsSpec, FleetSpec, Market, Offer, Role
from spotfleet.providers import Boot, Furnished, LaunchRequest, Provider

if TYPE_CHECKING:
    from spotfleet.providers.aws import AwsProvider
    from spotfleet.providers.aws.offers import Choice, RegionPrice

Progress = Callable[[str], None]
ENDPOINT = "AWS_ENDPOINT_URL"


@dataclass(frozen=True)
class RegionRow:
    """A candidate region of a new fleet; what is not on sale there costs 0."""

    region: str
    host_micros_h: int
    dispatcher_micros_h: int
    total_micros_h: int  # of all hosts wanted and the dispatcher
    why: str  # it is chosen; or it is not


def makes_machines(spec: FleetSpec) -> bool:
    """Does its provider make machines that are entered over SSH by keys which we gave them?"""
    return spec.aws is not None


def has_sshd(spec: FleetSpec) -> bool:
    """Are its machines entered over SSH, so that the fleet needs a key of its own?"""
    return spec.ssh is not None or makes_machines(spec)


def config(spec: FleetSpec, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What provider aws must know on the laptop; without a secret."""
    found = os.environ if environ is None else environ
    told = {
        "aws": json.dumps(to_json(spec.aws or AwsSpec())),
        "environment": json.dumps(to_json(spec.environment)),
        "placement": spec.placement,
        "target": spec.checkpoint.target,
        "side": "laptop",
        "endpoint_url": found.get(ENDPOINT, ""),
    }
    return {key: value for key, value in told.items() if value}


def moved(told: dict[str, str], spec: FleetSpec) -> dict[str, str]:
    """`told` of a fleet that is made, with what `spec` says by now. It stays in its region, at the same endpoint."""
    was: AwsSpec = from_json(AwsSpec, json.loads(told["aws"]))
    now = replace(spec.aws or AwsSpec(), regions=was.regions, networks=was.networks)
    return {**config(spec, {ENDPOINT: told.get("endpoint_url", "")}), "aws": json.dumps(to_json(now))}


def elsewhere(spec: FleetSpec) -> FleetSpec:
    """`spec` without what only this machine makes use of."""
    return spec if spec.aws is None else replace(spec, aws=replace(spec.aws, profile="", ssh_from=()))


def entered_as(spec: FleetSpec, asked: FleetSpec) -> FleetSpec:
    """`spec` with what `asked`, the same fleet's file as it is here, says of the ways in."""
    mine = asked.aws or AwsSpec()
    return replace(spec, aws=replace(spec.aws or AwsSpec(), profile=mine.profile, ssh_from=mine.ssh_from))


def everywhere(provider: Provider, told: dict[str, str]) -> dict[str, str]:
    """`told` of every region that the account has."""
    account: AwsProvider = provider  # type: ignore[assignment]
    aws: AwsSpec = from_json(AwsSpec, json.loads(told["aws"]))
    return {**told, "aws": json.dumps(to_json(replace(aws, regions=tuple(account.everywhere()))))}


def with_keys(told: dict[str, str], keys: Keys) -> dict[str, str]:
    """`told` with what launches machines and knows them again, for a provider in this process."""
    return {**told, "public_key": keys.ssh_public, "secret": keys.fleet_secret}


def for_dispatcher(told: dict[str, str], keys: Keys) -> dict[str, str]:
    """The same for the dispatcher, who has its machine's own credentials. `private_key` is for a second laptop, which
    finds it in boot.json (`attach`); no machine uses it."""
    spec = replace(from_json(AwsSpec, json.loads(told["aws"])), profile="")
    return {**with_keys(told, keys), "aws": json.dumps(to_json(spec)), "side": "dispatcher",
            "private_key": keys.ssh_private}


def settle(provider: Provider, told: dict[str, str], spec: FleetSpec, region: str = "",
           ) -> tuple[dict[str, str], tuple[RegionRow, ...]]:
    """`told` with the one region where a new fleet like `spec` goes, and all candidates with their prices, the chosen
    one first. `region`: what was agreed on before.

    Raises NoCapacity or NeedsPerson where it can be in none of them.
    """
    aws: AwsSpec = from_json(AwsSpec, json.loads(told["aws"]))
    if aws.joined:
        return told, ()
    if region:
        return _in(told, aws, region), ()
    cloud: AwsProvider = provider  # type: ignore[assignment]
    hosts = hosts_wanted(spec.nodes, 1, [first_workers(spec.resize)])
    choice = cloud.cheapest_region(spec.any_of, spec.dispatcher, hosts)
    rows = tuple(RegionRow(row.region, row.hosts.price_micros_h if row.hosts else 0,
                           row.dispatcher.price_micros_h if row.dispatcher else 0, row.total_micros_h,
                           row.why or _why(row, choice)) for row in choice.rows)
    return _in(told, aws, choice.region), rows


def unknown(provider: Provider, spec: FleetSpec) -> str:
    """The words of `resources` that name nothing which the cloud sells anywhere; "" if there are none, or elsewhere."""
    if not makes_machines(spec):
        return ""
    account: AwsProvider = provider  # type: ignore[assignment]
    return account.unknown(spec.any_of) or "nothing on sale fits"


def _why(row: RegionPrice, choice: Choice) -> str:
    scored = f"; EC2 scores its capacity {row.score} of 10" if row.score else ""
    if row.region == choice.region:
        return f"chosen{scored}"
    return ("dearer" if row.total_micros_h > choice.rows[0].total_micros_h else "not cheaper") + scored


def _in(told: dict[str, str], aws: AwsSpec, region: str) -> dict[str, str]:
    networks = tuple(n for n in aws.networks if n.region == region)
    return {**told, "aws": json.dumps(to_json(replace(aws, regions=(region,), networks=networks)))}


def region_of(told: Mapping[str, str]) -> str:
    """Where a fleet has settled; "" for one of several regions, or of another cloud."""
    regions = from_json(AwsSpec, json.loads(told["aws"])).regions if "aws" in told else ()
    return regions[0] if len(regions) == 1 else ""


def refuse_oversize(provider: Provider, folder: Folder, boot: Boot) -> None:
    """Raise UsageError where the dispatcher's machine could not be told all of `boot`, before anything is made."""
    spec = folder.record.spec
    if makes_machines(spec):
        from spotfleet.providers.aws import userdata

        account: AwsProvider = provider  # type: ignore[assignment]
        offer = Offer("aws", "", "", "", Market.ON_DEMAND, 1, 0, 0)
        name = folder.record.cloud_name
        request = LaunchRequest(f"{name}-d-0", name, Role.DISPATCHER, offer, boot)
        userdata.user_data(account.account.settings, [request])


def prepare(provider: Provider, folder: Folder, progress: Progress) -> None:
    """Make what hosts need and is no host; open the door from here. Raises NeedsPerson where we may not."""
    if isinstance(provider, Furnished):
        record = folder.record
        provider.prepare(record.cloud_name, record.spec.tags, progress)


def open_door(provider: Provider, cloud_name: str, progress: Progress = lambda _line: None) -> None:
    """This machine may have moved since. What goes wrong is only told: whoever comes next sees why it cannot enter."""
    if isinstance(provider, Furnished):
        try:
            provider.open_door(cloud_name, progress)
        except SpotfleetError as error:
            progress(f"note: {error}")
