"""The runtime of this process: a member of a job and the loop around the user's function.

    elastic.run: READY -> [join -> reset callbacks -> user's function] -> barrier -> FINISHED
                            ^                           |                   |
                            +------ CommBroken, MembershipChanged ----------+

Every rank takes the same branch. A planned change is agreed in a reduction that all completed. A failure reaches all
ranks because the first to detect it aborts its sockets. A rank that leaves the function for either reason goes to
`join`, which waits for a newer generation (see worker/member.py).

Without SPOTFLEET_SOCKET the process is a job of its own: world size 1, no control thread, no checkpoints.

Threads: the main thread owns everything here; autograd threads call `round_begins` and `round_ended` while it waits
in backward(); the control thread calls `live`, which reads numbers.
"""

from __future__ import annotations

import importlib
import os
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from spotfleet.errors import UsageError
from spotfleet.protocol.messages import Assignment, Stage, WorkerOrders
from spotfleet.train import current as current_runtime
from spotfleet.train import watch
from spotfleet.train.comm import backends
from spotfleet.train.comm.group import Group
from spotfleet.train.data.sampler import Elastic
from spotfleet.train.optimizer_tag import handle_of
from spotfleet.train.resize import Resizer, read
from spotfleet.train.state import divergence
from spotfleet.train.state.copies import await_copies
from spotfleet.train.state.rng import BETWEEN, reseed
from spotfleet.train.state.sync import synchronize
from spotfleet.train.steps import Steps
from spotfleet.worker.activity import waits_for_peers
from spotfleet.worker.errors import CommBroken, MembershipChanged, StateDiverged, StateLost
from spotfleet.worker.member import FLUSH_LIMIT_S, Dismissed, Member

if TYPE_CHECKING:
    from spotfleet.train.state.state import State


class CheckpointWriter(Protocol):
    """The methods of `checkpoint.writer.Checkpointer` that the runtime calls; described there."""

    def on_orders(self, orders: WorkerOrders) -> None: ...
    def at_boundary(self, state: State) -> None: ...
    def is_wanted_at_rest(self, state: State) -> bool: ...
    def at_rest(self, state: State) -> None: ...
    def final(self, state: State) -> None: ...
    def restore(self, state: State) -> None: ...


