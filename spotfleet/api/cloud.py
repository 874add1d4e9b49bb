"""Cloud fleets seen from the laptop: provider configuration, a new fleet's region, resources besides machines.

A fleet with candidate regions gets one of them when it is made, and stays there whatever prices do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spotfleet.api.home import FleetDir, Keys
from spotfleet.codec import from_json, to_json
from spotfleet.errors import SpotfleetError
from spotfleet.fleet.planner.size import first_workers, hosts_wanted
from spotfleet.model import AwsSpec, FleetSpec, Market, Offer, Role
from spotfleet.providers import Boot, LaunchRequest, ManagedResources, Provider

if TYPE_CHECKING:
    from spotfleet.providers.aws import AwsProvider
    from spotfleet.providers.aws.offers import RegionChoice, RegionPrice

Progress = Callable[[str], None]
ENDPOINT = "AWS_ENDPOINT_URL"


@dataclass(frozen=True)
class RegionRow:
    """Candidate region of a new fleet; a price of 0 means that it is not on sale there."""

    region: str
    host_micros_h: int
    dispatcher_micros_h: int
    total_micros_h: int  # price of all hosts wanted and the dispatcher
    why: str  # why it is chosen or not


def makes_machines(spec: FleetSpec) -> bool:
    """Return whether its provider creates machines, which are then reached over SSH with our keys."""
    return spec.aws is not None


def has_sshd(spec: FleetSpec) -> bool:
    """Return whether its machines are reached over SSH, so that the fleet needs a key of its own."""
    return spec.ssh is not None or makes_machines(spec)


def config(spec: FleetSpec, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the configuration of provider aws on the laptop; it holds no secret."""
    found = os.environ if environ is None else environ
    provider_config = {
        "aws": json.dumps(to_json(spec.aws or AwsSpec())),
        "environment": json.dumps(to_json(spec.environment)),
        "placement": spec.placement,
        "target": spec.checkpoint.target,
        "side": "laptop",
        "endpoint_url": found.get(ENDPOINT, ""),
    }
    return {key: value for key, value in provider_config.items() if value}


def updated_config(provider_config: dict[str, str], spec: FleetSpec) -> dict[str, str]:
    """Return the configuration of an existing fleet updated from `spec`. Its region and its endpoint stay."""
    was: AwsSpec = from_json(AwsSpec, json.loads(provider_config["aws"]))
    now = replace(spec.aws or AwsSpec(), regions=was.regions, networks=was.networks)
    return {**config(spec, {ENDPOINT: provider_config.get("endpoint_url", "")}), "aws": json.dumps(to_json(now))}


def without_local_settings(spec: FleetSpec) -> FleetSpec:
    """Return `spec` without the settings that hold only for this machine."""
    return spec if spec.aws is None else replace(spec, aws=replace(spec.aws, profile="", ssh_from=()))


def with_local_access(spec: FleetSpec, asked: FleetSpec) -> FleetSpec:
    """Return `spec` with the access settings of `asked`, the same fleet's file on this machine."""
    local = asked.aws or AwsSpec()
    return replace(spec, aws=replace(spec.aws or AwsSpec(), profile=local.profile, ssh_from=local.ssh_from))


def with_all_regions(provider: Provider, provider_config: dict[str, str]) -> dict[str, str]:
    """Return the configuration with every region of the account."""
    account: AwsProvider = provider  # type: ignore[assignment]
    aws: AwsSpec = from_json(AwsSpec, json.loads(provider_config["aws"]))
    return {**provider_config, "aws": json.dumps(to_json(replace(aws, regions=tuple(account.all_regions()))))}


def with_keys(provider_config: dict[str, str], keys: Keys) -> dict[str, str]:
    """Return the configuration with the keys to launch machines and to authenticate them, for this process."""
    return {**provider_config, "public_key": keys.ssh_public, "secret": keys.fleet_secret}


