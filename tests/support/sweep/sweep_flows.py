"""What is swept: each flow of the laptop's commands and of the dispatcher, and what must be true after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from spotfleet.api.home import FleetDir
from spotfleet.api.lifecycle.down import close_if_ended, take_down
from spotfleet.api.lifecycle.up import bring_up
from spotfleet.api.reports import archived_events, fleet_ledgers, laptop_events
from spotfleet.config import FleetFile
from spotfleet.errors import NoCapacity, NoSuchFleet, SpotfleetError
from spotfleet.fleet.domain.events import (
    FleetCreated,
    FleetDown,
    JobChanged,
    JobSubmitted,
    LaunchIntended,
    TerminateIntended,
)
from spotfleet.fleet.ledger import read_events
from spotfleet.model import Autostop, FleetSpec, HostState, JobSpec, Market, Need, Nodes, Role
from tests.support.sweep.sweep_fuse import DISPATCHER, LAPTOP, NOBODY
from tests.support.sweep.sweep_states import Recorder
from tests.support.sweep.sweep_world import FETCH_S, World

NAME = "digits"
SPEC = FleetSpec(NAME, nodes=Nodes(2, 2, 2), any_of=(Need(instance_type="cpu.small"),))
SECRET = "the-users-secret"
IDLE = replace(SPEC, autostop=Autostop(idle_s=8.0))
Act = Callable[[World], None]


@dataclass(frozen=True)
class Flow:
    name: str
    victim: str  # who is killed
    act: Act  # what it is killed in
    hosts: int  # worker hosts wanted afterwards; 0: the fleet is down
    before: Act = lambda world: None
    again: Act | None = None  # after the kill; None: the same once more
    jobs: int = 0  # that the fleet had


# ---- what a user and a cloud do


def up(hosts: int, spec: FleetSpec = SPEC) -> Act:
    file = FleetFile(replace(spec, nodes=Nodes(hosts, hosts, hosts)), {"PASSWORD": SECRET})
    return lambda world: world.laptop(lambda: bring_up(world.house, file, _silent, 200.0))


def down(world: World) -> None:
    try:
        found = world.house.find(NAME)
    except NoSuchFleet:  # `up` was killed before there was one
        return
    world.laptop(lambda: take_down(found, _silent, discard=False, why="asked by `down`"))


def discard(world: World) -> None:
    world.laptop(lambda: take_down(folder(world), _silent, discard=True, why="asked by `down`"))


def with_job(world: World) -> None:
    """Two hosts, and a job with a secret that waits for a third."""
    up(2)(world)
    job = JobSpec("train", run="true", min_workers=3, max_workers=3)
    (process,) = world.processes.values()
    world.turn(process.dispatcher.desk.submit(job, {"TOKEN": SECRET}, wait=True))


def notice(world: World) -> None:
    world.market.interrupt(world.living(Role.WORKER)[0], 5.0, world.clock.now)
    replaced(world)


def loss(world: World) -> None:
    world.market.interrupt(world.living(Role.WORKER)[0], None, world.clock.now)
    replaced(world)


def replaced(world: World) -> None:
    world.sleep(6.0)
    settled(world, 2)


def refused(world: World) -> None:
    """The two cheapest pools have no room for a while."""
    for zone in "ab":
        world.market.refuse(f"local/local-{zone}/cpu.small/{Market.SPOT.value}", "pool", world.clock.now, for_s=20.0)


def lost_dispatcher(world: World) -> None:
    """Its machine is taken a moment after it has launched a host that no listing shows yet."""
    up(2)(world)
    (process,) = world.processes.values()
    world.turn(process.dispatcher.fleet_desk.set_nodes(Nodes(2, 3, 3)))
    world.until("a third host", lambda: len(world.living(Role.WORKER)) == 3)
    world.market.interrupt(world.living(Role.DISPATCHER)[0], None, world.clock.now)
    world.sleep(0.5)


def half_up(world: World) -> None:
    """`up` gave up before the dispatcher's machine, which it launched, ran."""
    file = FleetFile(SPEC, {"PASSWORD": SECRET})
    try:
        world.laptop(lambda: bring_up(world.house, file, _silent, 0.1))
    except NoCapacity:
        return
    raise AssertionError("it should have given up")


