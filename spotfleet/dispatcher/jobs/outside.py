"""Work of a job outside `elastic.run`: its kind, in words, for the bill, and the job's end at a loss. Pure.

    COMMAND    workers run a shell command
    NO_INIT    workers run the script, and none has called hvd.init(): each runs all of it alone
    ALONE      after hvd.init(), each worker trains alone
    TOGETHER   after hvd.init(), the workers' steps use their group: the loss of one ends the script on all

A script that has entered `elastic.run` anywhere, or has progress, has no such work.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from spotfleet.bundle.scripts import horovod_advice
from spotfleet.dispatcher.jobs.context import JobContext
from spotfleet.dispatcher.jobs.restart import TOGETHER_S, Cause, JobFailure
from spotfleet.dispatcher.jobs.workers import JobWorker, JobWorkers
from spotfleet.fleet.domain.events import Event, ScriptsRan
from spotfleet.membership import Membership
from spotfleet.model import JobSpec
from spotfleet.protocol.messages import Stage
from spotfleet.words import counted

SURE_S = 60.0  # a script that runs for this long without hvd.init() counts as one that never calls it
FEW = 3  # optimizer steps that a script may make before `elastic.run` to build the optimizer's state
ELASTIC = 'README, "Make a script elastic"'


class Outside(Enum):
    """Kind of work outside `elastic.run`."""

    COMMAND = "the command"
    NO_INIT = "the script without hvd.init()"
    ALONE = "the script without hvd.elastic.run, each alone"
    TOGETHER = "the script without hvd.elastic.run, together"


HINTS = {
    Outside.NO_INIT: "to train together: `import spotfleet.train as hvd`, hvd.init(), and the training loop in a "
                     f"function under @hvd.elastic.run ({ELASTIC})",
    Outside.ALONE: "to train together: hvd.DistributedOptimizer, and the training loop in a function under "
                   f"@hvd.elastic.run ({ELASTIC})",
    Outside.TOGETHER: "to survive the loss of a host: put the training loop into a function under @hvd.elastic.run "
                      f"({ELASTIC})",
}
RESTART = ("Without hvd.elastic.run a script supports one thing after a loss: to be started\n"
           "again on all workers, from a checkpoint of its own. `--launcher torchrun` does that.")


class OutsideTracker:
    """Work of one job outside `elastic.run`, derived from its workers' reports."""

    def __init__(self, job: str, spec: JobSpec) -> None:
        self.job, self._spec = job, spec
        self.kind: Outside | None = None
        self.steps = 0  # most optimizer steps outside that a worker has reported
        self._since: tuple[float, float] | None = None  # monotonic and Unix: when the first script began
        self._now = 0.0
        self._ran: set[str] = set()  # workers whose script has begun, ended ones too
        self._billed: tuple[str, ...] | None = None  # workers of the newest event; None: training, or no event yet
        self._written = False
        self._broke_at: float | None = None

    def update(self, workers: JobWorkers, membership: Membership, version: int, context: JobContext) -> list[Event]:
        """Take the workers' reports; `version` is the job's. Returns an event where the bill needs one."""
        known = [w for w in workers.all.values() if not w.past and (w.begun or w.done)]
        running = [w for w in known if not w.ended]
        self._now = context.now
        if running and self._since is None:
            self._since = (context.now, context.unix)
        self.kind = self._kind_of(known, membership.generation, version)
        self._ran |= {w.name for w in known}
        self.steps = max([self.steps, *(w.report.outside for w in known)]) if self.kind is not None else 0
        return self._bill(tuple(sorted(w.name for w in running)), membership, context)

    def _kind_of(self, known: list[JobWorker], generation: int, version: int) -> Outside | None:
        if not self._spec.argv:
            return Outside.COMMAND if known else None
        reports = [w.report for w in known]
        if version > 0 or any(w.entered for w in known):
            return None
        if any(r.outside > FEW for r in reports):
            return Outside.TOGETHER if any(r.together for r in reports) else Outside.ALONE
        if known and generation == 0 and all(r.stage is Stage.STARTING for r in reports):
            return Outside.NO_INIT
        return None

    @property
    def sure(self) -> bool:
        """Whether the kind will most probably stay: a script may still call hvd.init() for a while."""
        if self.kind is not Outside.NO_INIT:
            return self.kind is not None
        return self._since is not None and self._now - self._since[0] >= SURE_S

    # ---- in words

    def why(self, live: int) -> str:
        """Return the activity of `live` workers; "" without such work."""
        if self.kind is Outside.COMMAND:
            return f"workers that run the command: {live}"
        if self.kind is None or not live:
            return ""
        run = f"{counted(live, 'worker')} {'runs' if live == 1 else 'run'} this script"
        if not self.sure and self._spec.kind == "command":
            return run  # its source shows that it never calls it
        if not self.sure:
            return f"{run}; hvd.init() has not been called yet"
        return f"{run} {self._without}: {self._at_a_loss if self._together else self._alone(live)}"

    @property
    def ended_why(self) -> str:
        """Return the outcome, once every worker's script has ended."""
        if self.kind is Outside.COMMAND:
            return "every worker's command has ended"
        if self.kind is None or not self._ran:
            return "every worker's script has ended"
        how = "they trained together" if self._together else "each ran all of it alone"
        if self.kind is Outside.ALONE:
            how = "each trained alone"
        ran = f"{counted(len(self._ran), 'worker')} ran this script {self._without}"
        return f"{ran}: {how}" if len(self._ran) > 1 else ran

    @property
    def hint(self) -> str:
        """Return the next thing to try; "" if nothing is wrong, or nothing is sure."""
        return self.ended_hint if self.sure else ""

    @property
    def ended_hint(self) -> str:
        """Return the same for a job that has ended, so that its kind is known."""
        if self.kind is None or self._spec.restarts:
            return ""
        return HINTS.get(self.kind, "")

    @property
    def _without(self) -> str:
        return "without hvd.init()" if self.kind is Outside.NO_INIT else "without hvd.elastic.run"

    @property
    def _at_a_loss(self) -> str:
        return "all start anew at a change of hosts" if self._spec.restarts else "a lost host ends the job"

    @property
    def _together(self) -> bool:
        return self.kind is Outside.TOGETHER

    def _alone(self, live: int) -> str:
        if live == 1:
            return "a lost host starts it again from its beginning"
        return "each trains alone" if self.kind is Outside.ALONE else "each runs all of it alone"

    # ---- for the bill

    def _bill(self, running: tuple[str, ...], membership: Membership, context: JobContext) -> list[Event]:
        if self.sure:
            return self._write(running, context, known=False)
        if self.kind is None and self._billed is not None and running:  # elastic.run has been entered after all
            self._billed = None
            trains = membership.members if membership.generation else ()
            why = "the script in hvd.elastic.run"
            return [ScriptsRan(context.unix, self.job, trains, context.unix, why, known=True)]
        return []

    def _write(self, running: tuple[str, ...], context: JobContext, *, known: bool) -> list[Event]:
        if running == self._billed or self.kind is None:
            return []
        since = context.unix if self._written or self._since is None else self._since[1]
        self._billed, self._written = running, True
        return [ScriptsRan(context.unix, self.job, running, since, self.kind.value, known=known)]

    def last(self, context: JobContext) -> list[Event]:
        """Return the event of a job that ends before its kind was sure."""
        if self.kind is None or self._written or not self._ran:
            return []
        return self._write(tuple(sorted(self._ran)), context, known=False)

    # ---- a loss

    def loss(self, group: Iterable[str], workers: JobWorkers, context: JobContext) -> str:
        """Return what was lost of a script whose workers train together; "" if nothing was."""
        if not self._together:
            return ""
        members = [workers.all[m] for m in group if m in workers.all]
        if not any(w.ended and not w.done for w in members):
            return ""
        if self._broke_at is None:
            self._broke_at = context.now
        return _loss(members)

    def failure(self, group: Iterable[str], workers: JobWorkers, context: JobContext) -> JobFailure | None:
        """Return the failure of the job after a loss, once its cause can be known."""
        group = tuple(group)
        what = self.loss(group, workers, context)
        if not what or self._broke_at is None:
            return None
        live = [m for m in group if m in workers.all and not (workers.all[m].ended or workers.all[m].silent)]
        if live and context.now - self._broke_at < TOGETHER_S:
            return None
        users = [w for name in group if (w := workers.all.get(name)) is not None and w.cause is Cause.USER]
        others = "the other workers" if len(group) > 1 else "the script"
        why = f"{what}, and without hvd.elastic.run {others} cannot go on"
        return JobFailure(why, users[0].error if users else RESTART)


def _loss(members: list[JobWorker]) -> str:
    ends = {w.cause: w for w in reversed(members) if w.ended and not w.done}
    if Cause.USER in ends:
        return f"the script failed on {ends[Cause.USER].name}"
    if Cause.SIGNAL in ends:
        return f"{ends[Cause.SIGNAL].name} was {ends[Cause.SIGNAL].error}"
    lost = ends.get(Cause.LOST) or next((w for w in members if w.silent), None)
    if lost is not None:
        return f"host {lost.host} was lost"
    return "a collective broke"


def advice(error: str) -> str:
    """Return the change of a script that a traceback asks for; "" if none is known."""
    return horovod_advice(error)
