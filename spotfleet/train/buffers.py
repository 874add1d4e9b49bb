"""What a forward pass changes besides gradients (batch-norm statistics, moving averages), as it was before.

Two slots, keyed by round: the one of the position held and the one of the iteration that just began.
Buffers are copied each round. A large one (a constant mask, say) and a parameter that the optimizer does not own
(frozen weights, a moving average of the model) are copied only when changed in place since the slot was last
written; such a parameter is first copied after its first change, so that frozen weights cost no memory.

Threads: the main thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

LARGE = 1 << 16  # elements


@dataclass
class _Slot:
    round: int = -1
    copies: list[torch.Tensor | None] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)  # torch's in-place counter when copied


class Extras:
    def __init__(self, buffers: Sequence[torch.Tensor], loose: Sequence[torch.Tensor]) -> None:
        self._small = [b for b in buffers if b.numel() <= LARGE]
        self._watched = [b for b in buffers if b.numel() > LARGE] + list(loose)
        self._lazy_from = len(self._watched) - len(loose)
        self._slots = [_Slot(), _Slot()]
        self._small_copies: list[list[torch.Tensor]] = [[], []]
        self.rebase()

    def rebase(self) -> None:
        """The present values are the ones to measure changes from; forget both slots."""
        self._born = [t._version for t in self._watched]
        for slot in self._slots:
            slot.round = -1

    @torch.no_grad()
    def take(self, round_: int) -> None:
        if not self._small and not self._watched:
            return
        newest = max(range(2), key=lambda i: self._slots[i].round)
        which = newest if self._slots[newest].round == round_ else 1 - newest
        slot = self._slots[which]
        slot.round = round_
        if self._small:
            if not self._small_copies[which]:
                self._small_copies[which] = [t.detach().clone() for t in self._small]
            else:
                torch._foreach_copy_(self._small_copies[which], self._small)
        if not slot.copies:
            slot.copies, slot.changes = [None] * len(self._watched), [-1] * len(self._watched)
        for i, tensor in enumerate(self._watched):
            if slot.changes[i] == tensor._version or (i >= self._lazy_from and tensor._version == self._born[i]):
                continue
            copy = slot.copies[i]
            slot.copies[i] = tensor.detach().clone() if copy is None else copy.copy_(tensor)
            slot.changes[i] = tensor._version

    @torch.no_grad()
    def put_back(self, round_: int) -> None:
        """Make the tensors what they were before the forward of `round_`; they still are if it has not run."""
        for slot, small in zip(self._slots, self._small_copies, strict=True):
            if slot.round != round_:
                slot.round = slot.round if slot.round < round_ else -1  # what came later will be computed anew
                continue
            if small:
                torch._foreach_copy_(self._small, small)
            for i, (tensor, copy) in enumerate(zip(self._watched, slot.copies, strict=True)):
                if copy is not None and slot.changes[i] != tensor._version:
                    tensor.copy_(copy)
                    slot.changes[i] = tensor._version
