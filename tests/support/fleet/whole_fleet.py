"""Whole fleet in one thread and under one clock: cloud, planner, reconciler, schedule, membership, agents, workers.

It joins two worlds: machines, prices and the bill are those of `fleet_world.World`; agents, workers and the dispatcher
are those of `membership_sim.FleetSim`. They share the ledger.
"""

from __future__ import annotations

import random

from spotfleet.errors import NeedsPerson
from spotfleet.fleet.cost.meter import report
from spotfleet.fleet.domain.events import GenerationFormed, JobChanged, JobSubmitted
from spotfleet.fleet.reconcile import Observed
from spotfleet.membership import Formed
from spotfleet.model import BillingRules, CloudState, HostState, JobState, Notice
from tests.support.fleet.fleet_world import Killed, World, market_rules
from tests.support.membership.membership_jobs import Leaving, SimJob
from tests.support.membership.membership_sim import DRAIN_S, DT, Contact, FleetSim, Host

RECONCILE_S = 1.0
RESTART_S = 2.0  # until another process replaces one that was killed


class Machines(World):
    """World whose hosts report through the dispatcher's connections."""

    fleet: WholeFleet

    def observed(self) -> Observed:
        return self.fleet.observed()


class WholeFleet(FleetSim):
    def __init__(self, seed: int, rng: random.Random) -> None:
        super().__init__(seed)
        billing = rng.choice([BillingRules(1), BillingRules(60), BillingRules(60, 300)])
        self.world = Machines(rng.randint(2, 4), behavior=rng.choice(["terminate", "stop"]),
                              rules=market_rules(billing, capacity=rng.randint(1, 3), boot_s=2.0, beside=True))
        self.world.fleet = self
        self.refill = False  # by the planner alone
        self.began_at = self.world.clock()
        self._next_reconcile = 0.0
        self._written: dict[str, int] = {}  # job -> changes that are in the ledger
        self._closed: set[str] = set()  # jobs whose ends are

    # ---- time

    def tick(self) -> None:
        self.world.clock.advance(DT)
        self._move_machines()
        super().tick()
        self._write_jobs()
        if self.up and self.now >= self._next_reconcile:
            self._next_reconcile = self.now + RECONCILE_S
            self.reconcile()

    def _age(self, host: Host) -> None:
        """Let machines age in the market."""

    def _move_machines(self) -> None:
        """Update the simulated hosts from the cloud's machines."""
        market = self.world.market
        market.advance(self.world.clock())
        for name, machine in market.hosts.items():
            host, runs = self.hosts.get(name), machine.state is CloudState.RUNNING
            if host is None and runs:
                host = self.hosts[name] = Host(name, machine.offer.slots)
            elif host is not None and runs and host.gone:
                self.boot_again(host)
            elif host is not None and not runs and not host.gone:
                self.kill_host(host, listed_after_s=0.0)
            if host is not None:
                notice = machine.notice
                host.noticed_until = None if notice is None else notice.ends_at - self.began_at

    def reconcile(self) -> None:
        world = self.world
        world.skew_s = self.wall - self.now
        waits = self.settle_until is not None
        world.settle_until = world.clock() + max(0.0, (self.settle_until or 0.0) - self.mono) if waits else 0.0
        try:
            world.tick()
        except NeedsPerson:
            pass
        except Killed:
            world.fuse.left = None
            self.restart_dispatcher(RESTART_S)
        for name in world.living():
            assert world.state.host(name) is not None, f"the ledger does not know {name}"

    def observed(self) -> Observed:
        heard = [h for h in self.hosts.values() if h.contact.heard and self.connected(h)]
        joined = {h.name: f"{h.name}/{h.life}" for h in heard}
        notices = {}
        for host in heard:
            if host.contact.notice_until is not None:
                warned = self.world.market.hosts[host.name].notice
                action = warned.action if warned else "terminate"
                notices[host.name] = Notice(host.contact.notice_until - self.mono, action)
        held = {k.place[0] for j in self.jobs.values() for k in j.known.values()}
        draining = [h.request_id for h in self.world.state.hosts if h.state is HostState.DRAINING]
        released = frozenset(n for n in draining if n not in held and self.settle_until is None)
        return Observed(joined, notices, released, dict(self.world.asked_to_drain), frozenset(held),
                        self.world.settle_until + self.world.skew_s)

    # ---- a host in the ledger

    def is_lost(self, host: Host) -> bool:
        known = self.world.state.host(host.name)
        return known is None or known.state in (HostState.GONE, HostState.STOPPED)

    def _leaving(self, host: Host) -> Leaving | None:
        known = self.world.state.host(host.name)
        said = super()._leaving(host)
        if said is None and known is not None and known.state is HostState.DRAINING:
            return max(0.0, known.since + DRAIN_S - self.world.now), "drain"
        return said

    def _release_hosts(self, lost: set[str]) -> None:
        """Do nothing: the planner releases hosts."""
        for name in lost:
            if self.hosts[name].gone:
                self.hosts[name].contact = Contact()

    # ---- jobs in the ledger

    def submit(self, least: int, most: int, total_steps: int = 10**9) -> SimJob:
        job = super().submit(least, most, total_steps)
        self.world.ledger.rows.append(JobSubmitted(self.world.now, job.name, job.name, "train.py", least, most))
        return job

    def _write_jobs(self) -> None:
        rows, now = self.world.ledger.rows, self.world.now
        for job in self.jobs.values():
            seen = self._written.get(job.name, 0)
            for change in job.changes[seen:]:
                if isinstance(change, Formed):
                    rows.append(GenerationFormed(now, job.name, change.generation, change.members, change.cause,
                                                 change.why, max(0, change.version)))
            self._written[job.name] = len(job.changes)
            if job.ended and job.name not in self._closed:
                self._closed.add(job.name)
                rows.append(JobChanged(now, job.name, JobState.SUCCEEDED, "", job.core.version))

    # ---- the bill

    def check_bill(self) -> None:
        """Check the bill, once the ledger has the cloud's present listing."""
        self.reconcile()
        invoice = self.world.market.invoice(self.world.clock())
        bill = report(self.world.ledger.rows, invoice.at)
        assert bill.micros == invoice.micros, "the bill is not the cloud's"
        assert sum(job.micros for job in bill.jobs) + bill.idle_micros == bill.machine_micros
        assert bill.idle_micros >= 0, "jobs pay for more than there was"
