"""Network of a fleet's machines, and its firewall rules.

Rules go by network tags: machines of a fleet reach each other on every port, and one rule for each laptop lets it reach
port 22 of the dispatcher. Rules have no labels, so a rule's name is in our format and its description has the fleet and
whose it is. The rules of a shared VPC belong to its host project: we only name them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.providers.gcp.mapping import errors, names
from spotfleet.providers.gcp.session import GcpAccount
from spotfleet.providers.kit import laptop

Progress = Callable[[str], None]

DEFAULT = "default"
NETWORK_S = 600.0
PREFIX = "spotfleet-"
SSH_FROM = "spotfleet ssh_from"  # owner of the rule that the fleet file gives


@dataclass(frozen=True)
class Place:
    """Network and subnet of the machines of one region, as paths."""

    network: str
    subnetwork: str = ""


def shared(account: GcpAccount) -> str:
    """Return the host project of a shared VPC; "" for a network of the fleet's own project."""
    path = account.settings.spec.network.split("/")
    return path[1] if len(path) > 1 and path[1] != account.project else ""


def network_path(account: GcpAccount) -> str:
    name = account.settings.spec.network or DEFAULT
    return name if "/" in name else f"projects/{account.project}/global/networks/{name}"


def place(account: GcpAccount, region: str) -> Place:
    """Return where the machines of a region go. Raises NeedsPerson where there is no such network or subnet."""
    path = network_path(account)
    if named := account.settings.spec.subnetworks.get(region):
        project = shared(account) or account.project
        return Place(path, named if "/" in named else f"projects/{project}/regions/{region}/subnetworks/{named}")
    links = facts(account).get("subnetworks") or ()
    here = [link for link in links if f"/regions/{region}/" in link]
    if not here:
        raise NeedsPerson(f"gcp {region}: network {names.last(path)} has no subnet there",
                          hint=f"gcloud compute networks subnets create NAME --network {names.last(path)} --region "
                               f"{region} --range 10.0.0.0/20; or name one under `gcp.subnetworks`")
    return Place(path, "projects/" + here[0].partition("/projects/")[2])


def facts(account: GcpAccount) -> dict[str, Any]:
    """Return the network as Compute Engine describes it."""
    _, project, *_, name = network_path(account).split("/")

    def ask() -> dict[str, Any]:
        try:
            return account.ask("networks", "get", project=project, network=name)
        except SpotfleetError as error:
            if not errors.gone(error):
                raise
            make = (f"gcloud compute networks create {name} --subnet-mode auto --project {project}; or correct "
                    "`gcp.network`")
            raise NeedsPerson(f"gcp: project {project} has no network '{name}'", hint=make) from error

    return account.cached(("network", project, name), NETWORK_S, ask)


# ---- firewall


def prepare(account: GcpAccount, fleet: str, progress: Progress) -> None:
    """Make the rule for traffic inside the fleet, and that of this laptop. Named network tags have rules already."""
    if account.settings.spec.network_tags:
        return
    if host := shared(account):
        progress(f"the firewall of the shared VPC is {host}'s: `spotfleet check gcp` names the rules that it needs")
        return
    _make(account, _inside(account, fleet), progress)
    allow_ssh_from_here(account, fleet, progress)


def allow_ssh_from_here(account: GcpAccount, fleet: str, progress: Progress) -> None:
    """Allow SSH from the laptop's current address, instead of its old one. Rules of other laptops stay."""
    spec = account.settings.spec
    if shared(account) or spec.network_tags:
        return
    wanted = spec.ssh_from or (laptop.own_address("gcp", public=spec.public_addresses),)
    for cidr in wanted:
        laptop.refuse_the_world("gcp", cidr)
    whose = SSH_FROM if spec.ssh_from else laptop.rule_name()
    rule = _door(account, fleet, wanted, whose)
    there = next((r for r in listed(account, fleet) if r["name"] == rule["name"]), None)
    if there is None:
        _make(account, rule, progress)
    elif sorted(there.get("source_ranges") or ()) != sorted(wanted):
        account.wait(account.change("firewalls", "patch", firewall=rule["name"], firewall_resource={
            "name": rule["name"], "source_ranges": list(wanted)}), "firewalls.patch")
        progress(f"firewall rule {rule['name']}: SSH from {', '.join(wanted)}")


def listed(account: GcpAccount, fleet: str) -> list[dict[str, Any]]:
    """List the rules of a fleet, "" for those of every fleet. Rules of others are left out."""
    if shared(account):
        return []
    rules = [r for page in account.pages("firewalls", "list", filter=f"name eq {PREFIX}.*")
             for r in page.get("items") or ()]
    return [r for r in rules if (own := fleet_of(r)) and fleet in ("", own)]