class Runtime(Member[Group]):
    """A member of a job with the state that it trains."""

    def __init__(self, environ: Any = os.environ) -> None:
        super().__init__(self._make_group, environ)
        self.state: State | None = None
        self.optimizers: list[Any] = []  # the distributed ones
        self.repeated = 0
        self._steps = Steps()
        self._last_step_at = 0.0
        self._resumed = 0
        self._checkpointer: CheckpointWriter | None = None
        self._environ = environ
        self.resizer: Resizer | None = None
        self.watchers = watch.watchers(self, environ)
        self._reported_wanted = 0  # the last one reported: a report at each step would cost too much

    def _make_group(self, assignment: Assignment, address: str) -> Group:
        return backends.make_group(assignment, self.job, address, self._key, self.on_broken, self.on_stuck)

    # The loop

    def run(self, function: Callable[[], Any], state: State, resize: object,
            make_checkpointer: Callable[[Runtime], CheckpointWriter]) -> Any:
        """Return the function's result once it has returned on every rank; None on a rank that joined after that.

        `make_checkpointer` is called in a worker of a fleet only: its modules take seconds to import.
        """
        self._enter(state, resize)
        if self.control is not None:
            _warm_up()
            self._checkpointer = make_checkpointer(self)
            self.control.update(stage=Stage.READY)
        result = None
        while True:
            try:
                self.join(state)
                if not state._finished:
                    self.reseed_between()
                    result = function()
                    state.finish()
                self._finish(state)
                return result
            except Dismissed:
                return result
            except MembershipChanged:
                self._leave_group(state)
            except RuntimeError as error:
                broken = isinstance(error, CommBroken) or (self.group is not None and self.group.aborted)
                if not broken or isinstance(error, StateLost):
                    raise
                self._fail(state)
                traceback.clear_frames(error.__traceback__)  # in a cycle it would keep a loader's processes alive

    def has_finished(self) -> bool:
        return self.state is not None and self.state._finished

    def _enter(self, state: State, resize: object) -> None:
        if not self.initialized:
            raise UsageError("elastic.run: hvd.init() has not been called", hint="call hvd.init() first in the script")
        if self.state is not None:
            raise UsageError("elastic.run was entered a second time", hint="put all epochs into one function")
        world, rank = (self.place.size, self.place.rank) if self.placed else (0, -1)
        self.resizer = Resizer(read(resize, self._environ), self._environ)
        self.resizer.attach(state)
        state.attach(world, rank)
        self.state = state
        for watcher in self.watchers:
            watcher.entered(state)

    def join(self, state: State) -> None:
        """Enter a group and synchronise: all its ranks then have the same version and position."""
        while True:
            try:
                if self.group is None:
                    divergence.begin(state)
                    self._wait_for_place(state)
                    self.enter_generation()
                    assert self.group is not None
                    self.group.form()
                self.sync(state)
                break
            except CommBroken:
                self._fail(state)
        self.retire_old()
        if state.step_mode and state._computed >= state._position.round and not state._finished:
            self.repeated += 1
            state.mark(computed=state._position.round - 1)
        done = self.resizer.apply(state, self.place.size, state._position.world) if self.resizer else ""
        wanted = self._reported_wanted = self._wanted(state)
        if self.control is not None:
            self.control.update(generation=self.generation, resize=done, wanted=wanted)

    def _wait_for_place(self, state: State) -> None:
        """Wait until a place is offered. Meanwhile the last generation's leader, or the worker that stands in for it,
        writes a checkpoint when ordered."""
        control, checkpointer = self.control, self._checkpointer
        while True:
            with control.cv:
                control.cv.wait_for(lambda: self.is_offered() or checkpointer.is_wanted_at_rest(state))
                if self.is_offered():
                    return
            checkpointer.at_rest(state)

    def sync(self, state: State) -> None:
        assert self.group is not None
        if self._checkpointer is not None and (state._damaged or not state._held):
            self._checkpointer.restore(state)
        try:
            due = synchronize(self.group, state)
        except StateDiverged as error:
            self.report_divergence(error)
            raise
        if not state.step_mode and not state._finished:
            state.keep_copy(state._position.world, state._position.rank)
        if due:
            state.on_reset()

    def report_divergence(self, error: StateDiverged) -> None:
        if self.control is not None:
            self.control.update(diverged=str(error))

    def _finish(self, state: State) -> None:
        """Write the final checkpoint, wait until all ranks have returned from the function, and report FINISHED."""
        assert self.group is not None
        if self.control is None:
            return
        self._checkpointer.final(state)
        self.group.allreduce(torch.zeros(1))
        self.control.update(stage=Stage.FINISHED)
        self.control.flush(FLUSH_LIMIT_S)

    def _leave_group(self, state: State) -> None:
        """Leave the group for a planned change, with all ranks at one position; keep it until the next has formed."""
        self._drop_gradients(state)
        self.retire_old()
        with self.control.cv:
            self.retiring, self.group = self.group, None
        self.control.update(generation=0)

    def _fail(self, state: State) -> None:
        """Handle a failure: abort the group, so that peers fail too; go back to the position of the tensors here."""
        group = self.group
        if group is not None:
            group.abort()
            self.on_broken(group.generation)
        self._drop_gradients(state)
        if not state._finished:
            self.repeated += state._uncommitted
            state.restore()
        self.drop_group()

    def _drop_gradients(self, state: State) -> None:
        for optimizer in self.optimizers:
            handle_of(optimizer).reducer.reset()
        state.drop_gradients()

    def _wanted(self, state: State) -> int:
        """Return the world size that the resize policy requests now. Raises what the user's callback raises."""
        return self.resizer.wanted(state, self.place.size) if self.resizer is not None and not state._finished else 0

    def live(self) -> dict[str, Any]:
        version = self.state.reported_version if self.state is not None else 0
        return {"version": version, "waits": waits_for_peers(),
                "step_s": self._steps.step_s, "cost": self._steps.cost(self.group), "repeated": self.repeated}

    def _on_orders(self, orders: WorkerOrders) -> None:
        super()._on_orders(orders)
        if self._checkpointer is not None:
            self._checkpointer.on_orders(orders)

    # Called during an iteration

    def forward_begins(self) -> None:
        """Restart random numbers and copy buffers, once, before the first forward pass of each microbatch."""
        state = self.state
        await_copies()
        if state is None or state._position is None:
            return
        mark = (*_iteration_numbers(state), self._passes())
        if state._mark == mark:
            return
        state.mark(mark=mark)
        if mark[-1] == 0:
            state.refresh_groups()
            if state.step_mode:
                state._extras.take(state._round)
        reseed(getattr(state, "seed", 0), self.place.rank, *mark)

    def reseed_between(self) -> None:
        """Restart random numbers, so that draws until the next forward pass equal those of a worker that has just
        joined at this position."""
        state = self.state
        if state is not None and state._position is not None:
            reseed(getattr(state, "seed", 0), self.place.rank, *_iteration_numbers(state), BETWEEN)

    def _passes(self) -> int:
        return max((handle_of(o).reducer.passes_done for o in self.optimizers), default=0)

    def round_begins(self, optimizer: Any) -> None:
        state, group = self.state, self.group
        if state is None or not state.step_mode or optimizer not in state._optimizers.values():
            return
        state.round_begins(self.place.size, self.place.rank)
        if group is not None and group.change_agreed:
            raise MembershipChanged(f"generation {group.generation} ends here as planned")
        if self._checkpointer is not None and not state._replaying:
            self._checkpointer.at_boundary(state)
        if state._mark != (state._round, 0):
            state._extras.take(state._round)  # no forward pass of a model in training mode came before
        state.mark(computed=max(state._computed, state._round))
        for watcher in self.watchers:
            watcher.gradient_begins(state)

    def round_ended(self, optimizer: Any, change: bool, save: bool) -> None:
        state, group = self.state, self.group
        if state is None or not state.step_mode or optimizer not in state._optimizers.values():
            return
        state.round_ended()
        state.keep_generators()
        self.reseed_between()
        if group is not None:
            group.change_agreed |= change
            group.save_agreed |= save

    def step_begins(self, optimizer: Any) -> bool:
        """Return False while a step that is already applied is replayed."""
        state = self.state
        await_copies()
        if state is None or not (state.step_mode and state._replaying and state._replay > 0):
            return True
        state._extras.step_replayed(state._round - 1)
        state.keep_generators()
        return False

    def step_factor(self, optimizer: Any) -> float:
        """Return the factor for this step's learning rates; called for each step, also for a replayed one."""
        state, resizer = self.state, self.resizer
        if state is None or resizer is None or optimizer not in state._optimizers.values():
            return 1.0
        if not state.step_mode:
            return resizer.factor(state._version, self.place.size)
        return resizer.factor(state._position.version, state._position.world)

    def step_ended(self, optimizer: Any) -> None:
        state = self.state
        if state is None or optimizer not in state._optimizers.values():
            return
        if not state.step_mode:
            state.mark(uncommitted=state._uncommitted + 1)
            return
        state.mark(version=state._version + 1, made_in=self.generation)
        state._extras.step_applied(state._round - 1)
        state.keep_generators()
        self._step_completed()
        for watcher in self.watchers:
            watcher.stepped(state)

    def _step_completed(self) -> None:
        now = time.monotonic()
        if self._resumed != self.generation and self.control is not None:
            self._resumed = self.generation
            pause_s = now - self._last_step_at if self._last_step_at else 0.0
            self._steps.begin()
            self.control.update(resumed=self.generation, pause_s=pause_s)
        self._last_step_at = now
        self._steps.ended(now, self.group)
        assert self.state is not None
        wanted = self._wanted(self.state)
        if self.control is not None and self._reported_wanted != wanted:
            self._reported_wanted = wanted
            self.control.update(wanted=wanted)

    def commit_copy(self, state: State) -> None:
        """Commit in copy mode: all ranks agree, copy, and leave together if a change waits."""
        change = self._agree_change()
        state.mark(version=state._version + 1, made_in=self.generation)
        state.keep_copy(self.place.size, self.place.rank)
        self.reseed_between()
        self._step_completed()
        for watcher in self.watchers:
            watcher.stepped(state)
        if self._checkpointer is not None:
            self._checkpointer.at_boundary(state)
        if change:
            raise MembershipChanged(f"generation {self.generation} ends at this commit as planned")

    def check_change(self) -> None:
        if self._agree_change():
            state = self.state
            if state is not None and not state.step_mode:  # only a commit is a point to resume from
                self.repeated += state._uncommitted
                state.restore()
            raise MembershipChanged(f"generation {self.generation} ends here as planned")

    def _agree_change(self) -> bool:
        group = self.require_group("commit()")
        waits = torch.tensor([group.change_waits, group.save_waits], dtype=torch.float32)
        change, save = group.allreduce(waits).tolist()
        group.save_agreed |= save > 0
        return change > 0

    def weight(self) -> tuple[float, float] | None:
        """Return (real samples in this rank's batch, in all ranks' batches) by the sampler in use; None: all equal."""
        name = self.sampler_of(self.state) if self.state is not None else ""
        return self.state._stateful[name].weight() if name else None

    def sampler_of(self, state: State) -> str:
        """Return the name of the sampler in `state` that was iterated last; empty if there is none."""
        samplers = {n: s for n, s in state._stateful.items() if isinstance(s, Elastic) and s.is_weighted}
        return max(samplers, key=lambda n: samplers[n].last_used, default="")

    def require_group(self, what: str) -> Group:
        """Return the group for a user's own collective; UsageError where there can be none yet."""
        if not self.initialized:
            raise UsageError(f"{what}: hvd.init() has not been called", hint="call hvd.init() first in the script")
        if self.group is None:
            raise UsageError(
                f"{what}: this worker joined a running job, so it has no peers before elastic.run",
                hint="move the call into the function decorated with @hvd.elastic.run",
            )
        return self.group


def _iteration_numbers(state: State) -> tuple[int, ...]:
    """Return the numbers that identify this iteration in a seed of random numbers."""
    return (state._round,) if state.step_mode else (state._version, state._uncommitted)


def _warm_up() -> None:
    """Import and build with a scratch parameter what the first optimizer step needs, before training begins."""
    importlib.import_module("torch._dynamo")
    scratch = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([scratch], lr=0.0)
    (scratch * 1.0).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


_runtime: Runtime | None = None


def _get_runtime() -> Runtime:
    """Return the one runtime of this process, made from the environment on first use."""
    global _runtime
    if _runtime is None:
        _runtime = Runtime()
    return _runtime


def current() -> Runtime:
    """Return the runtime of this process with all its members; see current.py."""
    return cast(Runtime, current_runtime.runtime())


current_runtime.register(_get_runtime)
