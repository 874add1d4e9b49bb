"""Schedule and writing of checkpoints. Their format: format.py; restoring one: restore.py.

Rank 0 decides that one is due and asks the others in the tail of the next reduction (in copy mode in the commit's own
allreduce). At the boundary that follows every rank copies its own share of the same version into warm memory; training
waits for nothing else. A thread writes the copy and reports it to rank 0, which joins the metadata:

    due --save_waits--> agreed --copy--> writing --all have reported--> written, reported
     ^                                      '-- a rank was lost or failed: given up, and due again

One rank alone writes everything where no other trains (world size 1, at rest, at the end), and where no two ranks
provably hold the same (see shards.py). Each rank's report announces its files. The agent carries them to the
dispatcher, which keeps them once all are there; or the ranks write to an object store themselves.

Waits: for the disk to take a rank's share, LIMIT_S and GRACE_S of exchange.py for the others' reports, FETCH_LIMIT_S
for a checkpoint to restore. A boundary waits for none of them.

Threads: the main thread, or an autograd thread while it waits, calls every public method but `on_orders`, which the
control thread calls. One writer thread at a time turns a copy that no other thread touches into a file.
"""

from __future__ import annotations

import functools
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spotfleet.protocol.messages import Checkpoint, WorkerOrders
from spotfleet.protocol.proofs import MemberProof
from spotfleet.train.checkpoint import entries, exchange, format, peers, restore, store_folder
from spotfleet.train.checkpoint.exchange import PartReport, PeerFailed, PeerTimeout
from spotfleet.train.checkpoint.format import Shard
from spotfleet.train.checkpoint.store_folder import Times
from spotfleet.train.state.copies import Buffer

if TYPE_CHECKING:
    from spotfleet.train.comm.group import Group
    from spotfleet.train.runtime import Runtime
    from spotfleet.train.state.state import State

KEEP = 2
FOLDER = "checkpoints"  # below the worker's own
RETRY_S = 10.0  # after a checkpoint that could not be written
MOST_GAPS = 2  # after so many given up in a row rank 0 writes everything, until one of its own succeeds
AGAIN_S = 5.0  # interval between checkpoints while `checkpoint_now` is ordered
# Errors of writing: the disk's, and for values of the script that cannot be pickled.
WRITE_ERRORS = (OSError, *format.PICKLE_ERRORS)


def do_nothing() -> None:
    pass


@dataclass(frozen=True)
class ShardMemory:
    """Memory of a shard's tensors."""

    wait: Callable[[], None] = do_nothing  # returns when the copy is complete
    release: Callable[[], None] = do_nothing  # allows the memory to be used again


@dataclass
class CheckpointTask:
    """One rank's work on one checkpoint."""

    shard: Shard
    times: Times
    urgent: bool = False
    group: Group | None = None  # its ranks write the other parts; None: this rank writes everything
    turn: int = 0
    memory: ShardMemory = ShardMemory()
    url: str = ""  # the job's folder in an object store
    proof: MemberProof = field(default_factory=MemberProof)


