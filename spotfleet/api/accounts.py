"""The accounts that this machine knows a way to, what they list, and what it knows of the fleets in them.

Fleets of one AWS account are one account here, whatever regions each is in; those of the emulated cloud are one per
configuration, as are machines over SSH.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spotfleet import providers
from spotfleet.api import cloud
from spotfleet.api.house import Folder, House
from spotfleet.api.machine import Machine, load_provider, provider_config
from spotfleet.api.reports import laptop_events
from spotfleet.codec import from_json
from spotfleet.errors import SpotfleetError
from spotfleet.fleet.fold import fold
from spotfleet.model import AwsSpec, CloudHost, CloudState, FleetSpec
from spotfleet.providers import Belonging, ExistingMachines, Furnished, Provider

ORPHAN_AFTER_S = FleetSpec("").orphan_after_s  # of fleets whose file is not known here
OVER_SSH, AWS = "ssh", "aws"

Account = tuple[str, tuple[tuple[str, str], ...]]  # a provider and its configuration; of aws, what names an account


@dataclass(frozen=True)
class Known:
    """What this machine knows of one fleet."""

    down_at: float = 0.0  # 0: it lives
    orphan_after_s: float = ORPHAN_AFTER_S
    machines: frozenset[tuple[str, str]] = frozenset()  # (request_id, provider_id) in our own ledger
    hosts: frozenset[str] | None = None  # what its dispatcher knows; None: it does not answer
    name: str = ""  # here; the cloud may know it by another one
    reached: bool = True  # its dispatcher has answered once; False: it is being made


@dataclass
class Listed:
    """One account, as it answered."""

    provider: Provider
    lines: list[CloudHost] = field(default_factory=list)
    belongings: list[Belonging] = field(default_factory=list)
    whole: bool = True  # every region that was asked has answered

    @property
    def machines(self) -> list[CloudHost]:
        """Without requests that wait for a machine, which are listed among the belongings, too."""
        waiting = {b.id for b in self.belongings}
        return [h for h in self.lines if h.provider_id not in waiting]


def lives(line: CloudHost) -> bool:
    return line.state is not CloudState.TERMINATED


def listed(house: House, notes: list[str], everywhere: bool = False) -> dict[Account, Listed]:
    """The listing of every account we know a way to: of this machine's fleets, and of installed providers that work.
    `everywhere`: in all regions of an account. What could not be asked is noted, unless it is all of an account where a
    fleet of this machine lives: then what it raised is raised."""
    used: dict[Account, list[Folder]] = {}
    for folder in folders(house):
        used.setdefault(account_of(folder.record.spec.provider, folder.record.provider_config), []).append(folder)
    found: dict[Account, Listed] = {}
    for account, of_it in sorted(used.items(), key=lambda pair: pair[0]):
        try:
            found[account] = _asked(_provider(account, of_it), notes, everywhere)
        except SpotfleetError as error:
            if account[0] != AWS or not all(folder.is_down for folder in of_it):
                raise
            notes.append(f"{account[0]} was not asked, where {of_it[0].name} has been: {error}")
    for name in providers.names():
        config = provider_config(house, FleetSpec("", provider=name))
        if account_of(name, config) in found:
            continue
        provider = providers.load(name, config)
        if isinstance(provider, ExistingMachines):
            continue  # there is no account of them: the fleets here name the machines that there are
        try:
            if name != "local":  # where asking starts the emulated cloud
                provider.check()
            found[account_of(name, config)] = _asked(provider, notes, everywhere)
        except SpotfleetError as error:
            notes.append(f"{name} was not asked: {error}")
    return found


def account_of(provider: str, config: Mapping[str, str]) -> Account:
    if provider != AWS:
        return provider, tuple(sorted(config.items()))
    return AWS, (("endpoint_url", config.get("endpoint_url", "")), ("profile", _aws(config).profile))


def folders(house: House) -> list[Folder]:
    """Of every fleet there has been, also those whose name is used again."""
    return [*house.fleets(), *(Folder(p.parent) for p in sorted((house.path / "old").glob("*/fleet.json")))]


# ---- asking an account


def _provider(account: Account, of_it: Sequence[Folder]) -> Provider:
    if account[0] != AWS:
        return load_provider(of_it[0].record, of_it[0] if of_it[0].readable else None)
    regions = {region for folder in of_it for region in _aws(folder.record.provider_config).regions}
    return _of_regions(dict(account[1]), sorted(regions), _profiles(of_it))


def _of_regions(config: Mapping[str, str], regions: Sequence[str], named: AwsSpec) -> Provider:
    spec = replace(named, regions=tuple(regions), profile=config.get("profile") or _aws(config).profile)
    told = cloud.config(FleetSpec("", provider=AWS, aws=spec), {})
    return providers.load(AWS, {**told, "endpoint_url": config.get("endpoint_url", "")})


def _profiles(of_it: Sequence[Folder]) -> AwsSpec:
    """With those that are named, if none of these fleets has made roles: its user may not be allowed to list any."""
    specs = [(_aws(folder.record.provider_config), folder.record.spec.checkpoint.url) for folder in of_it]
    if all(s.dispatcher_profile and (s.host_profile or not url.startswith("s3://")) for s, url in specs):
        return AwsSpec(dispatcher_profile=specs[0][0].dispatcher_profile, host_profile=specs[0][0].host_profile)
    return AwsSpec()


def _aws(config: Mapping[str, str]) -> AwsSpec:
    return from_json(AwsSpec, json.loads(config["aws"])) if "aws" in config else AwsSpec()


def _asked(provider: Provider, notes: list[str], everywhere: bool) -> Listed:
    """What an account lists. Machines over SSH that do not answer are noted: they may be no more."""
    if isinstance(provider, ExistingMachines):
        try:
            lines = provider.hosts("")
        except SpotfleetError as error:
            notes.append(f"{provider.name} was not asked: {error}")
            return Listed(provider)
        notes += [line for line in (f"{provider.name}: {t}" for t in provider.troubles()) if line not in notes]
        return Listed(provider, lines)
    if not isinstance(provider, Furnished):
        return Listed(provider, provider.hosts(""))
    if everywhere:
        provider = provider.within(provider.regions(everywhere=True))
    try:
        return Listed(provider, provider.hosts(""), provider.belongings(""))
    except SpotfleetError as error:
        return _asked_by_region(provider, error, notes)


def _asked_by_region(provider: Furnished, trouble: SpotfleetError, notes: list[str]) -> Listed:
    """Without the regions that do not answer, each of which is noted; raises `trouble` if none does."""
    answering: list[str] = []
    for region in provider.regions():
        try:
            one = provider.within([region])
            one.hosts("")
            one.belongings("")
            answering.append(region)
        except SpotfleetError as error:
            notes.append(f"{region} was not asked: {error}")
    if not answering:
        raise trouble
    notes.append("a dispatcher may be there: hosts of which none is listed elsewhere are not judged")
    rest = provider.within(answering)
    return Listed(rest, rest.hosts(""), rest.belongings(""), whole=False)


# ---- what this machine knows


def known(house: House, account: Account, lines: Sequence[CloudHost], notes: list[str]) -> dict[str, Known]:
    """What this machine knows of the fleets of one account, by their names in the cloud."""
    found: dict[str, Known] = {}
    for folder in folders(house):
        record = folder.record
        if account[0] != record.spec.provider:
            continue
        if account[0] != OVER_SSH and account_of(record.spec.provider, record.provider_config) != account:
            continue
        ended = fold(laptop_events(folder))
        machines = frozenset((h.request_id, h.provider_id) for h in [*ended.hosts, *ended.ended.values()])
        other = found.get(record.cloud_name, Known(down_at=record.down_at))
        down_at = 0.0 if not (record.down_at and other.down_at) else max(record.down_at, other.down_at)
        reached = record.reached if not record.down_at else other.reached
        found[record.cloud_name] = Known(down_at, record.spec.orphan_after_s, machines | other.machines, other.hosts,
                                         record.spec.name, reached)
        if not record.down_at:
            alive = {h.request_id for h in lines if h.fleet == record.cloud_name and lives(h)}
            hosts = _told(folder, alive, notes) if alive else None
            found[record.cloud_name] = replace(found[record.cloud_name], hosts=hosts)
    return found


def _told(folder: Folder, alive: set[str], notes: list[str]) -> frozenset[str] | None:
    """The hosts that the fleet's dispatcher knows; None if it does not answer."""
    try:
        client = Machine(folder).client(folder.record.url, 0.0) if folder.record.url else None
        if client is None or not client.healthy():
            notes.append(f"fleet {folder.name}: its dispatcher does not answer, so its hosts are not judged")
            return None
        hosts = frozenset(h.host for h in client.status().hosts)
        if alive - hosts:  # some may be known to its ledger as gone: then it will see to them
            hosts |= _ever(client.events)
        return hosts
    except SpotfleetError as error:
        notes.append(f"fleet {folder.name}: its hosts are not judged: {error}")
        return None


def _ever(events: Callable[[int], list[dict]]) -> frozenset[str]:
    """Every host that a dispatcher's ledger names."""
    found, after = set(), 0
    while page := events(after):
        found |= {e["request_id"] for e in page if "request_id" in e}
        after = page[-1]["seq"]
    return frozenset(found)
