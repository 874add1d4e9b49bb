"""Choice of pools for new hosts. Pure.

Hosts spread over pools of about the same price, because a cloud reclaims a whole pool at once. Among equal pools, a
cloud that knows its capacity may choose: each launch names others besides its own pool. No two launches of one tick
name the same pool, so hosts stay spread whichever pools the cloud chooses.

`placement` "zone" and "cluster" keep a fleet together instead: in the zone, or in the pool, of its hosts. A fleet
without hosts takes the cheapest one that is not refused. Lost hosts are replaced in the same place, and wait while it
refuses: hosts elsewhere would be useless to the fleet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spotfleet.fleet.domain.actions import Launch, Wait, Wanted, request_id
from spotfleet.fleet.domain.copies import replace
from spotfleet.fleet.domain.state import FleetState, Host, cooling_until, failing, scope_keys
from spotfleet.fleet.policy.mix import MarketShare, is_mixed, shares
from spotfleet.fleet.policy.pools import host_charge, offer_charges, useful_prices
from spotfleet.matching import matches, meets
from spotfleet.model import Need, Offer
from spotfleet.words import clock_utc, rate

SPREAD_WITHIN = 1.5  # pools up to this many times the cheapest price share the hosts
RECLAIM_MEMORY_S = 180.0  # over 92 % of co-interruptions of a pool come within three minutes (arXiv 2604.16457)
NAMED = 10  # pools that one launch names at most, its own included


def launches(wanted: Wanted, state: FleetState, offers: Sequence[Offer], staying: list[Host],
             now: float) -> list[Launch | Wait]:
    """Return the launches that bring `staying` to the wanted numbers, as far as there is room; then why no more."""
    found: list[Launch | Wait] = []
    common = common_place(wanted, staying)
    spent = sum(host_charge(state, h) for h in staying) if wanted.max_micros_h else 0
    charges = offer_charges(state, offers, now) if wanted.max_micros_h else {}
    for share in shares(wanted):
        own = share.of(staying)
        if share.wanted.hosts <= len(own):
            continue
        budget = max(0, wanted.max_micros_h - spent) if wanted.max_micros_h else None
        more = _of_share(share, state, offers, _Context(own, staying, common, budget, charges), now)
        begun = [a for a in more if isinstance(a, Launch)]
        state = replace(state, launches=state.launches + len(begun))
        spent += sum(charges.get(a.offer, 0) for a in begun)
        common = common or next((place(wanted, a.offer) for a in begun), "")
        found += more
    return found


@dataclass(frozen=True)
class _Context:
    """Existing hosts that new ones join, and the limits for the new ones."""

    own: list[Host]  # hosts of their kind
    all: list[Host]
    common: str  # the place that all must share; "" for anywhere
    budget: int | None  # micro-dollars an hour left for new hosts; None: no limit
    charges: dict[Offer, int]  # if there is a limit: the amount that each offer counts against it


def _of_share(share: MarketShare, state: FleetState, offers: Sequence[Offer], context: _Context,
              now: float) -> list[Launch | Wait]:
    wanted, common = share.wanted, context.common
    missing = wanted.hosts - len(context.own)
    on_sale = {o: i for o in offers if (i := _preference(wanted, o)) >= 0}
    usable = {o: i for o, i in on_sale.items() if cooling_until(state, o) <= now}
    if common:
        usable = {o: i for o, i in usable.items() if place(wanted, o) == common}
    if not usable:
        return [Wait(f"{_missing(missing, wanted.hosts, share.called)}: {_place_reason(common, context.all)}"
                     f"{obstacles(wanted, state, _at(wanted, common, offers), now)}")]
    turn, turns = min(wanted.any_of[i].turn for i in usable.values()), len({n.turn for n in wanted.any_of})
    usable = {o: i for o, i in usable.items() if wanted.any_of[i].turn == turn}
    load = Counter(h.offer.pool for h in context.all)
    worth = useful_prices(state, usable, context.all, now)
    cost = _Cost(state, usable, load, worth, now)
    gang = _is_gang(wanted, context.all)
    if not common and (wanted.placement != "spread" or gang):
        common = place(wanted, _best(usable, cost))
        usable = {o: i for o, i in usable.items() if place(wanted, o) == common}
    if gang:
        return _gang(wanted, state, usable, cost, context)
    before = Counter(load)
    chosen = _chosen(usable, cost, missing, context)
    named = _alternatives(chosen, usable, cost)
    found: list[Launch | Wait] = []
    for n, (offer, others) in enumerate(zip(chosen, named, strict=True)):
        why = f"{_missing(missing - n, wanted.hosts, share.called)}; {at(offer)}"
        choice = cost.reason(offer, before)
        before[offer.pool] += 1
        why += f", {choice}" if choice else ""
        why += f", number {turn + 1} of {turns}" if turns > 1 else ""
        found.append(Launch(request_id(wanted, state.launches + n), offer, because(wanted, why), others,
                            group=wanted.group))
    if len(chosen) < missing:
        left = _missing(missing - len(chosen), wanted.hosts, share.called)
        found.append(Wait(f"{left}: {_place_reason(common, context.all)}"
                          f"{_no_more(usable, chosen, context)}"))
    return found


def at(offer: Offer) -> str:
    """Return price and pool of an offer for a launch's `why`; the zone alone for a machine without a price."""
    return f"{rate(offer.price_micros_h)} in {offer.pool}" if offer.price_micros_h else f"on {offer.zone}"


