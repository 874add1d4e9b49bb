"""The runtime of this process: a member of a job, and the loop around the user's function.

    elastic.run: READY -> [join -> reset callbacks -> user's function] -> barrier -> FINISHED
                            ^                           |                   |
                            +------ CommBroken, MembershipChanged ----------+

Every rank takes the same branch: a planned change is learnt from a reduction that all completed, a failure reaches
all because the first to see it aborts its sockets. Whoever leaves the function for either reason goes to `join`,
which waits for a newer generation (see member.py).

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
from typing import TYPE_CHECKING, Any

import torch

from spotfleet.errors import UsageError
from spotfleet.messages import Stage, WorkerOrders
from spotfleet.train.copies import guard
from spotfleet.train.doing import waits_for_peers
from spotfleet.train.errors import CommBroken, MembershipChanged
from spotfleet.train.group import Group
from spotfleet.train.member import FLUSH_LIMIT_S, Dismissed, Member
from spotfleet.train.resize import Resizer, read
from spotfleet.train.rng import BETWEEN, reseed
from spotfleet.train.steps import Steps

if TYPE_CHECKING:
    from spotfleet.train.state import State


class Runtime(Member):
    """A member of a job, with the state it trains."""

    def __init__(self, environ: Any = os.environ) -> None:
        super().__init__(environ)
        self.state: State | None = None
        self.optimizers: list[Any] = []  # the distributed ones
        self.repeated = 0
        self._steps = Steps()
        self._last_step_at = 0.0
        self._resumed = 0
        self._checkpointer: Any = None
        self._environ = environ
        self.resizer: Resizer | None = None
        self._told_wanted = 0  # by what was last reported; a report costs more than a look at each step may

    # The loop

    def run(self, function: Callable[..., Any], state: State, args: tuple, kwargs: dict, resize: object = None) -> Any:
        """The function's result, once it has returned on every rank; None for one who came after that."""
        self._enter(state, resize)
        result = None
        while True:
            try:
                self.join(state)
                if not state._finished:
                    self.draw_between()
                    result = function(state, *args, **kwargs)
                    state.finish()
                self._finish(state)
                return result
            except Dismissed:
                return result
            except MembershipChanged:
                self._leave_group(state)
            except RuntimeError as error:
                if not isinstance(error, CommBroken) and not (self.group is not None and self.group.aborted):
                    raise
                self._fail(state)
                traceback.clear_frames(error.__traceback__)  # it may be part of a cycle, and keep a loader's processes

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
        if self.control is not None:
            _warm_up()
            self._checkpointer = importlib.import_module("spotfleet.train.checkpoint").Checkpointer(self)
            self.control.update(stage=Stage.READY)

    def join(self, state: State) -> None:
        """Return in a group whose ranks all stand at the same version and position."""
        while True:
            try:
                if self.group is None:
                    self._stand_by(state)
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
        done = self.resizer.entered(state, self.place.size, state._position.world) if self.resizer else ""
        wanted = self._told_wanted = self._wanted(state)
        if self.control is not None:
            self.control.update(generation=self.generation, resize=done, wanted=wanted)

    def _stand_by(self, state: State) -> None:
        """Until a place is offered. Who led the last generation writes a checkpoint when asked, or who stands in."""
        control, checkpointer = self.control, self._checkpointer
        while True:
            with control.cv:
                control.cv.wait_for(lambda: self.is_offered() or checkpointer.is_wanted_at_rest(state))
                if self.is_offered():
                    return
            checkpointer.at_rest(state)

    def sync(self, state: State) -> None:
        from spotfleet.train.sync import synchronize

        assert self.group is not None
        if self._checkpointer is not None and (state._damaged or not state._held):
            self._checkpointer.restore(state)
        due = synchronize(self.group, state)
        if not state.step_mode and not state._finished:
            state.keep_copy(state._position.world, state._position.rank)
        if due:
            state.on_reset()

    def _finish(self, state: State) -> None:
        """All ranks have returned from the function, and the final checkpoint is written."""
        assert self.group is not None
        if self.control is None:
            return
        self._checkpointer.final(state)
        self.group.allreduce(torch.zeros(1))
        self.control.update(stage=Stage.FINISHED)
        self.control.flush(FLUSH_LIMIT_S)

    def _leave_group(self, state: State) -> None:
        """A planned change: everybody stands at the same position; the group is kept until the next one has formed."""
        self._drop_gradients(state)
        self.retire_old()
        with self.control.cv:
            self.retiring, self.group = self.group, None
        self.control.update(generation=0)

    def _fail(self, state: State) -> None:
        """A failure: fail the peers too, and stand where the newest tensors held here belong."""
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
            optimizer._spotfleet.reset()
        state.drop_gradients()

    def _wanted(self, state: State) -> int:
        """The world size that the resize policy asks for now. Raises what the user's callback raises."""
        return self.resizer.wanted(state, self.place.size) if self.resizer is not None and not state._finished else 0

    def live(self) -> dict[str, Any]:
        version = self.state.reported_version if self.state is not None else 0
        return {"version": version, "waits": waits_for_peers(),
                "step_s": self._steps.step_s, "cost": self._steps.cost(self.group), "repeated": self.repeated}

    def _on_orders(self, orders: WorkerOrders) -> None:
        super()._on_orders(orders)
        if self._checkpointer is not None:
            self._checkpointer.heard(orders)

    # Called during an iteration

    def forward_begins(self) -> None:
        """Before the first forward pass of each microbatch: random numbers restart, buffers are remembered."""
        state = self.state
        guard()
        if state is None or state._position is None:
            return
        mark = (*_stand(state), self._passes())
        if state._mark == mark:
            return
        state.mark(mark=mark)
        if mark[-1] == 0:
            state.see_groups()
            if state.step_mode:
                state._extras.take(state._round)
        reseed(getattr(state, "seed", 0), self.place.rank, *mark)

    def draw_between(self) -> None:
        """What is drawn from here to the next forward pass is what it would be if this worker had just come here."""
        state = self.state
        if state is not None and state._position is not None:
            reseed(getattr(state, "seed", 0), self.place.rank, *_stand(state), BETWEEN)

    def _passes(self) -> int:
        return max((o._spotfleet.passes_done for o in self.optimizers), default=0)

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
            state._extras.take(state._round)  # no forward pass of a model in training has been seen
        state.mark(computed=max(state._computed, state._round))

    def round_ended(self, optimizer: Any, change: bool, save: bool) -> None:
        state, group = self.state, self.group
        if state is None or not state.step_mode or optimizer not in state._optimizers.values():
            return
        state.round_ended()
        state.note_draws()
        self.draw_between()
        if group is not None:
            group.change_agreed |= change
            group.save_agreed |= save

    def step_begins(self, optimizer: Any) -> bool:
        """False while a step that is applied already is being replayed."""
        state = self.state
        guard()
        if state is None or not (state.step_mode and state._replaying and state._replay > 0):
            return True
        state._extras.redone(state._round - 1)
        state.note_draws()
        return False

    def step_factor(self, optimizer: Any) -> float:
        """What this step's learning rates are to be multiplied by; called for each step, also for one replayed."""
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
        state.note_draws()
        self._step_completed()

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
        if self.control is not None and self._told_wanted != wanted:
            self._told_wanted = wanted
            self.control.update(wanted=wanted)

    def commit_copy(self, state: State) -> None:
        """A commit in copy mode: all ranks agree, copy, and leave together if a change waits."""
        change = self._agree_change()
        state.mark(version=state._version + 1, made_in=self.generation)
        state.keep_copy(self.place.size, self.place.rank)
        self.draw_between()
        self._step_completed()
        if self._checkpointer is not None:
            self._checkpointer.at_boundary(state)
        if change:
            raise MembershipChanged(f"generation {self.generation} ends at this commit as planned")

    def check_change(self) -> None:
        if self._agree_change():
            state = self.state
            if state is not None and not state.step_mode:  # only what is committed is a point to go on from
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
        """(real samples of this rank's batch, of all ranks') by the attached sampler; None: all count alike."""
        name = self.sampler_of(self.state) if self.state is not None else ""
        return self.state._stateful[name].weight() if name else None

    def sampler_of(self, state: State) -> str:
        """The name of the sampler in `state` that was iterated last; empty if there is none."""
        from spotfleet.train.sampler import Elastic

        samplers = {n: s for n, s in state._stateful.items() if isinstance(s, Elastic) and s.weighs}
        return max(samplers, key=lambda n: samplers[n].iterated, default="")

    def require_group(self, what: str) -> Group:
        """The group, for a collective of the user's own; UsageError where there can be none yet."""
        if not self.initialized:
            raise UsageError(f"{what}: hvd.init() has not been called", hint="call hvd.init() first in the script")
        if self.group is None:
            raise UsageError(
                f"{what}: this worker joined a running job, so it has nobody to talk to before elastic.run",
                hint="move the call into the function decorated with @hvd.elastic.run",
            )
        return self.group


def _stand(state: State) -> tuple[int, ...]:
    """Which iteration this is, in what random numbers are made from."""
    return (state._round,) if state.step_mode else (state._version, state._uncommitted)


def _warm_up() -> None:
    """Pay for what the first optimizer step would import and build, with a scratch parameter."""
    importlib.import_module("torch._dynamo")
    scratch = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([scratch], lr=0.0)
    (scratch * 1.0).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


_runtime: Runtime | None = None


def current() -> Runtime:
    """The one runtime of this process, made on first use from the environment."""
    global _runtime
    if _runtime is None:
        _runtime = Runtime()
    return _runtime
