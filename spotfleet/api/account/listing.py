"""Cloud accounts reachable from this machine, their hosts, and which known fleet each host belongs to.

All fleets of one AWS account belong to one account here, in whichever regions they are. Fleets of the emulated cloud
and of machines over SSH have one account per configuration.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spotfleet import providers
from spotfleet.api import cloud
from spotfleet.api.home import FleetDir, Home
from spotfleet.api.machine import DispatcherMachine, load_provider, provider_config
from spotfleet.api.reports import laptop_events
from spotfleet.codec import from_json
from spotfleet.errors import SpotfleetError
from spotfleet.fleet.domain.state import fold
from spotfleet.model import AwsSpec, CloudHost, CloudState, FleetSpec
from spotfleet.providers import ExistingMachines, ManagedResources, Provider, Resource

ORPHAN_AFTER_S = FleetSpec("").orphan_after_s  # for fleets whose file is not known here
OVER_SSH, AWS = "ssh", "aws"

Account = tuple[str, tuple[tuple[str, str], ...]]  # provider and its configuration; for aws endpoint and profile only


@dataclass(frozen=True)
class KnownFleet:
    """This machine's records of one fleet."""

    down_at: float = 0.0  # 0: it is not down
    orphan_after_s: float = ORPHAN_AFTER_S
    machines: frozenset[tuple[str, str]] = frozenset()  # (request_id, provider_id) in our own ledger
    hosts: frozenset[str] | None = None  # as its dispatcher reports them; None: it does not answer
    name: str = ""  # on this machine; its name in the cloud may differ
    reached: bool = True  # its dispatcher has answered once; False: it is being made


@dataclass
class AccountListing:
    """Listing of one account."""

    provider: Provider
    lines: list[CloudHost] = field(default_factory=list)
    resources: list[Resource] = field(default_factory=list)
    whole: bool = True  # every region that was asked has answered

    @property
    def machines(self) -> list[CloudHost]:
        """The lines without requests that wait for a machine: those are also listed among the resources."""
        waiting = {b.id for b in self.resources}
        return [h for h in self.lines if h.provider_id not in waiting]


def lives(line: CloudHost) -> bool:
    return line.state is not CloudState.TERMINATED


def listed(home: Home, notes: list[str], everywhere: bool = False) -> dict[Account, AccountListing]:
    """List every account reachable from here: of this machine's fleets, and of installed providers that work.

    `everywhere`: in all regions of an account. An account or region that could not be listed is noted. If it is the
    whole account of a running fleet of this machine, its error is raised.
    """
    used: dict[Account, list[FleetDir]] = {}
    for folder in folders(home):
        used.setdefault(account_of(folder.record.spec.provider, folder.record.provider_config), []).append(folder)
    found: dict[Account, AccountListing] = {}
    for account, folders_of_account in sorted(used.items(), key=lambda pair: pair[0]):
        try:
            found[account] = _list_account(_provider(account, folders_of_account), notes, everywhere)
        except SpotfleetError as error:
            if account[0] != AWS or not all(folder.is_down for folder in folders_of_account):
                raise
            notes.append(f"{account[0]} was not asked, where {folders_of_account[0].name} has been: {error}")
    for name in providers.names():
        config = provider_config(home, FleetSpec("", provider=name))
        if account_of(name, config) in found:
            continue
        provider = providers.load(name, config)
        if isinstance(provider, ExistingMachines):
            continue  # no account lists them: only the fleets here name such machines
        try:
            if name != "local":  # its check would start the emulated cloud
                provider.check()
            found[account_of(name, config)] = _list_account(provider, notes, everywhere)
        except SpotfleetError as error:
            notes.append(f"{name} was not asked: {error}" + (f"; to ask it: {error.hint}" if error.hint else ""))
    return found


def account_of(provider: str, config: Mapping[str, str]) -> Account:
    if provider != AWS:
        return provider, tuple(sorted(config.items()))
    return AWS, (("endpoint_url", config.get("endpoint_url", "")), ("profile", _aws(config).profile))


def folders(home: Home) -> list[FleetDir]:
    """Return the folders of all fleets of this machine, including ended ones whose name is used again."""
    return [*home.fleets(), *(FleetDir(p.parent) for p in sorted((home.path / "old").glob("*/fleet.json")))]


# ---- asking an account


def _provider(account: Account, folders_of_account: Sequence[FleetDir]) -> Provider:
    if account[0] != AWS:
        first = folders_of_account[0]
        return load_provider(first.record, first if first.readable else None)
    regions = {region for folder in folders_of_account for region in _aws(folder.record.provider_config).regions}
    return _of_regions(dict(account[1]), sorted(regions), _profiles(folders_of_account))


def _of_regions(config: Mapping[str, str], regions: Sequence[str], named: AwsSpec) -> Provider:
    spec = replace(named, regions=tuple(regions), profile=config.get("profile") or _aws(config).profile)
    settings = cloud.config(FleetSpec("", provider=AWS, aws=spec), {})
    return providers.load(AWS, {**settings, "endpoint_url": config.get("endpoint_url", "")})


