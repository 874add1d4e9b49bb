"""Host controller: keeps the fleet's machines at target, with one `reconcile.tick` at a time, in a thread, because
providers block.

A tick follows at once when a notice came, an agent joined or left, a host was released, or another number of hosts is
wanted: a replacement must be requested at the notice, not a second later. Agents and the cloud's events report most
changes. Where a cloud limits the requests of a whole account, its listing is therefore read rarely while no machine
changes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from spotfleet.codec import to_json
from spotfleet.dispatcher.checkpoints import archive
from spotfleet.dispatcher.cloud.dispatcher_cost import DispatcherCost
from spotfleet.dispatcher.cloud.events import CloudEventListener, merge_notices
from spotfleet.dispatcher.cloud.group_sizes import GroupSizes
from spotfleet.dispatcher.cloud.outage import Outage
from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.disk import space
from spotfleet.dispatcher.hosts import HostView
from spotfleet.dispatcher.http.auth import host_token
from spotfleet.dispatcher.lifecycle import lifetime
from spotfleet.dispatcher.lifecycle.shutdown import FETCH_S, FleetShutdown, PowerOff
from spotfleet.dispatcher.lifecycle.unsent import unknown_s
from spotfleet.dispatcher.signal import wait_set
from spotfleet.errors import DiskFull, NeedsPerson, SpotfleetError
from spotfleet.fleet import reconcile
from spotfleet.fleet.domain.events import ClockSetBack, FleetDown
from spotfleet.fleet.domain.host import Host
from spotfleet.fleet.ledger import Ledger
from spotfleet.fleet.planner.groups import GroupHosts, OutsideDemand
from spotfleet.fleet.planner.plan import Observed, Wait, Wanted
from spotfleet.model import CloudHost, CloudState, HostState, Offer, Role
from spotfleet.protocol.messages import AgentOrders
from spotfleet.providers import Boot, ExistingMachines, InterruptionEvents, ManagedResources, Provider
from spotfleet.providers.plugin import traits_of

T = TypeVar("T")
log = logging.getLogger(__name__)
TICK_S = 1.0
LOSS_TICK_S = 0.2  # period of ticks while it is unknown whether a host whose agent just disconnected still exists
LOSS_S = 3.0
QUIET_TICK_S = 10.0  # the same where a cloud limits the account's requests, while no machine changes
AT_ONCE = 16  # launches and terminations requested at the same time
END_AGAIN_S = 10.0  # pause between requests to end our own host
DISMISSED = "the fleet goes down, and the cloud does not answer"


@dataclass(frozen=True)
class Policy:
    """Functions of the fleet's policy that a tick calls."""

    decide: Callable[[Wanted], Wanted]
    offers_due: Callable[[float], bool]  # at a monotonic time: is `read_offers` to be called before `decide`?
    read_offers: Callable[[Provider], None]  # blocks: called in the provider's thread
    ticked: Callable[[], None]  # called after each tick


