"""Checks whether a fleet can be made in the project: one finding per subject, with the command that helps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

from spotfleet.catalog import load
from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.model import FleetSpec, Need, Nodes, Offer, Role
from spotfleet.providers import Finding
from spotfleet.providers.gcp import images, network, offers
from spotfleet.providers.gcp.mapping import errors, names, quotas, roles
from spotfleet.providers.gcp.session import INSTALL, GcpAccount
from spotfleet.providers.kit import checks, laptop
from spotfleet.providers.kit.mapping.quotas import QuotaShare, QuotaUse, hosts_fit, one_fits

SKEW_S = 30.0
SERVICES = ("compute.googleapis.com",)
UNSEEN = (errors.DENIED, "403", "IAM_PERMISSION_DENIED", errors.API_OFF)  # also APIs by which only `check` looks


@dataclass(frozen=True)
class GcpCheckRequest:
    """What the checks of one region share."""

    region: str
    nodes: Nodes | None = None  # None: for any fleet
    needs: tuple[Need, ...] = ()
    hosts: tuple[Offer, ...] = ()
    dispatcher: tuple[Offer, ...] = ()
    trouble: SpotfleetError | None = None  # why there are no offers


def findings(account: GcpAccount, spec: FleetSpec | None) -> Iterator[Finding]:
    """Yield the results of all checks for a fleet like `spec`, or for any fleet."""
    opening = list(_opening(account))
    yield from opening
    if any(f.level in ("blocker", "absent") for f in opening):
        return
    wanted = account.settings.spec.regions
    unknown = [r for r in wanted if r not in account.all_regions()]
    if unknown:
        yield Finding(f"there is no region {', '.join(unknown)}", "blocker", "correct `gcp.regions` or `resources`; "
                      "`gcloud compute regions list` shows them", "regions")
        return
    places = [Need(zone=n.zone) for n in (*spec.any_of, spec.dispatcher)] if spec else []
    if nowhere := offers.unknown(account, places):
        yield Finding(nowhere, "blocker", "correct `resources`; `gcloud compute zones list` shows them", "zones")
        return
    yield from checks.findings(
        {"permissions": lambda: _permissions(account), "OS Login": lambda: _os_login(account),
         "service account": lambda: _service_account(account, spec), "SSH": lambda: _door(account, spec),
         "notices": lambda: _notices()},
        wanted or account.all_regions()[:1], lambda region: _want(account, spec, region),
        {about: lambda want, ask=ask: ask(account, want) for about, ask in REGIONAL.items()},  # type: ignore[misc]
        lambda error: errors.code(error) in UNSEEN)


# ---- the account


def _opening(account: GcpAccount) -> Iterator[Finding]:
    if find_spec("google") is None or find_spec("google.cloud.compute_v1") is None:
        yield Finding("google-cloud-compute is not installed", "absent", INSTALL, "SDK")
        return
    try:
        project = account.project
        account.ask("projects", "get")
    except SpotfleetError as error:
        missing = "no credentials" in str(error)
        yield Finding(str(error), "absent" if missing else "blocker", error.hint, "credentials")
        return
    yield Finding(f"{account.credentials_name()} may read project {project}", about="credentials")
    try:
        skew = account.time() - time.time()
    except SpotfleetError:
        return
    level = "warning" if abs(skew) > SKEW_S else "ok"
    yield Finding(f"within {max(1.0, abs(skew)):.0f} s of Google's", level,
                  "timedatectl set-ntp true" if level != "ok" else "", "clock")


def _permissions(account: GcpAccount) -> Iterator[Finding]:
    asked = sorted(roles.LAPTOP)
    answer, _ = account.rest("cloudresourcemanager", f"/v1/projects/{account.project}:testIamPermissions",
                             {"permissions": asked})
    missing = [p for p in asked if p not in (answer.get("permissions") or ())]
    if missing:
        yield Finding(f"you lack {', '.join(missing[:4])}" + (f" and {len(missing) - 4} more" if len(missing) > 4 else
                                                              ""), "blocker",
                      f"spotfleet check gcp --policy > role.yaml; gcloud iam roles create spotfleet --project "
                      f"{account.project} --file role.yaml; gcloud projects add-iam-policy-binding {account.project} "
                      f"--member user:YOU --role projects/{account.project}/roles/spotfleet")
    else:
        yield Finding("you have all that `up` needs")
    services = "&".join(f"names=projects/{account.project}/services/{s}" for s in SERVICES)
    answer, _ = account.rest("serviceusage", f"/v1/projects/{account.project}/services:batchGet?{services}")
    off = [names.last(s["name"]) for s in answer.get("services") or () if s.get("state") != "ENABLED"]
    if off:
        yield Finding(f"not enabled: {', '.join(off)}", "blocker",
                      f"gcloud services enable {' '.join(off)} --project {account.project}", "APIs")


def _os_login(account: GcpAccount) -> Iterator[Finding]:
    metadata = account.ask("projects", "get").get("common_instance_metadata") or {}
    on = any(i.get("key") == "enable-oslogin" and i.get("value", "").upper() == "TRUE"
             for i in metadata.get("items") or ())
    if on:
        yield Finding("the project has OS Login; machines of a fleet turn it off for themselves, and log in by the "
                      "fleet's key", "warning", "if a launch is refused by constraints/compute.requireOsLogin, ask for "
                      "an exception for this project")
    else:
        yield Finding("off: machines of a fleet let in the fleet's key alone")


def _service_account(account: GcpAccount, spec: FleetSpec | None) -> Iterator[Finding]:
    wanted = account.settings.spec.dispatcher_service_account
    project = account.project
    email = f"spotfleet-dispatcher@{project}.iam.gserviceaccount.com"
    make = (f"gcloud iam service-accounts create spotfleet-dispatcher --project {project}; spotfleet check gcp "
            "--policy dispatcher > role.yaml; gcloud iam roles create spotfleetDispatcher --file role.yaml --project "
            f"{project}; gcloud projects add-iam-policy-binding {project} --member serviceAccount:{email} --role "
            f"projects/{project}/roles/spotfleetDispatcher; then `gcp: {{dispatcher_service_account: {email}}}`")
    if wanted in ("", "default"):
        found = account.ask("projects", "get").get("default_service_account", "")
        if not found:
            yield Finding("the project has no default service account, and none is named for the dispatcher", "blocker",
                          make)
        elif _roles(account, found) == []:
            yield Finding(f"the dispatcher gets {found}, which has no role in this project: organizations made since "
                          "May 2024 give it none", "blocker", make)
        else:
            yield Finding(f"the dispatcher gets {found}, which may do more than it needs, or less", "warning", make)
        return
    try:
        account.rest("iam", f"/v1/projects/{wanted.partition('@')[2].partition('.')[0]}/serviceAccounts/{wanted}")
    except SpotfleetError as error:
        if not errors.gone(error):
            raise
        yield Finding(f"there is no {wanted}", "blocker", make)
        return
    yield Finding(f"the dispatcher gets {wanted}")


def _roles(account: GcpAccount, email: str) -> list[str] | None:
    """Return the roles that the project's policy gives a service account; None if the caller may not read it."""
    try:
        policy, _ = account.rest("cloudresourcemanager", f"/v1/projects/{account.project}:getIamPolicy", {})
    except SpotfleetError:
        return None
    return [b["role"] for b in policy.get("bindings") or () if f"serviceAccount:{email}" in (b.get("members") or ())]


