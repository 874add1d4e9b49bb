"""Plugin of provider aws: its traits, its section and its configuration. Imports no SDK.

Configuration: `section` (AwsSpec; for an existing fleet, `regions` are settled), `environment` (EnvironmentSpec),
`placement`, `target` (CheckpointSpec.target), `side` ("laptop" or "dispatcher"), `endpoint_url` (AWS_ENDPOINT_URL of
the laptop; every machine of the fleet uses it), `public_key` and `secret` of the fleet, for launches and logins. Each
may be missing; other keys are ignored. All fleets of one profile and endpoint are in one account, whatever their
regions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spotfleet.codec import to_json
from spotfleet.cost_export import CostExport
from spotfleet.errors import UsageError
from spotfleet.model import FleetSpec, Need
from spotfleet.plugins import Base, FileFacts, Machines, Note, Traits
from spotfleet.providers import LaunchRequest, Provider
from spotfleet.providers.aws import AwsProvider
from spotfleet.providers.aws.mapping import names, policies
from spotfleet.providers.aws.mapping.cost_export import AwsCostExport
from spotfleet.providers.aws.section.spec import AwsSpec, parsed, spec_in, with_spec
from spotfleet.providers.aws.section.values import region_of
from spotfleet.providers.aws.session import DEFAULT_REGION, SDK
from spotfleet.providers.kit.plugin import RegionalPlugin
from spotfleet.providers.plugin import AccountFleet, AccountKey, Config, ImageRecipe, Policies, RegionRow

if TYPE_CHECKING:
    from pydantic import BaseModel

    from spotfleet.interruptions import NoticeSource

ENDPOINT = "AWS_ENDPOINT_URL"
LONGEST = 6144  # characters of a managed policy, white space not counted
A_FILE = "spotfleet check --policy {role} FILE"
CREDENTIALS_FILE = "AWS_SHARED_CREDENTIALS_FILE"
KEY = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE",
               "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")


class AwsPolicies:
    """IAM policy documents of the user, the dispatcher and hosts."""

    roles = ("laptop", "dispatcher", "host")

    def document(self, role: str, spec: FleetSpec | None, cloud_name: str) -> dict[str, Any]:
        aws = parsed(spec.section) if spec else AwsSpec()
        target = spec.checkpoint.url if spec else ""
        regions = aws.regions or _named(spec)
        region = regions[0] if regions else policies.ANY
        partition = names.partition(regions[0] if regions else os.environ.get("AWS_REGION", ""))
        if role == "host":
            if not target.startswith("s3://"):
                raise UsageError("hosts have no permissions but those of a checkpoint bucket, and none is named",
                                 hint=f"{A_FILE.format(role=role)}, in it `checkpoint: {{target: s3://BUCKET/PREFIX}}`")
            return policies.host(target, partition)
        own = aws.image if aws.image.startswith("/") and not aws.image.startswith("/aws/service/") else ""
        base = spec.tags.get(names.BASE, "") if spec else ""
        if role == "laptop":  # for all regions: each named region would make it half as long again
            return _fitting(policies.laptop(policies.Scope(
                partition=partition, kms_key=aws.kms_key, image=own, target=target,
                queue=aws.event_queue and not aws.interruption_queue, on_base=bool(base),
                dispatcher_profile=aws.dispatcher_profile, host_profile=aws.host_profile,
                boundary=aws.permissions_boundary, reserved=bool(aws.capacity_reservations))))
        if not cloud_name:
            raise UsageError("a dispatcher's permissions are limited to its fleet, and none is named",
                             hint=A_FILE.format(role=role))
        own_role = f"{names.IAM_PATH}{names.role(cloud_name, 'host', region)}"
        of_any = "/*" if aws.host_profile else own_role  # a named profile may have any role
        host_role = f"arn:{partition}:iam::{policies.ANY}:role{of_any}"
        return policies.dispatcher(policies.Scope(
            base or cloud_name, regions, partition=partition, base=bool(base), named_queue=aws.interruption_queue,
            host_role=host_role if target.startswith("s3://") or aws.host_profile else "",
            kms_key=aws.kms_key, image=own, target=target, queue=aws.event_queue or bool(aws.interruption_queue),
            reserved=bool(aws.capacity_reservations)))


def _fitting(document: dict[str, Any]) -> dict[str, Any]:
    """Shorten the document if IAM would not take it."""
    if len(json.dumps(document, separators=(",", ":"))) <= LONGEST:
        return document
    return policies.shortened(document)


def _named(spec: FleetSpec | None) -> tuple[str, ...]:
    """Return the regions that the fleet's needs name; () if one of them names none."""
    found = tuple(dict.fromkeys(n.region for n in spec.any_of)) if spec else ()
    return found if all(found) else ()


