"""Synchronisation of a newly formed group: the newest state and position on every rank.

    allgather of one RankState per rank -> source = newest, lowest rank -> its position -> tensors to ranks behind

A source that is the only holder broadcasts; otherwise all holders of the newest state share the sending, see
handover.py.

Every branch depends on the allgathered rows alone, so all ranks take the same one. A receiver is *damaged* from before
the first chunk until the transfer is complete: it then holds no version, also in the next attempt.
Pickles are exchanged here, between the workers of one job only.

Threads: the main thread.
"""

from __future__ import annotations

import pickle
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol

import torch

from spotfleet.errors import UsageError
from spotfleet.train.comm.group import Group
from spotfleet.train.state import divergence
from spotfleet.train.state.buffers import Extras, overwrite
from spotfleet.train.state.divergence import Digests
from spotfleet.train.state.handover import hand_over
from spotfleet.train.state.weights import StateMarks, WeightMarks
from spotfleet.worker.errors import CommBroken, StateLost

CHUNK_BYTES = 32 << 20
FRESH, DAMAGED, MOVED = -1, -2, -3  # versions of ranks that have no state to send


@dataclass(frozen=True)
class RankState:
    """Version and position of one rank at the start of a generation."""

    version: int  # FRESH: as built by the script; DAMAGED: a transfer broke half-way
    round: int
    position_version: int
    finished: int
    world: int  # world size and rank in its position
    rank: int
    made_in: int = 0  # generation of its last step: a rank cut off may hold a step that the others have made again
    moved: int = 0  # its script has changed weights (1) or optimizer state (2), which belong to no version unless the
    # function has returned
    changes: int = 0  # its script changes them outside step(), and they are put back
    tensors: int = 0  # digests, as in divergence.py
    values: int = 0
    floats: int = 0


class SyncedState(Protocol):
    """The members of a `state.State` that synchronisation uses; positions and schemas are that module's classes."""

    _version: int
    _held: bool
    _damaged: bool
    _finished: bool
    _moved: int
    _marks: WeightMarks
    _touches: StateMarks
    _made_in: int
    _position: Any
    _final: Any
    _extras: Extras
    _plain: Any

    @property
    def step_mode(self) -> bool: ...
    @property
    def has_averages(self) -> bool: ...
    def restore(self) -> None: ...
    def put_changes_back(self) -> int: ...
    def put_back(self, round_: int) -> None: ...
    def rewind(self, position: Any) -> None: ...
    def fit_groups(self, position: Any) -> None: ...
    def schema(self) -> Any: ...
    def allocate_tensors(self, schema: Any) -> None: ...
    def tensors(self) -> list[torch.Tensor]: ...
    def shared(self) -> list[bool]: ...
    def move_memory(self) -> None: ...
    def mark(self, **fields: Any) -> None: ...


def rank_state(state: SyncedState, digests: Digests = Digests()) -> RankState:
    p = state._position
    version = DAMAGED if state._damaged else state._version if state._held else FRESH
    changes = state._marks.changes or state._touches.changes
    return RankState(version, p.round, p.version, int(state._finished), p.world, p.rank,
                     state._made_in, state._moved, int(changes), *astuple(digests))


def choose_source(rows: list[RankState]) -> int:
    """Return the rank whose state and position all take over: newest version, made latest, newest position, lowest
    rank."""
    def newness(r: int) -> tuple[int, ...]:
        row = rows[r]
        return row.version, row.made_in, row.round, row.position_version, -r

    return max(range(len(rows)), key=newness)


def ranks_behind(rows: list[RankState], source: int, averages: bool = False) -> list[int]:
    """Return the ranks that need the source's tensors. Fresh models may differ, so only the source's counts.

    `averages`: the state has parameters that no optimizer owns. Code after a step may change them, so a rank at another
    position than the source is behind, too; and so where that code changes weights.
    """
    newest = rows[source]
    place = (newest.round, newest.position_version)
    return [r for r, row in enumerate(rows) if r != source and (
        row.version != newest.version or newest.version == FRESH or row.made_in != newest.made_in
        or (averages and (row.round, row.position_version) != place))]


def without_moved(rows: list[RankState]) -> tuple[list[RankState], bool]:
    """Return the rows with MOVED for ranks whose weights belong to no version; and whether no rank has others.

    Where the function has returned on all ranks, its last changes are wanted.
    """
    if all(row.finished for row in rows if row.version >= 0):
        return rows, False
    found = [replace(row, version=MOVED) if row.moved and row.version >= 0 else row for row in rows]
    return found, found != rows and max(row.version for row in found) < 0