def open_to_all(account: GcpAccount) -> list[str]:
    """Return the rules by which anybody reaches port 22 of any machine in the network, such as default-allow-ssh."""
    return [r["name"] for page in account.pages("firewalls", "list") for r in page.get("items") or ()
            if r.get("network", "").endswith(network_path(account)) and not r.get("disabled")
            and "0.0.0.0/0" in (r.get("source_ranges") or ())
            and not r.get("target_tags") and not r.get("target_service_accounts")
            and any(_lets_in(allowed, 22) for allowed in r.get("allowed") or ())]


def _lets_in(allowed: Mapping[str, Any], port: int) -> bool:
    ranges = [ports.partition("-") for ports in allowed.get("ports") or ("0-65535",)]
    return allowed.get("I_p_protocol") in ("all", "tcp", "6") and any(
        int(low) <= port <= int(high or low) for low, _, high in ranges)


def let_in_by_tags(account: GcpAccount) -> tuple[bool, list[str]]:
    """Return what rules there are for the named network tags: whether machines with one reach each other, and the
    networks that reach port 22 of a dispatcher by one."""
    spec = account.settings.spec
    hosts, all_tags = set(spec.network_tags), {*spec.network_tags, *spec.dispatcher_network_tags}
    rules = [r for page in account.pages("firewalls", "list") for r in page.get("items") or ()
             if r.get("network", "").endswith(network_path(account)) and not r.get("disabled")]
    inside = any(hosts & set(r.get("source_tags") or ()) & set(r.get("target_tags") or ()) for r in rules)
    door = [r for r in rules if all_tags & set(r.get("target_tags") or ())
            and any(_lets_in(allowed, 22) for allowed in r.get("allowed") or ())]
    return inside, sorted({cidr for r in door for cidr in r.get("source_ranges") or ()})


def fleet_of(rule: Mapping[str, Any]) -> str:
    return _described(rule).get("fleet", "")


def since(rule: Mapping[str, Any]) -> float:
    return float(_described(rule).get("since", 0))


def delete(account: GcpAccount, name: str) -> None:
    try:
        account.wait(account.change("firewalls", "delete", firewall=name), "firewalls.delete")
    except SpotfleetError as error:
        if not errors.gone(error):
            raise


def commands(account: GcpAccount, fleet: str) -> list[str]:
    """Return the commands that make a fleet's rules in the host project of a shared VPC."""
    network, project = names.last(network_path(account)), shared(account)
    spec = account.settings.spec
    tag = spec.network_tags[0] if spec.network_tags else names.network_tag(fleet)
    door = spec.dispatcher_network_tags[0] if spec.dispatcher_network_tags else names.network_tag(fleet, door=True)
    make = f"gcloud compute firewall-rules create --project {project} --network {network}"
    return [f"{make} {tag}-in --allow all --source-tags {tag} --target-tags {tag}",
            f"{make} {door} --allow tcp:22 --source-ranges YOUR_ADDRESS/32 --target-tags {door}"]


def _inside(account: GcpAccount, fleet: str) -> dict[str, Any]:
    tag = names.network_tag(fleet)
    return {"name": f"{tag}-in", "network": network_path(account), "direction": "INGRESS", "source_tags": [tag],
            "target_tags": [tag], "allowed": [{"I_p_protocol": "all"}], "description": _description(fleet, "fleet")}


def _door(account: GcpAccount, fleet: str, cidrs: Iterable[str], whose: str) -> dict[str, Any]:
    tag, mark = names.network_tag(fleet, door=True), hashlib.sha256(whose.encode()).hexdigest()[:6]
    return {"name": f"{names.network_tag(fleet)}-{mark}", "network": network_path(account), "direction": "INGRESS",
            "source_ranges": list(cidrs), "target_tags": [tag],
            "allowed": [{"I_p_protocol": "tcp", "ports": ["22"]}], "description": _description(fleet, whose)}


def _make(account: GcpAccount, rule: dict[str, Any], progress: Progress) -> None:
    try:
        account.wait(account.change("firewalls", "insert", firewall_resource=rule), "firewalls.insert")
    except SpotfleetError as error:
        if errors.code(error) not in ("alreadyExists", "RESOURCE_ALREADY_EXISTS", "409"):
            raise
        return
    progress(f"firewall rule {rule['name']}")


def _description(fleet: str, whose: str) -> str:
    return json.dumps({"fleet": fleet, "of": whose, "since": int(time.time())})


def _described(rule: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(rule.get("description") or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
