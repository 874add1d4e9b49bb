"""The newest state, from those who hold it to those who do not: each holder sends a part, nobody else takes part.

Only what is the same on all ranks is shared out among the holders: what distributed optimizers own, and its state. The
rest (statistics, moving averages) comes from the source alone, since a mixture would be nobody's state. Everybody works
out the same messages from the sizes of the tensors; nothing else is told. A large tensor travels from memory to memory;
small ones, and those of another device than the group's, are gathered in chunks, of which WINDOW a peer are under way.

Memory besides the state: WINDOW * CHUNK_BYTES for each peer that sends, at most.

Threads: the main thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spotfleet.train.errors import CommBroken
from spotfleet.train.group import Group

CHUNK_BYTES = 8 << 20
DIRECT_BYTES = 256 << 10  # from here on a piece is a message of its own, and is not copied
ALIGN = 64
WINDOW = 2


@dataclass(frozen=True)
class Piece:
    """Bytes of one tensor."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class Message:
    sender: int  # its rank
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return sum(p.stop - p.start for p in self.pieces)


def plan(sizes: Sequence[int], shared: Sequence[bool], senders: Sequence[int], source: int) -> list[Message]:
    """Every byte once: `sizes` are those of the tensors, in the order of which each sender's messages are."""
    parts = _parts(sizes, shared, senders, source)
    queues = [[Message(s, m) for m in _messages(parts[s])] for s in senders]
    return [q[i] for i in range(max(map(len, queues))) for q in queues if i < len(q)]


def _parts(sizes: Sequence[int], shared: Sequence[bool], senders: Sequence[int], source: int) -> dict[int, list[Piece]]:
    """Pieces by sender, of about as many bytes each."""
    parts: dict[int, list[Piece]] = {s: [] for s in senders}
    room = dict.fromkeys(senders, -(-sum(sizes) // len(senders)))
    order = [*[s for s in senders if s != source], source]  # the source has its own besides, so it is filled last
    for i, size in enumerate(sizes):
        at = 0
        while at < size:
            sender = next((s for s in order if room[s] > 0), source) if shared[i] else source
            free = -(-room[sender] // ALIGN) * ALIGN if shared[i] and sender != source else size
            stop = min(size, at + free)
            parts[sender].append(Piece(i, at, stop))
            room[sender] -= stop - at
            at = stop
    return parts


def _messages(pieces: Sequence[Piece]) -> list[tuple[Piece, ...]]:
    found: list[tuple[Piece, ...]] = []
    small: list[Piece] = []
    for piece in pieces:
        for start in range(piece.start, piece.stop, CHUNK_BYTES):
            cut = Piece(piece.tensor, start, min(piece.stop, start + CHUNK_BYTES))
            if cut.stop - cut.start >= DIRECT_BYTES:
                found.append((cut,))
                continue
            if sum(p.stop - p.start for p in small) + cut.stop - cut.start > CHUNK_BYTES:
                found.append(tuple(small))
                small = []
            small.append(cut)
    return [*found, tuple(small)] if small else found


@torch.no_grad()
def hand_over(group: Group, tensors: Sequence[torch.Tensor], shared: Sequence[bool], senders: Sequence[int],
              receivers: Sequence[int], source: int) -> None:
    """Make `tensors` of the receivers those of the senders. For senders and receivers alone; the others go on.

    Where it fails and the group `forgot` an operation, that may still write to the memory of a receiver's tensors.
    """
    flats = [t.contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    messages = plan([f.numel() for f in flats], shared, senders, source)
    receives = group.rank in receivers
    if not receives:
        messages = [m for m in messages if m.sender == group.rank]
    under_way: deque[_Parcel] = deque()
    tags = dict.fromkeys(senders, 0)  # the how manieth of its sender a message is
    try:
        for message in messages:
            if len(under_way) == WINDOW * (len(senders) if receives else 1):
                under_way.popleft().arrive(group)
            under_way.append(_Parcel(group, message, flats, () if receives else receivers, tags[message.sender]))
            tags[message.sender] += 1
        while under_way:
            under_way.popleft().arrive(group)
    except CommBroken:
        group.drain([work for parcel in under_way for work in parcel.works])  # they write to live tensors, too
        raise
    if receives:
        for tensor, flat in zip(tensors, flats, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


class _Parcel:
    """A message under way, to `receivers` or, if there are none, to here."""

    def __init__(self, group: Group, message: Message, flats: Sequence[torch.Tensor], receivers: Sequence[int],
                 tag: int) -> None:
        self._pieces = [flats[p.tensor][p.start:p.stop] for p in message.pieces]
        self._comes = not receivers
        direct = len(self._pieces) == 1 and self._pieces[0].device == group.device
        self._body = self._pieces[0] if direct else torch.empty(
            message.bytes, dtype=torch.uint8, device=group.device,
            pin_memory=group.device.type == "cpu" and any(p.is_cuda for p in self._pieces))
        self._parts = [] if direct else list(self._body.split([p.numel() for p in self._pieces]))
        if not self._comes:
            self._move(self._parts, self._pieces)
        self.works: list[Any] = (
            [group.receive(self._body, message.sender, tag)] if self._comes
            else [group.send(self._body, r, tag) for r in receivers])

    def arrive(self, group: Group) -> None:
        group.finish(self.works)
        if self._comes:
            self._move(self._pieces, self._parts)

    def _move(self, into: Sequence[torch.Tensor], out_of: Sequence[torch.Tensor]) -> None:
        for target, value in zip(into, out_of, strict=False):  # no parts: it is where it belongs
            target.copy_(value)
