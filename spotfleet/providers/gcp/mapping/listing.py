"""Conversion of instances and operations to a listing: one line per host. Pure.

    PENDING, PROVISIONING, STAGING --> PENDING    RUNNING, STOPPING, REPAIRING --> RUNNING
    TERMINATED, STOPPED, SUSPENDED --> STOPPED    not listed, with an operation `delete` --> TERMINATED

"TERMINATED" is Compute Engine's word for a stopped machine. The runs come from the operations, for machines that exist
and for those that do not: a run begins when `insert` or `start` has ended, and it ends with `stop`, `delete` or one of
the cloud's own operations. Both kinds of lines then have the same instants. Operations are kept for two weeks at
least; a machine that has lived longer has one run, from its last start.
"""

from __future__ import annotations

import calendar
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spotfleet.model import CloudHost, CloudState, Market, Offer, Role, Run
from spotfleet.providers.gcp.mapping import names
from spotfleet.providers.kit.mapping.listing import ListingContext, MachineFacts, machine_line, offer_of, one_host

Instance = Mapping[str, Any]
Operation = Mapping[str, Any]

MOMENT_S = 1e-3  # a run that began and ended in the same instant is longer than nothing
PREEMPTED = "compute.instances.preempted"
BEGINS = ("insert", "start", "startWithEncryptionKey", "resume")
FAILURES = ("compute.instances.hostError", "compute.instances.terminateOnHostMaintenance")
DELETES = ("delete", "compute.instances.deferredDelete")  # the latter at the end of `max_run_duration`
ENDS = ("stop", "compute.instances.stop", *DELETES, "suspend", PREEMPTED, *FAILURES, "compute.instances.guestTerminate",
        "compute.instances.deferredStop")
