"""Which pools new hosts are asked for in. Pure.

Hosts spread over pools of about the same price, because a cloud reclaims a whole pool at once. Of places that are as
good, a cloud that knows its capacity may choose: each launch names others beside its own pool, and no two launches of
one tick name the same, so that hosts stay spread whatever the cloud takes.

`placement` "zone" and "cluster" keep a fleet together instead: in the zone, or in the pool, where its hosts are; one
without hosts takes the cheapest that is not refused. What is lost is replaced there, and waits while that place
refuses: hosts elsewhere would be of no use to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spotfleet.fleet.actions import Launch, Wait, Wanted, clock, dollars, matches, request_id
from spotfleet.fleet.copies import replace
from spotfleet.fleet.fold import FleetState, Host, cooling_until, scope_keys
from spotfleet.fleet.policy.mix import Share, is_mixed, shares
from spotfleet.fleet.policy.pools import accepted, asked, worths
from spotfleet.model import Need, Offer

SPREAD_WITHIN = 1.5  # pools up to this many times the cheapest price share the hosts
RECLAIM_MEMORY_S = 180.0  # over 92 % of co-interruptions of a pool come within three minutes (arXiv 2604.16457)
NAMED = 10  # pools that one launch names at most, its own included


def launches(wanted: Wanted, state: FleetState, offers: Sequence[Offer], staying: list[Host],
             now: float) -> list[Launch | Wait]:
    """Those that bring `staying` to the wanted numbers, as far as there is room; then why there are no more."""
    found: list[Launch | Wait] = []
    home = home_of(wanted, staying)
    spent = sum(accepted(state, h) for h in staying) if wanted.max_micros_h else 0
    asks = asked(state, offers, now) if wanted.max_micros_h else {}
    for share in shares(wanted):
        mine = share.of(staying)
        if share.wanted.hosts <= len(mine):
            continue
        purse = max(0, wanted.max_micros_h - spent) if wanted.max_micros_h else None
        more = _of_share(share, state, offers, _Party(mine, staying, home, purse, asks), now)
        begun = [a for a in more if isinstance(a, Launch)]
        state = replace(state, launches=state.launches + len(begun))
        spent += sum(asks.get(a.offer, 0) for a in begun)
        home = home or next((place(wanted, a.offer) for a in begun), "")
        found += more
    return found


@dataclass(frozen=True)
class _Party:
    """Whom new hosts join."""

    mine: list[Host]  # of their kind
    all: list[Host]
    home: str  # where all must be; "" for anywhere
    purse: int | None  # micro-dollars an hour that are left for them; None: no limit
    asks: dict[Offer, int]  # where there is one: what each counts for against it


def _of_share(share: Share, state: FleetState, offers: Sequence[Offer], party: _Party,
              now: float) -> list[Launch | Wait]:
    wanted, home = share.wanted, party.home
    lacking, short = wanted.hosts - len(party.mine), f"of {wanted.hosts} {share.called} missing"
    on_sale = {o: i for o in offers if (i := _preference(wanted, o)) >= 0}
    usable = {o: i for o, i in on_sale.items() if cooling_until(state, o) <= now}
    if home:
        usable = {o: i for o, i in usable.items() if place(wanted, o) == home}
    if not usable:
        return [Wait(f"{lacking} {short}: {_held(home, party.all)}"
                     f"{obstacles(wanted, state, _at(wanted, home, offers), now)}")]
    load = Counter(h.offer.pool for h in party.all)
    worth = worths(state, usable, party.all, now)
    cost = _Cost(state, usable, load, worth, now)
    gang = _is_gang(wanted, party.all)
    if not home and (wanted.placement != "spread" or gang):
        home = place(wanted, _best(usable, cost))
        usable = {o: i for o, i in usable.items() if place(wanted, o) == home}
    if gang:
        return _gang(wanted, state, usable, cost, party)
    before = Counter(load)
    chosen = _chosen(usable, cost, lacking, party)
    named = _alternatives(chosen, usable, cost)
    found: list[Launch | Wait] = []
    for n, (offer, others) in enumerate(zip(chosen, named, strict=True)):
        why = f"{len(party.mine) + n} of {wanted.hosts} {share.called}; {dollars(offer.price_micros_h)} in {offer.pool}"
        told = cost.reason(offer, before)
        before[offer.pool] += 1
        found.append(Launch(request_id(wanted, state.launches + n), offer, why + (f", {told}" if told else ""), others))
    if len(chosen) < lacking:
        found.append(Wait(f"{lacking - len(chosen)} {short}: {_held(home, party.all)}"
                          f"{_no_more(usable, chosen, party)}"))
    return found


def _no_more(usable: dict[Offer, int], chosen: Sequence[Offer], party: _Party) -> str:
    begun = Counter(o.pool for o in chosen)
    roomy = [o for o in usable if not o.room or begun[o.pool] < o.room]
    if party.purse is None or not roomy:
        return "what is on offer has room for no more"
    left = party.purse - sum(party.asks[o] for o in chosen)
    least = min(party.asks[o] for o in roomy)
    return f"max_hourly_cost leaves {dollars(left)} for them, and the cheapest is {dollars(least)}"


# ---- one place for all


def place(wanted: Wanted, offer: Offer) -> str:
    """What all hosts of a fleet share by its `placement`; "" where they need not share anything."""
    if wanted.placement == "zone":
        return f"zone {offer.zone}"
    pool = offer.pool.rpartition("/")[0] if is_mixed(wanted) else offer.pool
    return f"pool {pool}" if wanted.placement == "cluster" else ""


def home_of(wanted: Wanted, staying: Sequence[Host]) -> str:
    """Where most of the hosts that stay are, "" for nowhere yet."""
    places = Counter(place(wanted, h.offer) for h in staying)
    return min(places, key=lambda p: (-places[p], p), default="")


def _at(wanted: Wanted, home: str, offers: Sequence[Offer]) -> list[Offer]:
    return [o for o in offers if not home or place(wanted, o) == home]


def _held(home: str, staying: Sequence[Host]) -> str:
    if not home or not staying:
        return ""
    names = ", ".join(h.request_id for h in staying[:3]) + (" ..." if len(staying) > 3 else "")
    return f"they must be in {home}, where {names} {'is' if len(staying) == 1 else 'are'}: "


# ---- all or nothing


def _is_gang(wanted: Wanted, staying: Sequence[Host]) -> bool:
    return wanted.all_or_nothing and not staying and wanted.hosts > 1


def _gang(wanted: Wanted, state: FleetState, usable: dict[Offer, int],
          cost: _Cost, party: _Party) -> list[Launch | Wait]:
    """All hosts in the best pool that may have room for all of them."""
    roomy = {o: i for o, i in usable.items() if not o.room or o.room >= wanted.hosts}
    if not roomy:
        return [Wait(f"{wanted.hosts} of {wanted.hosts} hosts missing: no pool on offer has room for all of them")]
    purse = party.purse
    if purse is not None:
        roomy = {o: i for o, i in roomy.items() if party.asks[o] * wanted.hosts <= purse}
    if not roomy:
        return [Wait(f"{wanted.hosts} of {wanted.hosts} hosts missing: max_hourly_cost leaves {dollars(purse or 0)} "
                     "for all of them, which cost more in any pool")]
    offer = _best(roomy, cost)
    names = tuple(request_id(wanted, state.launches + n) for n in range(wanted.hosts))
    why = f"all {wanted.hosts} hosts or none; {dollars(offer.price_micros_h)} in {offer.pool}"
    return [Launch(name, offer, why, together=names) for name in names]


# ---- which pools


@dataclass(frozen=True)
class _Cost:
    """What a host in a pool is worth taking for: the order in which pools are taken, and the words for it."""

    state: FleetState
    usable: dict[Offer, int]  # and the user's preference
    load: Counter[str]  # pool -> hosts that are or will be there
    worth: dict[Offer, float]  # micro-dollars per useful host-hour
    now: float

    def __call__(self, offer: Offer) -> tuple:
        return (self.burnt(offer), self.load[offer.pool], self.worth[offer], self.usable[offer], offer.pool)

    def burnt(self, offer: Offer) -> bool:
        return self.now - self.state.reclaimed_at.get(offer.pool, -RECLAIM_MEMORY_S) < RECLAIM_MEMORY_S

    def in_band(self, offers: Iterable[Offer], roomy: Iterable[Offer]) -> list[Offer]:
        """Those that cost about as much as the cheapest of `roomy`."""
        cheapest = min(self.worth[o] for o in roomy)
        return [o for o in offers if self.worth[o] <= cheapest * SPREAD_WITHIN]

    def reason(self, offer: Offer, load: Counter[str]) -> str:
        """Why this pool and no other of those on offer; "" where there is no other. `load`: before it was taken."""
        others = [o for o in self.usable if o is not offer]
        if not others:
            return ""
        best = min(self.usable, key=lambda o: (self.worth[o], self.usable[o], o.pool))
        about = f"about {dollars(round(self.worth[offer]))} of use" if self.told_apart else ""
        if best.pool == offer.pool:
            said = f"the cheapest of {len(self.usable)} pools"
        elif self.burnt(best):
            said = f"as hosts in {best.pool} were just taken"
        elif load[best.pool] > load[offer.pool]:
            said = f"apart from the {load[best.pool]} in {best.pool}"
        else:
            said = f"as {best.pool} has no more room"
        return "; ".join(filter(None, [said, about]))

    @property
    def told_apart(self) -> bool:
        """Does any pool's worth differ from its price by what somebody would notice?"""
        return any(abs(w - o.price_micros_h) > 0.01 * o.price_micros_h for o, w in self.worth.items())