def _door(account: GcpAccount, spec: FleetSpec | None) -> Iterator[Finding]:
    own = account.settings.spec
    if network.shared(account):
        yield Finding("the firewall of the shared VPC is not ours", "warning",
                      "; ".join(network.commands(account, spec.name if spec else "FLEET")))
    elif rules := network.open_to_all(account):
        yield Finding(f"anybody reaches port 22 of every machine in the network by its rule {', '.join(rules)}",
                      "warning", f"gcloud compute firewall-rules update {rules[0]} --project {account.project} "
                      "--source-ranges YOUR_NETWORK; or another `gcp.network`. Machines of a fleet take its keys only")
    if own.network_tags:
        yield from () if network.shared(account) else _rules_of_others(account)
        return
    if own.ssh_from:
        yield Finding(f"the fleet's rule lets in: {', '.join(own.ssh_from)}")
        return
    try:
        yield Finding(f"you come from {laptop.own_address('gcp', public=own.public_addresses)}; the fleet's rule lets "
                      "in only that")
    except NeedsPerson as error:
        yield Finding(str(error), "warning" if spec is None else "blocker", error.hint)


def _rules_of_others(account: GcpAccount) -> Iterator[Finding]:
    """Check the rules for the named network tags, as a base has them: `up` makes none beside them."""
    own = account.settings.spec
    inside, door = network.let_in_by_tags(account)
    make_inside, make_door = network.commands(account, "")
    if not inside:
        yield Finding(f"no rule lets machines with the network tag {own.network_tags[0]} reach each other", "blocker",
                      f"`terraform apply` of the base; or {make_inside}")
    if door:
        yield Finding(f"rules for the dispatcher's network tags let in: {', '.join(door)}")
    else:
        tags = ", ".join((*own.network_tags, *own.dispatcher_network_tags))
        yield Finding(f"no rule for the network tags {tags} lets SSH in to the dispatcher", "warning",
                      f"`ssh_cidrs` of the base's module; or {make_door}")


