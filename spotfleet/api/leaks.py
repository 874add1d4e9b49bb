"""`leaks`: machines of this account that nothing accounts for, and what fleets have left there besides machines.

    the cloud's listing of every fleet --> then our folders --> then the dispatchers that live --> a verdict on each

The cloud is listed first: whatever is launched or told to us meanwhile can only take a machine off the list of leaks.
Machines over SSH are in nobody's account: the fleets that were here name those that there are, and one machine may be
named by several.

A machine is a leak when its fleet is down or unknown here and no dispatcher of that fleet is listed, or when it is a
worker host that its living dispatcher does not know. Anything else is one when no machine of its fleet lives. Who is
young may not be known yet, so it is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from spotfleet.api import belongings
from spotfleet.api.accounts import ORPHAN_AFTER_S, OVER_SSH, Account, Known, Listed, known, listed, lives
from spotfleet.api.belongings import Thing, Verdict
from spotfleet.api.house import House
from spotfleet.errors import SpotfleetError
from spotfleet.fleet.plan import clock
from spotfleet.model import CloudHost, CloudState, Role
from spotfleet.providers import ExistingMachines, Furnished

FRESH_S = 300.0  # a machine younger than this, or whose fleet or dispatcher ended since, may be in good hands
END_S = 300.0  # for a cloud to end leaks; then a person must look
POLL_S = 1.0


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
class Search:
    suspects: tuple[Suspect, ...]
    listed: int  # machines that live, all in all
    notes: tuple[str, ...] = ()  # what could not be asked
    things: tuple[Thing, ...] = ()  # besides machines

    @property
    def leaks(self) -> tuple[Suspect, ...]:
        return tuple(s for s in self.suspects if s.verdict is Verdict.LEAK)

    @property
    def left(self) -> tuple[Thing, ...]:
        """Leaks that are no machines."""
        return tuple(t for t in self.things if t.verdict is Verdict.LEAK)


def search(house: House, everywhere: bool = False) -> Search:
    """Look everywhere, `everywhere` also in regions where no fleet of this machine is; changes nothing. Raises what a
    provider that cannot be listed raises."""
    notes: list[str] = []
    accounts = listed(house, notes, everywhere)
    suspects: list[Suspect] = []
    things: list[Thing] = []
    for account, found in accounts.items():
        ours, machines = known(house, account, found.lines, notes), found.machines
        here = judge(machines, ours, time.time(), whole=found.whole)
        if any(s.verdict is Verdict.LEAK for s in here):  # it may have been ended while we looked
            alive = {(h.request_id, h.provider_id) for h in found.provider.hosts("") if lives(h)}
            here = [s for s in here if (s.machine, s.provider_id) in alive]
        shown = {(s.provider, s.machine, s.provider_id) for s in suspects}
        suspects += [s for s in here if (s.provider, s.machine, s.provider_id) not in shown]
        doomed = frozenset(s.machine for s in here if s.verdict is Verdict.LEAK)
        things += belongings.judge(account[0], found.belongings, machines, ours, doomed, time.time(), FRESH_S)
    living = {(a[0] if a[0] == OVER_SSH else a, h.request_id) for a, found in accounts.items()
              for h in found.machines if lives(h)}
    return Search(tuple(suspects), len(living), tuple(notes), tuple(things))


def end(house: House, shown: Sequence[Suspect], progress: Callable[[str], None], things: Sequence[Thing] = (),
        everywhere: bool = False) -> None:
    """Terminate those of `shown` and remove those of `things` that are leaks by now still; return when the cloud lists
    them as ended.

    Raises SpotfleetError after END_S, naming what is left.
    """
    agreed = {(s.machine, s.provider_id) for s in shown if s.verdict is Verdict.LEAK}
    still = search(house, everywhere)
    found = [s for s in still.leaks if (s.machine, s.provider_id) in agreed]
    accounts = listed(house, [], everywhere)
    left = {(a, s.machine) for a, account in accounts.items() for s in found
            if any((h.request_id, h.provider_id) == (s.machine, s.provider_id) for h in account.lines)}
    deadline, told = time.monotonic() + END_S, ""
    for account, machine in sorted(left):
        progress(f"ending {machine}")
        accounts[account].provider.terminate(machine)
    while left:
        alive = {(a, h.request_id) for a in {a for a, _ in left} for h in accounts[a].provider.hosts("") if lives(h)}
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
    _part(house, accounts, found, progress)
    _clear(accounts, {t.key for t in still.left} & {t.key for t in things if t.verdict is Verdict.LEAK}, progress)


def _clear(accounts: Mapping[Account, Listed], agreed: set[tuple[str, str, str]], progress: Callable[[str], None],
           ) -> None:
    for account in accounts.values():
        provider = account.provider
        if isinstance(provider, Furnished):
            belongings.remove(
                provider, lambda provider=provider: [b for b in provider.belongings("") if belongings.key(b) in agreed],
                progress, belongings.CLEAR_S, "`spotfleet leaks --fix` again")


def _part(house: House, accounts: Mapping[Account, Listed], ended: Sequence[Suspect],
          progress: Callable[[str], None]) -> None:
    """Take the keys of fleets that are no more from the machines that bore something of them."""
    living = {f.record.cloud_name for f in house.living() if f.readable}
    for fleet in sorted({s.fleet for s in ended} - living):
        for account in accounts.values():
            if isinstance(account.provider, ExistingMachines) and any(h.fleet == fleet for h in account.lines):
                for line in account.provider.part(fleet):
                    progress(f"something of fleet {fleet} is still on {line}")


# ---- the verdict


def judge(lines: Iterable[CloudHost], known: Mapping[str, Known], now: float, *, whole: bool = True) -> list[Suspect]:
    """The living machines of one account that are leaks, may be, or belong to another machine's fleets. Pure.

    `whole`: the whole account is listed. Else a dispatcher that is not may live, and its hosts are left out.
    """
    fleets: dict[str, dict[str, CloudHost]] = {}
    for line in lines:  # the last of repeated lines
        fleets.setdefault(line.fleet, {})[line.request_id] = line
    suspects = []
    for fleet, hosts in sorted(fleets.items()):
        for line in hosts.values():
            if lives(line) and (found := _verdict(line, list(hosts.values()), known.get(fleet), now, whole)):
                suspects.append(_suspect(line, *found))
    return suspects


def _verdict(line: CloudHost, fleet: Sequence[CloudHost], known: Known | None, now: float,
             whole: bool) -> tuple[Verdict, str] | None:
    if known is not None and not known.down_at:
        if line.role is not Role.WORKER or known.hosts is None or line.request_id in known.hosts:
            return None
        return _grace(line, now) or (Verdict.LEAK, "its dispatcher lives and does not know it")
    ours = known.machines if known else frozenset()
    guard = next((h for h in fleet if lives(h) and h.role is Role.DISPATCHER
                  and (h.request_id, h.provider_id) not in ours), None)
    if guard is not None:
        return Verdict.ELSEWHERE, f"fleet {line.fleet} of another machine: its dispatcher lives"
    if not whole and (line.request_id, line.provider_id) not in ours:
        return None
    if young := _grace(line, now):
        return young
    why = f"fleet {line.fleet} is not known here, and no dispatcher of it is listed"
    if known is not None:
        why = f"fleet {line.fleet} is down since {clock(known.down_at)}"
        if now - known.down_at < FRESH_S:
            return Verdict.FRESH, f"{why}, which the listing may not show yet"
    return _orphan(line, fleet, known.orphan_after_s if known else ORPHAN_AFTER_S, why, now)


def _grace(line: CloudHost, now: float) -> tuple[Verdict, str] | None:
    if line.state is CloudState.PENDING or (line.state is CloudState.RUNNING and not line.runs):
        return Verdict.FRESH, "it is just starting"
    if not line.runs:
        return None  # stopped since nobody knows when
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