def _profiles(folders_of_account: Sequence[FleetDir]) -> AwsSpec:
    """Return the named instance profiles if none of these fleets created roles: its user may lack permission to list
    roles."""
    specs = [(_aws(folder.record.provider_config), folder.record.spec.checkpoint.url) for folder in folders_of_account]
    if all(s.dispatcher_profile and (s.host_profile or not url.startswith("s3://")) for s, url in specs):
        return AwsSpec(dispatcher_profile=specs[0][0].dispatcher_profile, host_profile=specs[0][0].host_profile)
    return AwsSpec()


def _aws(config: Mapping[str, str]) -> AwsSpec:
    return from_json(AwsSpec, json.loads(config["aws"])) if "aws" in config else AwsSpec()


def _list_account(provider: Provider, notes: list[str], everywhere: bool) -> AccountListing:
    """Return the account's listing. Machines over SSH that do not answer are noted: they may no longer exist."""
    if isinstance(provider, ExistingMachines):
        try:
            lines = provider.hosts("")
        except SpotfleetError as error:
            notes.append(f"{provider.name} was not asked: {error}")
            return AccountListing(provider)
        notes += [line for line in (f"{provider.name}: {t}" for t in provider.problems()) if line not in notes]
        return AccountListing(provider, lines)
    if not isinstance(provider, ManagedResources):
        return AccountListing(provider, provider.hosts(""))
    if everywhere:
        provider = provider.in_regions(provider.regions(everywhere=True))
    try:
        return AccountListing(provider, provider.hosts(""), provider.list_resources(""))
    except SpotfleetError as error:
        return _list_by_region(provider, error, notes)


def _list_by_region(provider: ManagedResources, trouble: SpotfleetError, notes: list[str]) -> AccountListing:
    """List the regions that answer and note the others; raise `trouble` if none answers."""
    answering: list[str] = []
    for region in provider.regions():
        try:
            one = provider.in_regions([region])
            one.hosts("")
            one.list_resources("")
            answering.append(region)
        except SpotfleetError as error:
            notes.append(f"{region} was not asked: {error}")
    if not answering:
        raise trouble
    notes.append("a dispatcher may be there: hosts of which none is listed elsewhere are not judged")
    rest = provider.in_regions(answering)
    return AccountListing(rest, rest.hosts(""), rest.list_resources(""), whole=False)


# ---- what this machine knows


def known(home: Home, account: Account, lines: Sequence[CloudHost], notes: list[str]) -> dict[str, KnownFleet]:
    """Return this machine's records of the fleets of one account, by their names in the cloud."""
    found: dict[str, KnownFleet] = {}
    for folder in folders(home):
        record = folder.record
        if account[0] != record.spec.provider:
            continue
        if account[0] != OVER_SSH and account_of(record.spec.provider, record.provider_config) != account:
            continue
        ended = fold(laptop_events(folder))
        machines = frozenset((h.request_id, h.provider_id) for h in [*ended.hosts, *ended.ended.values()])
        other = found.get(record.cloud_name, KnownFleet(down_at=record.down_at))
        down_at = 0.0 if not (record.down_at and other.down_at) else max(record.down_at, other.down_at)
        reached = record.reached if not record.down_at else other.reached
        found[record.cloud_name] = KnownFleet(down_at, record.spec.orphan_after_s, machines | other.machines,
                                              other.hosts, record.spec.name, reached)
        if not record.down_at:
            alive = {h.request_id for h in lines if h.fleet == record.cloud_name and lives(h)}
            hosts = _dispatcher_hosts(folder, alive, notes) if alive else None
            found[record.cloud_name] = replace(found[record.cloud_name], hosts=hosts)
    return found


def _dispatcher_hosts(folder: FleetDir, alive: set[str], notes: list[str]) -> frozenset[str] | None:
    """Return the hosts that the fleet's dispatcher reports; None if it does not answer."""
    try:
        client = DispatcherMachine(folder).client(folder.record.url, 0.0) if folder.record.url else None
        if client is None or not client.healthy():
            notes.append(f"fleet {folder.name}: its dispatcher does not answer, so its hosts are not judged")
            return None
        hosts = frozenset(h.host for h in client.status().hosts)
        if alive - hosts:  # its ledger may record some of them as gone: then it will terminate them
            hosts |= _hosts_in_ledger(client.events)
        return hosts
    except SpotfleetError as error:
        notes.append(f"fleet {folder.name}: its hosts are not judged: {error}")
        return None


def _hosts_in_ledger(events: Callable[[int], list[dict]]) -> frozenset[str]:
    """Return every host that a dispatcher's ledger names."""
    found, after = set(), 0
    while page := events(after):
        found |= {e["request_id"] for e in page if "request_id" in e}
        after = page[-1]["seq"]
    return frozenset(found)