def synchronize(group: Group, state: SyncedState) -> bool:
    """Bring `state` to the newest one in the group; return True, on every rank alike, if reset callbacks are due."""
    own = rank_state(state, divergence.take(state, group.size))
    rows = [RankState(*row.tolist()) for row in group.allgather(torch.tensor(astuple(own), dtype=torch.int64))]
    rows, lost = without_moved(rows)
    source, rank = choose_source(rows), group.rank
    newest = rows[source]
    if lost:
        what = "weights" if any(row.moved == 1 for row in rows) else "the optimizer's state"
        raise UsageError(f"the loop changes {what} between gradients or after step(), and every worker that holds the "
                         "training state was interrupted before they were changed back",
                         hint="put such code into `with state.borrowed():`, or a change that follows each step into "
                              "optimizer.register_step_post_hook; or copy at each commit: @elastic.run(copy=True)")
    if newest.version == DAMAGED:
        raise StateLost("the only worker that held the training state was lost while it handed the state on")
    changed = state.has_averages or any(row.changes for row in rows)
    receivers = ranks_behind(rows, source, state.step_mode and changed)
    holders = [r for r in range(len(rows)) if r not in receivers]
    if newest.version != FRESH:
        divergence.check(group, state, [Digests(r.tensors, r.values, r.floats) for r in rows], holders,
                         [(r.round, r.position_version, r.finished) for r in rows], f"at version {newest.version}")
    finished = all(rows[r].finished for r in holders)
    if rank in holders and not finished:
        if state._finished:
            state.put_changes_back()
            state.restore()  # a rank has not finished, so all run the end of the function again
        state.put_back(newest.round)  # before the source sends its buffers
    position = state._final if finished else state._position
    if receivers or any((r.round, r.position_version) != (newest.round, newest.position_version) for r in rows):
        extras = state._extras
        payload = (position, state.schema() if receivers else None, extras.kept, extras.known, state._plain.settings())
        position, schema, kept, known, settings = broadcast_object(group, payload if rank == source else None, source)
        position = replace(position, rank=own.rank)
        if receivers:
            _transfer(group, state, holders, source, position, schema)
            if newest.version > newest.position_version:  # a replay: what its step found is not what the source has now
                values = state._extras.values_at_step(kept, rank in receivers, newest.round)
                broadcast_tensors(group, values, source)
        if rank in receivers:
            state._extras.learn(known)
            state._plain.put_settings(settings)
            state.mark(version=max(0, newest.version), made_in=newest.made_in)
    if rank in receivers or not finished:
        state.rewind(position)
    state.mark(held=True, damaged=False, moved=0, finished=finished, final=position if finished else None)
    return not finished and any((row.world, row.rank) != (group.size, r) for r, row in enumerate(rows))


def _transfer(group: Group, state: SyncedState, holders: list[int], source: int, position: Any, schema: Any) -> None:
    receivers = [r for r in range(group.size) if r not in holders]
    receives = group.rank in receivers
    if receives:
        state.fit_groups(position)
        state.allocate_tensors(schema)
        state.mark(damaged=True)
    if holders == [source]:
        broadcast_tensors(group, state.tensors(), source)
    else:
        try:
            hand_over(group, state.tensors(), state.shared(), holders, receivers, source)
        except CommBroken:
            if receives and group.abandoned:
                state.move_memory()
            raise
    if receives:
        state._extras.rebase()


def broadcast_object(group: Group, value: Any, source: int) -> Any:
    """Return the `value` of rank `source`, on every rank."""
    if group.size == 1:
        return value
    if group.rank == source:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
    else:
        size = torch.zeros(1, dtype=torch.int64)
    group.broadcast(size, source)
    if group.rank != source:
        data = torch.empty(int(size), dtype=torch.uint8)
    group.broadcast(data, source)
    return value if group.rank == source else pickle.loads(data.numpy().tobytes())


@torch.no_grad()
def broadcast_tensors(group: Group, tensors: list[torch.Tensor], source: int) -> None:
    """Make all tensors equal to those of `source`. Shapes and types must be the same on every rank."""
    if group.size == 1:
        return
    chunk, filled, pieces = _chunk(group, sum(map(_bytes, tensors))), 0, []
    for tensor in tensors:
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        done = 0
        while done < flat.numel():
            take = min(flat.numel() - done, chunk.numel() - filled)
            pieces.append((tensor, flat, done, take, filled))
            done, filled = done + take, filled + take
            if filled == chunk.numel():
                _send(group, chunk[:filled], pieces, source)
                filled, pieces = 0, []
    if filled:
        _send(group, chunk[:filled], pieces, source)


def _send(group: Group, chunk: torch.Tensor, pieces: list[Any], source: int) -> None:
    if group.rank == source:
        for _, flat, start, count, at in pieces:
            chunk[at:at + count].copy_(flat[start:start + count])
    group.broadcast(chunk, source)
    if group.rank != source:
        for tensor, flat, start, count, at in pieces:
            flat[start:start + count].copy_(chunk[at:at + count])
            if start + count == flat.numel() and not tensor.is_contiguous():
                overwrite(tensor, flat.view(tensor.dtype).view(tensor.shape))


def _chunk(group: Group, total_bytes: int) -> torch.Tensor:
    return torch.empty(max(1, min(CHUNK_BYTES, total_bytes)), dtype=torch.uint8, device=group.device)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()

