"""Compute Engine's listing of hosts, their boot files and tags: one query for instances and one for operations."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from spotfleet.catalog import load
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.model import SECOND, CloudHost, Offer, Role
from spotfleet.providers.gcp import offers
from spotfleet.providers.gcp.mapping import errors, listing, names
from spotfleet.providers.gcp.mapping.listing import Life
from spotfleet.providers.gcp.session import GcpAccount, lacking
from spotfleet.providers.kit import userdata
from spotfleet.providers.kit.mapping.listing import ListingContext

LONGEST = 2000  # characters of names in a filter
TRIES = 6  # for a change of metadata that another one may overtake

Seen = Callable[[GcpAccount, list[dict[str, Any]], dict[str, Life]], None]


@dataclass(frozen=True)
class Machine:
    """One machine of a host that exists, or whose making has been accepted."""

    id: str
    name: str
    zone: str
    instance: Mapping[str, Any] | None  # None: not listed yet
    life: Life | None


def hosts(account: GcpAccount, fleet: str, seen: Seen | None = None) -> list[CloudHost]:
    """List the hosts of `fleet`, or the living ones of every fleet for "". `seen` gets both answers.

    The hosts of a zone that does not answer are as they were listed last.
    """
    wanted = f'labels.{names.FLEET} = "{fleet}"' if fleet else f"labels.{names.FLEET}:*"
    instances = account.everywhere("instances", "instances", memory=fleet and f"instances {fleet}", filter=wanted)
    named = f"{fleet}-.*" if fleet else f"({'|'.join(sorted({i['name'] for i in instances}))})"
    done = operations(account, named, memory=fleet and f"operations {fleet}") if instances or fleet else []
    if seen is not None:
        seen(account, instances, listing.lives(done))
    return listing.lines(fleet, instances, done, _context(account), load().machines,
                         in_the_making=account.settings.laptop)


def find(account: GcpAccount, request_id: str, zones: Collection[str] = ()) -> list[Machine]:
    """Find a host's machines that have not ended, also those that the list lacks yet.

    `request_id` may be an intruder's: HOST~ID. Raises SpotfleetError if there is none and a zone does not answer, of
    `zones` where these are given.
    """
    host, _, alone = request_id.partition(SECOND)
    listed, silent = account.scopes("instances", "instances", zones=zones, filter=f"name eq {names.pattern(host)}")
    instances = {str(i["id"]): i for of in listed.values() for i in of}
    done, untold = account.scopes("global_operations", "operations", zones=zones,
                                  filter=_targets(names.pattern(host)))
    lives = listing.lives([o for of in done.values() for o in of])
    found = [Machine(machine, i["name"], listing.zone_of(i), i, lives.get(machine))
             for machine, i in instances.items() if names.FLEET in (i.get("labels") or {})]
    found += [Machine(life.id, life.name, life.zone, None, life) for life in lives.values()
              if life.id not in instances and life.made and not life.ending and not life.ended_at]
    found = [m for m in found if alone in ("", m.id)]
    if not found and (silent or untold):
        raise lacking(silent or untold)
    return found


def tag(account: GcpAccount, request_id: str, tags: Mapping[str, str]) -> None:
    """Set metadata items beside those that are there. Compute Engine refuses a change of what has changed since it was
    read, so it is read again."""
    for attempt in range(TRIES):
        instance, found = _read(account, request_id)
        items = {**listing.metadata(instance), **tags}
        try:
            operation = account.change(
                "instances", "set_metadata", zone=found.zone, instance=found.name, metadata_resource={
                    "fingerprint": (instance.get("metadata") or {}).get("fingerprint", ""),
                    "items": [{"key": key, "value": value} for key, value in items.items()]})
            return account.wait(operation, "instances.setMetadata", found.name)
        except SpotfleetError as error:
            if errors.code(error) not in (errors.FINGERPRINT, "412") or attempt == TRIES - 1:
                raise


def boot_files(account: GcpAccount, request_id: str) -> dict[str, str]:
    instance, _ = _read(account, request_id)
    return userdata.files(base64.b64decode(listing.metadata(instance).get(names.USER_DATA, "")), request_id)


def unknown(request_id: str) -> UsageError:
    return UsageError(f"gcp: there is no host {request_id}", hint="`spotfleet status` lists them")


def _read(account: GcpAccount, request_id: str) -> tuple[dict[str, Any], Machine]:
    """Return the newest machine of a host, as it is now."""
    for found in reversed(find(account, request_id)):
        try:
            return account.ask("instances", "get", zone=found.zone, instance=found.name), found
        except SpotfleetError as error:
            if not errors.gone(error):
                raise
    raise unknown(request_id)


def operations(account: GcpAccount, name: str, *, memory: str = "",
               zones: Collection[str] = ()) -> list[dict[str, Any]]:
    """List the operations on machines whose name matches the regular expression."""
    return account.everywhere("global_operations", "operations", memory=memory, zones=zones, filter=_targets(name))


def _targets(name: str) -> str:
    return f"targetLink eq .*/instances/{name if len(name) <= LONGEST else '.*'}"


def _context(account: GcpAccount) -> ListingContext:
    spec, secret = account.settings.spec, account.settings.secret

    def disk_gib(role: Role) -> int:
        return spec.dispatcher_disk_gib if role is Role.DISPATCHER else spec.disk_gib

    def priced(bare: Offer) -> Offer:
        return offers.priced(account, bare)

    return ListingContext("", spec.user, lambda host: userdata.host_keys(secret, host), lru_cache(priced), disk_gib)
