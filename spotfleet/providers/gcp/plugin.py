"""Plugin of provider gcp: its traits, its section and its configuration. Imports no SDK.

Configuration: `section` (GcpSpec; for an existing fleet, `regions` and `project` are settled), `environment`
(EnvironmentSpec), `placement`, `target` (CheckpointSpec.target), `side` ("laptop" or "dispatcher"), `endpoint_url`
(SPOTFLEET_GCP_ENDPOINT of the laptop; every machine of the fleet uses it), `public_key` and `secret` of the fleet, for
launches and logins. Each may be missing; other keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotfleet.codec import to_json
from spotfleet.cost_export import CostExport
from spotfleet.errors import UsageError
from spotfleet.model import FleetSpec
from spotfleet.plugins import Base, FileFacts, Machines, Note, Traits
from spotfleet.providers import LaunchRequest, Provider
from spotfleet.providers.gcp import GcpProvider
from spotfleet.providers.gcp.mapping import names, roles
from spotfleet.providers.gcp.mapping.cost_export import GcpCostExport
from spotfleet.providers.gcp.session import ENDPOINT, SDK, may_have_credentials, project_of
from spotfleet.providers.gcp.spec import GcpSpec, parsed, spec_in, with_spec
from spotfleet.providers.kit.plugin import RegionalPlugin
from spotfleet.providers.plugin import AccountFleet, AccountKey, Config, ImageRecipe, Policies
from spotfleet.version import __version__

if TYPE_CHECKING:
    from pydantic import BaseModel

    from spotfleet.interruptions import NoticeSource

class GcpPolicies:
    """Definitions of custom roles, for `gcloud iam roles create --file`."""

    roles = ("laptop", "dispatcher", "host")

    def document(self, role: str, spec: FleetSpec | None, cloud_name: str) -> dict[str, Any]:
        target = spec.checkpoint.url if spec else ""
        if role == "host" and not target.startswith("gs://"):
            raise UsageError("hosts have no permissions but those of a checkpoint bucket, and none is named",
                             hint="spotfleet check gcp --policy host FILE, in it `checkpoint: {target: "
                                  "gs://BUCKET/PREFIX}`")
        return roles.document(role)


class GcpPlugin(RegionalPlugin):
    """The plugin `gcp`."""

    name = "gcp"
    traits = Traits(Machines.MADE, settles_region=True, open_ended_types=True, placement=True, boot_limit_s=1800.0,
                    keeps_results_s=86_400.0, notice_poll_s=0.5, takes=frozenset({"disk_size", "image_id"}))
    policies: Policies | None = GcpPolicies()
    cost_export: CostExport | None = GcpCostExport()
    user_key = "gcp.user"
    sdk = SDK
    scored = "Google Cloud scores its capacity"

    def section(self) -> type[BaseModel] | None:
        from spotfleet.providers.gcp.section import GcpSection

        return GcpSection

    def read_section(self, given: BaseModel | None, facts: FileFacts, note: Note) -> Mapping[str, Any]:
        from spotfleet.providers.gcp.section import GcpSection, read

        return to_json(read(given if isinstance(given, GcpSection) else GcpSection(), facts, note))

    def base_keys(self, base: Base) -> Mapping[str, Any]:
        found = {"project": base.account, "regions": [base.region], "network": base.network,
                 "subnetworks": {base.region: base.subnets[0]} if base.subnets else {},
                 "network_tags": list(base.hosts_firewall), "dispatcher_network_tags": list(base.dispatcher_firewall),
                 "service_account": base.hosts_identity, "dispatcher_service_account": base.dispatcher_identity,
                 "image": base.image, "dispatcher_image": base.dispatcher_image, "disk": base.disk_gib,
                 "dispatcher_disk": base.dispatcher_disk_gib, "disk_key": base.disk_key}
        return {"public_addresses": base.public_addresses, **{key: value for key, value in found.items() if value}}

    def base_contract(self, provider: Provider, name: str) -> str:
        from spotfleet.providers.gcp import base

        assert isinstance(provider, GcpProvider)
        return base.found(provider.account, name)

    def open(self, config: Config) -> Provider:
        return GcpProvider(config)

    def notices(self, metadata_url: str) -> NoticeSource | None:
        from spotfleet.interruptions.gcp import GcpSource

        return GcpSource(metadata_url)

    # ---- the configuration

    def config(self, spec: FleetSpec, environ: Mapping[str, str], home: str) -> Config:
        section = parsed(spec.section)
        section = replace(section, project=section.project or project_of(environ))
        found = {
            "section": to_json(section), "environment": to_json(spec.environment), "placement": spec.placement,
            "target": spec.checkpoint.target, "side": "laptop", "endpoint_url": environ.get(ENDPOINT, ""),
        }
        return {key: value for key, value in found.items() if value}

    def moved(self, config: Config, spec: FleetSpec) -> Config:
        """Return the configuration with the present file's settings. Project, regions, network, endpoint stay."""
        was = spec_in(config)
        now = replace(parsed(spec.section), project=was.project, regions=was.regions, network=was.network,
                      subnetworks=was.subnetworks)
        return with_spec(self.config(spec, {ENDPOINT: config.get("endpoint_url", "")}, ""), now)

    def for_dispatcher(self, config: Config) -> Config:
        return {**with_spec(config, replace(spec_in(config), dispatcher_credentials="")), "side": "dispatcher"}

    def credentials(self, config: Config) -> dict[str, str] | None:
        path = spec_in(config).dispatcher_credentials
        return {"key": account_key_file(path)} if path else {}

    def portable(self, spec: FleetSpec) -> FleetSpec:
        return replace(spec, section=to_json(replace(parsed(spec.section), ssh_from=(), dispatcher_credentials="")))

    def with_access(self, spec: FleetSpec, asked: FleetSpec) -> FleetSpec:
        here = parsed(asked.section)
        return replace(spec, section=to_json(replace(
            parsed(spec.section), ssh_from=here.ssh_from, dispatcher_credentials=here.dispatcher_credentials)))

    # ---- regions

    def regions_in(self, config: Config) -> tuple[str, ...]:
        return spec_in(config).regions

    def with_regions(self, config: Config, regions: Sequence[str]) -> Config:
        return with_spec(config, replace(spec_in(config), regions=tuple(regions)))

    def region_of(self, zone: str) -> str:
        return names.region_of(zone)

    # ---- the account

    def account_key(self, config: Config) -> AccountKey:
        return ("endpoint_url", config.get("endpoint_url", "")), ("project", spec_in(config).project)

    def account_config(self, key: AccountKey, fleets: Sequence[AccountFleet]) -> Config | None:
        account = dict(key)
        regions = sorted({region for fleet in fleets for region in spec_in(fleet.config).regions})
        spec = GcpSpec(project=account["project"], regions=tuple(regions))
        return self.config(FleetSpec("", provider=self.name, section=to_json(spec)),
                           {ENDPOINT: account["endpoint_url"]}, "")

    def may_have_credentials(self, environ: Mapping[str, str]) -> bool:
        return may_have_credentials(environ)

    # ---- machines

    def refuse_oversize(self, config: Config, request: LaunchRequest) -> None:
        from spotfleet.providers.gcp.session import settings_of
        from spotfleet.providers.kit import userdata

        userdata.user_data(settings_of(config).machine, [request])

    def image_recipe(self, config: Config, *, gpus: bool, region: str) -> ImageRecipe | None:
        from spotfleet.providers.gcp import images as of_gcp
        from spotfleet.providers.kit import images

        project, place = spec_in(config).project, region or self.region(config)
        if not project:
            raise UsageError("an image belongs to a project, and none is named",
                             hint="set GOOGLE_CLOUD_PROJECT, or `gcp.project` in the fleet file of -f")
        if not place:
            raise UsageError("the machine that builds the image needs a place, and none is named",
                             hint="--region us-central1, or a zone")
        base = (of_gcp.DEEP_LEARNING if gpus else of_gcp.UBUNTU).split("/")
        made = images.recipe("spotfleet.providers.gcp", ("image.pkr.hcl", "plugins.pkr.hcl"), gpus, project=project,
                             zone=place if names.region_of(place) else f"{place}-b", base_family=base[-1],
                             base_project=base[1])
        return replace(made, variables=made.variables | {"tags": names.labels(made.variables["tags"])
                                                         | {images.VERSION: __version__.replace(".", "-")}})

    def unpriced(self, spec: FleetSpec, hosts: int) -> str:
        gcp = parsed(spec.section)
        disks_gib = gcp.dispatcher_disk_gib + hosts * gcp.disk_gib
        addresses = f", {hosts + 1} public addresses" if gcp.public_addresses else ""
        ssds = f", {hosts * gcp.local_ssds} local SSDs" if gcp.local_ssds else ""
        return (f"not in these prices: {disks_gib} GiB of disks{ssds}{addresses}, traffic between zones and out of the "
                "cloud")


def account_key_file(path: str) -> str:
    """Return the text of a service account's key file. Raises UsageError for another file."""
    try:
        text = Path(path).expanduser().read_text()
        if json.loads(text)["type"] == "service_account":
            return text
        why = "is no key of a service account"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except (ValueError, TypeError, KeyError):
        why = "is no key file of Google Cloud"
    raise UsageError(f"gcp.dispatcher_credentials: {path} {why}",
                     hint="`gcloud iam service-accounts keys create FILE --iam-account ACCOUNT`")


GCP = GcpPlugin()
