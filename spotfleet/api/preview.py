"""What `up` is about to do and what that costs, in the planner's own words, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum

from spotfleet.config.values import did_you_mean
from spotfleet.fleet.fold import FleetState
from spotfleet.fleet.plan import Launch, Observed, Wait, Wanted, plan
from spotfleet.fleet.size import first_workers, hosts_wanted
from spotfleet.model import FleetSpec, Need, Nodes, Offer, Role
from spotfleet.providers import Provider

KEYS = {"accelerator": "accelerators"}  # as the fleet file calls them
FOR_NEXT_JOB = ("workdir", "envs", "file_mounts", "setup", "run", "resize")  # need no other machines: simply kept


class Change(Enum):
    NEW = "new"
    CONTINUE = "continue"  # an earlier `up` did not come to its end
    SAME = "same"
    NODES = "nodes"


@dataclass(frozen=True)
class UpPlan:
    fleet: str
    provider: str
    change: Change
    nodes: Nodes
    was: Nodes | None  # before, when `change` is NODES
    offers: tuple[Offer, ...]  # for the workers, cheapest first
    dispatcher: Launch | None  # None: nothing on sale fits, see `why`
    workers: tuple[Launch, ...]
    why: str = ""  # what stands in the way
    kept: tuple[str, ...] = ()  # keys of the fleet file that changed and hold from the next job on
    orphan_after_s: float = 0.0
    max_lifetime_s: float = 0.0
    left_out: str = ""  # what the checkpoint target does not take
    unknown: str = ""  # with no offers: the words of `resources` that the provider does not know, and those it knows

    @property
    def micros_h(self) -> int:
        """Of all machines at target, at the prices of now."""
        return sum(launch.offer.price_micros_h for launch in self._launches())

    @property
    def on_demand_micros_h(self) -> int:
        """Of the same machines, all on demand."""
        return sum(launch.offer.on_demand_micros_h for launch in self._launches())

    def _launches(self) -> list[Launch]:
        return [*([self.dispatcher] if self.dispatcher else []), *self.workers]


def preview(spec: FleetSpec, cloud_name: str, change: Change, was: FleetSpec | None, provider: Provider,
            now: float) -> UpPlan:
    """Ask the provider for offers, and the planner what it would do with them."""
    offers = _offers(provider, spec.any_of)
    slots = min((o.slots for o in offers), default=1)
    hosts = hosts_wanted(spec.nodes, slots, [first_workers(spec.resize)])  # later ones only when a job asks for them
    workers = Wanted(cloud_name, Role.WORKER, hosts, spec.any_of, spec.interruption_behavior)
    dispatcher = Wanted(cloud_name, Role.DISPATCHER, 1, (spec.dispatcher,))
    actions = plan(dispatcher, FleetState(), _offers(provider, dispatcher.any_of), Observed(), now)
    launches = plan(workers, FleetState(), offers, Observed(), now)
    changed = [f.name for f in fields(spec) if was and getattr(was, f.name) != getattr(spec, f.name)]
    return UpPlan(
        fleet=spec.name, provider=spec.provider, change=change, nodes=spec.nodes, was=was.nodes if was else None,
        offers=tuple(sorted(offers, key=lambda o: (o.price_micros_h, o.pool))),
        dispatcher=next((a for a in actions if isinstance(a, Launch)), None),
        workers=tuple(a for a in launches if isinstance(a, Launch)),
        why="; ".join(a.why for a in [*actions, *launches] if isinstance(a, Wait)),
        kept=tuple(name for name in changed if name in FOR_NEXT_JOB),
        orphan_after_s=spec.orphan_after_s, max_lifetime_s=spec.max_lifetime_s,
        left_out=spec.checkpoint.leaves_out,
        unknown="" if offers else _unknown(provider, spec.any_of),
    )


def changes(was: FleetSpec, spec: FleetSpec) -> list[str]:
    """The fields that differ and that only a new fleet can have otherwise."""
    allowed = ("nodes", *FOR_NEXT_JOB)
    return [f.name for f in fields(spec) if getattr(was, f.name) != getattr(spec, f.name) and f.name not in allowed]


def _offers(provider: Provider, needs: Sequence[Need]) -> list[Offer]:
    found: dict[str, Offer] = {}
    for need in needs:  # without its limit, so that the plan can say how far off the price is
        found.update((o.pool, o) for o in provider.offers(replace(need, max_micros_h=0)))
    return list(found.values())


def _unknown(provider: Provider, needs: Sequence[Need]) -> str:
    """Why nothing on sale fits, by the words: "instance_type: ... expected one of ..."; "" if each is known."""
    sold = [offer for use_spot in (True, False) for offer in provider.offers(Need(use_spot=use_spot))]
    found = []
    for need in needs:
        for key in ("instance_type", "accelerator", "region", "zone"):
            word, known = getattr(need, key), sorted({getattr(offer, key) for offer in sold} - {""})
            if word and word not in known:
                found.append(f"{KEYS.get(key, key)} '{word}' is none of {', '.join(known)}{did_you_mean(word, known)}")
    return "; ".join(dict.fromkeys(found))