def _best(usable: dict[Offer, int], cost: _Cost) -> Offer:
    return min(cost.in_band(usable, usable), key=cost)


def _chosen(usable: dict[Offer, int], cost: _Cost, lacking: int, party: _Party) -> list[Offer]:
    """A pool for each host, as far as there is room and money. Counts them into the load."""
    chosen: list[Offer] = []
    purse = party.purse
    begun: Counter[str] = Counter()
    for _ in range(lacking):
        roomy = [o for o in usable if (not o.room or begun[o.pool] < o.room)
                 and (purse is None or party.asks[o] <= purse)]
        if not roomy:
            break
        offer = min(cost.in_band(roomy, roomy), key=cost)
        cost.load[offer.pool] += 1
        begun[offer.pool] += 1
        purse = None if purse is None else purse - party.asks[offer]
        chosen.append(offer)
    return chosen


def _alternatives(chosen: Sequence[Offer], usable: dict[Offer, int], cost: _Cost) -> list[tuple[Offer, ...]]:
    """For each chosen pool the others that are as good, dealt out like cards so that none is named twice.

    As good: in its region and market, alike as a machine, in its band of prices, as little used, not reclaimed a moment
    ago, and with room that nobody has counted.
    """
    taken, load = {o.pool for o in chosen}, cost.load
    free = sorted((o for o in cost.in_band(usable, usable) if o.pool not in taken and not o.room and not cost.burnt(o)),
                  key=cost)
    named: list[list[Offer]] = [[] for _ in chosen]
    for offer in free:
        fitting = [n for n, own in enumerate(chosen)
                   if len(named[n]) < NAMED - 1 and load[offer.pool] <= load[own.pool] - 1 and _alike(own, offer)]
        if fitting:
            named[min(fitting, key=lambda n: (len(named[n]), n))].append(offer)
    return [tuple(others) for others in named]


