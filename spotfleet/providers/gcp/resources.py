"""Resources of fleets in the project besides machines: disks that outlived theirs, and firewall rules.

A resource is ours by its label or, for a rule, by name and description. Those made by a person or another program are
never listed, so never removed.
"""

from __future__ import annotations

from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.providers import Resource
from spotfleet.providers.gcp import network
from spotfleet.providers.gcp.mapping import errors, listing, names
from spotfleet.providers.gcp.session import GcpAccount

DISK, RULE = "disk", "firewall-rule"
KINDS = (DISK, RULE)  # in a valid order of removal


def listed(account: GcpAccount, fleet: str) -> list[Resource]:
    """List the resources of `fleet`, "" for every fleet."""
    wanted = f'labels.{names.FLEET} = "{fleet}"' if fleet else f"labels.{names.FLEET}:*"
    found = []
    for disk in account.everywhere("disks", "disks", filter=wanted):
        own = (disk.get("labels") or {}).get(names.FLEET, "")
        if own and not disk.get("users"):  # a machine's disk goes with the machine
            zone = names.last(disk.get("zone", ""))
            found.append(Resource(DISK, f"{zone}/{disk['name']}", names.region_of(zone), own,
                                  listing.instant(disk.get("creation_timestamp", "")), disk.get("status", "").lower()))
    found += [Resource(RULE, r["name"], "", network.fleet_of(r), network.since(r))
              for r in network.listed(account, fleet)]
    return found


def delete(account: GcpAccount, resource: Resource) -> None:
    """Remove one resource, no error if it is gone; raises SpotfleetError while something else uses it."""
    match resource.kind:
        case "disk":
            zone, _, name = resource.id.partition("/")
            try:
                account.wait(account.change("disks", "delete", zone=zone, disk=name), "disks.delete")
            except SpotfleetError as error:
                if not errors.gone(error):
                    raise
        case "firewall-rule":
            network.delete(account, resource.id)
        case other:
            raise UsageError(f"provider gcp makes no {other}")
