"""Keeps the fleet's machines at target: one `reconcile.tick` at a time, in a thread, because providers block.

A tick follows at once when a notice came, an agent joined or left, or a host has been released: a replacement must be
asked for at the notice, not a second later.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from spotfleet.codec import to_json
from spotfleet.dispatcher import archive, disk, lifetime, sizing
from spotfleet.dispatcher.auth import host_token
from spotfleet.dispatcher.bell import rings
from spotfleet.dispatcher.ear import Ear, both
from spotfleet.dispatcher.endgame import FETCH_S, PowerOff
from spotfleet.dispatcher.hosts import HostView
from spotfleet.dispatcher.outage import Outage
from spotfleet.dispatcher.own_bill import OwnBill
from spotfleet.dispatcher.stopwatch import Jumps
from spotfleet.errors import DiskFull, NeedsPerson, SpotfleetError
from spotfleet.fleet import reconcile
from spotfleet.fleet.events import ClockSetBack, FleetDown
from spotfleet.fleet.ledger import Ledger
from spotfleet.fleet.plan import Observed, Wait, Wanted
from spotfleet.messages import AgentOrders
from spotfleet.model import CloudHost, CloudState, HostState, Offer, Role
from spotfleet.providers import Boot, ExistingMachines, Furnished, Hears, Provider

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotfleet.dispatcher.state import Dispatcher

T = TypeVar("T")
log = logging.getLogger(__name__)
TICK_S = 1.0
LOSS_TICK_S = 0.2  # while it is open whether a host whose agent has just gone still exists
LOSS_S = 3.0
LAST_WORD_S = 10.0  # for so long a notice counts whose agent has gone: the machine may come back without it
AT_ONCE = 16  # so many launches or ends of machines are asked for at the same time
INSTALL_S = 3600.0  # for a machine that brings no environment: each step of making one has a limit of its own
BOOT_S = 1800.0  # the same, and to boot, for one whose power goes off by itself when it has failed
END_AGAIN_S = 10.0  # our own host is asked to end again after this
DISMISSED = "the fleet goes down, and the cloud does not answer"


class Machines:
    def __init__(self, dispatcher: Dispatcher, provider: Provider, settle_until: float) -> None:
        self.own: CloudHost | None = None  # the dispatcher's own host, as the cloud lists it
        self._waits = ""  # what the last tick waited for
        self._troubles: list[str] = []  # of machines that existed before the fleet
        self.doing: dict[str, str] = {}  # host -> what its machine is at to become it
        self.tick_s = 0.0  # how long it took, the cloud's answers included
        self.stays = isinstance(provider, ExistingMachines)  # our own machine, and the results on it, till fetched
        self._outage, self._jumps = Outage(provider.name), Jumps()
        self._dispatcher, self._provider = dispatcher, provider
        self.own_bill = OwnBill(dispatcher.boot.fleet, dispatcher.boot.host)
        self._settle_until = time.monotonic() + max(0.0, settle_until - time.time())  # whatever the clock is set to
        self._thread = ThreadPoolExecutor(1, "provider")
        self._calls = reconcile.Calls(AT_ONCE, ThreadPoolExecutor(AT_ONCE, "machines").map,
                                      scout=isinstance(provider, Furnished))  # an account, with quotas per region
        self._poked = asyncio.Event()
        self._slots = 0  # workers that the smallest host has room for: of those here, or last here, or offered
        self._released: frozenset[str] = frozenset()
        self._busy: frozenset[str] = frozenset()
        self._ear = Ear(provider, dispatcher.boot.fleet, lambda: dispatcher.journal.state.hosts, self.poke) if (
            isinstance(provider, Hears) and provider.hears()) else None

    @property
    def waits(self) -> str:
        """What the machines wait for, the cloud's answer included; "" for nothing."""
        return self._outage.why(time.monotonic()) or self._waits

    @property
    def why(self) -> str:
        """The same, and what keeps machines that existed before the fleet from being of use."""
        waits, deaf = self.waits, self._ear.trouble if self._ear else ""
        deaf = f"what the cloud says of its machines by itself is not heard: {deaf}" if deaf else ""
        return "; ".join(filter(None, [waits, *(line for line in self._troubles if line not in waits), deaf]))

    def poke(self) -> None:
        """Tick at once."""
        self._poked.set()

    def look(self, views: dict[str, HostView]) -> None:
        """Note which hosts hold workers; a draining one that holds none is released at once."""
        jobs = self._dispatcher.jobs.values()
        held = {worker.host for job in jobs for worker in job.crew.live()}
        released = frozenset(n for n, v in views.items()
                             if v.host.state is HostState.DRAINING and n not in held and not v.workers)
        self._busy = frozenset(held)
        if released - self._released:
            self.poke()
        self._released = released

    async def run(self) -> None:
        listening = asyncio.create_task(self._ear.run()) if self._ear else None
        try:
            while True:
                self._poked.clear()
                await self._tick()
                await self._dispatcher.journal.catch_up()
                self._dispatcher.steward.mind()
                self._dispatcher.change()
                await self._finish()
                await rings(self._poked, LOSS_TICK_S if self._someone_was_lost() else TICK_S)
        finally:
            if listening is not None:
                listening.cancel()

    def _someone_was_lost(self) -> bool:
        """Has an agent gone a moment ago, and the cloud still lists its host as running?"""
        now = time.monotonic()
        lost = {n for n, s in self._dispatcher.seats.items() if not s.connected and now - s.away_since < LOSS_S}
        return any(h.request_id in lost for h in self._dispatcher.journal.state.hosts)

    async def interrupt(self, host: str, notice_s: float | None) -> None:
        await self._call(lambda: self._provider.interrupt(host, notice_s))
        self.poke()

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _tick(self) -> None:
        await self._ask_for_slots()
        if (steward := self._dispatcher.steward).looks(time.monotonic()):
            await self._call(lambda: steward.look(self._provider))
        if self.own is None and steward.policy.max_micros_h:  # its price is part of the limit
            with suppress(SpotfleetError, OSError):
                self.own = await self._call(self._find_own)
        wanted, observed, ledger = self._wanted(), self._observed(), self._dispatcher.journal.ledger
        began = time.monotonic()
        self._outage.asked(began)
        try:
            done = await self._call(lambda: reconcile.tick(
                wanted, ledger, self._provider, self._boot, observed, self._now(ledger), self._calls))
            answers = not any(isinstance(a, reconcile.Unanswered) for a in done)
            if self.own is None and answers:
                self.own = await self._call(self._find_own)
            if answers and self.own_bill.due(time.monotonic()):
                await self._call(lambda: self.own_bill.look(self._provider, time.monotonic(), time.time()))
            if self.stays:
                await self._call(self._look_at_existing)
        except (SpotfleetError, OSError) as error:
            hint = f" ({error.hint})" if isinstance(error, NeedsPerson) and error.hint else ""
            done = [Wait(f"{error}{hint}")]
            if disk.is_full(error) and self._dispatcher.endgame.why:
                disk.spend(self._dispatcher.home)
            if done[0].why != self._waits:
                log.warning("machines: %s", done[0].why)
        self.tick_s = time.monotonic() - began
        self._waits = "; ".join(a.why for a in done if isinstance(a, Wait))
        silent = next((a.error for a in done if isinstance(a, reconcile.Unanswered)), "")
        if self._outage.failed(silent) if silent else self._outage.answered():
            log.warning("%s: %s", self._provider.name, silent or "answers again")

    def _look_at_existing(self) -> None:
        """What the ledger does not hold: it changes with each step of an installation."""
        assert isinstance(self._provider, ExistingMachines)
        self._troubles = self._provider.troubles()
        self.doing = {h.request_id: h.why for h in self._provider.hosts(self._dispatcher.boot.fleet)
                      if h.state is CloudState.PENDING and h.why}

    def _now(self, ledger: Ledger) -> float:
        """The wall clock. That it was set back the reconciler sees; that it was set forward only we can know, who have
        been here meanwhile: else all that waits would be over at once."""
        now = time.time()
        forward_s = self._jumps.look(now, time.monotonic())
        if forward_s > 0:
            log.warning("the clock was set forward by %.0f s", forward_s)
            ledger.append(ClockSetBack(now, -forward_s))
        return now

    def _find_own(self) -> CloudHost | None:
        boot = self._dispatcher.boot
        return next((h for h in self._provider.hosts(boot.fleet) if h.request_id == boot.host), None)

    @property
    def target(self) -> int:
        """Hosts that there should be: `nodes.target`, or fewer where jobs ask for fewer."""
        jobs, slots = self._dispatcher.jobs.values(), [v.slots for v in self._dispatcher.views()]
        self._slots = min(slots, default=self._slots)
        newest = next(reversed(jobs), None)
        idle = newest.spec.resize if newest is not None else self._dispatcher.boot.spec.resize
        live = [j for j in jobs if not j.state.ended]
        return sizing.target(self._dispatcher.nodes, self._slots or 1, live, idle)

    async def _ask_for_slots(self) -> None:
        """While there is no host to see it from."""
        if not self._slots and not self._dispatcher.views():
            with suppress(SpotfleetError, OSError):  # of a cloud that does not answer the tick tells
                self._slots = await self._call(self._offered_slots)

    def _offered_slots(self) -> int:
        needs = (replace(need, max_micros_h=0) for need in self._dispatcher.boot.spec.any_of)
        return min((offer.slots for need in needs for offer in self._provider.offers(need)), default=0)

    def _wanted(self) -> Wanted:
        spec, down = self._dispatcher.boot.spec, bool(self._dispatcher.endgame.why)
        wanted = Wanted(self._dispatcher.boot.fleet, Role.WORKER, 0 if down else self.target,
                        spec.any_of, spec.interruption_behavior, spec.tags, placement=spec.placement,
                        all_or_nothing=spec.all_or_nothing)
        if self.stays or self._dispatcher.boot.spec.aws is not None:
            wanted = replace(wanted, launch_timeout_s=INSTALL_S if self.stays else BOOT_S)
        return self._dispatcher.steward.share(wanted)

    def _observed(self) -> Observed:
        seats, now = self._dispatcher.seats, time.monotonic()
        joined = {n: s.report.incarnation for n, s in seats.items() if s.connected}
        notices = {n: notice for n, s in seats.items()
                   if (s.connected or now - s.away_since < LAST_WORD_S) and (notice := s.notice(now))}
        if self._ear is not None:
            notices = both(notices, self._ear.notices(now))
        settle_until = time.time() + max(0.0, self._settle_until - now)
        return Observed(joined, notices, self._released, dict(self._dispatcher.drains), self._busy, settle_until)

    def _boot(self, host: str, offer: Offer) -> Boot:
        boot, now = self._dispatcher.boot, time.time()
        born_at = now - self._dispatcher.stopwatch.age_s(time.monotonic())
        self._dispatcher.announcer.born(host)
        told = {"fleet": boot.fleet, "host": host, "provider": boot.spec.provider, "slots": offer.slots,
                "dispatcher": self._dispatcher.url, "ca": boot.ca, "token": host_token(boot.fleet_secret, host),
                **lifetime.told_to_host(boot.spec, born_at, now)}
        return Boot("spotfleet.agent", {"boot.json": json.dumps(to_json(told))})

    # ---- the end

    async def _finish(self) -> None:
        """Once no worker host is left: remember it, and if nobody fetches the archive, leave it and end ourselves.

        On a machine of the user's own, which costs nobody anything, the archive waits here to be fetched.
        """
        endgame, journal = self._dispatcher.endgame, self._dispatcher.journal
        if endgame.decision is None:
            return
        left = [h for h in journal.state.hosts if h.role is Role.WORKER]
        if left or any(not j.state.ended for j in self._dispatcher.jobs.values()):
            if self._outage.lasts:
                self._dismiss()
            await self._give_up(len(left))
            return
        if journal.state.down is None and journal.full is None:  # a full disk keeps no machine billed
            journal.note(FleetDown(time.time(), endgame.why))
            with suppress(DiskFull):
                await journal.flush()
        if self.stays or not endgame.alone(time.time()):
            return
        if not endgame.decision.archived and not await self._archive():
            return
        log.info("the fleet is down: ending our own host")
        try:
            await self._call(lambda: self._provider.terminate(self._dispatcher.boot.host))
        except (SpotfleetError, OSError) as error:
            log.warning("our own host was not ended, asked again: %s", error)
        await asyncio.sleep(END_AGAIN_S)
        await self._give_up(0)

    def _dismiss(self) -> None:
        """Have hosts without work end themselves, as the cloud does not do it."""
        for seat in self._dispatcher.seats.values():
            if seat.connected and not seat.report.workers:
                seat.orders, seat.due = AgentOrders(seat.host, refuse=DISMISSED), False
                self._dispatcher.disconnect(seat)
                seat.wake()

    async def _give_up(self, hosts_left: int) -> None:
        """Stop our own bill at least, when the cloud has done nothing for long: raises PowerOff."""
        endgame, now = self._dispatcher.endgame, time.time()
        assert endgame.decision is not None
        if self.stays or not endgame.alone(now) or not lifetime.may_power_off(
                self._dispatcher.boot.spec, endgame.decision.at, hosts_left, now):
            return
        if endgame.decision.archived or await self._archive():
            raise PowerOff(f"powering off: the cloud has not ended this fleet's machines, {hosts_left} other hosts "
                           "are left to end themselves", hint="spotfleet leaks --fix")

    async def _archive(self) -> bool:
        """Leave the results in the archive folder. A disk that refuses them for FETCH_S does not keep us billed."""
        endgame, home, target = self._dispatcher.endgame, self._dispatcher.home, self._dispatcher.archive_folder
        assert endgame.decision is not None
        try:
            await asyncio.to_thread(archive.write_folder, home, self._dispatcher.journal.ledger, target)
        except (OSError, SpotfleetError) as error:
            log.error("the archive cannot be written to %s: %s", target, error)
            return time.time() - endgame.decision.at >= FETCH_S
        endgame.mark_archived()
        return True
