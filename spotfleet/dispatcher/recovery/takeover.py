"""Takeover from a lost dispatcher: request the jobs that agents hold, and adopt them.

    unsettled: nothing is ordered; agents get requests until all have answered, or the settle window ends
    settled:   jobs of late agents are adopted as they connect; one holder at a time uploads each missing bundle
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.disk import jobfile
from spotfleet.dispatcher.hosts import HostView
from spotfleet.dispatcher.jobs.desk import JobDesk
from spotfleet.dispatcher.jobs.job import ManagedJob
from spotfleet.dispatcher.recovery.job_adoption import ADOPT_S, AdoptedJob, Adoption, check, merged, with_hosts
from spotfleet.fleet.domain.events import JobChanged, JobSubmitted
from spotfleet.model import JobState
from spotfleet.protocol.messages import AgentOrders, AgentReport
from spotfleet.words import clock_utc

BEHIND_S = 120.0  # until then after the takeover, a restored record may be outdated
SEND_S = 30.0  # then another holder is ordered to upload a missing bundle
GROUPS = 8  # the number that a job keeps


class Takeover:
    """Takeover of the jobs of an earlier dispatcher."""

    def __init__(self, core: Core, desk: JobDesk) -> None:
        self._core, self._desk = core, desk
        self._missing_bundles: dict[str, tuple[str, ...]] = {}  # host -> bundles to upload now
        self.event = core.journal.state.taken_over
        self.adoption = Adoption()
        if self.event is not None:
            self.adoption.open_until = self.event.at + ADOPT_S
            for job in core.jobs.values():
                job.checkpoints.awaited = job.record.fence > 0  # set by `ledger_restore.py`
            if core.unix() < self.event.at + BEHIND_S:
                self.adoption.behind = {j.id for j in core.jobs.values()
                                        if not j.state.ended and j.record.submitted_at < self.event.at}

    @property
    def remarks(self) -> list[str]:
        """Lasting remarks for users."""
        lost = [] if self.event is None or self.event.restored else [
            f"taken over at {clock_utc(self.event.at)} without the earlier records: what had ended by then is not "
            "known"]
        without = self._without_bundle() if self.event is not None else []
        return lost + [f"the working directory of {job.id} is lost: no host that has it answers, and new workers wait"
                       for job in without if not self._senders(job)]

    def receive(self, report: AgentReport) -> None:
        """Process an agent's report. Raises ValueError for data that no agent of ours would hold."""
        if self.event is None and self._core.settled:
            return
        check(report)
        known = {name: job.record for name, job in self._core.jobs.items()}
        self.adoption.receive(report, known, self._core.unix(), settled=self._core.settled)

    # ---- before the dispatcher has settled

    def ask(self) -> None:
        """Send requests to agents with unknown or outdated jobs; the others get no orders yet."""
        for connection in self._core.connections.values():
            asked = self.adoption.asked(connection.host)
            if asked and connection.connected and connection.due:  # every message is also a sign of life
                connection.orders, connection.due = AgentOrders(connection.host, tell=asked), False
                connection.wake()

    def waits(self) -> bool:
        return any(s.connected and self.adoption.awaits_answer(s.host) for s in self._core.connections.values())

    def settle(self) -> None:
        """Update the jobs with the agents' answers, before they continue."""
        for job in self._core.jobs.values():
            if not job.state.ended:
                self._learn(job)
        self.adoption.behind = set()
        hosts = {h.request_id for h in self._core.journal.state.hosts}
        for found in self._found(hosts):
            self._take(found)
        self._fail_lost_jobs()
        if self.event is None:
            self.adoption = Adoption()  # no more requests

    def _learn(self, job: ManagedJob) -> None:
        before = job.record
        holders = self.adoption.holders(job.id, job.spec, job.secrets)
        groups = self.adoption.groups(job.id, holders | set(before.hosts))
        if not groups:
            return
        job.record = replace(before, groups=merged(before.groups, groups, GROUPS))
        if before.hosts:
            job.record = with_hosts(job.record, holders)
        jobfile.save(job.folder, job.record)

    def _fail_lost_jobs(self) -> None:
        """Record as failed the ledger's live jobs that no host holds any more."""
        if self.event is None or self._core.unix() >= self.event.at + ADOPT_S:
            return
        submitted: dict[str, bool] = {}
        for event in self._core.journal.each():
            if isinstance(event, JobSubmitted):
                submitted[event.job] = True
            elif isinstance(event, JobChanged):
                submitted[event.job] = not event.state.ended
        lost = [name for name, live in submitted.items() if live and name not in self._core.jobs]
        why = "lost with the dispatcher's machine: no host holds it, and no copy of it is kept"
        self._core.journal.note(*(JobChanged(self._core.unix(), name, JobState.FAILED, why) for name in lost))

    # ---- after the dispatcher has settled

    def adopt(self, views: dict[str, HostView]) -> None:
        """Adopt the jobs of late agents, and find missing bundles."""
        if self.event is None:
            return
        self._missing_bundles = self._missing()
        if not self.adoption.any_unknown(self._core.jobs):
            return
        reports = [s.report for s in self._core.connections.values() if s.connected]
        for found in self._found(views.keys()):
            job = self._take(found)
            job.adopt(reports)
            for connection in self._core.connections.values():
                if not connection.connected:
                    job.workers.mark_silent(connection.host)
            self._desk.hold(job)
        for report in reports:
            self.receive(report)  # adopted jobs need no more requests

    def asked(self, host: str) -> tuple[str, ...]:
        return self.adoption.asked(host)

    def missing_bundles(self, host: str) -> tuple[str, ...]:
        """Return the bundles that this host must upload now."""
        return self._missing_bundles.get(host, ())

    def _missing(self) -> dict[str, tuple[str, ...]]:
        turn, found = int(time.monotonic() / SEND_S), defaultdict[str, list[str]](list)
        for job in self._without_bundle():
            if senders := self._senders(job):
                found[senders[turn % len(senders)]].append(job.spec.bundle)
        return {host: tuple(dict.fromkeys(digests)) for host, digests in found.items()}

    def _without_bundle(self) -> list[ManagedJob]:
        return [j for j in self._core.jobs.values() if not j.state.ended and j.spec.bundle
                and not self._desk.bundles.is_whole(j.spec.bundle)]

    def _senders(self, job: ManagedJob) -> list[str]:
        connections = self._core.connections
        return [h for h in self.adoption.with_bundle(job.spec.bundle)
                if h in connections and connections[h].connected and job.has_worker_on(h)]

    def _found(self, hosts: Collection[str]) -> list[AdoptedJob]:
        reports = [s.report for s in self._core.connections.values()]
        return self.adoption.found(self._core.jobs.keys(), hosts, reports, self._core.unix())

    def _take(self, found: AdoptedJob) -> ManagedJob:
        record = with_hosts(found.record, found.hosts)
        job = self._desk.add(record, found.secrets)
        self._core.journal.note(JobChanged(self._core.unix(), job.id, record.state, record.why))
        return job
