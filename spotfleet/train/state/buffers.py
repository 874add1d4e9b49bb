"""Copies of the values that an iteration changes besides weights (batch-norm statistics, moving averages).

An iteration lasts from the end of one step to the end of the next. Only two of its moments are known: its beginning
and its first gradient. Code after a step runs between them, and so does the forward pass. If the iteration is computed
again, the code after the step does not run again. So each tensor counts as one of these:

- *inside*: the forward pass changes it. Buffers of a model that is trained. Copied when the iteration begins.
- *outside*: code after a step changes it. Parameters that no optimizer owns (frozen weights, a moving average of the
  model) and the buffers of a model of which nothing is trained. Copied at the first gradient. One of these that changes
  between the call of the user's function and the first gradient counts as inside from then on: there is no step before.

A loop over the state (`for state.i in range(state.i, N)`) shows more: code after its head will run again, code before
it will not. There all tensors are copied at its head, and those of the second kind have their values there again when
an iteration is repeated. Other loops are compared with themselves: a tensor that counts as outside has the same value
at the first gradient of a repeated iteration, one that has changed inside changes again.

There are two slots, keyed by round: the round of the position held and that of the iteration that just began. Small
buffers are copied each round. A large one (a constant mask, say) and a parameter that no optimizer owns are copied only
when changed in place since the slot was last written. Such a parameter is first copied after its first change, so
frozen weights cost no memory.

A buffer belongs to its place in a module: forward passes may set another tensor there, which counts as a change. It is
never written to, since it may be memory of the script; a copy takes its place. One that a forward pass resizes in
place (`resize_`) gets its shape back with its values.

torch counts in-place changes, but not those made through `.data`. Another memory is seen and counted here. For changes
in the same memory, the norms of the watched tensors are compared in rounds 1, 2, 4, ..., in each COMPARE_EVERY-th, and
at the first gradient of a call. A tensor that changed uncounted is copied each round from then on, with all loose
parameters of its module.

A replay computes an iteration again whose step is applied. Its forward pass runs on newer weights and leaves wrong
buffers, so `step_applied` keeps them as they were at the step, and `step_replayed` writes them back.

Threads: the main thread, or an autograd thread while the main thread waits in backward().
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

LARGE = 1 << 16  # elements
COMPARE_EVERY = 64  # rounds


@dataclass
class _Slot:
    round: int = -1
    settled: bool = False  # the first gradient has come: tensors that count as outside are copied
    headed: bool = False  # they are copied: at the head of a loop over the state
    small: list[torch.Tensor] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)  # counters of small and watched ones when the inside were copied
    copies: list[torch.Tensor | None] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)  # torch's in-place counter when copied


class Moments(NamedTuple):
    """Moments at which an iteration has copied the tensors of the second kind, given by their numbers."""

    headed: bool  # all at the head of a loop
    inside: tuple[int, ...] = ()  # these when it began, others at its first gradient
    changed: tuple[int, ...] = ()  # the inside ones that had changed by then


Place = tuple[dict[str, torch.Tensor | None], str]  # the buffers of a module, and a name there


class _Live:
    """Tensors of the script, each with a counter of its changes: torch's own, raised where another tensor or, as far as
    `memory` is looked at, another memory is found in its place."""

    def __init__(self, tensors: list[torch.Tensor], places: Mapping[int, Place], memory: bool) -> None:
        self.tensors = tensors
        self.anew: set[int] = set()  # numbers of the buffers that the script has replaced by another tensor
        self._places = [(i, *places[id(t)]) for i, t in enumerate(tensors) if id(t) in places]
        self._looks_at_memory = memory
        self._memory = [t.data_ptr() for t in tensors] if memory else []
        self._raised = [0] * len(tensors)

    def look(self) -> None:
        for i, buffers, key in self._places:
            found = buffers.get(key)
            if found is not self.tensors[i] and found is not None:
                self.anew.add(i)
                self._raised[i] += _version(self.tensors[i]) + 1 - _version(found)
                self.tensors[i] = found
        if self._looks_at_memory:
            last, self._memory = self._memory, [t.data_ptr() for t in self.tensors]
            if last != self._memory:
                for i, (was, now) in enumerate(zip(last, self._memory, strict=True)):
                    self._raised[i] += was != now

    def counts(self) -> list[int]:
        return [_version(t) + more for t, more in zip(self.tensors, self._raised, strict=True)]

    def count(self, i: int) -> int:
        return _version(self.tensors[i]) + self._raised[i]

    def write(self, pairs: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Give these tensors, by their numbers, these values."""
        pairs = list(pairs)
        for i, value in pairs:
            if i in self.anew:
                buffers, key = next((b, k) for j, b, k in self._places if i == j)
                buffers[key] = value.clone()
        for tensor, value in ((self.tensors[i], value) for i, value in pairs if i not in self.anew):
            if tensor.shape != value.shape:
                tensor.resize_(value.shape)
        inside = [_without_repeats(self.tensors[i], value) for i, value in pairs if i not in self.anew]
        if inside:
            torch._foreach_copy_(*map(list, zip(*inside, strict=True)))
        self.look()


