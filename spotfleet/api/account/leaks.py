"""`leaks`: orphaned machines and other resources of this account's fleets.

    the cloud's listing of every fleet --> then our folders --> then the running dispatchers --> a verdict on each

The cloud is listed first: a launch or a record that comes meanwhile can only take a machine off the list of leaks.
Machines over SSH belong to no account: they are found by the fleets of this machine, and several fleets may name the
same one.

A machine is a leak when its fleet is down or unknown here and no dispatcher of that fleet is listed, or when it is a
worker host that its running dispatcher does not know. Another resource is one when no machine of its fleet runs. Very
young ones may not be recorded yet, so they are left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from spotfleet.api.account import resources
from spotfleet.api.account.listing import (
    ORPHAN_AFTER_S,
    Account,
    AccountListing,
    KnownFleet,
    is_over_ssh,
    known,
    listed,
    lives,
)
from spotfleet.api.account.resources import Ownership, ResourceItem
from spotfleet.api.home import Home
from spotfleet.errors import SpotfleetError
from spotfleet.model import CloudHost, CloudState, Role
from spotfleet.providers import ExistingMachines, ManagedResources
from spotfleet.words import clock_utc

FRESH_S = 300.0  # no verdict on a machine younger than this, or whose fleet or dispatcher ended more recently
END_S = 300.0  # for a cloud to end leaks; after that a person must act
POLL_S = 1.0


@dataclass(frozen=True)
class Suspect:
    machine: str
    fleet: str  # its name in the cloud
    provider: str
    role: Role
    pool: str
    since: float  # when its first run began; 0 when none has
    micros_h: int  # its offer's price; 0 while it is stopped
    verdict: Ownership
    why: str
    provider_id: str = ""


@dataclass(frozen=True)
class LeakSearch:
    suspects: tuple[Suspect, ...]
    listed: int  # number of machines that are not terminated
    notes: tuple[str, ...] = ()  # accounts and regions that could not be listed
    things: tuple[ResourceItem, ...] = ()  # besides machines

    @property
    def leaks(self) -> tuple[Suspect, ...]:
        return tuple(s for s in self.suspects if s.verdict is Ownership.LEAK)

    @property
    def left(self) -> tuple[ResourceItem, ...]:
        """Leaks other than machines."""
        return tuple(t for t in self.things if t.verdict is Ownership.LEAK)


def search(home: Home, everywhere: bool = False) -> LeakSearch:
    """Find leaks in all reachable accounts; with `everywhere` also in regions where no fleet of this machine is.

    Changes nothing. Raises the error of a provider that cannot be listed.
    """
    notes: list[str] = []
    accounts = listed(home, notes, everywhere)
    suspects: list[Suspect] = []
    things: list[ResourceItem] = []
    for account, found in accounts.items():
        records, machines = known(home, account, found.lines, notes), found.machines
        others = [h for other in accounts.values() if other is not found for h in other.machines
                  if h.role is Role.DISPATCHER]
        here = judge(machines, records, time.time(), whole=found.whole, others=others)
        if any(s.verdict is Ownership.LEAK for s in here):  # it may have ended during the search
            alive = {(h.request_id, h.provider_id) for h in found.provider.hosts("") if lives(h)}
            here = [s for s in here if (s.machine, s.provider_id) in alive]
        shown = {(s.provider, s.machine, s.provider_id) for s in suspects}
        suspects += [s for s in here if (s.provider, s.machine, s.provider_id) not in shown]
        doomed = frozenset(s.machine for s in here if s.verdict is Ownership.LEAK)
        things += resources.judge(account[0], found.resources, [*machines, *others], records, doomed, time.time(),
                                  FRESH_S)
    living = {(a[0] if is_over_ssh(a[0]) else a, h.request_id) for a, found in accounts.items()
              for h in found.machines if lives(h)}
    return LeakSearch(tuple(suspects), len(living), tuple(notes), tuple(things))


def end(home: Home, shown: Sequence[Suspect], progress: Callable[[str], None], things: Sequence[ResourceItem] = (),
        everywhere: bool = False) -> None:
    """Terminate the machines of `shown` and remove the `things` that are still leaks; return when the cloud lists them
    as ended.

    Raises SpotfleetError after END_S, naming the machines left.
    """
    agreed = {(s.machine, s.provider_id) for s in shown if s.verdict is Ownership.LEAK}
    still = search(home, everywhere)
    found = [s for s in still.leaks if (s.machine, s.provider_id) in agreed]
    accounts = listed(home, [], everywhere)
    left = {(a, s.machine) for a, account in accounts.items() for s in found
            if any((h.request_id, h.provider_id) == (s.machine, s.provider_id) for h in account.lines)}
    deadline, reported = time.monotonic() + END_S, ""
    for account, machine in sorted(left):
        progress(f"ending {machine}")
        accounts[account].provider.terminate(machine)
    while left:
        alive = {(a, h.request_id) for a in {a for a, _ in left} for h in accounts[a].provider.hosts("") if lives(h)}
        left &= alive
        names = ", ".join(sorted(machine for _, machine in left))
        if names and names != reported:
            progress(f"waiting for the provider to end {names}")
            reported = names
        if left and time.monotonic() >= deadline:
            raise SpotfleetError(f"after {END_S:g} s the provider still lists {names}",
                                 hint="`spotfleet leaks --fix` again, or look at its console")
        if left:
            time.sleep(POLL_S)
    _clean_up(home, accounts, found, progress)
    _clear(accounts, {t.key for t in still.left} & {t.key for t in things if t.verdict is Ownership.LEAK}, progress)


def _clear(accounts: Mapping[Account, AccountListing], agreed: set[tuple[str, str, str]],
           progress: Callable[[str], None],
           ) -> None:
    for account in accounts.values():
        provider = account.provider
        if isinstance(provider, ManagedResources):
            resources.remove(
                provider,
                lambda provider=provider: [r for r in provider.list_resources("") if resources.key(r) in agreed],
                progress, resources.CLEAR_S, "`spotfleet leaks --fix` again")


def _clean_up(home: Home, accounts: Mapping[Account, AccountListing], ended: Sequence[Suspect],
              progress: Callable[[str], None]) -> None:
    """Remove the files and keys of ended fleets from their machines over SSH."""
    living = {f.record.cloud_name for f in home.living() if f.readable}
    for fleet in sorted({s.fleet for s in ended} - living):
        for account in accounts.values():
            if isinstance(account.provider, ExistingMachines) and any(h.fleet == fleet for h in account.lines):
                for machine, why in account.provider.remove_fleet(fleet).items():
                    progress(f"something of fleet {fleet} is still on {machine}: {why}")


# ---- the verdict


def judge(lines: Iterable[CloudHost], known: Mapping[str, KnownFleet], now: float, *,
          whole: bool = True, others: Iterable[CloudHost] = ()) -> list[Suspect]:
    """Return the machines of one account that are leaks, may be, or belong to another machine's fleets. Pure.

    `whole`: the whole account is listed. Otherwise an unlisted dispatcher may be running, and its hosts are left out.
    `others`: dispatchers in other accounts, as a fleet may be on several clouds.
    """
    guards: dict[str, list[CloudHost]] = {}
    for line in others:
        guards.setdefault(line.fleet, []).append(line)
    fleets: dict[str, dict[str, CloudHost]] = {}
    for line in lines:  # the last of repeated lines
        fleets.setdefault(line.fleet, {})[line.request_id] = line
    suspects = []
    for fleet, hosts in sorted(fleets.items()):
        for line in hosts.values():
            if lives(line) and (found := _verdict(
                    line, [*hosts.values(), *guards.get(fleet, ())], known.get(fleet), now, whole)):
                suspects.append(_suspect(line, *found))
    return suspects


def _verdict(line: CloudHost, fleet: Sequence[CloudHost], known: KnownFleet | None, now: float,
             whole: bool) -> tuple[Ownership, str] | None:
    if known is not None and not known.down_at:
        if line.role is not Role.WORKER or known.hosts is None or line.request_id in known.hosts:
            return None
        return _grace(line, now) or (Ownership.LEAK, "its dispatcher lives and does not know it")
    own = known.machines if known else frozenset()
    guard = next((h for h in fleet if lives(h) and h.role is Role.DISPATCHER
                  and (h.request_id, h.provider_id) not in own), None)
    if guard is not None:
        return Ownership.ELSEWHERE, f"fleet {line.fleet} of another machine: its dispatcher lives"
    if not whole and (line.request_id, line.provider_id) not in own:
        return None
    if known is None and resources.hidden(line.fleet, fleet):
        return Ownership.ELSEWHERE, resources.unseen(line.fleet)
    if young := _grace(line, now):
        return young
    why = f"fleet {line.fleet} is not known here, and no dispatcher of it is listed"
    if known is not None:
        why = f"fleet {line.fleet} is down since {clock_utc(known.down_at)}"
        if now - known.down_at < FRESH_S:
            return Ownership.FRESH, f"{why}, which the listing may not show yet"
    return _orphan(line, fleet, known.orphan_after_s if known else ORPHAN_AFTER_S, why, now)


def _grace(line: CloudHost, now: float) -> tuple[Ownership, str] | None:
    if line.state is CloudState.PENDING or (line.state is CloudState.RUNNING and not line.runs):
        return Ownership.FRESH, "it is just starting"
    if not line.runs:
        return None  # stopped, at an unknown time
    age_s = now - line.runs[0].started_at
    return (Ownership.FRESH, f"it began {max(age_s, 0.0):.0f} s ago") if age_s < FRESH_S else None


def _orphan(line: CloudHost, fleet: Sequence[CloudHost], orphan_after_s: float, why: str,
            now: float) -> tuple[Ownership, str]:
    """Return the verdict on a machine without a dispatcher; its reason warns that a worker host may still train."""
    ends = [h.runs[-1].ended_at for h in fleet if h.role is Role.DISPATCHER and h.runs and h.runs[-1].ended_at]
    if line.role is not Role.WORKER or line.state is CloudState.STOPPED:
        return Ownership.LEAK, why
    if not ends:
        return Ownership.LEAK, f"{why}; it may still train, since nobody knows for how long it has had no dispatcher"
    ago_s = now - max(ends)
    if ago_s < FRESH_S:
        return Ownership.FRESH, f"its dispatcher ended {ago_s:.0f} s ago and may be replaced"
    if not orphan_after_s:
        return Ownership.LEAK, f"{why}; it may still train, for it never ends itself"
    left_s = orphan_after_s - ago_s
    if left_s > 0:
        return Ownership.LEAK, (f"{why}; it may still train: its dispatcher ended {ago_s / 60:.0f} min ago, "
                              f"it ends itself in about {left_s / 60:.0f} min")
    return Ownership.LEAK, f"{why}; it should have ended itself {-left_s / 60:.0f} min ago"


def _suspect(line: CloudHost, verdict: Ownership, why: str) -> Suspect:
    price = 0 if line.state is CloudState.STOPPED else line.offer.price_micros_h
    return Suspect(line.request_id, line.fleet, line.offer.provider, line.role, line.offer.pool,
                   line.runs[0].started_at if line.runs else 0.0, price, verdict, why, line.provider_id)
