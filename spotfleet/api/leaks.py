"""`leaks`: machines of this account that nothing accounts for.

    the cloud's listing of every fleet --> then our folders --> then the dispatchers that live --> a verdict on each

The cloud is listed first: whatever is launched or told to us meanwhile can only take a machine off the list of leaks.
A machine is a leak when its fleet is down or unknown here and no dispatcher of that fleet is listed, or when it is a
worker host that its living dispatcher does not know. Who is young may not be known yet, so it is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from spotfleet import providers
from spotfleet.api.house import Folder, House
from spotfleet.api.machine import Machine, provider_config
from spotfleet.api.reports import laptop_events
from spotfleet.errors import SpotfleetError
from spotfleet.fleet.fold import fold
from spotfleet.fleet.plan import clock
from spotfleet.model import CloudHost, CloudState, FleetSpec, Role
from spotfleet.providers import Provider

FRESH_S = 300.0  # a machine younger than this, or whose fleet or dispatcher ended since, may be in good hands
END_S = 300.0  # for a cloud to end leaks; then a person must look
POLL_S = 1.0
ORPHAN_AFTER_S = FleetSpec("").orphan_after_s  # of fleets whose file is not known here

Account = tuple[str, tuple[tuple[str, str], ...]]  # a provider and its configuration


class Verdict(Enum):
    LEAK = "leak"
    FRESH = "too fresh to tell"
    ELSEWHERE = "not ours"


@dataclass(frozen=True)
class Suspect:
    machine: str
    fleet: str  # as the cloud knows it
    provider: str
    role: Role
    pool: str
    since: float  # when its first run began; 0 when none has
    micros_h: int  # as sold; 0 while it is stopped
    verdict: Verdict
    why: str
    provider_id: str = ""


@dataclass(frozen=True)
class Known:
    """What this machine knows of one fleet."""

    down_at: float = 0.0  # 0: it lives
    orphan_after_s: float = ORPHAN_AFTER_S
    machines: frozenset[tuple[str, str]] = frozenset()  # (request_id, provider_id) in our own ledger
    hosts: frozenset[str] | None = None  # what its dispatcher knows; None: it does not answer


@dataclass(frozen=True)
class Search:
    suspects: tuple[Suspect, ...]
    listed: int  # machines that live, all in all
    notes: tuple[str, ...] = ()  # what could not be asked

    @property
    def leaks(self) -> tuple[Suspect, ...]:
        return tuple(s for s in self.suspects if s.verdict is Verdict.LEAK)


@dataclass
class _Account:
    provider: Provider
    lines: list[CloudHost] = field(default_factory=list)


def search(house: House) -> Search:
    """Look everywhere; changes nothing. Raises what a provider that cannot be listed raises."""
    notes: list[str] = []
    accounts = _listed(house, notes)
    suspects: list[Suspect] = []
    for account, found in accounts.items():
        known = _known(house, account, found.lines, notes)
        here = judge(found.lines, known, time.time())
        if any(s.verdict is Verdict.LEAK for s in here):  # it may have been ended while we looked
            alive = {(h.request_id, h.provider_id) for h in found.provider.hosts("") if _lives(h)}
            here = [s for s in here if (s.machine, s.provider_id) in alive]
        suspects += here
    living = {(a, h.request_id) for a, found in accounts.items() for h in found.lines if _lives(h)}
    return Search(tuple(suspects), len(living), tuple(notes))


def end(house: House, shown: Sequence[Suspect], progress: Callable[[str], None]) -> None:
    """Terminate those of `shown` that are leaks by now still; return when the cloud lists them as ended.

    Raises SpotfleetError after END_S, naming what is left.
    """
    agreed = {(s.machine, s.provider_id) for s in shown if s.verdict is Verdict.LEAK}
    found = [s for s in search(house).leaks if (s.machine, s.provider_id) in agreed]
    accounts = _listed(house, [])
    left = {(a, s.machine) for a, account in accounts.items() for s in found
            if any((h.request_id, h.provider_id) == (s.machine, s.provider_id) for h in account.lines)}
    deadline, told = time.monotonic() + END_S, ""
    for account, machine in sorted(left):
        progress(f"ending {machine}")
        accounts[account].provider.terminate(machine)
    while left:
        alive = {(a, h.request_id) for a in {a for a, _ in left} for h in accounts[a].provider.hosts("") if _lives(h)}
        left &= alive
        names = ", ".join(sorted(machine for _, machine in left))
        if names and names != told:
            progress(f"waiting for the cloud to end {names}")
            told = names
        if left and time.monotonic() >= deadline:
            raise SpotfleetError(f"after {END_S:g} s the provider still lists {names}",
                                 hint="`spotfleet leaks --fix` again, or look at its console")
        if left:
            time.sleep(POLL_S)


# ---- the verdict


def judge(lines: Iterable[CloudHost], known: Mapping[str, Known], now: float) -> list[Suspect]:
    """The living machines of one account that are leaks, may be, or belong to another machine's fleets. Pure."""
    fleets: dict[str, dict[str, CloudHost]] = {}
    for line in lines:  # the last of repeated lines
        fleets.setdefault(line.fleet, {})[line.request_id] = line
    suspects = []
    for fleet, hosts in sorted(fleets.items()):
        for line in hosts.values():
            if _lives(line) and (found := _verdict(line, list(hosts.values()), known.get(fleet), now)):
                suspects.append(_suspect(line, *found))
    return suspects