def _notices() -> Iterator[Finding]:
    yield Finding("each host polls its own metadata server, which warns 120 s before Google Cloud takes it")


# ---- regions


def _want(account: GcpAccount, spec: FleetSpec | None, region: str) -> GcpCheckRequest:
    if spec is None:
        return GcpCheckRequest(region)
    want = GcpCheckRequest(region, spec.nodes, (*spec.any_of, spec.dispatcher))
    try:
        hosts = {o.pool: o for need in spec.any_of for o in _of(region, account, need)}
        return replace(want, hosts=tuple(hosts.values()), dispatcher=tuple(_of(region, account, spec.dispatcher)))
    except SpotfleetError as error:
        return replace(want, trouble=error)


def _of(region: str, account: GcpAccount, need: Need) -> list[Offer]:
    return [o for o in offers.offers(account, need) if o.region == region]


def _pools(account: GcpAccount, want: GcpCheckRequest) -> Iterator[Finding]:
    if want.trouble is not None:
        raise want.trouble
    if want.nodes is None:
        return
    for what, found in (("hosts", want.hosts), ("the dispatcher", want.dispatcher)):
        if not found:
            words = offers.unknown(account, want.needs) or f"{want.region}: nothing is sold that fits {what}"
            yield Finding(words, "blocker",
                          "other types, zones or regions under `resources`; a higher `max_hourly_cost`")
            continue
        best = min(found, key=lambda o: o.price_micros_h)
        pools = "1 pool" if len(found) == 1 else f"{len(found)} pools"
        yield Finding(f"{want.region}: {pools} for {what}, the cheapest {best.instance_type} in {best.zone}, "
                      f"{best.sold}, ${best.price_micros_h / 1e6:.4f}/h")


