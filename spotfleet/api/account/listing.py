"""Cloud accounts reachable from this machine, their hosts, and which known fleet each host belongs to.

The provider's plugin decides which configurations have one account: on a cloud all fleets of the same credentials, in
whichever regions they are. Fleets of the emulated cloud and of machines over SSH have one account per configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from spotfleet import plugins, providers
from spotfleet.api.home import FleetDir, FleetRecord, Home
from spotfleet.api.machine import DispatcherMachine, config_in_process, provider_config
from spotfleet.api.reports import laptop_events
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.fleet.domain.state import fold
from spotfleet.model import CloudHost, CloudState, FleetSpec
from spotfleet.plugins import Machines
from spotfleet.providers import ExistingMachines, ManagedResources, Provider, Resource
from spotfleet.providers.plugin import AccountFleet, AccountKey, Config, plugin_of

ORPHAN_AFTER_S = FleetSpec("").orphan_after_s  # for fleets whose file is not known here

Account = tuple[str, AccountKey]  # provider, and what its plugin tells accounts apart by


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
        try:
            accounts = accounts_of(folder.record)
        except UsageError as error:  # its plugin is not installed any more
            if not folder.is_down:
                raise
            notes.append(f"fleet {folder.name} has been on {folder.record.spec.provider}, which was not asked: {error}")
            continue
        for account in accounts:
            used.setdefault(account, []).append(folder)
    found: dict[Account, AccountListing] = {}
    for account, folders_of_account in sorted(used.items(), key=lambda pair: pair[0]):
        try:
            found[account] = _list_account(_provider(account, folders_of_account), notes, everywhere)
        except SpotfleetError as error:
            if not _is_cloud(account[0]) or not all(folder.is_down for folder in folders_of_account):
                raise
            notes.append(f"{account[0]} was not asked, where {folders_of_account[0].name} has been: {error}")
    for name in providers.names():
        try:
            machines = plugin_of(name).traits.machines
            if machines is Machines.EXISTING:
                continue  # no account lists them: only the fleets here name such machines
            config = provider_config(home, FleetSpec("", provider=name))
            if account_of(name, config) in found:
                continue
            provider = providers.load(name, config)
            if machines is Machines.MADE:  # the check of an emulated cloud would start it
                provider.check()
            found[account_of(name, config)] = _list_account(provider, notes, everywhere)
        except SpotfleetError as error:
            notes.append(f"{name} was not asked: {error}" + (f"; to ask it: {error.hint}" if error.hint else ""))
    return found


def account_of(provider: str, config: Config) -> Account:
    return provider, plugin_of(provider).account_key(config)


def accounts_of(record: FleetRecord) -> dict[Account, Config]:
    """Return the accounts of a fleet, one for each of its clouds, with the configuration there."""
    return {account_of(name, config): config
            for name, config in plugin_of(record.spec.provider).parts(record.provider_config)}


def folders(home: Home) -> list[FleetDir]:
    """Return the folders of all fleets of this machine, including ended ones whose name is used again."""
    return [*home.fleets(), *(FleetDir(p.parent) for p in sorted((home.path / "old").glob("*/fleet.json")))]


# ---- asking an account


def _provider(account: Account, folders_of_account: Sequence[FleetDir]) -> Provider:
    fleets = [AccountFleet(accounts_of(folder.record)[account], folder.record.spec) for folder in folders_of_account]
    whole = plugin_of(account[0]).account_config(account[1], fleets)
    if whole is not None:
        return providers.load(account[0], whole)
    first = folders_of_account[0]
    record = first.record
    config = config_in_process(record, first) if first.readable else record.provider_config
    return providers.load(account[0], dict(plugin_of(record.spec.provider).parts(config))[account[0]])


def _is_cloud(provider: str) -> bool:
    return plugin_of(provider).traits.machines is Machines.MADE


def is_over_ssh(provider: str) -> bool:
    """Return whether its machines exist already: they belong to no account, and several fleets may name the same one.
    """
    return plugin_of(provider).traits.machines is Machines.EXISTING


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
        if account[0] not in record.spec.provider.split(plugins.JOINED):
            continue
        if not is_over_ssh(account[0]) and account not in accounts_of(record):
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
