"""When a checkpoint is written, and by whom. What one looks like: distcp.py; how it is restored: restoring.py.

Rank 0 decides that one is due and asks the others by the tail of the next reduction (in copy mode by the commit's own
allreduce). At the boundary that follows every rank copies its own share of the same version into warm memory; that is
all that training waits for. A thread writes it, and tells rank 0 what it wrote; rank 0 joins the metadata:

    due --save_waits--> agreed --copy--> writing --all have told--> written, reported
     ^                                      '-- a rank was lost or could not: given up, and due again

One rank alone writes all of it where nobody else trains (world size 1, at rest, at the end), and where no two ranks
provably hold the same (see shards.py). Each part is announced in its rank's report; the agent carries it to the
dispatcher, which joins the parts, or the ranks write to an object store themselves.

Waits: a rank's share for the disk, LIMIT_S and GRACE_S of exchange.py for the others' words, FETCH_LIMIT_S for a
checkpoint to restore. A boundary waits for none of them.

Threads: the main thread, or one of autograd's while it waits, calls everything public but `heard`, which belongs to the
control thread. One writer thread at a time turns a copy that nobody else touches into a file.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spotfleet.messages import WorkerOrders
from spotfleet.train import distcp, entries, exchange, objects, restoring, segments
from spotfleet.train.copies import Buffer
from spotfleet.train.distcp import Shard
from spotfleet.train.exchange import Refused, Told, Unheard
from spotfleet.train.segments import Times

if TYPE_CHECKING:
    from spotfleet.train.group import Group
    from spotfleet.train.runtime import Runtime
    from spotfleet.train.state import State

KEEP = 2
RETRY_S = 10.0  # after one that could not be written
MOST_GAPS = 2  # then rank 0 writes all of it, until one of its own succeeds
AGAIN_S = 5.0  # while `checkpoint_now` stands: how often
# What writing one may raise: the disk, and values of the script that cannot be pickled.
TROUBLE = (OSError, *distcp.UNSPEAKABLE)


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Hold:
    """The memory that a shard lies in."""

    wait: Callable[[], None] = nothing  # until the copy is complete
    release: Callable[[], None] = nothing  # it may be used again


@dataclass
class Job:
    """One rank's work on one checkpoint."""

    shard: Shard
    times: Times
    urgent: bool = False
    group: Group | None = None  # whose ranks write with us
    turn: int = 0
    hold: Hold = Hold()
    url: str = ""  # of the job's folder in an object store