def for_dispatcher(provider_config: dict[str, str], keys: Keys) -> dict[str, str]:
    """Return the configuration for the dispatcher, which uses its machine's own credentials.

    `private_key` is for a second laptop, which finds it in boot.json (`attach`); no machine uses it.
    """
    spec = replace(from_json(AwsSpec, json.loads(provider_config["aws"])), profile="")
    return {**with_keys(provider_config, keys), "aws": json.dumps(to_json(spec)), "side": "dispatcher",
            "private_key": keys.ssh_private}


def choose_region(provider: Provider, provider_config: dict[str, str], spec: FleetSpec, region: str = "",
                  ) -> tuple[dict[str, str], tuple[RegionRow, ...]]:
    """Choose the region of a new fleet: return the configuration with it, and all candidates with their prices, the
    chosen one first. `region`: the one that the user accepted before.

    Raises NoCapacity or NeedsPerson where no candidate is possible.
    """
    aws: AwsSpec = from_json(AwsSpec, json.loads(provider_config["aws"]))
    if aws.joined:
        return provider_config, ()
    if region:
        return _with_region(provider_config, aws, region), ()
    cloud: AwsProvider = provider  # type: ignore[assignment]
    hosts = hosts_wanted(spec.nodes, 1, [first_workers(spec.resize)])
    choice = cloud.cheapest_region(spec.any_of, spec.dispatcher, hosts)
    rows = tuple(RegionRow(row.region, row.hosts.price_micros_h if row.hosts else 0,
                           row.dispatcher.price_micros_h if row.dispatcher else 0, row.total_micros_h,
                           row.why or _why(row, choice)) for row in choice.rows)
    return _with_region(provider_config, aws, choice.region), rows


def unknown_words(provider: Provider, spec: FleetSpec) -> str:
    """Describe the words of `resources` that match nothing the cloud sells in any region; "" for another provider."""
    if not makes_machines(spec):
        return ""
    account: AwsProvider = provider  # type: ignore[assignment]
    return account.unknown(spec.any_of) or "no offer fits"


def _why(row: RegionPrice, choice: RegionChoice) -> str:
    scored = f"; EC2 scores its capacity {row.score} of 10" if row.score else ""
    if row.region == choice.region:
        return f"chosen{scored}"
    return ("dearer" if row.total_micros_h > choice.rows[0].total_micros_h else "not cheaper") + scored


def _with_region(provider_config: dict[str, str], aws: AwsSpec, region: str) -> dict[str, str]:
    networks = tuple(n for n in aws.networks if n.region == region)
    return {**provider_config, "aws": json.dumps(to_json(replace(aws, regions=(region,), networks=networks)))}


def region_of(provider_config: Mapping[str, str]) -> str:
    """Return the one region of a fleet; "" for a fleet with several regions, or of another provider."""
    regions = from_json(AwsSpec, json.loads(provider_config["aws"])).regions if "aws" in provider_config else ()
    return regions[0] if len(regions) == 1 else ""


def refuse_oversize(provider: Provider, folder: FleetDir, boot: Boot) -> None:
    """Raise UsageError if `boot` does not fit into the dispatcher's user data, before anything is made."""
    spec = folder.record.spec
    if makes_machines(spec):
        from spotfleet.providers.aws import userdata

        account: AwsProvider = provider  # type: ignore[assignment]
        offer = Offer("aws", "", "", "", Market.ON_DEMAND, 1, 0, 0)
        name = folder.record.cloud_name
        request = LaunchRequest(f"{name}-d-0", name, Role.DISPATCHER, offer, boot)
        userdata.user_data(account.account.settings, [request])


def prepare(provider: Provider, folder: FleetDir, progress: Progress) -> None:
    """Create the cloud resources that hosts need, and allow SSH from here. Raises NeedsPerson without permission."""
    if isinstance(provider, ManagedResources):
        record = folder.record
        provider.prepare(record.cloud_name, record.spec.tags, progress)


def allow_access(provider: Provider, cloud_name: str, progress: Progress = lambda _line: None) -> None:
    """Allow SSH from this machine's present address. An error is only reported: the next connection shows its effect.
    """
    if isinstance(provider, ManagedResources):
        try:
            provider.allow_ssh_from_here(cloud_name, progress)
        except SpotfleetError as error:
            progress(f"note: {error}")
