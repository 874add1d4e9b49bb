"""What a dispatcher does in the place of a lost one: asks the agents, and takes over the jobs that they hold.

    unsettled: nothing is ordered; agents are asked until all have told, or the settle window ends
    settled:   what late agents hold is taken over as they come; of bundles that are missing here one holder is asked
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from spotfleet.dispatcher import jobfile
from spotfleet.dispatcher.adopt import ADOPT_S, Adopted, Adoption, check, merged, with_hosts
from spotfleet.dispatcher.hosts import HostView
from spotfleet.fleet.events import JobChanged, JobSubmitted
from spotfleet.fleet.plan import clock
from spotfleet.messages import AgentOrders, AgentReport
from spotfleet.model import JobState

if TYPE_CHECKING:
    from spotfleet.dispatcher.jobs import Job
    from spotfleet.dispatcher.state import Dispatcher

BEHIND_S = 120.0  # so long after the takeover a copied record is not taken for the newest
SEND_S = 30.0  # then another holder is asked for a missing bundle
GROUPS = 8  # as many as a job keeps


class Takeover:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._lacks: dict[str, tuple[str, ...]] = {}  # host -> bundles that it is to upload now
        self.event = dispatcher.journal.state.taken_over
        self.adoption = Adoption()
        if self.event is not None:
            self.adoption.open_until = self.event.at + ADOPT_S
            for job in dispatcher.jobs.values():
                job.checkpoints.awaited = job.record.fence > 0  # `restore.py` saw to that
            if time.time() < self.event.at + BEHIND_S:
                self.adoption.behind = {j.id for j in dispatcher.jobs.values()
                                        if not j.state.ended and j.record.submitted_at < self.event.at}

    @property
    def remarks(self) -> list[str]:
        """What a user should know for good."""
        lost = [] if self.event is None or self.event.restored else [
            f"taken over at {clock(self.event.at)} without the ledger of before: what had ended by then is not known"]
        without = self._without_bundle() if self.event is not None else []
        return lost + [f"the working directory of {job.id} is lost: no host that has it answers, and new workers wait"
                       for job in without if not self._senders(job)]

    def hear(self, report: AgentReport) -> None:
        """ValueError for what no agent of ours would hold."""
        if self.event is None and self._dispatcher.settled:
            return
        check(report)
        known = {name: job.record for name, job in self._dispatcher.jobs.items()}
        self.adoption.hear(report, known, time.time(), settled=self._dispatcher.settled)

    # ---- before the dispatcher has settled

    def ask(self) -> None:
        """Ask those agents whose jobs are to be learnt of; the others get no orders yet."""
        for seat in self._dispatcher.seats.values():
            asked = self.adoption.asked(seat.host)
            if asked and seat.connected and seat.due:  # every answer is also a sign of life
                seat.orders, seat.due = AgentOrders(seat.host, tell=asked), False
                seat.wake()

    def waits(self) -> bool:
        return any(s.connected and self.adoption.owes(s.host) for s in self._dispatcher.seats.values())

    def settle(self) -> None:
        """Bring the jobs up to what was told, before they are gone on with."""
        for job in self._dispatcher.jobs.values():
            if not job.state.ended:
                self._learn(job)
        self.adoption.behind = set()
        hosts = {h.request_id for h in self._dispatcher.journal.state.hosts}
        for found in self._found(hosts):
            self._take(found)
        self._mourn()
        if self.event is None:
            self.adoption = Adoption()  # nothing is asked any more

    def _learn(self, job: Job) -> None:
        before = job.record
        holders = self.adoption.holders(job.id, job.spec, job.secrets)
        groups = self.adoption.groups(job.id, holders | set(before.hosts))
        if not groups:
            return
        job.record = replace(before, groups=merged(before.groups, groups, GROUPS))
        if before.hosts:
            job.record = with_hosts(job.record, holders)
        jobfile.save(job.folder, job.record)

    def _mourn(self) -> None:
        """Say which jobs of the ledger nobody holds any more."""
        if self.event is None or time.time() >= self.event.at + ADOPT_S:
            return
        submitted: dict[str, bool] = {}
        for _, event in self._dispatcher.journal.after(0):
            if isinstance(event, JobSubmitted):
                submitted[event.job] = True
            elif isinstance(event, JobChanged):
                submitted[event.job] = not event.state.ended
        lost = [name for name, live in submitted.items() if live and name not in self._dispatcher.jobs]
        why = "lost with the dispatcher's machine: no host holds it, and no copy of it is kept"
        self._dispatcher.journal.note(*(JobChanged(time.time(), name, JobState.FAILED, why) for name in lost))

    # ---- afterwards

    def adopt(self, views: dict[str, HostView]) -> None:
        """Take over what late agents hold, and look what is missing."""
        if self.event is None:
            return
        self._lacks = self._missing()
        if not self.adoption.any_unknown(self._dispatcher.jobs):
            return
        reports = [s.report for s in self._dispatcher.seats.values() if s.connected]
        for found in self._found(views.keys()):
            job = self._take(found)
            job.adopt(reports)
            for seat in self._dispatcher.seats.values():
                if not seat.connected:
                    job.crew.silence(seat.host)
            self._dispatcher.hold(job)
        for report in reports:
            self.hear(report)  # of known jobs nothing is asked any more

    def asked(self, host: str) -> tuple[str, ...]:
        return self.adoption.asked(host)

    def lacks(self, host: str) -> tuple[str, ...]:
        """The bundles that this host is to upload now."""
        return self._lacks.get(host, ())

    def _missing(self) -> dict[str, tuple[str, ...]]:
        turn, found = int(time.monotonic() / SEND_S), defaultdict[str, list[str]](list)
        for job in self._without_bundle():
            if senders := self._senders(job):
                found[senders[turn % len(senders)]].append(job.spec.bundle)
        return {host: tuple(dict.fromkeys(digests)) for host, digests in found.items()}

    def _without_bundle(self) -> list[Job]:
        return [j for j in self._dispatcher.jobs.values() if not j.state.ended and j.spec.bundle
                and not self._dispatcher.bundles.is_whole(j.spec.bundle)]

    def _senders(self, job: Job) -> list[str]:
        seats = self._dispatcher.seats
        return [h for h in self.adoption.with_bundle(job.spec.bundle)
                if h in seats and seats[h].connected and job.has_worker_on(h)]

    def _found(self, hosts: Collection[str]) -> list[Adopted]:
        reports = [s.report for s in self._dispatcher.seats.values()]
        return self.adoption.found(self._dispatcher.jobs.keys(), hosts, reports, time.time())

    def _take(self, found: Adopted) -> Job:
        record = with_hosts(found.record, found.hosts)
        folder = self._dispatcher.home / "jobs" / record.job
        jobfile.save_secrets(folder, found.secrets)
        jobfile.save(folder, record)  # last: without it the folder is no job
        job = self._dispatcher.load(folder)
        self._dispatcher.jobs[job.id] = job
        self._dispatcher.journal.note(jobfile.submission(record, found.secrets),
                                      JobChanged(time.time(), job.id, record.state, record.why))
        return job