def because(wanted: Wanted, what: str) -> str:
    """Return the reason of an action, with that of the number where demand decides."""
    return f"{what}: {wanted.why}" if wanted.why else what


def _missing(hosts: int, of: int, called: str) -> str:
    return f"{hosts} of {of} {called} missing" if of > 1 else f"1 {called.removesuffix('s')} missing"


def _no_more(usable: dict[Offer, int], chosen: Sequence[Offer], context: _Context) -> str:
    begun = Counter(o.pool for o in chosen)
    roomy = [o for o in usable if not o.room or begun[o.pool] < o.room]
    if context.budget is None or not roomy:
        return "no offer has room for more"
    left = context.budget - sum(context.charges[o] for o in chosen)
    least = min(context.charges[o] for o in roomy)
    return f"max_hourly_cost leaves {rate(left)} for them, and the cheapest is {rate(least)}"


# ---- one place for all


def place(wanted: Wanted, offer: Offer) -> str:
    """Return the place that all hosts of a fleet share by its `placement`; "" if they may be anywhere."""
    if wanted.placement == "zone":
        return f"zone {offer.zone}"
    pool = offer.pool.rpartition("/")[0] if is_mixed(wanted) else offer.pool
    return f"pool {pool}" if wanted.placement == "cluster" else ""


def common_place(wanted: Wanted, staying: Sequence[Host]) -> str:
    """Return the place of most hosts that stay; "" if there are none."""
    places = Counter(place(wanted, h.offer) for h in staying)
    return min(places, key=lambda p: (-places[p], p), default="")


def _at(wanted: Wanted, common: str, offers: Sequence[Offer]) -> list[Offer]:
    return [o for o in offers if not common or place(wanted, o) == common]


def _place_reason(common: str, staying: Sequence[Host]) -> str:
    if not common or not staying:
        return ""
    names = ", ".join(h.request_id for h in staying[:3]) + (" ..." if len(staying) > 3 else "")
    return f"they must be in {common}, where {names} {'is' if len(staying) == 1 else 'are'}: "


# ---- all or nothing


def _is_gang(wanted: Wanted, staying: Sequence[Host]) -> bool:
    return wanted.all_or_nothing and not staying and wanted.hosts > 1