def down_after_a_nap(world: World) -> None:
    """The laptop slept until the dispatcher gave up waiting for it."""
    world.sleep(FETCH_S + 15.0)
    down(world)


def idle(world: World) -> None:
    world.until("the fleet has ended by itself", lambda: not world.cloud.living())


def idle_and_closed(world: World) -> None:
    idle(world)
    close(world)


def close(world: World) -> None:
    """As `status` and all that look do, when a fleet has ended by itself. Killed, the next look does it."""
    world.until("the listing shows it", lambda: world.laptop(lambda: close_if_ended(folder(world))) is not False)


def up_or_as_told(world: World) -> None:
    """`up` of a fleet that was going down says so: `spotfleet down` first, then `up` again."""
    try:
        up(2)(world)
    except SpotfleetError as told:
        assert "`spotfleet down digits`, then `spotfleet up` again" in told.hint, told
        down(world)
        up(2)(world)


def up_then_down(world: World) -> None:
    up(2)(world)
    down(world)


FLOWS = (
    Flow("up", LAPTOP, up(2), 2),
    Flow("up, given up", LAPTOP, up(2), 0, again=down),
    Flow("up once more", LAPTOP, up(2), 2, before=up_then_down),
    Flow("scale up", LAPTOP, up(3), 3, before=up(2)),
    Flow("scale down", LAPTOP, up(1), 1, before=up(3)),
    Flow("down", LAPTOP, down, 0, before=with_job, jobs=1),
    Flow("down, then up", LAPTOP, down, 2, before=up(2), again=up_or_as_told),
    Flow("down, then a nap", LAPTOP, down, 0, before=with_job, again=down_after_a_nap, jobs=1),
    Flow("down of half an up", LAPTOP, down, 2, before=half_up, again=up_or_as_told),
    Flow("down --discard", LAPTOP, discard, 0, before=lost_dispatcher),
    Flow("end of an idle fleet", LAPTOP, close, 0, before=lambda w: (up(2, IDLE)(w), idle(w))),
    Flow("up", DISPATCHER, up(2), 2),
    Flow("up, pools refuse", DISPATCHER, up(2), 2, before=refused),
    Flow("scale up", DISPATCHER, up(3), 3, before=up(2)),
    Flow("scale down", DISPATCHER, lambda w: (up(1)(w), settled(w, 1)), 1, before=up(3)),
    Flow("replace after a notice", DISPATCHER, notice, 2, before=up(2)),
    Flow("replace after a loss", DISPATCHER, loss, 2, before=up(2)),
    Flow("down", DISPATCHER, down, 0, before=with_job, jobs=1),
    Flow("autostop", DISPATCHER, idle_and_closed, 0, before=up(2, IDLE)),
)


# ---- one kill, and what must be true afterwards


@dataclass(frozen=True)
class Point:
    flow: Flow
    at: int  # which effect
    after: bool
    lag_s: float
    what: str  # the effect
    state: int  # number of the world's state there; points of one state are one

    def __str__(self) -> str:
        return (f"{self.flow.victim} killed {'after' if self.after else 'before'} {self.what} (number {self.at}) of "
                f"'{self.flow.name}', listings late by {self.lag_s:g} s")


def points(flow: Flow, lag_s: float = 0.0, made: type[World] = World) -> list[Point]:
    """Where `flow` can be killed in a world that is `made` like that."""
    with made(lag_s) as world:
        flow.before(world)
        states = world.fuse.passed = Recorder(world.state)
        world.fuse.light(flow.victim)
        flow.act(world)
        effects = list(world.fuse.effects)
    return [Point(flow, n, after, lag_s, what, states.points[n, after])
            for n, what in enumerate(effects, 1) for after in (False, True)]


def distinct(points: Iterable[Point]) -> list[Point]:
    """Return the first of `points` in each state."""
    found: dict[tuple[Flow, float, int], Point] = {}
    for point in points:
        found.setdefault((point.flow, point.lag_s, point.state), point)
    return list(found.values())


def kill(point: Point) -> None:
    """Kill there, let the next run converge, end the fleet. AssertionError for anything lost, doubled or left."""
    kill_in(World, point, nothing_is_left)


