"""What every machine holds, as it said last. One look at a machine is one short script over its kept connection.

            answered                 no answer, 3 in a row and for AWAY_S
    known ------------> known           known ---------------------> away
                                          ^---- answers again ----------'

Nobody waits for a machine that gave no answer last time: it is looked at again beside the callers, with a back-off of
BACKOFF_MAX_S at most. All of this is a cache: another process with the same configuration finds the same machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition, Semaphore, Thread

from spotfleet.providers.ssh import listing, scripts, trouble
from spotfleet.providers.ssh.connect import Door
from spotfleet.providers.ssh.listing import Report
from spotfleet.providers.ssh.machines import Machine
from spotfleet.providers.ssh.trouble import Troubled

LOOK_S = 5.0  # callers wait so long for one machine, once
FRESH_S = 0.5  # a look that is younger is not repeated
LOOKS_PER_S = 20.0  # of a long list each machine is looked at more seldom
AT_ONCE = 48
AWAY_LOOKS, AWAY_S = 3, 10.0  # one lost answer ends no host
BACKOFF_S, BACKOFF_MAX_S = 1.0, 15.0


@dataclass
class View:
    """One machine as far as this process knows. Times are monotonic."""

    machine: Machine
    report: Report | None = None  # the newest answer
    at: float = 0.0  # when that was asked
    stale: float = 0.0  # what was asked before is out of date
    trouble: Troubled | None = None  # why there was none since
    failures: int = 0  # in a row
    failing_since: float = 0.0
    due: float = 0.0  # not looked at before
    looking: bool = False
    late: bool = False  # somebody waited for this look in vain
    told: bool = False  # `trouble` has been told to somebody who wanted the machine

    @property
    def away(self) -> bool:
        """Has it been silent for so long that nothing it held counts as running?"""
        return self.failures >= AWAY_LOOKS and time.monotonic() - self.failing_since >= AWAY_S


@dataclass
class Watch:
    """`door` opens the way into a machine; `heard` is called, by whatever thread looked, with each answer."""

    door: Callable[[Machine], Door]
    heard: Callable[[View, Report], None]
    _views: dict[str, View] = field(default_factory=dict)
    _changed: Condition = field(default_factory=Condition)
    _width: Semaphore = field(default_factory=lambda: Semaphore(AT_ONCE))

    def views(self, machines: Sequence[Machine]) -> list[View]:
        """Each of `machines`, looked at just now or in trouble. Takes LOOK_S at most."""
        now = time.monotonic()
        since = now - max(FRESH_S, len(machines) / LOOKS_PER_S)
        with self._changed:
            views = [self._view(machine) for machine in machines]
            while True:
                for view in views:
                    self._begin_if_due(view, since)
                if not any(self._waited_for(v) for v in views):
                    return views
                if not self._changed.wait(now + LOOK_S - time.monotonic()):
                    break
            for view in views:
                if self._waited_for(view):
                    view.late = True
                    self._failed(view, Troubled(view.machine.name, trouble.silent(LOOK_S)))
        return views

    def look(self, machine: Machine) -> View:
        """This one, anew: what was done to it is seen. Raises Troubled."""
        with self._changed:
            view = self._view(machine)
            self._changed.wait_for(lambda: not view.looking, LOOK_S)
            if not view.looking:
                self._begin(view)
            if not self._changed.wait_for(lambda: not view.looking, LOOK_S):
                raise view.trouble or Troubled(machine.name, trouble.silent(LOOK_S))
            if view.trouble is not None or view.report is None:
                raise view.trouble or Troubled(machine.name, trouble.silent(LOOK_S))
        return view

    def stale(self, machine: Machine) -> None:
        """Something was done to it: it is looked at again before anybody believes what it said before."""
        with self._changed:
            self._view(machine).stale = time.monotonic()

    def told(self, view: View) -> None:
        with self._changed:
            view.told = True

    @staticmethod
    def _waited_for(view: View) -> bool:
        return view.looking and view.trouble is None and not view.late

    def _view(self, machine: Machine) -> View:
        view = self._views.setdefault(machine.name, View(machine))
        view.machine = machine
        return view

    def _begin_if_due(self, view: View, since: float) -> None:
        old = view.trouble is not None or view.report is None or view.at < max(since, view.stale)
        if old and not view.looking and time.monotonic() >= view.due:
            self._begin(view)

    def _begin(self, view: View) -> None:
        view.looking, view.late = True, False
        Thread(target=self._look, args=(view,), name=f"look {view.machine.name}", daemon=True).start()

    def _look(self, view: View) -> None:
        asked, machine = time.monotonic(), view.machine
        report, problem = None, None
        try:
            with self._width:
                said = self.door(machine).run(scripts.probe(machine.root), LOOK_S)
            if said.status:
                raise Troubled(machine.name, trouble.of_output(said.status, said.err, machine.root))
            report = listing.read(said.out)
        except Troubled as error:
            problem = error
        finally:
            with self._changed:
                view.looking = False
                if report is not None:
                    self.heard(view, report)
                    view.report, view.at, view.trouble, view.failures, view.told = report, asked, None, 0, False
                else:
                    self._failed(view, problem or Troubled(machine.name, trouble.Trouble("the look at it broke off")))
                self._changed.notify_all()

    @staticmethod
    def _failed(view: View, problem: Troubled) -> None:
        now = time.monotonic()
        if view.trouble is None:
            view.failing_since = now
        if view.trouble is None or str(view.trouble) != str(problem):
            view.told = False
        view.failures += 1
        view.trouble = problem
        view.due = now + min(BACKOFF_S * 2 ** min(view.failures - 1, 10), BACKOFF_MAX_S)