def _version(tensor: torch.Tensor) -> int:
    """Return torch's counter of in-place changes; one made in inference_mode() has none."""
    return 0 if tensor.is_inference() else tensor._version


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy `value` into `tensor`, which may be one made by expand()."""
    tensor, value = _without_repeats(tensor, value)
    tensor.copy_(value)


def _without_repeats(tensor: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the part of `tensor` that has each place in memory once, as torch writes to no other, and of `value`."""
    if tensor.layout == torch.strided:
        for d in [d for d, stride in enumerate(tensor.stride()) if stride == 0 and tensor.shape[d] > 1]:
            tensor, value = tensor.narrow(d, 0, 1), value.narrow(d, 0, 1)
    return tensor, value


class Extras:
    """Copies of the `buffers` of all models, and of the `loose` parameters of each, which no optimizer owns.

    `untrained` has the ids of buffers whose model has no trained parameter, `places` where each buffer belongs, by id.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], loose: Iterable[Sequence[torch.Tensor]],
                 untrained: Collection[int] = (), places: Mapping[int, Place] | None = None) -> None:
        self._small = [b for b in buffers if b.numel() <= LARGE]
        self._watched = [b for b in buffers if b.numel() > LARGE]
        self._lazy_from = len(self._watched)
        self._loose_ranges = []  # loose parameters: one range of indices per model
        for parameters in loose:
            start = len(self._watched)
            self._watched.extend(parameters)
            self._loose_ranges.append(range(start, len(self._watched)))
        # Indices of tensors that count as outside by their kind: small ones, and watched ones.
        self._small_kind = frozenset(i for i, b in enumerate(self._small) if id(b) in untrained)
        self._kind = frozenset(i for i, t in enumerate(self._watched) if i >= self._lazy_from or id(t) in untrained)
        self._small_outside, self._outside = self._small_kind, self._kind
        self._live_small = _Live(self._small, places or {}, memory=False)
        self._live = _Live(self._watched, places or {}, memory=True)
        self.moments: Moments | None = None  # those at the newest first gradient
        self._seen: list[int] | None = None  # all counters, while the first gradient of a call is awaited
        self._slots = [_Slot(), _Slot()]
        self._applied: list[torch.Tensor] = []  # small ones when the newest step was applied
        self._applied_changes: list[int] = []  # counters of the watched ones then
        self._applied_round = -1
        self._at_step: dict[int, torch.Tensor] = {}  # watched ones then, of those that code changes at both places
        self._after_step: set[int] = set()  # watched ones that code has changed after a step
        self._before_step: set[int] = set()  # and those that an iteration has changed after the head of its loop
        self._redo: list[torch.Tensor | None] = []  # values that `step_replayed` restores; empty: no replay
        self._owned: set[int] = set()  # loose ones that an optimizer has taken since, ignored here
        self._uncounted: set[int] = set()  # watched ones that change without being counted
        self._last_norms: list[tuple[float, int]] = []  # norm and counter at the last comparison
        self.rebase()

    @property
    def has_loose(self) -> bool:
        return self._lazy_from < len(self._watched)

    @property
    def has_large(self) -> bool:
        return self._lazy_from > 0

    @torch.no_grad()
    def rebase(self) -> None:
        """Measure changes from the present values, and clear both slots."""
        self._look()
        self._base_versions = self._live.counts()
        self._last_norms = self._norms()
        self._applied_round, self._redo = -1, []
        for slot in self._slots:
            slot.round, slot.copies, slot.changes = -1, [], []

    @property
    def known(self) -> tuple[list[int], list[int]]:
        """The numbers of the loose parameters that have changed here, and of the tensors that do so uncounted."""
        now = self._live.counts()
        return ([i for i in range(self._lazy_from, len(now)) if now[i] != self._base_versions[i]],
                sorted(self._uncounted))

    def learn(self, known: tuple[list[int], list[int]]) -> None:
        """Copy from the first iteration on what is `known` to change by the rank that sent the values."""
        changed, uncounted = known
        for i in changed:
            self._base_versions[i] = -1
        self._uncounted.update(uncounted)

    def _counts(self) -> list[int]:
        return [*self._live_small.counts(), *self._live.counts()]

    def _look(self) -> None:
        self._live_small.look()
        self._live.look()

    def leave_to_optimizers(self, owned: set[int]) -> None:
        """Stop copying these parameters, given by id: optimizers own them now."""
        self._owned = {i for i in range(self._lazy_from, len(self._watched)) if id(self._watched[i]) in owned}

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the attributes that iterations change."""
        names = ("_slots", "_applied", "_applied_changes", "_applied_round", "_redo", "_seen", "_at_step")
        return {name: copy.deepcopy(getattr(self, name)) for name in names}

    # The two moments of an iteration

    @torch.no_grad()
    def begin(self, round_: int) -> None:
        """Copy the tensors that count as inside: the iteration `round_` begins."""
        if not self._small and not self._watched:
            return
        if round_ > self._applied_round:
            self._redo = []  # it was not replayed after all
        self._look()
        slot = self._slot(round_)
        slot.round, slot.settled, slot.headed = round_, False, False
        if not slot.copies:
            slot.copies, slot.changes = [None] * len(self._watched), [-1] * len(self._watched)
        self._copy_small(slot, outside=False)
        self._copy_watched(slot, outside=False)
        slot.begun = self._counts()

    def renew(self, round_: int) -> None:
        """Copy again where code after the last step has changed tensors, which then count as changed by it."""
        self._look()
        slot = self._slot(round_)
        if slot.round == round_ and not slot.settled and (
                slot.begun[:len(self._small)] != self._live_small.counts()
                or any(self._is_changed(i, slot) for i in range(len(self._watched)) if i not in self._outside)):
            self.begin(round_)

    @torch.no_grad()
    def loop_begins(self, round_: int, before: Moments | None = None) -> None:
        """Copy all tensors at what may be the head of the loop that trains. If that iteration is computed again, and
        they were copied there `before`, those that count as outside get their values first."""
        slot = self._slot(round_)
        if slot.round != round_ or slot.settled:
            return
        self._look()
        if self._seen is None:
            self.renew(round_)
            self._copy_outside(slot)
            at_step = self._applied_changes if self._applied_round == round_ - 1 else []
            self._after_step.update(i for i, count in enumerate(at_step) if self._live.count(i) != count)
        else:
            if before is not None and before.headed:
                self._restore(slot, self._differing(slot))
            self._note_values(slot)
        slot.headed = True

    def _copy_outside(self, slot: _Slot) -> None:
        self._copy_small(slot, outside=True)
        self._copy_watched(slot, outside=True)

    def _differing(self, slot: _Slot) -> list[int]:
        """Return the numbers of the small and watched tensors that count as outside, have changed since the function
        was called, and differ from their copies."""
        first, now = len(self._small), self._counts()
        held = {**{i: slot.small[i] for i in self._small_kind}, **{first + i: slot.copies[i] for i in self._kind}}
        return [i for i, copied in held.items() if copied is not None and (
            now[i] != slot.begun[i] or i - first in self._uncounted) and not _equal(self._tensor(i), copied)]

    def _tensor(self, i: int) -> torch.Tensor:
        return [*self._small, *self._watched][i]

    def _restore(self, slot: _Slot, which: list[int]) -> None:
        first = len(self._small)
        self._live_small.write((i, slot.small[i]) for i in which if i < first)
        watched = [i - first for i in which if i >= first]
        self._live.write((i, copied) for i in watched if (copied := slot.copies[i]) is not None)
        for i in watched:
            slot.changes[i] = self._live.count(i)

    @torch.no_grad()
    def settle(self, round_: int, in_loop: bool = False, before: Moments | None = None) -> list[torch.Tensor]:
        """Copy the tensors that count as outside: the first gradient of `round_` has come, `in_loop`: in the loop that
        began last. Put back those that differ from `before`, if the iteration is computed again, and return them."""
        if not self._small and not self._watched:
            return []
        self._look()
        slot = self._slot(round_)
        if slot.round != round_:
            self.begin(round_)
        slot.headed = slot.headed and in_loop
        wrong = self._put_right(slot, before) if before is not None and self._seen is not None else []
        found: set[int] = set()
        if self._watched and (round_ % COMPARE_EVERY == 0 or round_ & (round_ - 1) == 0 or self._seen is not None):
            found = self._find_uncounted()
        self._sort_out(slot, found)
        for i in found - self._outside:
            slot.copies[i] = None  # made before the change was found
        if not slot.headed:
            self._copy_outside(slot)
        slot.settled = True
        self.moments = before or self._moments(slot)
        return [self._tensor(i) for i in wrong]

    def _put_right(self, slot: _Slot, before: Moments) -> list[int]:
        """Return the numbers of tensors that have changed another time than in the iteration that is computed again,
        or not again, and put the former back."""
        if before.headed or slot.headed:
            return []
        now = self._counts()
        wrong = [i for i in self._differing(slot) if i not in before.inside]
        self._restore(slot, wrong)
        return wrong + [i for i in before.changed if now[i] == slot.begun[i]]

    def _moments(self, slot: _Slot) -> Moments:
        first, now = len(self._small), self._counts()
        inside = tuple(sorted([*(self._small_kind - self._small_outside),
                               *(first + i for i in self._kind - self._outside)]))
        return Moments(slot.headed, inside, tuple(i for i in inside if now[i] != slot.begun[i]))

    def take(self, round_: int) -> None:
        """Copy all present values as those before the forward pass of `round_`."""
        self.begin(round_)
        self.settle(round_)

    def _slot(self, round_: int) -> _Slot:
        """Return the slot of `round_`, or the older one."""
        newest = max(range(2), key=lambda i: self._slots[i].round)
        return self._slots[newest if self._slots[newest].round == round_ else 1 - newest]

    def _copy_small(self, slot: _Slot, outside: bool) -> None:
        if self._small and not slot.small:
            slot.small = [t.detach().clone() for t in self._small]
            return
        which = [i for i in range(len(self._small)) if (i in self._small_outside) == outside]
        if which:
            _copy(slot.small, self._small, which, self._live_small.anew)

    def _copy_watched(self, slot: _Slot, outside: bool) -> None:
        for i, tensor in enumerate(self._watched):
            if (i in self._outside) == outside and self._is_changed(i, slot) and i not in self._owned:
                held = slot.copies[i]
                fits = held is not None and i not in self._live.anew and held.shape == tensor.shape
                slot.copies[i] = held.copy_(tensor) if held is not None and fits else tensor.detach().clone()
                slot.changes[i] = self._live.count(i)

    def _is_changed(self, i: int, slot: _Slot) -> bool:
        """Return whether watched tensor `i` has changed since `slot` was written, as far as it is known."""
        now = self._live.count(i)
        untouched = slot.changes[i] == now or (i >= self._lazy_from and now == self._base_versions[i])
        return not untouched or i in self._uncounted

    # Inside or outside

    @torch.no_grad()
    def entered(self, round_: int) -> None:
        """Copy all tensors: the user's function is called, and `round_` begins. Changes until the first gradient are no
        work of code after a step."""
        self._small_outside, self._outside = self._small_kind, self._kind
        self.begin(round_)
        if self._watched:
            self._find_uncounted()  # so that the next comparison shows what changes before the first gradient
        self._note_values(self._slot(round_))

    def values_set(self, round_: int) -> None:
        """Note, while the first gradient of a call is awaited, that changes so far are those of code before its
        loop."""
        if self._seen is not None:
            self._look()
            self._note_values(self._slot(round_))

    @property
    def awaits_gradient(self) -> bool:
        """Whether the first gradient since the user's function was called has not come yet."""
        return self._seen is not None

    @torch.no_grad()
    def _note_values(self, slot: _Slot) -> None:
        self._seen = self._counts()
        if slot.copies:
            self._copy_outside(slot)

    def _sort_out(self, slot: _Slot, found: Collection[int]) -> None:
        """Sort the tensors at a first gradient; these have just been found to change uncounted."""
        seen, self._seen = self._seen, None
        if slot.headed:
            self._small_outside, self._outside = self._small_kind, self._kind
        if slot.headed or seen is None:
            return
        now, first = self._counts(), len(self._small)
        self._small_outside = frozenset(i for i in self._small_kind
                                        if now[i] == seen[i] and _equal(self._small[i], slot.small[i]))
        self._outside = frozenset(i for i in self._kind if now[first + i] == seen[first + i] and i not in found and (
            i not in self._uncounted or (held := slot.copies[i]) is None or _equal(self._watched[i], held)))

    def _find_uncounted(self) -> set[int]:
        """Find tensors that change without being counted, and the loose parameters of the same model. Return new
        ones."""
        last, self._last_norms = self._last_norms, self._norms()
        known = set(self._uncounted)
        for i, (was, now) in enumerate(zip(last, self._last_norms, strict=True)):
            if was[0] != now[0] and was[1] == now[1] and i not in self._uncounted:
                self._uncounted.update(next((f for f in self._loose_ranges if i in f), range(i, i + 1)))
        return self._uncounted - known

    def _norms(self) -> list[tuple[float, int]]:
        """Return norm and counter per watched tensor; almost any change changes the norm. Integers are not measured,
        nor floats of 8 bits or less, which have no norm in torch."""
        found = [0.0] * len(self._watched)
        floats = [i for i, t in enumerate(self._watched) if t.is_floating_point() and t.element_size() > 1]
        for device in {self._watched[i].device for i in floats}:
            here = [i for i in floats if self._watched[i].device == device]
            norms = torch._foreach_norm([self._watched[i].detach() for i in here])
            for i, norm in zip(here, torch.stack([n.double() for n in norms]).tolist(), strict=True):
                found[i] = norm
        return list(zip(found, self._live.counts(), strict=True))

    # Going back

    @torch.no_grad()
    def put_back(self, round_: int) -> list[torch.Tensor]:
        """Restore the tensors as before the forward pass of `round_`, if that has run. Return those that have changed
        since for the first time, so that there is no copy of them."""
        missing: list[torch.Tensor] = []
        self._look()
        if round_ == self._applied_round and not self._redo:
            self._keep_applied()
        elif round_ == self._applied_round + 1 and all(s.round != round_ for s in self._slots):
            self.step_replayed(round_ - 1)  # the buffers were put back one round too far
        for slot in self._slots:
            if slot.round != round_:
                slot.round = slot.round if slot.round < round_ else -1  # later rounds will be computed again
                continue
            self._live_small.write(self._small_values(slot))
            back = [(i, held) for i, held in enumerate(slot.copies) if held is not None and self._goes_back(i, slot)]
            self._live.write(back)
            for i, _ in back:
                slot.changes[i] = self._live.count(i)
            first = len(self._small)
            held = {i for i, _ in self.kept} | {first + i for i, v in enumerate(slot.copies) if v is not None}
            missing = [self._watched[i] for i in range(self._lazy_from, len(self._watched)) if i not in self._owned
                       and slot.settled and first + i not in held
                       and self._live.count(i) != self._base_versions[i]]
        return missing

    def values_before(self, round_: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the pairs that `put_back` would copy: (live tensor, its value before the forward pass of `round_`)."""
        self._look()
        for slot in self._slots:
            if slot.round == round_:
                watched = [(self._watched[i], held) for i, held in enumerate(slot.copies)
                           if held is not None and self._goes_back(i, slot)]
                return [*((self._small[i], held) for i, held in self._small_values(slot)), *watched]
        return []

    def _small_values(self, slot: _Slot) -> list[tuple[int, torch.Tensor]]:
        """Return the numbers of the small tensors of which `slot` holds values, and the values."""
        return [(i, held) for i, held in enumerate(slot.small) if slot.settled or i not in self._small_outside]

    def _goes_back(self, i: int, slot: _Slot) -> bool:
        changed = slot.changes[i] != self._live.count(i) or i in self._uncounted
        return changed and i not in self._owned and (slot.settled or i not in self._outside)

    # A replay

    @torch.no_grad()
    def step_applied(self, round_: int) -> None:
        """Keep the values at the step of `round_`, which has just been applied to the parameters."""
        self._look()
        self._applied_round = round_
        if self._small and not self._applied:
            self._applied = [t.detach().clone() for t in self._small]
        elif self._small:
            _copy(self._applied, self._small, range(len(self._small)), self._live_small.anew)
        self._applied_changes = self._live.counts()
        slot = self._slot(round_)
        held, self._at_step = self._at_step, {}
        for i in sorted(self._kind - self._owned) if slot.round == round_ and slot.headed else ():
            uncounted = i in self._uncounted
            if uncounted or slot.changes[i] != self._applied_changes[i] != self._base_versions[i]:
                if uncounted or i in self._after_step or i not in self._before_step:  # others keep it to the next copy
                    tensor, into = self._watched[i], held.get(i)
                    fits = into is not None and into.shape == tensor.shape
                    self._at_step[i] = into.copy_(tensor) if into is not None and fits else tensor.detach().clone()
                self._before_step.add(i)

    def _keep_applied(self) -> None:
        """Keep the values at the newest step that are still available."""
        slots = {s.round: s for s in self._slots if s.copies}
        before, after = slots.get(self._applied_round), slots.get(self._applied_round + 1)
        watched: list[torch.Tensor | None] = [None] * len(self._watched)
        for i, (tensor, at_step) in enumerate(zip(self._watched, self._applied_changes, strict=True)):
            if before is None or i in self._owned or (i not in self._uncounted and (
                    before.changes[i] == at_step or at_step == self._base_versions[i])):
                continue  # the iteration did not change it
            copied = after.copies[i] if after is not None and i not in self._outside else None
            if i in self._at_step:
                watched[i] = self._at_step[i].clone()
            elif self._live.count(i) == at_step and i not in self._uncounted:
                watched[i] = tensor.detach().clone()
            elif copied is not None and after is not None and after.changes[i] == at_step:
                watched[i] = copied.clone()
        self._redo = [*self._applied, *watched]

    @property
    def kept(self) -> list[tuple[int, tuple[int, ...]]]:
        """The numbers and shapes of the values that `step_replayed` would restore."""
        return [(i, tuple(value.shape)) for i, value in enumerate(self._redo) if value is not None]

    def values_at_step(self, kept: list[tuple[int, tuple[int, ...]]], receives: bool,
                       round_: int) -> list[torch.Tensor]:
        """Return the `kept` values of the step of `round_`, for a transfer; memory for them if this rank `receives`."""
        tensors = [*self._small, *self._watched]
        if receives and kept:
            self._redo = [None] * len(tensors)
            self._applied_round = round_
            for i, shape in kept:
                self._redo[i] = _memory(tensors[i], shape)
        return [value if (value := self._redo[i] if self._redo else None) is not None
                else _memory(tensors[i], shape) for i, shape in kept]

    @torch.no_grad()
    def step_replayed(self, round_: int) -> None:
        """Restore the values that the step of `round_` found, after that round was computed again without its step."""
        if self._redo and self._applied_round == round_:
            self._look()
            first = len(self._small)
            values = [(i, value) for i, value in enumerate(self._redo) if value is not None]
            self._live_small.write((i, value) for i, value in values if i < first)
            self._live.write((i - first, value) for i, value in values if i >= first)
            self._applied_changes = self._live.counts()
        self._redo = []


def _memory(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_like(like).detach() if like.shape == shape else like.new_empty(shape)


def _copy(held: list[torch.Tensor], tensors: Sequence[torch.Tensor], which: Collection[int], anew: set[int]) -> None:
    """Copy `tensors`; those that the script has replaced (`anew`) or resized may have another shape than before."""
    other = {i for i in which if i in anew or held[i].shape != tensors[i].shape}
    for i in other:
        held[i] = tensors[i].detach().clone()
    same = [i for i in which if i not in other] if other else which
    if same:
        torch._foreach_copy_([held[i] for i in same], [tensors[i] for i in same])
