"""Trials of Ray Tune on the cluster, written to the ledger when their workers change, for the bill."""

from __future__ import annotations

from collections.abc import Iterable

from spotfleet.fleet.domain.events import Event, TrialHeld
from spotfleet.protocol.ray_cluster import RayState, RayTrial


class TrialLog:
    """The newest events of the trials that hold parts of hosts."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, RayTrial]] = {}  # job -> trial -> as in its last event

    def load(self, past: Iterable[Event]) -> None:
        """Take the events of earlier processes of the dispatcher."""
        for event in past:
            if isinstance(event, TrialHeld):
                self._record(event.job, RayTrial(event.trial, event.name, event.workers, event.hosts))

    def changes(self, job: str, state: RayState | None, at: float) -> list[TrialHeld]:
        """Return the events by which the ledger follows `state`. What is not known changes nothing: the head may only
        be slow, and the bill ends with the hosts that the job holds."""
        self._held = {j: trials for j, trials in self._held.items() if j == job}
        if not job or state is None or not state.up:
            return []
        before, now = self._held.get(job, {}), {trial.trial: trial for trial in state.trials}
        gone = [RayTrial(t.trial, t.name, 0) for t in before.values() if t.trial not in now]
        changed = [*gone, *(t for t in now.values() if t != before.get(t.trial))]
        for trial in changed:
            self._record(job, trial)
        return [TrialHeld(at, job, t.trial, t.name, t.workers, dict(t.hosts)) for t in changed]

    def _record(self, job: str, trial: RayTrial) -> None:
        held = self._held.setdefault(job, {})
        if trial.hosts:
            held[trial.trial] = trial
        else:
            held.pop(trial.trial, None)