class Checkpointer:
    """Checkpoints of one worker: when to write them, its part of each, and restoring one."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._due_from = time.monotonic()
        self._now_ordered = False
        self._wanted = False  # one is due and has not begun
        self._writer: threading.Thread | None = None
        self._written: list[Path] = []
        self._failed_at: float | None = None  # time at which the last one failed
        self._written_at_rest = (0, 0)  # generation and version that were written last at rest
        self._turn = (0, 0)  # generation, and the number of checkpoints that its ranks have agreed on
        self._gaps = 0  # checkpoints given up in a row because another rank did not write its part
        self._warmed = 0  # generation for which memory has been made
        self._warmer: threading.Thread | None = None
        self._buffer: Buffer | None = None
        self._host_gone_at: tuple[float, float] | None = None  # seconds_left in the newest orders, and the time it ends
        self._announced: Checkpoint | None = None  # the one to restore, whose files here were announced
        self._last_took_s = 0.0  # duration of the newest checkpoint, from its copy to its final name

    # The control thread

    def on_orders(self, orders: WorkerOrders) -> None:
        """Take new orders. A checkpoint ordered now uses the reduction that is in progress."""
        left_s = orders.seconds_left if orders.checkpoint_now else None
        if left_s is None:
            self._host_gone_at = None
        elif self._host_gone_at is None or self._host_gone_at[0] != left_s:
            self._host_gone_at = (left_s, time.monotonic() + left_s)
        group = self._runtime.group
        busy = self._writer is not None and self._writer.is_alive()
        if orders.checkpoint_now and not self._now_ordered and not busy and group is not None and group.rank == 0:
            group.save_waits = True

    # At a boundary

    def at_boundary(self, state: State) -> None:
        """Take part in a checkpoint, or begin one. Every rank calls this when its tensors and position are whole."""
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
            return  # requested before this one began; the others' reports are not read
        if busy or not self._runtime.work:
            why = "it still writes the last one" if busy else "it has no folder to write to"
            report = PartReport(self._turn[1], state.version, problem=why)
            threading.Thread(target=self._send_report, args=(group, report), daemon=True).start()
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
        now, every_s, gone_at = time.monotonic(), orders.checkpoint_every_s, self._host_gone_at
        if orders.checkpoint_now:
            if gone_at is not None and now + 2 * self._last_took_s > gone_at[1]:
                return False  # it would not be done in time, and the checkpoint at rest would have to wait for it
            every_s = min(every_s, AGAIN_S) if every_s > 0 else AGAIN_S
        if self._failed_at is not None and now - self._failed_at >= min(RETRY_S, every_s):
            return True
        return every_s > 0 and now - self._due_from >= every_s

    def _begin(self, state: State, group: Group | None) -> None:
        """Copy this rank's part and start the writer thread."""
        assert self._runtime.control is not None
        begun = time.monotonic()
        rank, world = (group.rank, group.size) if group is not None else (0, 1)
        if state.step_mode:
            live = entries.rank_shard(state, self._runtime.generation, rank, world, entries.sources(state))
            shard, memory = self._copy_to_buffer(live)
        else:  # the newest commit is a copy already
            buffer = state._copy.buffer
            shard = entries.rank_shard(state, self._runtime.generation, rank, world, buffer.tensors)
            state._pool.hold(buffer)
            memory = ShardMemory(buffer.wait, functools.partial(state._pool.release, buffer))
        self._note_begin()
        task = CheckpointTask(shard, Times(copy_s=time.monotonic() - begun), self._now_ordered, group, self._turn[1],
                              memory, self._url(), self._runtime.proof)
        self._writer = threading.Thread(target=self._write, args=(task,), name="spotfleet-checkpoint")
        self._writer.start()

    def _warm(self, state: State, group: Group | None) -> None:
        """Make the memory for this rank's share in another thread, once a generation, before it is needed."""
        control = self._runtime.control
        assert control is not None
        if self._warmed == self._runtime.generation or not state.step_mode or state.version == 0:
            return
        if self._warmer is not None and self._warmer.is_alive():
            return  # for an earlier generation: one at a time
        self._warmed = self._runtime.generation
        shared = group is not None and group.size > 1 and entries.is_shared(state)
        if control.orders.checkpoint_every_s <= 0 or not self._runtime.work or not (shared or self._is_leader()):
            return
        rank, world = (group.rank, group.size) if shared and group is not None else (0, 1)
        values = entries.rank_shard(state, self._runtime.generation, rank, world, state.tensors()).values
        busy = self._writer is not None and self._writer.is_alive()
        if busy or (self._buffer is not None and self._buffer.fits(values)):
            return
        self._buffer = None

        def make() -> None:
            self._buffer = Buffer(values)

        self._warmer = threading.Thread(target=make, name="spotfleet-warm", daemon=True)
        self._warmer.start()

    def _is_leader(self) -> bool:
        return self._runtime.place.rank == 0

    def _copy_to_buffer(self, live: Shard) -> tuple[Shard, ShardMemory]:
        if self._warmer is not None:
            self._warmer.join()
            self._warmer = None
        if self._buffer is None or not self._buffer.fits(live.values):
            self._buffer = None  # frees the old one's memory first
            self._buffer = Buffer(live.values)
        return replace(live, values=self._buffer.fill(live.values)), ShardMemory(self._buffer.wait)

    def _note_begin(self) -> None:
        control = self._runtime.control
        assert control is not None
        self._due_from, self._wanted, self._now_ordered = time.monotonic(), False, control.orders.checkpoint_now

    # Outside of training

    def is_wanted_at_rest(self, state: State) -> bool:
        """Return whether, between two generations, the state held here is to be written and has not been yet."""
        runtime, control = self._runtime, self._runtime.control
        assert control is not None
        leads = runtime.place.rank == 0 or control.orders.stands_in
        wanted = control.orders.checkpoint_now and leads and bool(runtime.work) and state.reported_version > 0
        return wanted and self._written_at_rest != (runtime.generation, state.version)

    def at_rest(self, state: State) -> None:
        """Write the state held, and wait for it."""
        self._written_at_rest = (self._runtime.generation, state.version)
        self._write_here(state, urgent=True)

    def final(self, state: State) -> None:
        """Write the finished state and wait for it, on rank 0."""
        runtime = self._runtime
        control = runtime.control
        assert control is not None
        if runtime.place.rank == 0 and runtime.work and control.orders.checkpoint_every_s > 0:
            self._write_here(state, urgent=False)

    def _write_here(self, state: State, urgent: bool) -> None:
        """Write the whole state in this thread, without a copy: nothing changes it meanwhile."""
        if self._writer is not None:
            self._writer.join()
        self._note_begin()
        self._write(CheckpointTask(entries.whole_shard(state, self._runtime.generation, urgent), Times(), urgent,
                                   url=self._url(), proof=self._runtime.proof))

    def _url(self) -> str:
        """Return the job's folder in an object store, or ""; UsageError, in the script's thread, without obstore."""
        control = self._runtime.control
        assert control is not None
        if control.orders.checkpoint_url:
            store_folder.require(control.orders.checkpoint_url)
        return control.orders.checkpoint_url

    # The writer

    def _write(self, task: CheckpointTask) -> None:
        task.memory.wait()
        try:
            report = self._write_part(task)
        finally:
            task.memory.release()
        if task.shard.rank != 0 and task.group is not None:
            self._send_report(task.group, report)

    def _write_part(self, task: CheckpointTask) -> PartReport:
        report = PartReport(task.turn, task.shard.version)
        try:
            report = replace(self._write_file(task), turn=task.turn)
            self._failed_at, self._last_took_s = None, task.times.total_s
            if task.urgent:
                self._log_urgent(task, "")
            self._gaps = 0
        except PeerTimeout as gap:
            self._gaps += 1
            if isinstance(gap, PeerFailed):
                self._failed_at = time.monotonic()
            else:  # the remaining ranks are asked at once
                self._wanted = True
            self._log(f"spotfleet: checkpoint of version {task.shard.version} is given up: {gap}; the next one follows")
            if task.urgent:
                self._log_urgent(task, str(gap))
        except WRITE_ERRORS as error:  # a full disk must not end training; the next one may fit
            why = (error.strerror if isinstance(error, OSError) else "") or f"{error}"
            report = replace(report, problem=f"it cannot be written: {why}")
            self._failed_at = time.monotonic()
            self._log(f"spotfleet: checkpoint of version {task.shard.version} cannot be written: {why}; training goes "
                      f"on, and it is tried again within {RETRY_S:g} s")
            if task.urgent:
                self._log_urgent(task, why)
        return report

    def _write_file(self, task: CheckpointTask) -> PartReport:
        control = self._runtime.control
        assert control is not None
        if task.url:
            return self._upload(task)
        done, report = store_folder.write_here(task.shard, Path(self._runtime.work) / FOLDER,
                                               functools.partial(self._others, task), task.times, task.proof)
        control.update(checkpoint=task.proof.marked(done))
        folder = Path(done.path).parent
        self._written = [p for p in self._written if p != folder] + [folder]
        for old in self._written[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)
        self._written = self._written[-KEEP:]
        return report

    def _upload(self, task: CheckpointTask) -> PartReport:
        control = self._runtime.control
        assert control is not None
        done, report = store_folder.write(task.shard, task.url, functools.partial(self._others, task), task.times,
                                          task.proof)
        if done is not None:
            control.update(checkpoint=task.proof.marked(done))
            try:
                store_folder.prune(task.url, done, control.orders.checkpoint_keep)
            except OSError as error:  # the next one removes more
                self._log(f"spotfleet: older checkpoints at {task.url} cannot be removed: {error}")
        return report

    def _others(self, task: CheckpointTask, own_s: float) -> list[PartReport]:
        group = task.group
        if group is None:
            return []
        return exchange.receive_reports(functools.partial(group.dial, "parts"), group.size, task.turn,
                                        exchange.LIMIT_S + exchange.SLOWER * own_s, lambda: group.aborted)

    def _send_report(self, group: Group, report: PartReport) -> None:
        try:
            exchange.send_report(functools.partial(group.dial, "parts"), group.rank, report)
        except OSError as error:
            self._log(f"spotfleet: rank 0 does not receive this part's report of version {report.version}: {error}")

    def _log_urgent(self, task: CheckpointTask, problem: str) -> None:
        """Log whether it was in time, for the log of a job that lost all its hosts."""
        gone_at = self._host_gone_at  # the control thread may reset it at any time
        if gone_at is None or task.shard.rank != 0:
            return
        left_s = gone_at[1] - time.monotonic()
        when = f"{left_s:.1f} s before the host goes" if left_s >= 0 else f"{-left_s:.1f} s after the host was to go"
        done = f"not written: {problem}" if problem else f"written in {task.times.total_s:.1f} s"
        self._log(f"spotfleet: checkpoint of version {task.shard.version} {done}, {when}")

    def _log(self, line: str) -> None:
        try:
            print(line, flush=True)
        except OSError:
            pass  # the log is on the same disk

    # Restoring

    def announcement(self, state: State) -> str:
        """Return this rank's announcement to the generation that it is about to form: which files of the checkpoint to
        restore its host has. "" if it restores none."""
        assert self._runtime.control is not None
        named = self._runtime.control.orders.restore
        needs = state._damaged or not state._held
        announced = peers.announcement(named) if needs and named is not None else ""
        self._announced = named if announced else None
        return announced

    def restore(self, state: State) -> None:
        """Load the checkpoint that this rank has announced or the orders name, if they name one. CommBroken if a peer
        was lost that sends files of it."""
        control, group = self._runtime.control, self._runtime.group
        named, self._announced = self._announced, None
        assert control is not None
        if named is not None and group is not None and group.announced:
            restore.complete_with_peers(control, group, named)
        restore.restore(control, state, Path(self._runtime.shared or "."), self._runtime.proof, named)