def _gang(wanted: Wanted, state: FleetState, usable: dict[Offer, int],
          cost: _Cost, context: _Context) -> list[Launch | Wait]:
    """Launch all hosts in the best pool that may have room for all of them."""
    roomy = {o: i for o, i in usable.items() if not o.room or o.room >= wanted.hosts}
    if not roomy:
        return [Wait(f"{wanted.hosts} of {wanted.hosts} hosts missing: no pool on offer has room for all of them")]
    budget = context.budget
    if budget is not None:
        roomy = {o: i for o, i in roomy.items() if context.charges[o] * wanted.hosts <= budget}
    if not roomy:
        return [Wait(f"{wanted.hosts} of {wanted.hosts} hosts missing: max_hourly_cost leaves {rate(budget or 0)} "
                     "for all of them, which cost more in any pool")]
    offer = _best(roomy, cost)
    names = tuple(request_id(wanted, state.launches + n) for n in range(wanted.hosts))
    why = f"all {wanted.hosts} hosts or none; {at(offer)}"
    return [Launch(name, offer, because(wanted, why), together=names, group=wanted.group) for name in names]


# ---- which pools


@dataclass(frozen=True)
class _Cost:
    """Sort key of pools for new hosts, and the words that explain the choice."""

    state: FleetState
    usable: dict[Offer, int]  # offer -> rank in the user's preference
    load: Counter[str]  # pool -> hosts that are or will be there
    worth: dict[Offer, float]  # micro-dollars per useful host-hour
    now: float

    def __call__(self, offer: Offer) -> tuple:
        return (self.is_reclaimed(offer), self.load[offer.pool], self.worth[offer], self.usable[offer], offer.pool)

    def is_reclaimed(self, offer: Offer) -> bool:
        return self.now - self.state.reclaimed_at.get(offer.pool, -RECLAIM_MEMORY_S) < RECLAIM_MEMORY_S

    def in_band(self, offers: Iterable[Offer], roomy: Iterable[Offer]) -> list[Offer]:
        """Return the offers that cost about as much as the cheapest of `roomy`."""
        cheapest = min(self.worth[o] for o in roomy)
        return [o for o in offers if self.worth[o] <= cheapest * SPREAD_WITHIN]

    def reason(self, offer: Offer, load: Counter[str]) -> str:
        """Return why this pool was chosen; "" if there is no other. `load` is the one before the choice."""
        if offer.reserved:
            return "reserved capacity, which costs whether it is used or not"
        others = [o for o in self.usable if o is not offer]
        if not others or not any(o.price_micros_h for o in self.usable):
            return ""
        best = min(self.usable, key=lambda o: (self.worth[o], self.usable[o], o.pool))
        about = f"about {rate(round(self.worth[offer]))} of useful work" if self.differs_from_price else ""
        if best.pool == offer.pool:
            text = f"the cheapest of {len(self.usable)} pools"
        elif self.is_reclaimed(best):
            text = f"as hosts in {best.pool} were just interrupted"
        elif load[best.pool] > load[offer.pool]:
            text = f"to spread: {best.pool} has {load[best.pool]} already"
        else:
            text = f"as {best.pool} has no more room"
        return "; ".join(filter(None, [text, about]))

    @property
    def differs_from_price(self) -> bool:
        """Return whether any pool's cost of useful work differs from its price by more than 1 %."""
        return any(abs(w - o.price_micros_h) > 0.01 * o.price_micros_h for o, w in self.worth.items()
                   if not o.reserved)


def _best(usable: dict[Offer, int], cost: _Cost) -> Offer:
    return min(cost.in_band(usable, usable), key=cost)


def _chosen(usable: dict[Offer, int], cost: _Cost, missing: int, context: _Context) -> list[Offer]:
    """Choose a pool for each host, as far as there is room and money. Adds them to the load."""
    chosen: list[Offer] = []
    budget = context.budget
    begun: Counter[str] = Counter()
    for _ in range(missing):
        roomy = [o for o in usable if (not o.room or begun[o.pool] < o.room)
                 and (budget is None or context.charges[o] <= budget)]
        if not roomy:
            break
        offer = min(cost.in_band(roomy, roomy), key=cost)
        cost.load[offer.pool] += 1
        begun[offer.pool] += 1
        budget = None if budget is None else budget - context.charges[offer]
        chosen.append(offer)
    return chosen


