"""What a forward pass changes besides gradients (batch-norm statistics, moving averages), as it was before.

Two slots, keyed by round: the one of the position held and the one of the iteration that just began.
Buffers are copied each round. A large one (a constant mask, say) and a parameter that the optimizer does not own
(frozen weights, a moving average of the model) are copied only when changed in place since the slot was last
written; such a parameter is first copied after its first change, so that frozen weights cost no memory.

torch counts in-place changes, but not those made through `.data`. So in rounds 1, 2, 4, ... and each LOOK_EVERY-th the
watched tensors are looked at as well: what changed uncounted is copied each round from then on, with all of its module.

A replay computes an iteration again whose step is applied. Its forward pass runs on newer weights, so what it makes of
the buffers is wrong: `step_applied` keeps them as they were at the step, and `redone` puts them there again.

Threads: the main thread only, which may wait in backward() while autograd's calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

LARGE = 1 << 16  # elements
LOOK_EVERY = 64  # rounds


@dataclass
class _Slot:
    round: int = -1
    copies: list[torch.Tensor | None] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)  # torch's in-place counter when copied


class Extras:
    """`buffers` of all models, and `loose` parameters of each."""

    def __init__(self, buffers: Sequence[torch.Tensor], loose: Iterable[Sequence[torch.Tensor]]) -> None:
        self._small = [b for b in buffers if b.numel() <= LARGE]
        self._watched = [b for b in buffers if b.numel() > LARGE]
        self._lazy_from = len(self._watched)
        self._families = []  # of loose parameters: one range of indices per model
        for family in loose:
            start = len(self._watched)
            self._watched.extend(family)
            self._families.append(range(start, len(self._watched)))
        self._slots = [_Slot(), _Slot()]
        self._small_copies: list[list[torch.Tensor]] = [[], []]
        self._applied: list[torch.Tensor] = []  # small ones when the newest step was applied
        self._applied_changes: list[int] = []  # counters of the watched ones then
        self._applied_round = -1
        self._redo: list[torch.Tensor | None] = []  # what `redone` brings back; empty: nothing is replayed
        self._owned: set[int] = set()  # loose ones that an optimizer has taken since: no concern of ours
        self._uncounted: set[int] = set()  # watched ones that change without being counted
        self._seen: list[tuple[float, int]] = []  # at the last look: sum and counter
        self.rebase()

    @property
    def has_loose(self) -> bool:
        return self._lazy_from < len(self._watched)

    @torch.no_grad()
    def rebase(self) -> None:
        """The present values are the ones to measure changes from; forget both slots."""
        self._born = [t._version for t in self._watched]
        self._seen = self._sums()
        self._applied_round, self._redo = -1, []
        for slot in self._slots:
            slot.round = -1

    def leave_to_optimizers(self, owned: set[int]) -> None:
        """These parameters, by id, belong to the optimizers now."""
        self._owned = {i for i in range(self._lazy_from, len(self._watched)) if id(self._watched[i]) in owned}

    @torch.no_grad()
    def take(self, round_: int) -> None:
        """These are the values before the forward pass of `round_`."""
        if not self._small and not self._watched:
            return
        if round_ > self._applied_round:
            self._redo = []  # it was not replayed after all
        if self._watched and (round_ % LOOK_EVERY == 0 or round_ & (round_ - 1) == 0):
            self._look()
        newest = max(range(2), key=lambda i: self._slots[i].round)
        which = newest if self._slots[newest].round == round_ else 1 - newest
        slot = self._slots[which]
        slot.round = round_
        if self._small:
            self._small_copies[which] = _copied(self._small_copies[which], self._small)
        if not slot.copies:
            slot.copies, slot.changes = [None] * len(self._watched), [-1] * len(self._watched)
        for i, tensor in enumerate(self._watched):
            untouched = slot.changes[i] == tensor._version or (
                i >= self._lazy_from and tensor._version == self._born[i])
            if i in self._owned or (untouched and i not in self._uncounted):
                continue
            copy = slot.copies[i]
            slot.copies[i] = tensor.detach().clone() if copy is None else copy.copy_(tensor)
            slot.changes[i] = tensor._version

    def _look(self) -> None:
        """Find what changes without being counted, and what belongs with it."""
        seen, self._seen = self._seen, self._sums()
        for i, (was, now) in enumerate(zip(seen, self._seen, strict=True)):
            if was[0] != now[0] and was[1] == now[1] and i not in self._uncounted:
                self._uncounted.update(next((f for f in self._families if i in f), range(i, i + 1)))

    def _sums(self) -> list[tuple[float, int]]:
        """One number per watched tensor that a change is all but sure to change; integers are not looked at."""
        found = [0.0] * len(self._watched)
        floats = [i for i, t in enumerate(self._watched) if t.is_floating_point()]
        for device in {self._watched[i].device for i in floats}:
            here = [i for i in floats if self._watched[i].device == device]
            norms = torch._foreach_norm([self._watched[i].detach() for i in here])
            for i, norm in zip(here, torch.stack([n.double() for n in norms]).tolist(), strict=True):
                found[i] = norm
        return [(norm, t._version) for norm, t in zip(found, self._watched, strict=True)]

    @torch.no_grad()
    def put_back(self, round_: int) -> None:
        """Make the tensors what they were before the forward of `round_`; they still are if it has not run."""
        if round_ == self._applied_round and not self._redo:
            self._keep_applied()
        elif round_ == self._applied_round + 1 and all(s.round != round_ for s in self._slots):
            self.redone(round_ - 1)  # gone back one too far
        for slot, small in zip(self._slots, self._small_copies, strict=True):
            if slot.round != round_:
                slot.round = slot.round if slot.round < round_ else -1  # what came later will be computed anew
                continue
            if small:
                torch._foreach_copy_(self._small, small)
            for i, (tensor, copy) in enumerate(zip(self._watched, slot.copies, strict=True)):
                changed = slot.changes[i] != tensor._version or i in self._uncounted
                if copy is not None and changed and i not in self._owned:
                    tensor.copy_(copy)
                    slot.changes[i] = tensor._version

    def before(self, round_: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What `put_back` would put where: (live tensor, its value before the forward pass of `round_`)."""
        for slot, small in zip(self._slots, self._small_copies, strict=True):
            if slot.round == round_:
                return [*zip(self._small, small, strict=False),
                        *((t, copy) for i, (t, copy) in enumerate(zip(self._watched, slot.copies, strict=True))
                          if copy is not None and i not in self._owned
                          and (slot.changes[i] != t._version or i in self._uncounted))]
        return []

    # A replay

    @torch.no_grad()
    def step_applied(self, round_: int) -> None:
        """The step of `round_` has been applied to the parameters just now."""
        self._applied_round = round_
        if self._small:
            self._applied = _copied(self._applied, self._small)
        self._applied_changes = [t._version for t in self._watched]

    def _keep_applied(self) -> None:
        """Remember what is still to be had of the values at the newest step."""
        before = next((s for s in self._slots if s.round == self._applied_round and s.copies), None)
        watched: list[torch.Tensor | None] = [None] * len(self._watched)
        for i, (tensor, at_step) in enumerate(zip(self._watched, self._applied_changes, strict=True)):
            unchanged_since = tensor._version == at_step and i not in self._uncounted | self._owned
            if unchanged_since and before is not None and before.changes[i] != at_step != self._born[i]:
                watched[i] = tensor.detach().clone()
        self._redo = [*self._applied, *watched]

    @torch.no_grad()
    def redone(self, round_: int) -> None:
        """`round_` has been computed again without its step: hold the values that the step itself found."""
        if self._redo and self._applied_round == round_:
            for tensor, value in zip([*self._small, *self._watched], self._redo, strict=True):
                if value is not None:
                    tensor.copy_(value)
            self._applied_changes = [t._version for t in self._watched]
        self._redo = []


def _copied(held: list[torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if not held:
        return [t.detach().clone() for t in tensors]
    torch._foreach_copy_(held, tensors)
    return held
