"""Cache of every machine's last report. One poll of a machine is one short script over its persistent connection.

            answered                 no answer, 3 in a row and for AWAY_S
    known ------------> known           known ---------------------> away
                                          ^---- answers again ----------'

No caller waits for a machine that failed last time: it is polled in a thread, with a back-off of at most
BACKOFF_MAX_S. All of this is a cache: another process with the same configuration finds the same machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition, Semaphore, Thread

from spotfleet.providers.ssh import diagnosis, listing, scripts
from spotfleet.providers.ssh.diagnosis import MachineError
from spotfleet.providers.ssh.listing import Report
from spotfleet.providers.ssh.machines import ResolvedMachine
from spotfleet.providers.ssh.transport import Transport
from spotfleet.retry import growing_s

POLL_S = 5.0  # maximum wait for one machine, once
FRESH_S = 0.5  # a younger report is not refreshed
POLLS_PER_S = 20.0  # machines of a long list are polled less often
AT_ONCE = 48
AWAY_POLLS, AWAY_S = 3, 10.0  # one lost answer ends no host
BACKOFF_S, BACKOFF_MAX_S = 1.0, 15.0


@dataclass
class MachineView:
    """This process's knowledge of one machine. Times are monotonic."""

    machine: ResolvedMachine
    report: Report | None = None  # the newest answer
    at: float = 0.0  # time of its request
    stale: float = 0.0  # reports requested before are out of date
    trouble: MachineError | None = None  # error since then, if any
    failures: int = 0  # in a row
    failing_since: float = 0.0
    due: float = 0.0  # no poll before
    polling: bool = False
    late: bool = False  # a caller waited for this poll in vain
    reported: bool = False  # `trouble` was reported to a caller that wanted the machine

    @property
    def away(self) -> bool:
        """Return whether it has been silent so long that its hosts no longer count as running."""
        return self.failures >= AWAY_POLLS and time.monotonic() - self.failing_since >= AWAY_S


@dataclass
class MachinePoller:
    """Poller of machines. `transport` connects to a machine; the polling thread calls `on_report` with each answer."""

    transport: Callable[[ResolvedMachine], Transport]
    on_report: Callable[[MachineView, Report], None]
    _views: dict[str, MachineView] = field(default_factory=dict)
    _changed: Condition = field(default_factory=Condition)
    _width: Semaphore = field(default_factory=lambda: Semaphore(AT_ONCE))

    def views(self, machines: Sequence[ResolvedMachine]) -> list[MachineView]:
        """Return a view of each machine, fresh or with its error. Takes POLL_S at most."""
        now = time.monotonic()
        since = now - max(FRESH_S, len(machines) / POLLS_PER_S)
        with self._changed:
            views = [self._view(machine) for machine in machines]
            while True:
                for view in views:
                    self._begin_if_due(view, since)
                if not any(self._waited_for(v) for v in views):
                    return views
                if not self._changed.wait(now + POLL_S - time.monotonic()):
                    break
            for view in views:
                if self._waited_for(view):
                    view.late = True
                    self._failed(view, MachineError(view.machine.name, diagnosis.silent(POLL_S)))
        return views

    def poll(self, machine: ResolvedMachine) -> MachineView:
        """Poll this machine again, to see the effect of a change. Raises MachineError."""
        with self._changed:
            view = self._view(machine)
            self._changed.wait_for(lambda: not view.polling, POLL_S)
            if not view.polling:
                self._begin(view)
            if not self._changed.wait_for(lambda: not view.polling, POLL_S):
                raise view.trouble or MachineError(machine.name, diagnosis.silent(POLL_S))
            if view.trouble is not None or view.report is None:
                raise view.trouble or MachineError(machine.name, diagnosis.silent(POLL_S))
        return view

    def stale(self, machine: ResolvedMachine) -> None:
        """Mark its report as out of date after a change."""
        with self._changed:
            self._view(machine).stale = time.monotonic()

    def mark_reported(self, view: MachineView) -> None:
        with self._changed:
            view.reported = True

    @staticmethod
    def _waited_for(view: MachineView) -> bool:
        return view.polling and view.trouble is None and not view.late

    def _view(self, machine: ResolvedMachine) -> MachineView:
        view = self._views.setdefault(machine.name, MachineView(machine))
        view.machine = machine
        return view

    def _begin_if_due(self, view: MachineView, since: float) -> None:
        old = view.trouble is not None or view.report is None or view.at < max(since, view.stale)
        if old and not view.polling and time.monotonic() >= view.due:
            self._begin(view)

    def _begin(self, view: MachineView) -> None:
        view.polling, view.late = True, False
        Thread(target=self._poll, args=(view,), name=f"poll {view.machine.name}", daemon=True).start()

    def _poll(self, view: MachineView) -> None:
        asked, machine = time.monotonic(), view.machine
        report, problem = None, None
        try:
            with self._width:
                result = self.transport(machine).run(scripts.probe(machine.root), POLL_S)
            if result.status:
                raise MachineError(machine.name, diagnosis.of_output(result.status, result.err, machine.root))
            report = listing.read(result.out)
        except MachineError as error:
            problem = error
        finally:
            with self._changed:
                view.polling = False
                if report is not None:
                    self.on_report(view, report)
                    view.report, view.at, view.trouble, view.failures, view.reported = report, asked, None, 0, False
                else:
                    self._failed(view,
                                 problem or MachineError(machine.name, diagnosis.Diagnosis("the poll of it broke off")))
                self._changed.notify_all()

    @staticmethod
    def _failed(view: MachineView, problem: MachineError) -> None:
        now = time.monotonic()
        if view.trouble is None:
            view.failing_since = now
        if view.trouble is None or str(view.trouble) != str(problem):
            view.reported = False
        view.failures += 1
        view.trouble = problem
        view.due = now + growing_s(view.failures, BACKOFF_S, BACKOFF_MAX_S)
