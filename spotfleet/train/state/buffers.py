"""Copies of the values that a forward pass changes besides gradients (batch-norm statistics, moving averages).

There are two slots, keyed by round: the round of the position held and that of the iteration that just began.
Buffers are copied each round. A large one (a constant mask, say) and a parameter that the optimizer does not own
(frozen weights, a moving average of the model) are copied only when changed in place since the slot was last
written. Such a parameter is first copied after its first change, so frozen weights cost no memory.

torch counts in-place changes, but not those made through `.data`. So in rounds 1, 2, 4, ... and each COMPARE_EVERY-th
the norms of the watched tensors are compared as well. A tensor that changed uncounted is copied each round from then
on, with all loose parameters of its module.

A replay computes an iteration again whose step is applied. Its forward pass runs on newer weights and leaves wrong
buffers, so `step_applied` keeps them as they were at the step, and `step_replayed` writes them back.

Threads: the main thread, or an autograd thread while the main thread waits in backward().
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

LARGE = 1 << 16  # elements
COMPARE_EVERY = 64  # rounds


@dataclass
class _Slot:
    round: int = -1
    copies: list[torch.Tensor | None] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)  # torch's in-place counter when copied


class Extras:
    """Copies of the `buffers` of all models, and of the `loose` parameters of each, which no optimizer owns."""

    def __init__(self, buffers: Sequence[torch.Tensor], loose: Iterable[Sequence[torch.Tensor]]) -> None:
        self._small = [b for b in buffers if b.numel() <= LARGE]
        self._watched = [b for b in buffers if b.numel() > LARGE]
        self._lazy_from = len(self._watched)
        self._loose_ranges = []  # loose parameters: one range of indices per model
        for parameters in loose:
            start = len(self._watched)
            self._watched.extend(parameters)
            self._loose_ranges.append(range(start, len(self._watched)))
        self._slots = [_Slot(), _Slot()]
        self._small_copies: list[list[torch.Tensor]] = [[], []]
        self._applied: list[torch.Tensor] = []  # small ones when the newest step was applied
        self._applied_changes: list[int] = []  # counters of the watched ones then
        self._applied_round = -1
        self._redo: list[torch.Tensor | None] = []  # values that `step_replayed` restores; empty: no replay
        self._owned: set[int] = set()  # loose ones that an optimizer has taken since, ignored here
        self._uncounted: set[int] = set()  # watched ones that change without being counted
        self._last_norms: list[tuple[float, int]] = []  # norm and counter at the last comparison
        self.rebase()

    @property
    def has_loose(self) -> bool:
        return self._lazy_from < len(self._watched)

    @torch.no_grad()
    def rebase(self) -> None:
        """Measure changes from the present values, and clear both slots."""
        self._base_versions = [t._version for t in self._watched]
        self._last_norms = self._norms()
        self._applied_round, self._redo = -1, []
        for slot in self._slots:
            slot.round = -1

    def leave_to_optimizers(self, owned: set[int]) -> None:
        """Stop copying these parameters, given by id: optimizers own them now."""
        self._owned = {i for i in range(self._lazy_from, len(self._watched)) if id(self._watched[i]) in owned}

    @torch.no_grad()
    def take(self, round_: int) -> None:
        """Copy the present values as those before the forward pass of `round_`."""
        if not self._small and not self._watched:
            return
        if round_ > self._applied_round:
            self._redo = []  # it was not replayed after all
        if self._watched and (round_ % COMPARE_EVERY == 0 or round_ & (round_ - 1) == 0):
            self._find_uncounted()
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
                i >= self._lazy_from and tensor._version == self._base_versions[i])
            if i in self._owned or (untouched and i not in self._uncounted):
                continue
            copy = slot.copies[i]
            slot.copies[i] = tensor.detach().clone() if copy is None else copy.copy_(tensor)
            slot.changes[i] = tensor._version

    def _find_uncounted(self) -> None:
        """Find tensors that change without being counted, and the loose parameters of the same model."""
        last, self._last_norms = self._last_norms, self._norms()
        for i, (was, now) in enumerate(zip(last, self._last_norms, strict=True)):
            if was[0] != now[0] and was[1] == now[1] and i not in self._uncounted:
                self._uncounted.update(next((f for f in self._loose_ranges if i in f), range(i, i + 1)))

    def _norms(self) -> list[tuple[float, int]]:
        """Return norm and counter per watched tensor; almost any change changes the norm. Integers are not measured."""
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
        """Restore the tensors as before the forward pass of `round_`, if that has run."""
        if round_ == self._applied_round and not self._redo:
            self._keep_applied()
        elif round_ == self._applied_round + 1 and all(s.round != round_ for s in self._slots):
            self.step_replayed(round_ - 1)  # the buffers were put back one round too far
        for slot, small in zip(self._slots, self._small_copies, strict=True):
            if slot.round != round_:
                slot.round = slot.round if slot.round < round_ else -1  # later rounds will be computed again
                continue
            if small:
                torch._foreach_copy_(self._small, small)
            for i, (tensor, copy) in enumerate(zip(self._watched, slot.copies, strict=True)):
                changed = slot.changes[i] != tensor._version or i in self._uncounted
                if copy is not None and changed and i not in self._owned:
                    tensor.copy_(copy)
                    slot.changes[i] = tensor._version

    def values_before(self, round_: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the pairs that `put_back` would copy: (live tensor, its value before the forward pass of `round_`)."""
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
        """Keep the values at the step of `round_`, which has just been applied to the parameters."""
        self._applied_round = round_
        if self._small:
            self._applied = _copied(self._applied, self._small)
        self._applied_changes = [t._version for t in self._watched]

    def _keep_applied(self) -> None:
        """Keep the values at the newest step that are still available."""
        before = next((s for s in self._slots if s.round == self._applied_round and s.copies), None)
        watched: list[torch.Tensor | None] = [None] * len(self._watched)
        for i, (tensor, at_step) in enumerate(zip(self._watched, self._applied_changes, strict=True)):
            unchanged_since = tensor._version == at_step and i not in self._uncounted | self._owned
            if unchanged_since and before is not None and before.changes[i] != at_step != self._base_versions[i]:
                watched[i] = tensor.detach().clone()
        self._redo = [*self._applied, *watched]

    @torch.no_grad()
    def step_replayed(self, round_: int) -> None:
        """Restore the values that the step of `round_` found, after that round was computed again without its step."""
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