def _alike(own: Offer, other: Offer) -> bool:
    """May one text tell a machine of either kind what it is?"""
    return ((own.provider, own.region, own.market, own.slots, bool(own.accelerator))
            == (other.provider, other.region, other.market, other.slots, bool(other.accelerator)))


def _preference(wanted: Wanted, offer: Offer) -> int:
    """The place in the user's `any_of` of the first need that `offer` meets at its price; -1 for none."""
    for number, need in enumerate(wanted.any_of):
        if matches(need, offer) and (not need.max_micros_h or offer.price_micros_h <= need.max_micros_h):
            return -1 if offer.pool in wanted.shun else number
    return -1


# ---- why not


def obstacles(wanted: Wanted, state: FleetState, offers: Sequence[Offer], now: float) -> str:
    """What stands in the way of a launch, and until when; of what refuses more than a type, also why."""
    cooling: dict[str, str] = {}
    dear, shunned = [], []
    for offer in offers:
        if _preference(wanted, offer) >= 0:
            for scope, key in scope_keys(offer).items():
                until, past = state.cooldown_until.get(key, 0.0), state.refusals.get(key)
                if until > now:
                    wide = past is not None and past.why and scope in ("region", "account")
                    cooling[key] = f"asked again at {clock(until)}" + (f": {past.why}" if wide else "")
        elif offer.pool in wanted.shun:
            shunned.append(f"{offer.pool} costs no less than on demand")
        elif any(matches(need, offer) for need in wanted.any_of):
            dear.append(offer)
    reasons = [*(f"{key} refused, {said}" for key, said in sorted(cooling.items())), *sorted(shunned)]
    if dear:
        least = min(dear, key=lambda o: (o.price_micros_h, o.pool))
        limit = max(n.max_micros_h for n in wanted.any_of if matches(n, least))
        reasons.append(f"the cheapest of {len(dear)} offers above the limit is {dollars(least.price_micros_h)} "
                       f"in {least.pool}, the limit is {dollars(limit)}")
    if not reasons:
        reasons.append(f"nothing on sale is {' or '.join(_describe(n) for n in wanted.any_of)}; "
                       "looked up again at every tick")
    return "; ".join(reasons)


def _describe(need: Need) -> str:
    accelerator = f"{need.accelerator}:{need.accelerator_count or 1}" if need.accelerator else ""
    parts = ["spot" if need.use_spot else "on-demand", need.instance_type, accelerator, need.zone or need.region]
    return " ".join(p for p in parts if p)