class AwsPlugin(RegionalPlugin):
    """The plugin `aws`."""

    name = "aws"
    traits = Traits(Machines.MADE, settles_region=True, open_ended_types=True, placement=True, boot_limit_s=1800.0,
                    keeps_results_s=86_400.0, notice_poll_s=0.5, takes=frozenset({"disk_size", "image_id"}))
    policies: Policies | None = AwsPolicies()
    cost_export: CostExport | None = AwsCostExport()
    user_key = "aws.user"
    sdk = SDK
    scored = "EC2 scores its capacity"

    def section(self) -> type[BaseModel] | None:
        from spotfleet.providers.aws.section.schema import AwsSection

        return AwsSection

    def read_section(self, given: BaseModel | None, facts: FileFacts, note: Note) -> Mapping[str, Any]:
        from spotfleet.providers.aws.section.reader import read
        from spotfleet.providers.aws.section.schema import AwsSection

        return to_json(read(given if isinstance(given, AwsSection) else AwsSection(), facts, note))

    def base_keys(self, base: Base) -> Mapping[str, Any]:
        network = {"vpc": base.network, "subnets": list(base.subnets), "security_groups": list(base.hosts_firewall),
                   "dispatcher_security_groups": list(base.dispatcher_firewall)}
        found = {"regions": [base.region], "networks": {base.region: network},
                 "host_profile": base.hosts_identity, "dispatcher_profile": base.dispatcher_identity,
                 "interruption_queue": base.queue, "image": base.image, "dispatcher_image": base.dispatcher_image,
                 "disk": base.disk_gib, "dispatcher_disk": base.dispatcher_disk_gib, "kms_key": base.disk_key}
        return {"public_addresses": base.public_addresses, **{key: value for key, value in found.items() if value}}

    def base_contract(self, provider: Provider, name: str) -> str:
        from spotfleet.providers.aws import base

        assert isinstance(provider, AwsProvider)
        return base.found(provider.account, name)

    def open(self, config: Config) -> Provider:
        return AwsProvider(config)

    def notices(self, metadata_url: str) -> NoticeSource | None:
        from spotfleet.interruptions.imds import ImdsSource

        return ImdsSource(metadata_url)

    # ---- the configuration

    def config(self, spec: FleetSpec, environ: Mapping[str, str], home: str) -> Config:
        found = {
            "section": to_json(parsed(spec.section)), "environment": to_json(spec.environment),
            "placement": spec.placement, "target": spec.checkpoint.target, "side": "laptop",
            "endpoint_url": environ.get(ENDPOINT, ""),
        }
        return {key: value for key, value in found.items() if value}

    def moved(self, config: Config, spec: FleetSpec) -> Config:
        """Return the configuration with the present file's settings. Region, networks and endpoint stay."""
        was = spec_in(config)
        now = replace(parsed(spec.section), regions=was.regions, networks=was.networks)
        return with_spec(self.config(spec, {ENDPOINT: config.get("endpoint_url", "")}, ""), now)

    def for_dispatcher(self, config: Config) -> Config:
        """Return the configuration for the dispatcher, which uses its machine's own credentials."""
        spec = spec_in(config)
        return {**with_spec(config, replace(spec, profile="", dispatcher_credentials="")), "side": "dispatcher"}

    def credentials(self, config: Config) -> dict[str, str] | None:
        profile = spec_in(config).dispatcher_credentials
        return access_key(profile, os.environ) if profile else {}

    def portable(self, spec: FleetSpec) -> FleetSpec:
        return replace(spec, section=to_json(replace(parsed(spec.section), profile="", ssh_from=(),
                                                     dispatcher_credentials="")))

    def with_access(self, spec: FleetSpec, asked: FleetSpec) -> FleetSpec:
        here = parsed(asked.section)
        return replace(spec, section=to_json(
            replace(parsed(spec.section), profile=here.profile, ssh_from=here.ssh_from,
                    dispatcher_credentials=here.dispatcher_credentials)))

    # ---- regions

    def settle(self, provider: Provider, config: Config, spec: FleetSpec, hosts: int,
               region: str) -> tuple[Config, tuple[RegionRow, ...]]:
        return (config, ()) if spec_in(config).joined else super().settle(provider, config, spec, hosts, region)

    def regions_in(self, config: Config) -> tuple[str, ...]:
        return spec_in(config).regions

    def with_regions(self, config: Config, regions: Sequence[str]) -> Config:
        return with_spec(config, replace(spec_in(config), regions=tuple(regions)))

    def in_region(self, config: Config, region: str) -> Config:
        networks = tuple(n for n in spec_in(config).networks if n.region == region)
        return with_spec(config, replace(spec_in(config), regions=(region,), networks=networks))

    def region_of(self, zone: str) -> str:
        return region_of(zone)

    def usual_regions(self) -> tuple[str, ...]:
        return (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or DEFAULT_REGION,)

    # ---- the account

    def account_key(self, config: Config) -> AccountKey:
        return ("endpoint_url", config.get("endpoint_url", "")), ("profile", spec_in(config).profile)

    def account_config(self, key: AccountKey, fleets: Sequence[AccountFleet]) -> Config | None:
        regions = sorted({region for fleet in fleets for region in spec_in(fleet.config).regions})
        account = dict(key)
        spec = replace(_profiles(fleets), regions=tuple(regions), profile=account["profile"])
        return self.config(FleetSpec("", provider=self.name, section=to_json(spec)),
                           {ENDPOINT: account["endpoint_url"]}, "")

    def may_have_credentials(self, environ: Mapping[str, str]) -> bool:
        """Check environment and files: without credentials the SDK would wait seconds for a metadata server."""
        files = (environ.get(CREDENTIALS_FILE) or "~/.aws/credentials",
                 environ.get("AWS_CONFIG_FILE") or "~/.aws/config")
        return any(environ.get(name) for name in CREDENTIALS) or any(
            os.path.isfile(path) and os.path.getsize(path) for path in map(os.path.expanduser, files))

    # ---- machines

    def refuse_oversize(self, config: Config, request: LaunchRequest) -> None:
        from spotfleet.providers.aws.session import settings_of
        from spotfleet.providers.kit import userdata

        userdata.user_data(settings_of(config).machine, [request])

    def usual_types(self, need: Need) -> tuple[str, ...]:
        from spotfleet.providers.aws.types import FOR_DISPATCHER, FOR_HOSTS

        return () if need.sized else FOR_HOSTS if need.use_spot else FOR_DISPATCHER

    def obstacle(self, spec: FleetSpec, instance_type: str) -> str:
        from spotfleet.providers.aws.types import undriven

        return "" if parsed(spec.section).image else undriven(instance_type)

    def image_recipe(self, config: Config, *, gpus: bool, region: str) -> ImageRecipe | None:
        from spotfleet.providers.aws.images import BASES
        from spotfleet.providers.kit import images, laptop

        spec = spec_in(config)
        place = region or self.region(config)
        if not place:
            raise UsageError("an image of EC2 belongs to a region, and none is named", hint="--region us-east-1")
        name, owner = BASES[images.kind(gpus)]
        made = images.recipe("spotfleet.providers.aws", ("image.pkr.hcl", "plugins.pkr.hcl", "efa.sh"), gpus,
                             region=place, base_name=name, base_owner=owner,
                             ssh_from=list(spec.ssh_from or (laptop.own_address("aws"),)))
        return replace(made, environ={"AWS_PROFILE": spec.profile} if spec.profile else {})

    def unpriced(self, spec: FleetSpec, hosts: int) -> str:
        aws = parsed(spec.section)
        disks_gib = aws.dispatcher_disk_gib + hosts * aws.disk_gib
        addresses = f", {hosts + 1} public addresses" if aws.public_addresses else ""
        return f"not in these prices: {disks_gib} GiB of disks{addresses}, traffic between zones and out of the cloud"


