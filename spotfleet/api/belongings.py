"""What fleets have in a cloud besides machines: removed by `down`, and by `leaks --fix` when nothing accounts for it.

A thing that something else still uses is asked for again, for the cloud lets go of an ended machine's things within
minutes. What the cloud refuses for want of a person is told once nothing else is left.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from spotfleet.api.accounts import Known, lives
from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.fleet.plan import clock
from spotfleet.model import CloudHost, CloudState, Role
from spotfleet.providers import Belonging, Furnished, Provider

CLEAR_S = 900.0  # for a cloud to let go of what its machines used; then a person must look
POLL_S = 1.0
SLOW_POLL_S = 5.0  # when nothing has changed

Tell = Callable[[str], None]


class Verdict(Enum):
    LEAK = "leak"
    FRESH = "too fresh to tell"
    ELSEWHERE = "not ours"


@dataclass(frozen=True)
class Thing:
    """Something in a cloud that is no machine and that no living fleet accounts for, as far as one can tell."""

    kind: str
    id: str
    region: str
    fleet: str
    provider: str
    since: float  # 0: nobody knows
    state: str
    verdict: Verdict
    why: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.region, self.id


@dataclass(frozen=True)
class Cleared:
    """What `down` has removed besides machines, and what a last look has found."""

    removed: tuple[Belonging, ...] = ()
    proof: str = ""  # in one line; empty where a provider has nothing besides machines


# ---- removal


def clear(provider: Provider, fleet: str, tell: Tell, limit_s: float | None = None) -> Cleared:
    """Remove everything of `fleet` that is no machine, once its machines have ended; return when none is listed.

    Raises SpotfleetError after `limit_s`, CLEAR_S if it is None, naming what is still in use; NeedsPerson when only
    that is left which we may not remove.
    """
    if not isinstance(provider, Furnished):
        return Cleared()
    removed = remove(provider, lambda: provider.belongings(fleet), tell, CLEAR_S if limit_s is None else limit_s,
                     f"`spotfleet down {fleet}` again")
    counted = Counter(b.kind for b in provider.belongings(fleet))
    counted["machine"] = sum(lives(h) for h in provider.hosts(fleet))
    counts = ", ".join(f"{counted[kind]} {_plural(kind, counted[kind])}" for kind in ("machine", *provider.kinds()))
    if counted.total():
        raise SpotfleetError(f"something of fleet {fleet} has come up meanwhile: {counts}",
                             hint=f"`spotfleet down {fleet}` again")
    where = " and ".join(provider.regions())
    return Cleared(tuple(removed), f"nothing of fleet {fleet} is listed in {where}: {counts}")


def remove(provider: Furnished, listed: Callable[[], Sequence[Belonging]], tell: Tell, limit_s: float, again: str,
           ) -> list[Belonging]:
    """Discard what `listed` names until it names nothing; the answer is what went."""
    deadline, seen, told = time.monotonic() + limit_s, {}, ""
    while left := listed():
        before = set(seen)
        refused = _discard_once(provider, left, seen, tell)
        if refused and all(isinstance(e, NeedsPerson) for e in refused.values()):
            raise _mine(refused)
        waiting = ", ".join(_name(b) for b in left if key(b) in refused)
        if waiting and waiting != told:
            tell(f"waiting for the cloud to let go of {waiting}")
            told = waiting
        if time.monotonic() >= deadline and (refused or len(seen) == len(before)):
            still = [b for b in left if key(b) in refused or key(b) in before]  # the others have just gone
            names = "; ".join(f"{_name(b)}: {refused.get(key(b)) or 'still listed'}" for b in still)
            raise SpotfleetError(f"after {limit_s:g} s there are still {names}",
                                 hint=f"see what uses them, then {again}")
        if refused or len(seen) == len(before):
            time.sleep(POLL_S if len(seen) > len(before) else SLOW_POLL_S)
    return list(seen.values())


def _discard_once(provider: Furnished, left: Iterable[Belonging], seen: dict[tuple[str, str, str], Belonging],
                  tell: Tell) -> dict[tuple[str, str, str], SpotfleetError]:
    """Ask once for each; why some did not go. What goes is added to `seen`."""
    refused: dict[tuple[str, str, str], SpotfleetError] = {}
    for one in left:
        try:
            provider.discard(one)
        except SpotfleetError as error:
            refused[key(one)] = error
            continue
        if key(one) not in seen:
            seen[key(one)] = one
            tell(f"removed {_name(one)}")
    return refused


def _mine(refused: Mapping[tuple[str, str, str], SpotfleetError]) -> NeedsPerson:
    first = next(iter(refused.values()))
    others = f"; and {len(refused) - 1} more" if len(refused) > 1 else ""
    (kind, _region, name) = next(iter(refused))
    return NeedsPerson(f"{kind} {name} is left: {first}{others}", hint=first.hint)


# ---- the verdict


def judge(provider: str, things: Iterable[Belonging], lines: Sequence[CloudHost], known: Mapping[str, Known],
          doomed: frozenset[str], now: float, fresh_s: float) -> list[Thing]:
    """Those of one account that are leaks, or may be. Pure.

    `doomed`: the request_ids of machines that are leaks themselves: what they use goes when they do.
    """
    fleets: dict[str, list[CloudHost]] = {}
    for line in lines:
        fleets.setdefault(line.fleet, []).append(line)
    found = []
    for b in things:
        verdict = _verdict(b, fleets.get(b.fleet, []), known.get(b.fleet), doomed, now, fresh_s)
        if verdict is not None:
            found.append(Thing(b.kind, b.id, b.region, b.fleet, provider, b.since, b.state, *verdict))
    return found


def _verdict(thing: Belonging, fleet: Sequence[CloudHost], known: Known | None, doomed: frozenset[str], now: float,
             fresh_s: float) -> tuple[Verdict, str] | None:
    """None: a living fleet has it."""
    if any(lives(h) and h.request_id not in doomed for h in fleet):
        return None
    if known is not None and not known.down_at and not known.reached:
        return None  # it is being made here
    if now - thing.since < fresh_s:
        return Verdict.FRESH, f"it was made {max(now - thing.since, 0.0):.0f} s ago"
    if known is None:
        why = f"fleet {thing.fleet} is not known here, and no machine of it lives"
    elif known.down_at:
        why = f"fleet {thing.fleet} is down since {clock(known.down_at)}"
        if now - known.down_at < fresh_s:
            return Verdict.FRESH, f"{why}, which the listing may not show yet"
    else:
        why = f"fleet {thing.fleet} has ended by itself; `spotfleet down {known.name or thing.fleet}` removes it, too"
    ends = [h.runs[-1].ended_at for h in fleet if h.role is Role.DISPATCHER and h.runs and h.runs[-1].ended_at]
    if ends and now - max(ends) < fresh_s:
        return Verdict.FRESH, f"the dispatcher of fleet {thing.fleet} ended {now - max(ends):.0f} s ago"
    if any(h.state is not CloudState.TERMINATED for h in fleet):
        why += "; what of it lives is a leak"
    return Verdict.LEAK, why


# ---- words


def key(thing: Belonging) -> tuple[str, str, str]:
    return thing.kind, thing.region, thing.id


def _name(thing: Belonging) -> str:
    return f"{thing.kind} {thing.id}" + (f" in {thing.region}" if thing.region else "")


def _plural(kind: str, n: int) -> str:
    return kind if n == 1 else f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