class HostController:
    """Ticks of the reconciler, and the end of our own machine."""

    def __init__(self, core: Core, provider: Provider, policy: Policy, shutdown: FleetShutdown,
                 dispatcher_cost: DispatcherCost, launched: Callable[[str], None]) -> None:
        """`launched` is called with the name of each host that receives our URL at its launch."""
        self._waits = ""  # the reason that the last tick waited
        self._problems: list[str] = []  # problems of machines that existed before the fleet
        self._archive_error = ""  # that was reported last
        self._refused = False  # the last tick requested a host that was refused: another pool may have room
        self._ended_at = 0.0  # Unix: the last host of a fleet that goes down has ended
        self._forward_s = 0.0  # the time was wrong by this so far, and the ledger does not have it yet
        self.doing: dict[str, str] = {}  # host -> the installation step of its machine
        self.tick_s = 0.0  # duration of the last tick, including the cloud's answers
        self.stays = isinstance(provider, ExistingMachines)  # our machine and its results outlive the fleet
        self._outage = Outage(provider.name)
        self._core, self._provider, self._policy, self._launched = core, provider, policy, launched
        self._shutdown, self._dispatcher_cost = shutdown, dispatcher_cost
        self._settle_until = core.settle_until  # the whole window, even if the loop settles earlier
        self._restarted_at = time.monotonic() if core.settle_until else None
        self._thread = ThreadPoolExecutor(1, "provider")
        self._calls = reconcile.Calls(AT_ONCE, ThreadPoolExecutor(AT_ONCE, "machines").map,
                                      # cloud accounts have quotas per region
                                      scout=isinstance(provider, ManagedResources))
        self._released: frozenset[str] = frozenset()
        self._busy: frozenset[str] = frozenset()
        self._groups = GroupSizes(core)
        self._aimed: tuple[int, ...] = ()  # number of hosts of each group that the last tick aimed at; empty: none
        self._limited = isinstance(provider, ManagedResources)
        self._events = CloudEventListener(
            provider, core.boot.fleet, lambda: core.journal.state.hosts, core.tick_soon
        ) if isinstance(provider, InterruptionEvents) and provider.has_events() else None

    @property
    def waits(self) -> str:
        """The reason that machines wait, including an outage of the cloud; "" for none."""
        return self._outage.why(time.monotonic()) or self._waits

    @property
    def why(self) -> str:
        """The same, with the problems of existing machines and of the cloud's events."""
        waits, problem = self.waits, self._events.problem if self._events else ""
        problem = f"the cloud's own events about its machines cannot be read: {problem}" if problem else ""
        return "; ".join(filter(None, [waits, *(line for line in self._problems if line not in waits), problem]))

    @property
    def own(self) -> CloudHost | None:
        """The dispatcher's own host, as listed by the cloud."""
        return self._dispatcher_cost.machine

    def note_workers(self, views: dict[str, HostView]) -> None:
        """Record which hosts hold workers; a draining one without workers is released at once."""
        jobs = self._core.jobs.values()
        held = {worker.host for job in jobs for worker in job.workers.live()}
        unknown = self._unknown(time.monotonic())
        released = frozenset(n for n, v in views.items()
                             if v.host.state is HostState.DRAINING and n not in held and not v.workers
                             and not self._core.unsent.holds(n) and n not in unknown)
        self._busy = frozenset(held) | self._groups.outside.busy
        self._groups.note(self._busy, time.monotonic())
        if released - self._released or self._aim() != self._aimed:
            self._core.tick_soon()
        self._released = released

    async def run(self) -> None:
        listening = asyncio.create_task(self._events.run()) if self._events else None
        try:
            while True:
                self._core.tick_due.clear()
                await self._tick()
                await self._core.journal.catch_up()
                self._policy.ticked()
                self._core.step_soon()
                await self._finish()
                await wait_set(self._core.tick_due, pause_s(
                    self._core.journal.state.hosts, lost=self._someone_was_lost(), limited=self._limited,
                    settled=self._core.settled, refused=self._refused))
        finally:
            if listening is not None:
                listening.cancel()

    def _someone_was_lost(self) -> bool:
        """Return whether an agent disconnected in the last LOSS_S and the cloud still lists its host."""
        now = time.monotonic()
        lost = {n for n, s in self._core.connections.items() if not s.connected and now - s.away_since < LOSS_S}
        return any(h.request_id in lost for h in self._core.journal.state.hosts)

    async def interrupt(self, host: str, notice_s: float | None) -> None:
        await self._call(lambda: self._provider.interrupt(host, notice_s))
        self._core.tick_soon()

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _tick(self) -> None:
        await self._check_clock()
        await self._ask_for_slots()
        await self._give_up_unsent()
        if self._policy.offers_due(time.monotonic()):
            await self._call(lambda: self._policy.read_offers(self._provider))
        if self.own is None and self._core.policy.max_micros_h:  # its price counts for the limit
            with suppress(SpotfleetError, OSError):
                await self._call(lambda: self._dispatcher_cost.find(self._provider))
        wanted, observed, ledger = self._wanted(), self._observed(), self._core.journal.ledger
        began = time.monotonic()
        self._outage.asked(began)
        try:
            done = await self._call(lambda: reconcile.tick(
                wanted, ledger, self._provider, self._boot, observed, self._now(ledger), self._calls))
            answers = not any(isinstance(a, reconcile.NoAnswer) for a in done)
            if self.own is None and answers:
                await self._call(lambda: self._dispatcher_cost.find(self._provider))
            if answers and self._dispatcher_cost.due(time.monotonic()):
                await self._call(lambda: self._dispatcher_cost.refresh(self._provider, time.monotonic(),
                                                                       self._core.unix()))
            if self.stays:
                await self._call(self._read_existing)
        except (SpotfleetError, OSError) as error:
            hint = f" ({error.hint})" if isinstance(error, NeedsPerson) and error.hint else ""
            done = [Wait(f"{error}{hint}")]
            if space.is_full(error) and self._shutdown.why:
                space.remove_ballast(self._core.home)
            if done[0].why != self._waits:
                log.warning("machines: %s", done[0].why)
        self.tick_s = time.monotonic() - began
        self._waits = "; ".join(a.why for a in done if isinstance(a, Wait))
        requested = [ledger.state().host(a.request_id) for a in done if isinstance(a, reconcile.Launch)]
        self._refused = any(host is not None and host.was_refused for host in requested)
        silent = next((a.error for a in done if isinstance(a, reconcile.NoAnswer)), "")
        if self._outage.failed(silent) if silent else self._outage.answered():
            log.warning("%s: %s", self._provider.name, silent or "answers again")

    async def _give_up_unsent(self) -> None:
        """Record the results of hosts that this tick ends before they have sent them."""
        core, now, unix = self._core, time.monotonic(), self._core.unix()
        draining = {h.request_id: max(0.0, (h.notice_deadline or unix) - unix) for h in core.journal.state.hosts
                    if h.state is HostState.DRAINING and h.terminate_at is None}
        core.unsent.note_draining(draining, now)
        if lost := core.unsent.give_up(self._shutdown.patience, core.goes_on, now, unix):
            core.journal.note(*lost)
            with suppress(DiskFull):  # they wait in memory: a full disk must not keep machines billed
                await core.journal.flush()

    def _read_existing(self) -> None:
        """Read the state of existing machines, which is not in the ledger: each installation step changes it."""
        assert isinstance(self._provider, ExistingMachines)
        self._problems = self._provider.problems()
        self.doing = {h.request_id: h.why for h in self._provider.hosts(self._core.boot.fleet)
                      if h.state is CloudState.PENDING and h.why}

    def _now(self, ledger: Ledger) -> float:
        """Return the time, and record where it was wrong so far: else all waits would be over at once, or last longer.
        """
        now = self._core.unix()
        if self._forward_s:
            ledger.append(ClockSetBack(now, -self._forward_s))
            self._forward_s = 0.0
        return now

    async def _check_clock(self) -> None:
        """Compare this machine's clock, by the cloud's and the hosts' where that is needed."""
        clock, connections = self._core.fleet_clock, self._core.connections.values()
        clock.update()
        if clock.cloud_due(self._provider):
            await self._call(lambda: clock.ask_cloud(self._provider))
        clock.compare_hosts([(c.clock_at, c.report.clock) for c in connections if c.connected and c.report.clock],
                            self._provider)
        if forward_s := clock.take_shift():
            log.warning("the time of the events so far was wrong by %.0f s", -forward_s)
            self._forward_s += forward_s
            self._shutdown.move(forward_s)
            self._ended_at = self._ended_at and self._ended_at + forward_s
            for job in self._core.jobs.values():
                job.move(forward_s)
        if clock.save_due:
            await asyncio.to_thread(clock.save)

    @property
    def sizes(self) -> dict[str, GroupHosts]:
        """The number of hosts that each group should have, unless the fleet goes down."""
        return self._groups.sizes(time.monotonic())

    @property
    def slots(self) -> dict[str, int]:
        """The slots of the smallest host of each group, as seen or offered; none where that is not known yet."""
        return self._groups.slots

    @property
    def groups(self) -> GroupSizes:
        return self._groups

    def wish(self, outside: OutsideDemand) -> None:
        """Take the newest demand besides that of jobs; the next tick follows it."""
        if outside != self._groups.outside:
            self._groups.outside = outside
            self._core.tick_soon()

    async def _ask_for_slots(self) -> None:
        """Read the slots per host from offers, while there is no host that shows them."""
        if self._groups.unknown:
            with suppress(SpotfleetError, OSError):  # the tick reports a cloud that does not answer
                await self._call(lambda: self._groups.read_offers(self._provider))

    def _aim(self) -> tuple[int, ...]:
        return () if self._shutdown.why else tuple(size.hosts for size in self.sizes.values())

    def _wanted(self) -> Wanted:
        spec, sizes, self._aimed = self._core.boot.spec, self.sizes, self._aim()
        wanted = Wanted(self._core.boot.fleet, Role.WORKER, sum(self._aimed),
                        spec.any_of, spec.interruption_behavior, spec.tags, placement=spec.placement,
                        all_or_nothing=spec.all_or_nothing, stays=bool(self._aimed))
        if limit_s := traits_of(spec).boot_limit_s:
            wanted = replace(wanted, launch_timeout_s=limit_s)
        if self._aimed and spec.groups:
            wanted = replace(wanted, parts=tuple(
                replace(wanted, hosts=sizes[g.name].hosts, any_of=g.any_of, why=sizes[g.name].why, group=g.name)
                for g in spec.groups))
        elif self._aimed:
            wanted = replace(wanted, why=sizes[""].why)
        return self._policy.decide(wanted)

    def _observed(self) -> Observed:
        connections, now = self._core.connections, time.monotonic()
        joined = {n: s.report.incarnation for n, s in connections.items() if s.connected}
        state = self._core.journal.state
        notices = {n: notice for n, s in connections.items() if (notice := s.valid_notice(state.host(n), now))}
        if self._events is not None:
            notices = merge_notices(notices, self._events.notices(now))
        settle_until = self._core.unix() + max(0.0, self._settle_until - now)
        boots = {n: boot for n in joined if (boot := connections[n].report.boot) is not None}
        return Observed(joined, notices, self._released, dict(self._core.drains), self._busy,
                        settle_until, self._unsent(now), boots, self._groups.idle(now))

    def _unsent(self, now: float) -> dict[str, float]:
        """Return how many more seconds draining hosts may stay for results that have not arrived."""
        return self._unknown(now) | self._core.unsent.stays_s(self._shutdown.patience, now)

    def _unknown(self, now: float) -> dict[str, float]:
        """Return the same for draining hosts whose agents have not connected since our restart."""
        if self._restarted_at is None:
            return {}
        return unknown_s((h.request_id for h in self._core.journal.state.hosts
                          if h.state is HostState.DRAINING and h.request_id not in self._core.connections),
                         self._restarted_at, now)

    def _boot(self, host: str, offer: Offer) -> Boot:
        boot, now = self._core.boot, self._core.unix()
        born_at = now - self._core.clock.age_s(self._core.fleet_clock.passed())
        self._launched(host)
        token = host_token(boot.fleet_secret, host)
        boot_data = {"fleet": boot.fleet, "host": host, "provider": offer.provider, "slots": offer.slots,
                "dispatcher": self._core.url, "ca": boot.ca, "token": token,
                **lifetime.told_to_host(boot.spec, born_at, now)}
        return Boot("spotfleet.agent", {"boot.json": json.dumps(to_json(boot_data))}, token)

    # ---- shutdown

    async def _finish(self) -> None:
        """Once no worker host is left, record it; if nobody fetches the archive, write it and end our own machine.

        On an existing machine, which costs nothing, the archive waits here to be fetched.
        """
        shutdown, journal = self._shutdown, self._core.journal
        if shutdown.decision is None:
            return
        left = [h for h in journal.state.hosts if h.role is Role.WORKER]
        if left or any(not j.state.ended for j in self._core.jobs.values()):
            if self._outage.lasts:
                self._dismiss_hosts()
            if any(s > 0 for s in self._core.unsent.stays_s(shutdown.patience, time.monotonic()).values()):
                shutdown.note_sending(self._core.unix())
            elif self._core.settled:
                await self._give_up(len(left))
            return
        self._core.record_losses()
        if journal.state.down is not None:
            self._ended_at = journal.state.down.at
        self._ended_at = self._ended_at or self._core.unix()  # once: a full disk may keep the ledger from having it
        shutdown.note_sending(self._ended_at)
        if journal.state.down is None and journal.full is None:  # a full disk must not keep machines billed
            journal.note(FleetDown(self._core.unix(), shutdown.why))
            with suppress(DiskFull):
                await journal.flush()
        if self.stays or not self._must_end(self._core.unix()):
            return
        if not shutdown.decision.archived and not await self._archive():
            return
        log.info("the fleet is down: ending our own host")
        try:
            await self._call(lambda: self._provider.terminate(self._core.boot.host))
        except (SpotfleetError, OSError) as error:
            log.warning("our own host was not ended, asked again: %s", error)
        await asyncio.sleep(END_AGAIN_S)
        await self._give_up(0)

    def _must_end(self, unix: float) -> bool:
        return self._shutdown.must_end(unix, incomplete=bool(self._core.journal.state.lost))

    def _dismiss_hosts(self) -> None:
        """Order hosts without workers to end themselves, as the cloud does not end them."""
        for connection in self._core.connections.values():
            if connection.connected and not (connection.report.workers or connection.report.unsent):
                connection.orders, connection.due = AgentOrders(connection.host, refuse=DISMISSED), False
                self._core.disconnect(connection)
                connection.wake()

    async def _give_up(self, hosts_left: int) -> None:
        """Stop at least our own bill when the cloud has not acted for long: raise PowerOff."""
        shutdown, now = self._shutdown, self._core.unix()
        assert shutdown.decision is not None
        if self.stays or not self._must_end(now) or not lifetime.may_power_off(
                self._core.boot.spec, shutdown.last_at, hosts_left, now):
            return
        if shutdown.decision.archived or await self._archive():
            raise PowerOff(f"powering off: the cloud has not ended this fleet's machines, {hosts_left} other hosts "
                           "are left to end themselves", hint="spotfleet leaks --fix")

    async def _archive(self) -> bool:
        """Write the results to the archive folder; return whether to go on. A disk that refuses them for FETCH_S must
        not keep us billed."""
        shutdown, home, target = self._shutdown, self._core.home, self._core.archive_folder
        assert shutdown.decision is not None
        try:
            await asyncio.to_thread(archive.write_folder, home, self._core.journal.ledger, target)
        except (OSError, SpotfleetError) as error:
            if str(error) != self._archive_error:
                self._archive_error = str(error)
                log.error("the archive cannot be written to %s, tried again each second: %s", target, error)
            if self._core.unix() - shutdown.last_at < FETCH_S:  # hosts may have sent for long before
                return False
            await self._give_up_archive(str(error))
            return True
        shutdown.mark_archived()
        return True

    async def _give_up_archive(self, why: str) -> None:
        """Leave what there is of the archive with the reason, so that a later `down` reports it."""
        home, target = self._core.home, self._core.archive_folder
        space.remove_ballast(home)
        try:
            await asyncio.to_thread(archive.write_incomplete, home, self._core.journal.ledger, target, why)
            log.error("the archive in %s is incomplete: %s", target, why)
        except (OSError, SpotfleetError) as error:
            log.error("the archive is given up without a record of it in %s: %s", target, error)


def pause_s(hosts: Sequence[Host], *, lost: bool, limited: bool, settled: bool, refused: bool = False) -> float:
    """Return the time until the next tick. `lost`: an agent has just disconnected; `limited`: see QUIET_TICK_S;
    `refused`: a launch has just been refused."""
    if not limited:
        return LOSS_TICK_S if lost else TICK_S
    return TICK_S if lost or refused or not settled or any(_changes(h) for h in hosts) else QUIET_TICK_S


def _changes(host: Host) -> bool:
    """Return whether only a listing or time shows what becomes of the host; a machine that boots sends a report."""
    return (not host.provider_id or host.cloud is CloudState.PENDING or host.state is HostState.DRAINING
            or host.terminate_at is not None or host.silent_since is not None or host.missing_since is not None)