def kill_in(made: type[World], point: Point, check: Callable[[World, int], None]) -> None:
    """Do so in a world that is `made` like that; `check` gets it afterwards, with how many jobs the fleet had."""
    flow = point.flow
    with made(point.lag_s) as world:
        flow.before(world)
        unknown: list[set[str]] = []
        world.fuse.witness = lambda: unknown.append(unknown_machines(world))
        world.fuse.light(flow.victim, point.at, point.after)
        flow.act(world)
        passed = world.fuse.effects
        assert unknown == [set()], f"a machine that no ledger knows: {unknown}" if unknown else "it was not killed"
        world.fuse.light(NOBODY)
        if flow.victim == LAPTOP:
            (flow.again or flow.act)(world)
        if flow.hosts:
            settled(world, flow.hosts)
            down(world)
        check(world, flow.jobs)
        assert passed[point.at - 1:point.at] == [point.what], f"the flow took another way: {passed}"


def settled(world: World, hosts: int) -> None:
    """Exactly what is wanted lives, and the dispatcher says the same."""
    def right() -> bool:
        process = next((p for p in world.processes.values() if p.answers), None)
        if process is None or len(world.living(Role.DISPATCHER)) != 1:
            return False
        up = [h.request_id for h in process.dispatcher.core.journal.state.hosts if h.state is HostState.UP]
        return len(up) == hosts and sorted(up) == sorted(world.living(Role.WORKER))

    for _ in range(2):  # and it stays so
        world.until(f"{hosts} hosts", right)
        world.sleep(3.0)


def unknown_machines(world: World) -> set[str]:
    """Those that live though no ledger on any disk knows them."""
    ledgers = [*world.house.path.rglob("ledger.db"), *(world.root / "disks").rglob("ledger.db")]
    intended = {e.request_id for path in ledgers for e in read_events(path) if isinstance(e, LaunchIntended)}
    return set(world.cloud.living()) - intended


def nothing_is_left(world: World, jobs: int) -> None:
    """The cloud has no machine, every bill is the cloud's own, each ledger tells one life once, no secret is left."""
    assert world.cloud.living() == [], "machines are left"
    assert all(f.record.down_at for f in lives(world)), "a fleet that is down is not known to be"
    for life in lives(world):
        ours, theirs = laptop_events(life), archived_events(life)
        for events in (ours, theirs):
            kinds = Counter(type(e) for e in events)
            assert kinds[FleetCreated] == (1 if events else 0), "made more than once"
            assert kinds[FleetDown] == (1 if events else 0), "down more than once, or never"
        told = Counter((type(e), e.job) for e in theirs if isinstance(e, JobSubmitted)
                       or (isinstance(e, JobChanged) and e.state.ended))
        assert list(told.values()) == [1] * (2 * jobs), f"not each job's beginning and end once: {told}"
        asked = {e.request_id for e in [*ours, *theirs] if isinstance(e, TerminateIntended)}
        hosts = [h for h in world.market.hosts.values() if h.order.fleet == life.record.cloud_name]
        ended = {h.order.request_id for h in hosts if h.order.role is Role.WORKER and h.why == "terminated by its user"}
        assert not ended - asked, "ended without a word in a ledger"
        bill = {line.host: line.micros for line in fleet_ledgers("", theirs, ours).report().lines if line.micros}
        invoice = world.market.invoice(world.clock.now, life.record.cloud_name)
        billed = {host: micros for host, micros in invoice.hosts.items() if micros}
        assert bill == billed, f"the bill is not the cloud's: {bill} instead of {billed}"
        assert not (life.fetched.exists() or (life.path / ".archive.part").exists()), "left over from fetching"
    everything = [p for p in world.root.rglob("*") if p.is_file()]
    left = [str(p.relative_to(world.root)) for p in everything if SECRET.encode() in p.read_bytes()]
    assert not left, f"a secret is left in {left}"


def lives(world: World) -> list[FleetDir]:
    """Every fleet there has been, also those whose name was used again."""
    return [*world.house.fleets(),
            *(FleetDir(p.parent) for p in sorted((world.house.path / "old").glob("*/fleet.json")))]


def folder(world: World) -> FleetDir:
    return world.house.folder(NAME)


def _silent(_line: str) -> None:
    """Progress is for people."""