def _alternatives(chosen: Sequence[Offer], usable: dict[Offer, int], cost: _Cost) -> list[tuple[Offer, ...]]:
    """Return the alternatives of each chosen pool: equal pools, distributed so that none is named twice.

    Equal means: in the same region and market, with a similar machine, in the same band of prices, as little used, not
    reclaimed recently, and without a known limit of room.
    """
    taken, load = {o.pool for o in chosen}, cost.load
    market = [o for o in usable if not o.reserved]
    free = sorted((o for o in (cost.in_band(market, market) if market else ())
                   if o.pool not in taken and not o.room and not cost.is_reclaimed(o)), key=cost)
    named: list[list[Offer]] = [[] for _ in chosen]
    for offer in free:
        fitting = [n for n, own in enumerate(chosen)
                   if len(named[n]) < NAMED - 1 and load[offer.pool] <= load[own.pool] - 1 and _alike(own, offer)]
        if fitting:
            named[min(fitting, key=lambda n: (len(named[n]), n))].append(offer)
    return [tuple(others) for others in named]


def _alike(own: Offer, other: Offer) -> bool:
    """Return whether one boot text fits machines of both kinds."""
    return ((own.provider, own.region, own.sold, own.slots, bool(own.accelerator))
            == (other.provider, other.region, other.sold, other.slots, bool(other.accelerator)))


def _preference(wanted: Wanted, offer: Offer) -> int:
    """Return the index in the user's `any_of` of the first need that `offer` meets at its price; -1 for none."""
    for number, need in enumerate(wanted.any_of):
        if meets(need, offer):
            return -1 if offer.pool in wanted.shun else number
    return -1


# ---- why not


def obstacles(wanted: Wanted, state: FleetState, offers: Sequence[Offer], now: float) -> str:
    """Return what prevents a launch, and until when; for refusals by a region or account also why."""
    cooling: dict[str, str] = {}
    expensive, shunned = [], []
    failed = failing(state, now)
    for offer in offers:
        if _preference(wanted, offer) >= 0:
            for scope, key in scope_keys(offer).items():
                until, past = state.cooldown_until.get(key, 0.0), state.refusals.get(key)
                if key in failed:
                    cooling[key] = failed[key]
                if until > now and scope != "machine":
                    wide = past is not None and past.why and scope in ("quota", "region", "account")
                    text = f": {past.why}" if past is not None and wide else ""
                    cooling[key] = f"{key} refused, asked again at {clock_utc(until)}{text}"
        elif offer.pool in wanted.shun:
            shunned.append(f"{offer.pool} costs no less than on demand")
        elif any(matches(need, offer) for need in wanted.any_of):
            expensive.append(offer)
    reasons = [*(text for _, text in sorted(cooling.items())), *sorted(shunned)]
    if expensive:
        least = min(expensive, key=lambda o: (o.price_micros_h, o.pool))
        limit = max(n.max_micros_h for n in wanted.any_of if matches(n, least))
        reasons.append(f"the cheapest of {len(expensive)} offers above the limit is {rate(least.price_micros_h)} "
                       f"in {least.pool}, the limit is {rate(limit)}")
    if not reasons:
        reasons.append(f"no machine is available that is {' or '.join(_describe(n) for n in wanted.any_of)}; "
                       "checked again regularly")
    return "; ".join(reasons)


def _describe(need: Need) -> str:
    accelerator = f"{need.accelerator}:{need.accelerator_count or 1}" if need.accelerator else ""
    parts = ["spot" if need.use_spot else "on-demand", need.instance_type, accelerator, need.zone or need.region]
    return " ".join(p for p in parts if p)
