"""Cloud resources of fleets besides machines: removed by `down`, and orphaned ones by `leaks --fix`.

The removal of a resource that is still in use is tried again: a cloud frees an ended machine's resources within
minutes. A refusal that needs a person is raised once nothing else is left to remove.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from spotfleet import names
from spotfleet.api.account.listing import KnownFleet, lives
from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.model import CloudHost, CloudState, Role
from spotfleet.providers import ManagedResources, Provider, Resource
from spotfleet.words import clock_utc

CLEAR_S = 900.0  # for a cloud to let go of what its machines used; then a person must look
POLL_S = 1.0
SLOW_POLL_S = 5.0  # when nothing has changed

Progress = Callable[[str], None]


class Ownership(Enum):
    LEAK = "leak"
    FRESH = "too fresh to tell"
    ELSEWHERE = "not ours"


@dataclass(frozen=True)
class ResourceItem:
    """Resource in a cloud, other than a machine, that appears to belong to no running fleet."""

    kind: str
    id: str
    region: str
    fleet: str
    provider: str
    since: float  # 0: nobody knows
    state: str
    verdict: Ownership
    why: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.region, self.id


@dataclass(frozen=True)
class RemovedResources:
    """Resources that `down` has removed besides machines, and the result of a last listing."""

    removed: tuple[Resource, ...] = ()
    proof: str = ""  # one line: nothing is listed any more; empty where a provider has only machines


# ---- removal


def clear(provider: Provider, fleet: str, progress: Progress, limit_s: float | None = None) -> RemovedResources:
    """Remove all resources of `fleet` once its machines have ended; return when none is listed.

    Raises SpotfleetError after `limit_s`, CLEAR_S if it is None, naming the resources still in use; NeedsPerson when
    permission is missing for all that are left.
    """
    if not isinstance(provider, ManagedResources):
        return RemovedResources()
    removed = remove(provider, lambda: provider.list_resources(fleet), progress,
                     CLEAR_S if limit_s is None else limit_s, f"`spotfleet down {fleet}` again")
    counted = Counter(b.kind for b in provider.list_resources(fleet))
    counted["machine"] = sum(lives(h) for h in provider.hosts(fleet))
    kinds = ("machine", *provider.resource_kinds())
    counts = ", ".join(f"{counted[kind]} {_plural(kind, counted[kind])}" for kind in kinds)
    if counted.total():
        raise SpotfleetError(f"something of fleet {fleet} has come up meanwhile: {counts}",
                             hint=f"`spotfleet down {fleet}` again")
    where = " and ".join(provider.regions())
    return RemovedResources(tuple(removed), f"nothing of fleet {fleet} is listed in {where}: {counts}")


def remove(provider: ManagedResources, listed: Callable[[], Sequence[Resource]], progress: Progress, limit_s: float,
           again: str) -> list[Resource]:
    """Discard the resources that `listed` returns until it returns none; return the removed ones."""
    deadline, seen, reported = time.monotonic() + limit_s, {}, ""
    while left := listed():
        before = set(seen)
        refused = _discard_once(provider, left, seen, progress)
        if refused and all(isinstance(e, NeedsPerson) for e in refused.values()):
            raise _needs_person(refused)
        waiting = ", ".join(_name(b) for b in left if key(b) in refused)
        if waiting and waiting != reported:
            progress(f"waiting for the cloud to let go of {waiting}")
            reported = waiting
        if time.monotonic() >= deadline and (refused or len(seen) == len(before)):
            still = [b for b in left if key(b) in refused or key(b) in before]  # the others have just gone
            names = "; ".join(f"{_name(b)}: {refused.get(key(b)) or 'still listed'}" for b in still)
            raise SpotfleetError(f"after {limit_s:g} s there are still {names}",
                                 hint=f"see what uses them, then {again}")
        if refused or len(seen) == len(before):
            time.sleep(POLL_S if len(seen) > len(before) else SLOW_POLL_S)
    return list(seen.values())


def _discard_once(provider: ManagedResources, left: Iterable[Resource], seen: dict[tuple[str, str, str], Resource],
                  progress: Progress) -> dict[tuple[str, str, str], SpotfleetError]:
    """Try once to discard each; return the errors by key. Accepted ones are added to `seen`."""
    refused: dict[tuple[str, str, str], SpotfleetError] = {}
    for one in left:
        try:
            provider.delete_resource(one)
        except SpotfleetError as error:
            refused[key(one)] = error
            continue
        if key(one) not in seen:
            seen[key(one)] = one
            progress(f"removed {_name(one)}")
    return refused


def _needs_person(refused: Mapping[tuple[str, str, str], SpotfleetError]) -> NeedsPerson:
    first = next(iter(refused.values()))
    others = f"; and {len(refused) - 1} more" if len(refused) > 1 else ""
    (kind, _region, name) = next(iter(refused))
    return NeedsPerson(f"{kind} {name} is left: {first}{others}", hint=first.hint)


# ---- the verdict


def judge(provider: str, things: Iterable[Resource], lines: Sequence[CloudHost], known: Mapping[str, KnownFleet],
          doomed: frozenset[str], now: float, fresh_s: float) -> list[ResourceItem]:
    """Return the resources of one account that are leaks, or may be. Pure.

    `doomed`: request_ids of machines that are leaks themselves; they do not count as users of a resource.
    """
    fleets: dict[str, list[CloudHost]] = {}
    for line in lines:
        fleets.setdefault(line.fleet, []).append(line)
    found = []
    for b in things:
        verdict = _verdict(b, fleets.get(b.fleet, []), known.get(b.fleet), doomed, now, fresh_s)
        if verdict is not None:
            found.append(ResourceItem(b.kind, b.id, b.region, b.fleet, provider, b.since, b.state, *verdict))
    return found


def _verdict(thing: Resource, fleet: Sequence[CloudHost], known: KnownFleet | None, doomed: frozenset[str], now: float,
             fresh_s: float) -> tuple[Ownership, str] | None:
    """Return the verdict and its reason; None if a running fleet, or one that is being made here, owns it."""
    if any(lives(h) and h.request_id not in doomed for h in fleet):
        return None
    if known is not None and not known.down_at and not known.reached:
        return None  # it is being made here
    if now - thing.since < fresh_s:
        return Ownership.FRESH, f"it was made {max(now - thing.since, 0.0):.0f} s ago"
    if known is None and hidden(thing.fleet, fleet):
        return Ownership.ELSEWHERE, unseen(thing.fleet)
    if known is None:
        why = f"fleet {thing.fleet} is not known here, and no machine of it lives"
    elif known.down_at:
        why = f"fleet {thing.fleet} is down since {clock_utc(known.down_at)}"
        if now - known.down_at < fresh_s:
            return Ownership.FRESH, f"{why}, which the listing may not show yet"
    else:
        why = f"fleet {thing.fleet} has ended by itself; `spotfleet down {known.name or thing.fleet}` removes it, too"
    ends = [h.runs[-1].ended_at for h in fleet if h.role is Role.DISPATCHER and h.runs and h.runs[-1].ended_at]
    if ends and now - max(ends) < fresh_s:
        return Ownership.FRESH, f"the dispatcher of fleet {thing.fleet} ended {now - max(ends):.0f} s ago"
    if any(h.state is not CloudState.TERMINATED for h in fleet):
        why += "; what of it lives is a leak"
    return Ownership.LEAK, why


def hidden(name: str, fleet: Sequence[CloudHost]) -> bool:
    """Return whether the dispatcher of a fleet on several clouds may be in an account that is not listed here."""
    return names.on_several(name) and not any(h.role is Role.DISPATCHER for h in fleet)


def unseen(name: str) -> str:
    return f"fleet {name} is on several clouds, and its dispatcher may be in one that is not listed here"


# ---- words


def key(thing: Resource) -> tuple[str, str, str]:
    return thing.kind, thing.region, thing.id


def _name(thing: Resource) -> str:
    return f"{thing.kind} {thing.id}" + (f" in {thing.region}" if thing.region else "")


def _plural(kind: str, n: int) -> str:
    return kind if n == 1 else f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