class Checkpointer:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._due_from = time.monotonic()
        self._now_ordered = False
        self._wanted = False  # one is due and has not begun
        self._writer: threading.Thread | None = None
        self._written: list[Path] = []
        self._failed_at: float | None = None  # when the last one could not be written
        self._rested = (0, 0)  # generation and version that were written last at rest
        self._turn = (0, 0)  # generation, and how many its ranks have agreed on
        self._gaps = 0  # checkpoints given up in a row because another rank did not write its part
        self._warmed = 0  # generation for whose shares memory has been made
        self._warmer: threading.Thread | None = None
        self._buffer: Buffer | None = None
        self._gone_at: tuple[float, float] | None = None  # seconds_left as last told, and when that will have passed
        self._lasted_s = 0.0  # the newest checkpoint, from its copy to its name

    # The control thread

    def heard(self, orders: WorkerOrders) -> None:
        """New orders: one that is wanted now shall ride on the reduction that is under way."""
        left_s = orders.seconds_left if orders.checkpoint_now else None
        if left_s is None:
            self._gone_at = None
        elif self._gone_at is None or self._gone_at[0] != left_s:
            self._gone_at = (left_s, time.monotonic() + left_s)
        group = self._runtime.group
        busy = self._writer is not None and self._writer.is_alive()
        if orders.checkpoint_now and not self._now_ordered and not busy and group is not None and group.rank == 0:
            group.save_waits = True

    # At a boundary

    def at_boundary(self, state: State) -> None:
        """Called by every rank when its tensors and position are whole: take part in a checkpoint, or begin one."""
        runtime = self._runtime
        group = runtime.group
        if group is not None and group.size > 1 and group.save_agreed:
            self._take_part(state, group)
            return
        self._warm(state, group)
        if runtime.place.rank != 0 or not runtime.work:
            return
        if (self._writer is not None and self._writer.is_alive()) or not self._due():
            return
        if self._gaps < MOST_GAPS and group is not None and group.size > 1 and entries.is_shared(state):
            group.save_waits = True
            return
        self._begin(state, None)

    def _take_part(self, state: State, group: Group) -> None:
        group.save_waits = group.save_agreed = False
        generation, turns = self._turn
        self._turn = (group.generation, turns + 1 if generation == group.generation else 1)
        busy = self._writer is not None and self._writer.is_alive()
        if group.rank == 0 and busy:
            return  # asked for before this one began; the others hear nothing and nobody waits for them
        if busy or not self._runtime.work:
            why = "it still writes the last one" if busy else "it has no folder to write to"
            told = Told(self._turn[1], state.version, problem=why)
            threading.Thread(target=self._tell, args=(group, told), daemon=True).start()
            return
        self._begin(state, group)

    def _due(self) -> bool:
        control = self._runtime.control
        assert control is not None
        orders = control.orders
        first, self._now_ordered = orders.checkpoint_now and not self._now_ordered, orders.checkpoint_now
        self._wanted = self._wanted or first or self._is_time(orders)
        return self._wanted

    def _is_time(self, orders: WorkerOrders) -> bool:
        now, every_s, gone_at = time.monotonic(), orders.checkpoint_every_s, self._gone_at
        if orders.checkpoint_now:
            if gone_at is not None and now + 2 * self._lasted_s > gone_at[1]:
                return False  # it would not be done in time, and what is written at rest would have to wait for it
            every_s = min(every_s, AGAIN_S) if every_s > 0 else AGAIN_S
        if self._failed_at is not None and now - self._failed_at >= min(RETRY_S, every_s):
            return True
        return every_s > 0 and now - self._due_from >= every_s

    def _begin(self, state: State, group: Group | None) -> None:
        """Copy what this rank writes, and let the writer go."""
        assert self._runtime.control is not None
        begun = time.monotonic()
        rank, world = (group.rank, group.size) if group is not None else (0, 1)
        if state.step_mode:
            live = entries.share(state, self._runtime.generation, rank, world, entries.sources(state))
            shard, hold = self._copied(live)
        else:  # the newest commit is a copy already
            buffer = state._copy.buffer
            shard = entries.share(state, self._runtime.generation, rank, world, buffer.tensors)
            state._pool.hold(buffer)
            hold = Hold(buffer.wait, functools.partial(state._pool.release, buffer))
        self._began()
        job = Job(shard, Times(copy_s=time.monotonic() - begun), self._now_ordered, group, self._turn[1], hold,
                  self._url())
        self._writer = threading.Thread(target=self._write, args=(job,), name="spotfleet-checkpoint")
        self._writer.start()

    def _warm(self, state: State, group: Group | None) -> None:
        """Once a generation: let another thread make the memory for this rank's share before it is needed."""
        control = self._runtime.control
        assert control is not None
        if self._warmed == self._runtime.generation or not state.step_mode or state.version == 0:
            return
        if self._warmer is not None and self._warmer.is_alive():
            return  # for an earlier generation: one at a time
        self._warmed = self._runtime.generation
        shared = group is not None and group.size > 1 and entries.is_shared(state)
        if control.orders.checkpoint_every_s <= 0 or not self._runtime.work or not (shared or self._leads()):
            return
        rank, world = (group.rank, group.size) if shared and group is not None else (0, 1)
        values = entries.share(state, self._runtime.generation, rank, world, state.tensors()).values
        busy = self._writer is not None and self._writer.is_alive()
        if busy or (self._buffer is not None and self._buffer.fits(values)):
            return
        self._buffer = None

        def make() -> None:
            self._buffer = Buffer(values)

        self._warmer = threading.Thread(target=make, name="spotfleet-warm", daemon=True)
        self._warmer.start()

    def _leads(self) -> bool:
        return self._runtime.place.rank == 0

    def _copied(self, live: Shard) -> tuple[Shard, Hold]:
        if self._warmer is not None:
            self._warmer.join()
            self._warmer = None
        if self._buffer is None or not self._buffer.fits(live.values):
            self._buffer = None  # the memory of the old one goes first
            self._buffer = Buffer(live.values)
        return replace(live, values=self._buffer.fill(live.values)), Hold(self._buffer.wait)

    def _began(self) -> None:
        control = self._runtime.control
        assert control is not None
        self._due_from, self._wanted, self._now_ordered = time.monotonic(), False, control.orders.checkpoint_now

    # Outside of training

    def is_wanted_at_rest(self, state: State) -> bool:
        """Between two generations: what is held here is to be written, and has not been since the last one."""
        runtime, control = self._runtime, self._runtime.control
        assert control is not None
        leads = runtime.place.rank == 0 or control.orders.stands_in
        wanted = control.orders.checkpoint_now and leads and bool(runtime.work) and state.reported_version > 0
        return wanted and self._rested != (runtime.generation, state.version)

    def at_rest(self, state: State) -> None:
        """Write what is held, and wait for it."""
        self._rested = (self._runtime.generation, state.version)
        self._write_here(state, urgent=True)

    def final(self, state: State) -> None:
        """Write the finished state and wait for it, on rank 0."""
        runtime = self._runtime
        control = runtime.control
        assert control is not None
        if runtime.place.rank == 0 and runtime.work and control.orders.checkpoint_every_s > 0:
            self._write_here(state, urgent=False)

    def _write_here(self, state: State, urgent: bool) -> None:
        """Nobody changes the state meanwhile, so it is not copied."""
        if self._writer is not None:
            self._writer.join()
        self._began()
        self._write(Job(entries.whole(state, self._runtime.generation, urgent), Times(), urgent, url=self._url()))

    def _url(self) -> str:
        """Where in an object store it is to go; UsageError, in the script's own thread, if it cannot."""
        control = self._runtime.control
        assert control is not None
        if control.orders.checkpoint_url:
            objects.require(control.orders.checkpoint_url)
        return control.orders.checkpoint_url

    # The writer

    def _write(self, job: Job) -> None:
        job.hold.wait()
        try:
            told = self._written_or_told(job)
        finally:
            job.hold.release()
        if job.shard.rank != 0 and job.group is not None:
            self._tell(job.group, told)

    def _written_or_told(self, job: Job) -> Told:
        told = Told(job.turn, job.shard.version)
        try:
            told = replace(self._file(job), turn=job.turn)
            self._failed_at, self._lasted_s = None, job.times.whole_s
            if job.urgent:
                self._say_urgent(job, "")
            self._gaps = 0
        except Unheard as gap:
            self._gaps += 1
            if isinstance(gap, Refused):
                self._failed_at = time.monotonic()
            else:  # those who are left are asked at once
                self._wanted = True
            self._say(f"spotfleet: checkpoint of version {job.shard.version} is given up: {gap}; the next one follows")
            if job.urgent:
                self._say_urgent(job, str(gap))
        except TROUBLE as error:  # a full disk must not end training; the next one may fit
            why = (error.strerror if isinstance(error, OSError) else "") or f"{error}"
            told = replace(told, problem=f"it cannot be written: {why}")
            self._failed_at = time.monotonic()
            self._say(f"spotfleet: checkpoint of version {job.shard.version} cannot be written: {why}; training goes "
                      f"on, and it is tried again within {RETRY_S:g} s")
            if job.urgent:
                self._say_urgent(job, why)
        return told

    def _file(self, job: Job) -> Told:
        control = self._runtime.control
        assert control is not None
        if job.url:
            return self._upload(job)
        done, told = segments.write(job.shard, Path(self._runtime.work), functools.partial(self._others, job),
                                    job.times)
        control.update(checkpoint=done)
        self._written = [p for p in self._written if p != Path(done.path)] + [Path(done.path)]
        for old in self._written[:-KEEP]:
            old.unlink(missing_ok=True)
        self._written = self._written[-KEEP:]
        return told

    def _upload(self, job: Job) -> Told:
        control = self._runtime.control
        assert control is not None
        done, told = objects.write(job.shard, job.url, functools.partial(self._others, job), job.times)
        if done is not None:
            control.update(checkpoint=done)
            try:
                objects.prune(job.url, done, control.orders.checkpoint_keep)
            except OSError as error:  # the next one removes more
                self._say(f"spotfleet: older checkpoints at {job.url} cannot be removed: {error}")
        return told

    def _others(self, job: Job, own_s: float) -> list[Told]:
        group = job.group
        if group is None:
            return []
        return exchange.hear(functools.partial(group.dial, "parts"), group.size, job.turn,
                             exchange.LIMIT_S + exchange.SLOWER * own_s, lambda: group.aborted)

    def _tell(self, group: Group, told: Told) -> None:
        try:
            exchange.tell(functools.partial(group.dial, "parts"), group.rank, told)
        except OSError as error:
            self._say(f"spotfleet: rank 0 does not hear of this part of version {told.version}: {error}")

    def _say_urgent(self, job: Job, problem: str) -> None:
        """Whether it was in time, for whoever reads the log of a job that lost all its hosts."""
        gone_at = self._gone_at  # the control thread may forget it at any time
        if gone_at is None or job.shard.rank != 0:
            return
        left_s = gone_at[1] - time.monotonic()
        when = f"{left_s:.1f} s before the host goes" if left_s >= 0 else f"{-left_s:.1f} s after the host was to go"
        done = f"not written: {problem}" if problem else f"written in {job.times.whole_s:.1f} s"
        self._say(f"spotfleet: checkpoint of version {job.shard.version} {done}, {when}")

    def _say(self, line: str) -> None:
        try:
            print(line, flush=True)
        except OSError:
            pass  # the log lies on the same disk

    # Back

    def restore(self, state: State) -> None:
        """If the orders name a checkpoint, hold what it holds."""
        control = self._runtime.control
        assert control is not None
        restoring.restore(control, state, Path(self._runtime.work or "."))
