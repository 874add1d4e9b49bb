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
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from spotfleet.errors import UsageError
from spotfleet.protocol.messages import Assignment, Stage, WorkerOrders
from spotfleet.train import current as current_runtime
from spotfleet.train import default_group, watch
from spotfleet.train.comm import backends
from spotfleet.train.comm.group import Group
from spotfleet.train.comm.script_lines import parse_ahead
from spotfleet.train.data.sampler import Elastic
from spotfleet.train.features import nccl_version
from spotfleet.train.gradients.optimizer_tag import OptimizerList, handle_of
from spotfleet.train.iteration import CheckpointWriter, IterationEvents
from spotfleet.train.outside import OutsideSteps
from spotfleet.train.resize import Resizer, read
from spotfleet.train.script.beginnings import watch_loaders
from spotfleet.train.script.calls import FunctionCalls
from spotfleet.train.state import divergence
from spotfleet.train.state.rng import keep_loaders_apart
from spotfleet.train.state.sync import synchronize
from spotfleet.train.steps import Steps
from spotfleet.worker.activity import waits_for_peers
from spotfleet.worker.errors import CommBroken, MembershipChanged, StateDiverged, StateLost
from spotfleet.worker.member import FLUSH_LIMIT_S, Dismissed

if TYPE_CHECKING:
    from spotfleet.train.state.state import State