def access_key(profile: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the access key of a profile, as arguments of boto3.Session. Raises UsageError for one that has none."""
    path = os.path.expanduser(environ.get(CREDENTIALS_FILE) or "~/.aws/credentials")
    file = ConfigParser(interpolation=None)
    try:
        file.read(path)
    except ConfigParserError as error:
        raise UsageError(f"aws.dispatcher_credentials: {path} cannot be read: {error.message}") from error
    found = {key: value for key in KEY if (value := file.get(profile, key, fallback=""))}
    if not all(key in found for key in KEY[:2]):
        raise UsageError(f"aws.dispatcher_credentials: {path} has no access key of profile {profile!r}",
                         hint=f"`aws configure --profile {profile}`, with the key of an IAM user for this")
    if KEY[2] in found:
        raise UsageError(f"aws.dispatcher_credentials: the key of profile {profile!r} is a temporary one: within hours "
                         "the dispatcher could neither launch nor end machines on AWS",
                         hint=f"`aws configure --profile {profile}`, with the key of an IAM user for this")
    return {key: found[key] for key in KEY[:2]}


def _profiles(fleets: Sequence[AccountFleet]) -> AwsSpec:
    """Return the named instance profiles if none of these fleets created roles: its user may lack permission to list
    roles."""
    specs = [(spec_in(fleet.config), fleet.spec.checkpoint.url) for fleet in fleets]
    if specs and all(s.dispatcher_profile and (s.host_profile or not url.startswith("s3://")) for s, url in specs):
        return AwsSpec(dispatcher_profile=specs[0][0].dispatcher_profile, host_profile=specs[0][0].host_profile)
    return AwsSpec()


AWS = AwsPlugin()
