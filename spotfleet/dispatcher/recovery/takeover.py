"""Takeover from a lost dispatcher: request the jobs that agents hold, and adopt them.

    unsettled: nothing is ordered; agents get requests until all have answered, or the settle window ends
    settled:   jobs of late agents are adopted as they connect; one holder at a time uploads each missing bundle
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

from spotfleet.dispatcher.checkpoints.seals import SealKey
from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.disk import jobfile
from spotfleet.dispatcher.disk.space import is_full
from spotfleet.dispatcher.hosts import HostView
from spotfleet.dispatcher.jobs.desk import JobDesk
from spotfleet.dispatcher.jobs.job import ManagedJob
from spotfleet.dispatcher.recovery.job_adoption import ADOPT_S, AdoptedJob, Adoption, check, merged, with_hosts
from spotfleet.dispatcher.recovery.lost_jobs import LOST, LedgerJob
from spotfleet.fleet.domain.events import JobChanged, JobSubmitted, TakenOver
from spotfleet.model import JobState
from spotfleet.protocol.messages import AgentOrders, AgentReport
from spotfleet.storage.json_file import digest_of_json
from spotfleet.words import clock_utc

BEHIND_S = 120.0  # until then after the takeover, a restored record may be outdated
SEND_S = 30.0  # then another holder is ordered to upload a missing bundle
GROUPS = 8  # the number that a job keeps


def adopts(taken: TakenOver | None, unix: float) -> bool:
    """Return whether unknown jobs are adopted, because another dispatcher's machine was lost lately."""
    return taken is not None and unix < taken.at + ADOPT_S


class Takeover:
    """Takeover of the jobs of an earlier dispatcher."""

    def __init__(self, core: Core, desk: JobDesk, lost: Mapping[str, LedgerJob]) -> None:
        """`lost`: jobs of the ledger without their file, see `lost_jobs.py`."""
        self._core, self._desk, self._lost = core, desk, dict(lost)
        self._missing_bundles: dict[str, tuple[str, ...]] = {}  # host -> bundles to upload now
        key = SealKey(core.boot.fleet_secret)
        self.adoption = Adoption(lambda job, given: key.has_granted(job, given.generation, given.grant))
        self.adoption.lost = {name: job.hosts for name, job in lost.items()}
        if self.event is not None:
            self.adoption.open_until = self.event.at + ADOPT_S
            for job in core.jobs.values():
                job.checkpoints.awaited = job.record.fence > 0  # set by `ledger_restore.py`
            if core.unix() < self.event.at + BEHIND_S:
                self.adoption.behind = {j.id for j in core.jobs.values()
                                        if not j.state.ended and j.record.submitted_at < self.event.at}
        self.adoption.behind |= {j.id for j in core.jobs.values() if j.secrets_lost}

    @property
    def event(self) -> TakenOver | None:
        """The newest takeover, by the time that is known now."""
        return self._core.journal.state.taken_over

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
        """Update the jobs with the agents' answers, before they continue. A full disk raises its error: it may be
        called again."""
        for job in self._core.jobs.values():
            if job.secrets_lost:
                self._return_secrets(job)
            if not job.state.ended:
                self._learn(job)
        self.adoption.behind = set()
        hosts = {h.request_id for h in self._core.journal.state.hosts}
        for found in self._found(hosts):
            self._take(found)
        self._fail_lost_jobs()
        self.adoption.lost = {}
        if self.event is None:
            self.adoption = Adoption()  # no more requests

    def _return_secrets(self, job: ManagedJob) -> None:
        secrets = self.adoption.secrets_of(job.record)
        if secrets is not None:  # else the job fails in its next step
            record = replace(job.record, secrets_digest=digest_of_json(secrets))
            jobfile.save_secrets(job.folder, secrets)
            jobfile.save(job.folder, record)
            job.secrets, job.secrets_lost, job.record = secrets, False, record

    def _learn(self, job: ManagedJob) -> None:
        before = job.record
        holders = self.adoption.holders(job.id, job.spec, job.secrets)
        groups = self.adoption.groups(job.id, holders | set(before.hosts))
        if not groups:
            return
        ordered = self.adoption.ordered(job.id, holders | set(before.hosts))
        job.record = replace(before, groups=merged(before.groups, groups, GROUPS),
                             ordered=max(before.ordered, ordered))
        if before.hosts:
            job.record = with_hosts(job.record, holders)
        jobfile.save(job.folder, job.record)

    def _fail_lost_jobs(self) -> None:
        """Record as failed the ledger's live jobs that no host holds any more.

        For a while after a takeover a host that is late may still bring them, so they stay unknown here.
        """
        if not adopts(self.event, self._core.unix()):
            self._close_lost()
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

    def _close_lost(self) -> None:
        """End the jobs whose files were lost and which no host holds: `jobs`, `logs` and `outputs` know them again."""
        for name, job in self._lost.items():
            if name not in self._core.jobs:
                now = self._core.unix()
                self._desk.add(job.record(JobState.FAILED, LOST, now), {}, in_ledger=True)
                self._core.journal.note(JobChanged(now, name, JobState.FAILED, LOST))
        self._lost = {}

    # ---- after the dispatcher has settled

    def adopt(self, views: dict[str, HostView]) -> None:
        """Adopt the jobs of late agents, and find missing bundles."""
        if self.event is None:
            return
        self.adoption.open_until = self.event.at + ADOPT_S  # the time may have been wrong
        self._missing_bundles = self._missing()
        if not self.adoption.any_unknown(self._core.jobs):
            return
        reports = [s.report for s in self._core.connections.values() if s.connected]
        for found in self._found(views.keys()):
            try:
                job = self._take(found)
            except OSError as error:
                if not is_full(error):
                    raise
                break  # its workers train on without orders, and it is tried again
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
        known, unix = self._lost.get(found.record.job), self._core.unix()
        record = with_hosts(found.record, found.hosts if known is None else {*found.hosts, *known.hosts})
        if known is not None:
            why = record.why if adopts(self.event, unix) else "its job.json was lost, and its hosts hold the job"
            record = replace(record, submitted_at=known.submitted.at, why=why)
        job = self._desk.add(record, found.secrets, in_ledger=known is not None)
        self._core.journal.note(JobChanged(unix, job.id, record.state, record.why))
        return job