class Runtime(IterationEvents):
    """A member of a job with the state that it trains."""

    def __init__(self, environ: Any = os.environ) -> None:
        super().__init__(self._make_group, environ)
        self.state: State | None = None
        self.optimizers = OptimizerList()
        self.repeated = self.recomputed = 0  # see WorkerReport
        self._leaving = False
        self._inside = False  # the user's function is running
        self.outside = OutsideSteps()
        self._steps = Steps()
        self._last_step_at = 0.0
        self._resumed = 0
        self._checkpointer: CheckpointWriter | None = None
        self._environ = environ
        self.resizer: Resizer | None = None
        self._calls: FunctionCalls | None = None
        self._backend = ""  # that of the generations formed here
        self._nccl = nccl_version()
        self._layout: tuple[int, ...] = ()  # that of the newest one
        self.watchers = watch.watchers(self, environ)
        self._reported_wanted = 0  # the last one reported: a report at each step would cost too much

    def _make_group(self, assignment: Assignment, address: str) -> Group:
        return backends.make_group(assignment, self.job, address, self._key, self.on_broken, self.on_stuck,
                                   settled=self._settled_backend())

    def _settled_backend(self) -> str:
        """Return the backend of the job's first generation; "" before that has formed."""
        return self._backend or (self.control.orders.backend if self.control is not None else "")

    def has_formed(self, group: Group) -> None:
        self._backend = group.backend
        before, self._layout = self._layout, group.layout
        if group.backend == "nccl" and len(before) == len(group.layout) and before != group.layout:
            print(f"spotfleet: from generation {group.generation} on, ranks lie on hosts in another way "
                  f"({_hosts(before)} -> {_hosts(group.layout)}). Over NCCL sums depend on that, so bits may differ "
                  "from those of an undisturbed run", file=sys.stderr, flush=True)
        default_group.enter(group, self.place)

    def has_left(self) -> None:
        default_group.leave()

    # The loop

    def run(self, function: Callable[[], Any], state: State, resize: object, copies: bool,
            make_checkpointer: Callable[[Runtime], CheckpointWriter]) -> Any:
        """Return the function's result once it has returned on every rank; None on a rank that joined after that.

        `make_checkpointer` is called in a worker of a fleet only: its modules take seconds to import.
        """
        self._enter(state, resize, copies)
        self._calls = FunctionCalls(function)
        if self.control is not None:
            _warm_up()
            parse_ahead(getattr(function, "func", function))
            self._checkpointer = make_checkpointer(self)
            self.reads.print_all()
            self.control.update(stage=Stage.READY, **self.bound())
        result = None
        while True:
            try:
                self.join(state)
                if not state._finished:
                    state.enter()
                    self._calls.begins(state)
                    self.restart_draws()
                    self._inside = True
                    result = function()
                    self._check_returned(state)
                    state.finish()
                    self._inside = False
                self._finish(state)
                return result
            except Dismissed:
                return result
            except MembershipChanged:
                self._check_weights(state)
                if state._call_again:  # the same members go on
                    self._drop_gradients(state)
                else:
                    self._leave_group(state)
            except (CommBroken, RuntimeError) as error:
                broken = isinstance(error, CommBroken) or (self.group is not None and self.group.aborted)
                if not broken or isinstance(error, StateLost):
                    raise
                self._check_weights(state)
                self._fail(state)
                traceback.clear_frames(error.__traceback__)  # in a cycle it would keep a loader's processes alive

    def _check_returned(self, state: State) -> None:
        """Raise what the user's function has caught: it has returned, but not finished."""
        if self._leaving and not state.step_mode:
            self.repeated += state._uncommitted
            state.restore()
        if self._leaving or (self.group is not None and self.group.broken):
            print("spotfleet: the function has caught a change of membership and returned; it is called again. Let "
                  "CommBroken and MembershipChanged pass: use `except Exception`", file=sys.stderr, flush=True)
        self._raise_again()

    def _check_weights(self, state: State) -> None:
        """Put back what the user's function had changed where it was interrupted, or note that it belongs to no
        version."""
        if self._inside and (moved := state.put_changes_back()):
            state.mark(moved=moved)
        self._inside = False

    @property
    def is_inside(self) -> bool:
        """Whether the user's function is running."""
        return self._inside

    def has_finished(self) -> bool:
        return self.state is not None and self.state._finished

    def _enter(self, state: State, resize: object, copies: bool = False) -> None:
        if not self.initialized:
            raise UsageError("elastic.run: hvd.init() has not been called", hint="call hvd.init() first in the script")
        if self.state is not None:
            raise UsageError("elastic.run was entered a second time", hint="put all epochs into one function")
        if not self.placed:  # rather now than in a generation that others have to form again
            backends.choose_here(self.place.local_rank, self.place.local_size, self._settled_backend(), self._environ)
        world, rank = (self.place.size, self.place.rank) if self.placed else (0, -1)
        state.mark(copies=copies)
        self.outside.end()
        self.resizer = Resizer(read(resize, self._environ), self._environ)
        self.resizer.attach(state)
        keep_loaders_apart()
        watch_loaders(lambda: current().loader_begins())
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
                    if self._checkpointer is not None:
                        self.group.announces = self._checkpointer.announcement(state)
                    self.group.form()
                    self.has_formed(self.group)
                self.sync(state)
                break
            except CommBroken:
                self._fail(state)
        self.retire_old()
        self.reads.clear()
        self._leaving = self._inside = False
        if state.step_mode and state._computed >= state._position.round and not state._finished:
            self.recomputed += 1
            state.mark(computed=state._position.round - 1)
        done = self.resizer.apply(state, self.place.size, state._position.world) if self.resizer else ""
        wanted = self._reported_wanted = self._wanted(state)
        if self.control is not None:
            self.control.update(generation=self.generation, resize=done, wanted=wanted, **self.bound())

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
        """Wait until all ranks have returned from the function, write the final checkpoint, and report FINISHED."""
        group = self.require_group("elastic.run")
        if self.control is None:
            return
        group.order.end(f"after step {state.version}")
        self._checkpointer.final(state)
        group.allreduce(torch.zeros(1))
        self.control.update(stage=Stage.FINISHED)
        self.control.flush(FLUSH_LIMIT_S)

    def _leave_group(self, state: State) -> None:
        """Leave the group for a planned change, with all ranks at one position; keep it until the next has formed."""
        self._drop_gradients(state)
        self.has_left()
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
        return {"version": version, "waits": waits_for_peers(), "backend": self._backend,
                "nccl": self._nccl,
                "step_s": self._steps.step_s, "cost": self._steps.cost(self.group), "repeated": self.repeated,
                "recomputed": self.recomputed, **self.outside.fields(self.group, self.optimizers)}

    def _on_orders(self, orders: WorkerOrders) -> None:
        super()._on_orders(orders)
        if self._checkpointer is not None:
            self._checkpointer.on_orders(orders)

    # Called by samplers and by user code

    def weight(self) -> tuple[float, float] | None:
        """Return (real samples in this rank's batch, in all ranks' batches) by the sampler in use; None: all equal."""
        name = self.sampler_of(self.state) if self.state is not None else ""
        return self.state._stateful[name].weight() if name else None

    def loader_begins(self) -> None:
        if self._inside and self.state is not None:
            self.state._beginnings.loader_begins(self.state)

    def sampler_of(self, state: State) -> str:
        """Return the name of the sampler in `state` that was iterated last; empty if there is none."""
        samplers = {n: s for n, s in state._stateful.items() if isinstance(s, Elastic) and s.is_weighted}
        return max(samplers, key=lambda n: samplers[n].last_used, default="")


def _hosts(layout: tuple[int, ...]) -> str:
    """Return the ranks of each host, such as "0 1 | 2 3"."""
    return " | ".join(" ".join(str(r) for r, first in enumerate(layout) if first == host) for host in sorted({*layout}))


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
