"""Transfer of the newest state to the ranks that lack it: each holder sends a part of it.

Only tensors that are the same on all ranks are divided among the holders: parameters of distributed optimizers, and
their optimizer state. The rest (statistics, moving averages) comes from the source alone, since a mixture would be no
rank's state. Every rank derives the same messages from the sizes of the tensors, so no plan is exchanged. A large
tensor travels from memory to memory. Small ones, and tensors on another device than the group's, are gathered in
chunks; at most WINDOW messages of each sender are in flight.

Memory besides the state: at most WINDOW * CHUNK_BYTES for each peer that sends.

Threads: the main thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spotfleet.train.comm.group import Group
from spotfleet.train.state.buffers import overwrite
from spotfleet.worker.errors import CommBroken

CHUNK_BYTES = 8 << 20
DIRECT_BYTES = 256 << 10  # a piece of this size or more is a message of its own, and is not copied
ALIGN = 64
WINDOW = 2


@dataclass(frozen=True)
class TensorPiece:
    """Range of bytes of one tensor."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class Message:
    """Pieces that one rank sends together."""

    sender: int  # rank
    pieces: tuple[TensorPiece, ...]

    @property
    def bytes(self) -> int:
        return sum(p.stop - p.start for p in self.pieces)


def plan(sizes: Sequence[int], shared: Sequence[bool], senders: Sequence[int], source: int) -> list[Message]:
    """Return messages that hold every byte once. `sizes` are those of the tensors; each sender's messages keep their
    order."""
    parts = _parts(sizes, shared, senders, source)
    queues = [[Message(s, m) for m in _messages(parts[s])] for s in senders]
    return [q[i] for i in range(max(map(len, queues))) for q in queues if i < len(q)]


def _parts(sizes: Sequence[int], shared: Sequence[bool], senders: Sequence[int],
           source: int) -> dict[int, list[TensorPiece]]:
    """Return pieces by sender, with about the same number of bytes for each."""
    parts: dict[int, list[TensorPiece]] = {s: [] for s in senders}
    room = dict.fromkeys(senders, -(-sum(sizes) // len(senders)))
    order = [*[s for s in senders if s != source], source]  # the source also sends what is not shared, so it is last
    for i, size in enumerate(sizes):
        at = 0
        while at < size:
            sender = next((s for s in order if room[s] > 0), source) if shared[i] else source
            free = -(-room[sender] // ALIGN) * ALIGN if shared[i] and sender != source else size
            stop = min(size, at + free)
            parts[sender].append(TensorPiece(i, at, stop))
            room[sender] -= stop - at
            at = stop
    return parts


def _messages(pieces: Sequence[TensorPiece]) -> list[tuple[TensorPiece, ...]]:
    found: list[tuple[TensorPiece, ...]] = []
    small: list[TensorPiece] = []
    for piece in pieces:
        for start in range(piece.start, piece.stop, CHUNK_BYTES):
            cut = TensorPiece(piece.tensor, start, min(piece.stop, start + CHUNK_BYTES))
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
    """Copy the senders' `tensors` to the receivers. Only senders and receivers communicate; the others return at once.

    Where it fails and the group has `abandoned` an operation, that may still write to a receiver's tensors.
    """
    flats = [t.contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    messages = plan([f.numel() for f in flats], shared, senders, source)
    receives = group.rank in receivers
    if not receives:
        messages = [m for m in messages if m.sender == group.rank]
    under_way: deque[_Parcel] = deque()
    tags = dict.fromkeys(senders, 0)  # number of the next message of each sender
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
                overwrite(tensor, flat.view(tensor.dtype).view(tensor.shape))


class _Parcel:
    """Message in transfer: to `receivers` or, if there are none, to this rank."""

    def __init__(self, group: Group, message: Message, flats: Sequence[torch.Tensor], receivers: Sequence[int],
                 tag: int) -> None:
        self._pieces = [flats[p.tensor][p.start:p.stop] for p in message.pieces]
        self._receives = not receivers
        direct = len(self._pieces) == 1 and self._pieces[0].device == group.device
        self._body = self._pieces[0] if direct else torch.empty(
            message.bytes, dtype=torch.uint8, device=group.device,
            pin_memory=group.device.type == "cpu" and any(p.is_cuda for p in self._pieces))
        self._parts = [] if direct else list(self._body.split([p.numel() for p in self._pieces]))
        if not self._receives:
            self._move(self._parts, self._pieces)
        self.works: list[Any] = (
            [group.receive(self._body, message.sender, tag)] if self._receives
            else [group.send(self._body, r, tag) for r in receivers])

    def arrive(self, group: Group) -> None:
        group.finish(self.works)
        if self._receives:
            self._move(self._pieces, self._parts)

    def _move(self, into: Sequence[torch.Tensor], out_of: Sequence[torch.Tensor]) -> None:
        for target, value in zip(into, out_of, strict=False):  # no parts: the bytes are in place already
            target.copy_(value)
