"""After a group has formed: find who holds the newest state, give it to those behind, stand at one position.

    allgather of one Standing per rank -> source = newest, lowest rank -> its position -> tensors to those behind

Where only the source holds anything, it broadcasts; otherwise all who hold the newest state share the sending, see
handover.py.

Every branch depends on the allgathered standings alone, so all ranks take the same one. A receiver is *damaged*
from the first chunk until the position has arrived: it then holds no version, also for the next attempt.
Pickles travel here, between the workers of one job only.

Threads: the main thread.
"""

from __future__ import annotations

import pickle
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from spotfleet.train.errors import CommBroken, StateLost
from spotfleet.train.group import Group
from spotfleet.train.handover import hand_over
from spotfleet.train.state import State

CHUNK_BYTES = 32 << 20
FRESH, DAMAGED = -1, -2  # versions of those who have nothing to give


@dataclass(frozen=True)
class Standing:
    """What one rank brings to a new generation."""

    version: int  # FRESH: as built by the script; DAMAGED: a transfer broke half-way
    round: int
    position_version: int
    finished: int
    world: int  # of its position
    rank: int
    made_in: int = 0  # the generation of its last step: who was cut off may hold a step that the others made anew


def standing(state: State) -> Standing:
    p = state._position
    version = DAMAGED if state._damaged else state._version if state._held else FRESH
    return Standing(version, p.round, p.version, int(state._finished), p.world, p.rank,
                    state._made_in)


def choose(rows: list[Standing]) -> int:
    """The rank whose state and position all take over: newest version, made latest, newest position, lowest rank."""
    def newness(r: int) -> tuple[int, ...]:
        row = rows[r]
        return row.version, row.made_in, row.round, row.position_version, -r

    return max(range(len(rows)), key=newness)


def behind(rows: list[Standing], source: int, averages: bool = False) -> list[int]:
    """Ranks that need the source's tensors. Fresh models may differ, so nobody's but the source's counts.

    `averages`: the state has parameters that no optimizer owns. Code after a step may change them, so who has not come
    as far in it as the source is behind, too.
    """
    lead = rows[source]
    place = (lead.round, lead.position_version)
    return [r for r, row in enumerate(rows) if r != source and (
        row.version != lead.version or lead.version == FRESH or row.made_in != lead.made_in
        or (averages and (row.round, row.position_version) != place))]


def synchronize(group: Group, state: State) -> bool:
    """Bring `state` to the newest one in the group; True if reset callbacks are due, on every rank alike."""
    mine = standing(state)
    rows = [Standing(*row.tolist()) for row in group.allgather(torch.tensor(astuple(mine), dtype=torch.int64))]
    source, me = choose(rows), group.rank
    lead = rows[source]
    if lead.version == DAMAGED:
        raise StateLost("the only worker that held the training state was lost while it handed the state on")
    receivers = behind(rows, source, state.step_mode and state.has_averages)
    holders = [r for r in range(len(rows)) if r not in receivers]
    finished = all(rows[r].finished for r in holders)
    if me in holders and not finished:
        if state._finished:
            state.restore()  # somebody must run the end of the function again, so all do
        state.put_back(lead.round)  # before the source hands its buffers on
    position = state._final if finished else state._position
    if receivers or any((r.round, r.position_version) != (lead.round, lead.position_version) for r in rows):
        about = (position, state.schema() if receivers else None) if me == source else None
        position, schema = broadcast_object(group, about, source)
        position = replace(position, rank=mine.rank)
        if receivers:
            _transfer(group, state, holders, source, position, schema)
        if me in receivers:
            state.mark(version=max(0, lead.version), made_in=lead.made_in)
    if me in receivers or not finished:
        state.rewind(position)
    state.mark(held=True, damaged=False, finished=finished, final=position if finished else None)
    return not finished and any((row.world, row.rank) != (group.size, r) for r, row in enumerate(rows))


def _transfer(group: Group, state: State, holders: list[int], source: int, position: Any, schema: Any) -> None:
    receivers = [r for r in range(group.size) if r not in holders]
    receives = group.rank in receivers
    if receives:
        state.fit_groups(position)
        state.make_room(schema)
        state.mark(damaged=True)
    if holders == [source]:
        broadcast_tensors(group, state.tensors(), source)
    else:
        try:
            hand_over(group, state.tensors(), state.shared(), holders, receivers, source)
        except CommBroken:
            if receives and group.forgot:
                state.leave_memory()
            raise
    if receives:
        state._extras.rebase()


def broadcast_object(group: Group, value: Any, source: int) -> Any:
    """`value` of rank `source`, on every rank."""
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
    """Make all tensors equal to those of `source`; they must agree in shape and type on every rank."""
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
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def _chunk(group: Group, total_bytes: int) -> torch.Tensor:
    return torch.empty(max(1, min(CHUNK_BYTES, total_bytes)), dtype=torch.uint8, device=group.device)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()