PENDING = ("PENDING", "PROVISIONING", "STAGING")
STOPPED = ("TERMINATED", "STOPPED", "SUSPENDED")
INSTANT = re.compile(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(\.\d+)?(?:Z|([+-])(\d\d):(\d\d))")
GOING = ("STOPPING", "PENDING_STOP", "SUSPENDING", "DEPROVISIONING")


@dataclass(frozen=True)
class Step:
    """One operation on a machine that has ended without an error, or that goes on."""

    kind: str
    at: float  # its end; 0: it goes on
    by_user: bool


@dataclass(frozen=True)
class Life:
    """Known operations on one machine, in their order."""

    id: str
    name: str
    zone: str
    steps: tuple[Step, ...]

    @property
    def made(self) -> bool:
        """Return whether it was made, or is being made."""
        return any(s.kind == "insert" for s in self.steps)

    @property
    def in_the_making(self) -> bool:
        return any(s.kind == "insert" and not s.at for s in self.steps)

    @property
    def ended_at(self) -> float:
        """Return when it was deleted, or taken; 0 if it was not."""
        deleted = max((s.at for s in self.steps if s.kind in DELETES), default=0.0)
        return deleted or (self.preempted_at if not self.ending else 0.0)

    @property
    def ending(self) -> bool:
        return any(s.kind in DELETES for s in self.steps)

    @property
    def preempted_at(self) -> float:
        """Return when the cloud has taken it last, if it has not been started since; else 0."""
        taken = max((s.at for s in self.steps if s.kind == PREEMPTED), default=0.0)
        return taken if taken >= max((s.at for s in self.steps if s.kind in BEGINS), default=0.0) else 0.0

    def runs(self) -> tuple[Run, ...]:
        """Return its runs, the last one open if no operation has ended it."""
        found: list[Run] = []
        for step in sorted((s for s in self.steps if s.at), key=lambda s: (s.at, s.kind in ENDS)):
            open_run = bool(found) and found[-1].ended_at is None
            if step.kind in BEGINS and not open_run:
                found.append(Run(step.at))
            elif step.kind in ENDS and open_run:
                taken = step.kind in (PREEMPTED, *FAILURES)
                found[-1] = Run(found[-1].started_at, max(step.at, found[-1].started_at + MOMENT_S), taken,
                                paid=step.kind in FAILURES)
        return tuple(found)


def lives(operations: Iterable[Operation]) -> dict[str, Life]:
    """Group the operations on machines by the machine's id. A failed operation changed nothing."""
    steps: dict[str, dict[str, tuple[Operation, Step]]] = defaultdict(dict)
    for op in operations:
        link = op.get("target_link", "")
        if "/instances/" not in link or not op.get("target_id"):
            continue
        done = op.get("status") == "DONE"
        if failed(op):
            continue
        at = instant(op.get("end_time", "")) if done else 0.0
        steps[str(op["target_id"])][op.get("name", "")] = op, Step(
            op.get("operation_type", ""), at, op.get("user", "") != "system")
    return {machine: Life(machine, names.last(first["target_link"]), names.last(first.get("zone", "")),
                          tuple(s for _, s in of.values()))
            for machine, of in steps.items() for first in [next(iter(of.values()))[0]]}


def failed(operation: Operation) -> bool:
    return operation.get("status") == "DONE" and bool((operation.get("error") or {}).get("errors"))


def lines(fleet: str, instances: Iterable[Instance], operations: Iterable[Operation], context: ListingContext,
          kinds: Collection[str], *, in_the_making: bool = True) -> list[CloudHost]:
    """Return one line per host, sorted by name. `fleet`: "" for every fleet, of which ended hosts are left out.

    `kinds`: the machine types that a name's code may mean. `in_the_making`: False leaves out machines whose launch has
    not ended, unless somebody deletes them, and the remains of failed launches.
    """
    done = list(operations)
    known, held, seen = lives(done), defaultdict(list), set()
    remains = {str(op.get("target_id")) for op in done if op.get("operation_type") == "insert" and failed(op)}
    for instance in sorted(instances, key=lambda i: (i.get("creation_timestamp", ""), str(i.get("id", "")))):
        machine = str(instance.get("id", ""))
        if machine in seen or names.FLEET not in (instance.get("labels") or {}):
            continue
        seen.add(machine)
        life = known.get(machine)
        unmade = machine in remains if life is None or not life.made else life.in_the_making and not life.ending
        if in_the_making or not unmade:
            host = names.host_of(instance["name"])
            held[host].append(_line(host, instance, life, context))
    for life in sorted(known.values(), key=lambda life: life.ended_at):
        if fleet and life.id not in seen and (line := _ended(fleet, life, context, kinds)) is not None:
            held[line.request_id].insert(0, line)
    return sorted((line for host, of in held.items() for line in one_host(host, of)), key=lambda o: o.request_id)


def tags(instance: Instance) -> dict[str, str]:
    """Return the tags of a machine: its labels, and the short items of its metadata."""
    return {**(instance.get("labels") or {}), **{
        key: value for key, value in metadata(instance).items() if key != names.USER_DATA}}


def metadata(instance: Instance) -> dict[str, str]:
    return {item["key"]: item.get("value", "") for item in (instance.get("metadata") or {}).get("items") or ()}


def zone_of(instance: Instance) -> str:
    return names.last(instance.get("zone", ""))


def _line(host: str, instance: Instance, life: Life | None, context: ListingContext) -> CloudHost:
    own, state = tags(instance), state_of(instance, life)
    nic = (instance.get("network_interfaces") or [{}])[0]
    public = next((c.get("nat_i_p", "") for c in nic.get("access_configs") or () if c.get("nat_i_p")), "")
    runs = _runs(instance, life, state)
    return machine_line(host, MachineFacts(
        str(instance["id"]), own, _offer(instance, own, context.priced), state, runs, nic.get("network_i_p", ""),
        public, _why(instance, life), None), context)


def state_of(instance: Instance, life: Life | None) -> CloudState:
    """Return the state of a listed machine; one that is being made is not there yet, whatever its status."""
    status = instance.get("status", "")
    if status in PENDING or (life is not None and life.in_the_making and status not in STOPPED):
        return CloudState.PENDING
    return CloudState.STOPPED if status in STOPPED else CloudState.RUNNING


def _runs(instance: Instance, life: Life | None, state: CloudState) -> tuple[Run, ...]:
    found = life.runs() if life is not None and life.made else ()
    if not found and state is not CloudState.PENDING and not (life is not None and life.in_the_making):
        begun = instant(instance.get("last_start_timestamp") or instance.get("creation_timestamp", ""))
        found = (Run(begun),) if begun else ()
    closed = bool(found) and found[-1].ended_at is not None
    if state is CloudState.RUNNING and closed and instance.get("status") not in GOING:
        return (*found, *_later(instance, found[-1]))
    if state is CloudState.STOPPED and found and found[-1].ended_at is None:
        ended = instant(instance.get("last_stop_timestamp", ""))
        return (*found[:-1], Run(found[-1].started_at, max(ended, found[-1].started_at + MOMENT_S))) if ended else (
            found[:-1])
    return found


def _later(instance: Instance, run: Run) -> tuple[Run, ...]:
    """Return the run of a machine that runs again, whose start is not among the operations yet."""
    begun = instant(instance.get("last_start_timestamp", ""))
    return (Run(begun),) if run.ended_at is not None and begun >= run.ended_at else ()


def _why(instance: Instance, life: Life | None) -> str:
    status = instance.get("status", "")
    if status in PENDING or status == "RUNNING":
        return ""
    last = max(life.steps, key=lambda s: (s.at == 0.0, s.at, s.kind in ENDS), default=None) if life else None
    reason = reason_of(last) if last is not None and last.kind in ENDS else ""
    return f"{status.lower()}: {reason}" if reason else str(instance.get("status_message") or status.lower())


def reason_of(step: Step) -> str:
    if step.kind == PREEMPTED:
        return "Google Cloud has preempted it"
    if step.kind in FAILURES:
        return f"its machine failed or had maintenance ({names.last(step.kind.replace('.', '/'))})"
    if ".deferred" in step.kind:
        return "its longest run time is over"
    return "its system shut down" if step.kind.endswith("guestTerminate") else f"{step.kind} was asked for"


def _offer(instance: Instance, own: Mapping[str, str], priced: Callable[[Offer], Offer]) -> Offer:
    zone, kind = zone_of(instance), names.last(instance.get("machine_type", ""))
    for gpu in instance.get("guest_accelerators") or ():
        if kind.startswith("n1-"):
            kind = attached(kind, names.last(gpu.get("accelerator_type", "")), int(gpu.get("accelerator_count", 0)))
    model = (instance.get("scheduling") or {}).get("provisioning_model", "")
    return offer_of(bare(zone, kind, Market.SPOT if model == "SPOT" else Market.ON_DEMAND), own, priced)


def attached(kind: str, accelerator: str, count: int) -> str:
    """Return our name of an N1 type with GPUs: n1-standard-8+nvidia-tesla-t4x1."""
    return f"{kind}+{accelerator}x{count}"


def split(kind: str) -> tuple[str, str, int]:
    """Return (machine type, accelerator type, number of GPUs) of such a name; ("", 0) for other types."""
    base, _, gpus = kind.partition("+")
    accelerator, _, count = gpus.rpartition("x")
    return base, accelerator, int(count) if count.isdigit() else 0


def bare(zone: str, kind: str, market: Market) -> Offer:
    return Offer("gcp", names.region_of(zone), zone, kind, market, 1, 0, 0)


def _ended(fleet: str, life: Life, context: ListingContext, kinds: Collection[str]) -> CloudHost | None:
    """Return the line of a machine that was deleted; None for one that was not, or that is no host of the fleet."""
    host, found = names.host_of(life.name), names.sold(life.name, kinds)
    role = names.of_fleet(fleet, host)
    if role is None or found is None or not life.made or not life.ended_at or life.in_the_making:
        return None
    own = {names.FLEET: fleet, names.ROLE: role.value}
    taken = next((s for s in life.steps if s.at and (s.kind in (PREEMPTED, *FAILURES) or ".deferred" in s.kind)), None)
    line = machine_line(host, MachineFacts(
        life.id, own, context.priced(bare(life.zone, *found)), CloudState.TERMINATED, life.runs(),
        why=reason_of(taken) if taken else "deleted", ended_at=life.ended_at), context)
    return replace(line, disk_gib=context.disk_gib(role))


def pools(offers: Sequence[Offer], role: Role) -> list[Offer]:
    """Return the pools that one request can choose among: those of the first one's type, market and region.

    Its dispatcher goes where it was asked for.
    """
    first = offers[0]
    same = [o for o in offers if (o.region, o.instance_type, o.market) == (
        first.region, first.instance_type, first.market)]
    return [first] if role is Role.DISPATCHER else list({o.zone: o for o in same}.values())


def instant(text: str) -> float:
    """Return Unix seconds of an RFC 3339 time; 0 for none."""
    found = INSTANT.fullmatch(text)
    if found is None:
        return 0.0
    whole = calendar.timegm(tuple(map(int, found.groups()[:6])))
    away_s = (int(found[9]) * 60 + int(found[10])) * 60 * (-1 if found[8] == "-" else 1) if found[8] else 0
    return whole + float(f"0{found[7] or '.0'}") - away_s