def _verdict(line: CloudHost, fleet: Sequence[CloudHost], known: Known | None,
             now: float) -> tuple[Verdict, str] | None:
    if known is not None and not known.down_at:
        if line.role is not Role.WORKER or known.hosts is None or line.request_id in known.hosts:
            return None
        return _grace(line, now) or (Verdict.LEAK, "its dispatcher lives and does not know it")
    ours = known.machines if known else frozenset()
    guard = next((h for h in fleet if _lives(h) and h.role is Role.DISPATCHER
                  and (h.request_id, h.provider_id) not in ours), None)
    if guard is not None:
        return Verdict.ELSEWHERE, f"fleet {line.fleet} of another machine: its dispatcher lives"
    if young := _grace(line, now):
        return young
    why = f"fleet {line.fleet} is not known here, and no dispatcher of it is listed"
    if known is not None:
        why = f"fleet {line.fleet} is down since {clock(known.down_at)}"
        if now - known.down_at < FRESH_S:
            return Verdict.FRESH, f"{why}, which the listing may not show yet"
    return _orphan(line, fleet, known.orphan_after_s if known else ORPHAN_AFTER_S, why, now)


def _grace(line: CloudHost, now: float) -> tuple[Verdict, str] | None:
    if line.state is CloudState.PENDING or not line.runs:
        return Verdict.FRESH, "it is just starting"
    age_s = now - line.runs[0].started_at
    return (Verdict.FRESH, f"it began {max(age_s, 0.0):.0f} s ago") if age_s < FRESH_S else None


def _orphan(line: CloudHost, fleet: Sequence[CloudHost], orphan_after_s: float, why: str,
            now: float) -> tuple[Verdict, str]:
    """A worker host goes on training without its dispatcher for a while: nobody ends that without being told."""
    ends = [h.runs[-1].ended_at for h in fleet if h.role is Role.DISPATCHER and h.runs and h.runs[-1].ended_at]
    if line.role is not Role.WORKER or line.state is CloudState.STOPPED:
        return Verdict.LEAK, why
    if not ends:
        return Verdict.LEAK, f"{why}; it may still train, since nobody knows for how long it has had no dispatcher"
    ago_s = now - max(ends)
    if ago_s < FRESH_S:
        return Verdict.FRESH, f"its dispatcher ended {ago_s:.0f} s ago and may be replaced"
    if not orphan_after_s:
        return Verdict.LEAK, f"{why}; it may still train, for it never ends itself"
    left_s = orphan_after_s - ago_s
    if left_s > 0:
        return Verdict.LEAK, (f"{why}; it may still train: its dispatcher ended {ago_s / 60:.0f} min ago, "
                              f"it ends itself in about {left_s / 60:.0f} min")
    return Verdict.LEAK, f"{why}; it should have ended itself {-left_s / 60:.0f} min ago"


def _suspect(line: CloudHost, verdict: Verdict, why: str) -> Suspect:
    price = 0 if line.state is CloudState.STOPPED else line.offer.price_micros_h
    return Suspect(line.request_id, line.fleet, line.offer.provider, line.role, line.offer.pool,
                   line.runs[0].started_at if line.runs else 0.0, price, verdict, why, line.provider_id)


def _lives(line: CloudHost) -> bool:
    return line.state is not CloudState.TERMINATED


# ---- what is asked


def _listed(house: House, notes: list[str]) -> dict[Account, _Account]:
    """The listing of every account we know a way to: of this machine's fleets, and of installed providers that work."""
    used = {_account(f.record.spec.provider, f.record.provider_config) for f in _folders(house)}
    found = {account: _Account(providers.load(account[0], dict(account[1]))) for account in sorted(used)}
    for name in providers.names():
        account = _account(name, provider_config(house, FleetSpec("", provider=name)))
        if account in found:
            continue
        provider = providers.load(name, dict(account[1]))
        try:
            if name != "local":  # where asking starts the emulated cloud
                provider.check()
            found[account] = _Account(provider)
        except SpotfleetError as error:
            notes.append(f"{name} was not asked: {error}")
    for one in found.values():
        one.lines = one.provider.hosts("")
    return found


def _account(provider: str, config: Mapping[str, str]) -> Account:
    return provider, tuple(sorted(config.items()))


def _folders(house: House) -> list[Folder]:
    """Of every fleet there has been, also those whose name is used again."""
    return [*house.fleets(), *(Folder(p.parent) for p in sorted((house.path / "old").glob("*/fleet.json")))]


def _known(house: House, account: Account, lines: Sequence[CloudHost], notes: list[str]) -> dict[str, Known]:
    """What this machine knows of the fleets of one account, by their names in the cloud."""
    known: dict[str, Known] = {}
    for folder in _folders(house):
        record = folder.record
        if _account(record.spec.provider, record.provider_config) != account:
            continue
        ended = fold(laptop_events(folder))
        machines = frozenset((h.request_id, h.provider_id) for h in [*ended.hosts, *ended.ended.values()])
        other = known.get(record.cloud_name, Known(down_at=record.down_at))
        down_at = 0.0 if not (record.down_at and other.down_at) else max(record.down_at, other.down_at)
        known[record.cloud_name] = Known(down_at, record.spec.orphan_after_s, machines | other.machines, other.hosts)
        if not record.down_at:
            alive = {h.request_id for h in lines if h.fleet == record.cloud_name and _lives(h)}
            hosts = _asked(folder, alive, notes) if alive else None
            known[record.cloud_name] = replace(known[record.cloud_name], hosts=hosts)
    return known


def _asked(folder: Folder, alive: set[str], notes: list[str]) -> frozenset[str] | None:
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