def _quota(account: GcpAccount, want: GcpCheckRequest) -> Iterator[Finding]:
    if want.nodes is None or not want.hosts:
        return
    local = {q["metric"]: q for q in account.ask("regions", "get", region=want.region).get("quotas") or ()}
    everywhere = {q["metric"]: q for q in account.ask("projects", "get").get("quotas") or ()}
    vcpus = {name: machine.vcpus for name, machine in load().machines.items()}
    limits = {name: float(str(quota.get("limit") or 0)) for name, quota in local.items()}
    shares: dict[str, QuotaShare] = {}
    for offer in want.hosts:
        units = quotas.units(offer, vcpus.get(offer.instance_type, 0))
        metric = quotas.counting(offer, limits)
        known = shares.get(metric)
        if metric in local and (known is None or units < known.each):
            use = _use(account, local[metric], want.region)
            shares[metric] = QuotaShare(use, max(1, units), (offer.instance_type,))
        elif metric not in local:
            yield Finding(f"{want.region}: the quota {offer.quota} is not in Compute Engine's list, so it is not known "
                          "whether it suffices", "warning", _raise(account, offer.quota, want.region, 0))
    yield from hosts_fit(want.region, list(shares.values()), want.nodes)
    gpus = min((o.slots for o in want.hosts if o.accelerator), default=0)
    if gpus and quotas.ALL_REGIONS in everywhere:
        use = _use(account, everywhere[quotas.ALL_REGIONS], "")
        yield one_fits("all regions", use, gpus * want.nodes.target, f"a fleet of {want.nodes.target} hosts")
    if want.dispatcher:
        best = min(want.dispatcher, key=lambda o: o.price_micros_h)
        if best.quota in local:
            yield one_fits(want.region, _use(account, local[best.quota], want.region),
                           max(1, quotas.units(best, vcpus.get(best.instance_type, 0))), "the dispatcher")


def _use(account: GcpAccount, quota: dict[str, object], region: str) -> QuotaUse:
    name = str(quota["metric"])
    return QuotaUse(name, int(float(str(quota.get("limit") or 0))), int(float(str(quota.get("usage") or 0))),
                    lambda n: _raise(account, name, region, n), "GPUs" if "GPUS" in name else "vCPUs")


def _raise(account: GcpAccount, name: str, region: str, units: int) -> str:
    place = f", region {region}" if region else ""
    to = f" to {units}" if units else ""
    return (f"https://console.cloud.google.com/iam-admin/quotas?project={account.project}: filter {name}{place}, and "
            f"ask for a higher limit{to}")


def _network(account: GcpAccount, want: GcpCheckRequest) -> Iterator[Finding]:
    here = network.place(account, want.region)
    yield Finding(f"{want.region}: {here.subnetwork or here.network}")
    if account.settings.spec.public_addresses or network.shared(account):
        return
    routers = account.everywhere("routers", "routers")
    nat = any(r.get("nats") and names.last(r.get("region", "")) == want.region
              and names.last(r.get("network", "")) == names.last(here.network) for r in routers)
    if not nat:
        name = names.last(here.network)
        yield Finding(f"{want.region}: {name} has no Cloud NAT: a machine without a public address reaches no package "
                      "index", "warning",
                      f"gcloud compute routers create spotfleet --network {name} --region {want.region}; gcloud "
                      f"compute routers nats create spotfleet --router spotfleet --region {want.region} "
                      "--auto-allocate-nat-external-ips --nat-all-subnet-ip-ranges")


def _image(account: GcpAccount, want: GcpCheckRequest) -> Iterator[Finding]:
    if want.nodes is None:
        wanted = {images.UBUNTU: "machines without GPUs", images.DEEP_LEARNING: "hosts with GPUs"}
    else:
        wanted = {images.wanted(account, Role.WORKER, o): f"hosts such as {o.instance_type}" for o in want.hosts}
    wanted.setdefault(account.settings.spec.dispatcher_image or images.UBUNTU, "the dispatcher")
    for path, what in wanted.items():
        yield Finding(f"{names.last(images.named(account, path))} for {what}")


REGIONAL: dict[str, Callable[[GcpAccount, GcpCheckRequest], Iterable[Finding]]] = {
    "pools": _pools, "GPU quota": _quota, "network": _network, "image": _image}
