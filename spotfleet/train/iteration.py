"""The moments of an iteration as an optimizer and its reducer report them: gradients, reductions, steps and commits.

    step ended --code of the user, forward pass--> first gradient --reductions--> step begins --> step ended
      random numbers restart                         position captured;            skipped in a replay
      statistics copied                              a planned change leaves here

An iteration may reduce several times; its position is that of the first gradient after a step. So a change of
membership repeats the whole of it, or nothing.

Threads: as in runtime.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd import graph
from torch.autograd.function import BackwardCFunction

from spotfleet.errors import UsageError
from spotfleet.protocol.messages import WorkerOrders
from spotfleet.train.comm.group import Group
from spotfleet.train.gradients.optimizer_tag import OptimizerList, handle_of
from spotfleet.train.resize import Resizer
from spotfleet.train.script.calls import FunctionCalls
from spotfleet.train.state.copies import await_copies
from spotfleet.train.state.rng import reseed
from spotfleet.train.steps import Steps
from spotfleet.train.watch import StepWatcher
from spotfleet.worker.errors import CommBroken, MembershipChanged
from spotfleet.worker.member import Member

if TYPE_CHECKING:
    from spotfleet.train.state.state import State


_RUN_BACKWARD = graph._engine_run_backward.__code__  # the frame of each backward()
_APPLY_BACKWARD = BackwardCFunction.apply.__code__  # that of a Function's backward, on whichever thread


class CheckpointWriter(Protocol):
    """The methods of `checkpoint.writer.Checkpointer` that the runtime calls; described there."""

    def on_orders(self, orders: WorkerOrders) -> None: ...
    def at_boundary(self, state: State) -> None: ...
    def is_wanted_at_rest(self, state: State) -> bool: ...
    def at_rest(self, state: State) -> None: ...
    def final(self, state: State) -> None: ...
    def announcement(self, state: State) -> str: ...
    def restore(self, state: State) -> None: ...


class IterationEvents(Member[Group]):
    """The part of a runtime that is called during an iteration."""

    state: State | None
    resizer: Resizer | None
    optimizers: OptimizerList
    watchers: list[StepWatcher]
    repeated: int
    _checkpointer: CheckpointWriter | None
    _calls: FunctionCalls | None
    _steps: Steps
    _last_step_at: float
    _resumed: int
    _reported_wanted: int
    _wanted: Callable[[State], int]
    _leaving: bool  # MembershipChanged has been raised in this call of the user's function

    def restart_draws(self) -> None:
        """Restart random numbers, so that draws from here on equal those of a worker that joins at this point. Changes
        of statistics since the last step are those of code that will not run again."""
        state = self.state
        if state is None or state._position is None:
            return
        if state.step_mode and not state._open:
            state._extras.renew(state._round)
        reseed(getattr(state, "seed", 0), self.place.rank, *state._draws)

    def _is_of_state(self, optimizer: Any) -> bool:
        return self.state is not None and any(o is optimizer for o in self.state._optimizers.values())

    def round_begins(self, optimizer: Any) -> None:
        """Handle the first gradient of a reduction. Leave here, for a planned change, if it is an iteration's first."""
        _refuse_nested_backward()
        state, group = self.state, self.group
        if state is None or not self._is_of_state(optimizer):
            return
        if self._calls is not None:
            self._calls.gradient_begins(state)
        if not state.step_mode:
            state.refresh_groups()
            state._commits.worked(state)
            state._beginnings.waits_for = None
            return
        self._raise_again()
        if not state.round_begins(self.place.size, self.place.rank):
            return
        if state._call_again:
            self._leaving = True
            raise MembershipChanged("the function is called again, with other values: see state/repeats.py")
        if group is not None and group.change_agreed and not state._marks.are_borrowed:
            raise self._change("here")
        if self._checkpointer is not None and not state._replaying and not self._has_moved(state):
            self._checkpointer.at_boundary(state)
            if state._extras.has_large:
                await_copies()  # the next forward pass may change what is being copied
        state.mark(computed=max(state._computed, state._round))
        for watcher in self.watchers:
            watcher.gradient_begins(state)

    def _has_moved(self, state: State) -> bool:
        """Return whether the tensors are not those of the position: changed by steps that will be undone, or by
        noise."""
        return state._marks.are_borrowed or (state._loan is not None and state._loan.has_steps)

    def _change(self, where: str) -> MembershipChanged:
        """Return the exception to raise for a planned change."""
        self._leaving = True
        return MembershipChanged(f"generation {self.generation} ends {where} as planned")

    def _raise_again(self) -> None:
        """Raise for a change that the user's function has caught: it must not go on, and its position is kept."""
        if self._leaving:
            raise self._change("here")
        if self.group is not None and self.group.broken:
            raise CommBroken(f"generation {self.generation} is broken")

    def round_ended(self, optimizer: Any, change: bool, save: bool) -> None:
        state, group = self.state, self.group
        if state is None or not state.step_mode or not self._is_of_state(optimizer):
            return
        if group is not None:
            group.change_agreed |= change
            group.save_agreed |= save

    def step_begins(self, optimizer: Any) -> bool:
        """Return False while a step that is already applied is replayed."""
        state = self.state
        await_copies()
        if state is not None and self._is_of_state(optimizer):
            self._raise_again()
            if state.step_mode:
                state._marks.step_begins(state._trained)
                state._touches.step_begins(state._optimizer_states)
            state._plain.step_begins(optimizer)
            for watcher in self.watchers:
                watcher.step_begins(state)
            if state._loan is not None:
                state._loan.before_step(state)
        if state is None or not (state.step_mode and state._replaying and state._replay > 0):
            return True
        state._extras.step_replayed(state._round)
        state.put_applied()
        state._plain.note_groups()
        state.step_ended()
        self.restart_draws()
        return False

    def step_factor(self, optimizer: Any) -> float:
        """Return the factor for this step's learning rates; called for each step, also for a replayed one."""
        state, resizer = self.state, self.resizer
        if state is None or resizer is None or not self._is_of_state(optimizer):
            return 1.0
        if not state.step_mode:
            return resizer.factor(state._version, self.place.size)
        return resizer.factor(state._position.version, state._position.world)

    def step_ended(self, optimizer: Any) -> None:
        state = self.state
        if state is None or not self._is_of_state(optimizer):
            return
        borrowed = state._marks.are_borrowed
        state._plain.step_ended(optimizer)
        if state.step_mode:
            state.mark(version=state._version + 1, made_in=self.generation)
            state._extras.step_applied(state._round)
            state.keep_applied()
            state.step_ended()
        else:
            state._commits.worked(state)
            state.mark(uncommitted=state._uncommitted + 1)
        self.restart_draws()
        if state.step_mode:
            self._step_completed()
            for watcher in self.watchers:
                watcher.stepped(state)
            if borrowed and self.group is not None and self.group.change_agreed:
                raise self._change("here")  # at the gradient the weights were others; this iteration is replayed

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
        change = self._agree_change(state._commits.is_unclear(state))
        state.mark(version=state._version + 1, made_in=self.generation)
        state.keep_copy(self.place.size, self.place.rank, commits=True)
        self.restart_draws()
        self._step_completed()
        for watcher in self.watchers:
            watcher.stepped(state)
        if self._checkpointer is not None:
            self._checkpointer.at_boundary(state)
        if change:
            raise self._change("at this commit")

    def check_change(self) -> None:
        state = self.state
        if self._agree_change(state is not None and state.has_moved):
            if state is not None and not state.step_mode:  # only a commit is a point to resume from
                self.repeated += state._uncommitted
                state.restore()
            raise self._change("here")

    def _agree_change(self, later: bool = False) -> bool:
        """Return whether all ranks leave here: not where one of them must do so `later`, at the next gradient or
        commit."""
        group = self.require_group("commit()")
        waits = torch.tensor([group.change_waits, group.save_waits, later], dtype=torch.float32)
        change, save, postponed = group.allreduce(waits).tolist()
        group.save_agreed |= save > 0
        if change and postponed:
            group.change_agreed = True
        return change > 0 and not postponed

    def require_group(self, what: str) -> Group:
        """Return the group for a user's own collective; UsageError where there can be none yet."""
        if not self.initialized:
            raise UsageError(f"{what}: hvd.init() has not been called", hint="call hvd.init() first in the script")
        if self.group is None:
            raise UsageError(
                f"{what}: this worker joined a running job, so it has no peers before elastic.run",
                hint="move the call into the function decorated with @hvd.elastic.run",
            )
        for optimizer in self.optimizers:
            handle_of(optimizer).reducer.settle()
        return self.group


def _refuse_nested_backward() -> None:
    """Raise UsageError inside a backward pass that another one has begun: its end would end the reduction."""
    frame: FrameType | None = sys._getframe(1)
    codes = [_RUN_BACKWARD, _APPLY_BACKWARD]
    while frame is not None and codes:
        if frame.f_code is codes[0]:
            del codes[0]
        frame = frame.f_back
    if not codes:
        raise UsageError("backward() runs inside another backward(), as torch.utils.checkpoint does with "
                         "use_reentrant=True, so gradients would be reduced before all of them are there",
                         hint="call checkpoint(..., use_reentrant=False)")
