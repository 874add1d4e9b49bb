"""Comparison of ranks that hold the same version of a state: they must be equal in every bit.

    begin: digests, in a thread, while a place is awaited -> they travel with the ranks' versions -> check
                               equal: nothing more '-- different: one digest per tensor and value -> StateDiverged

Compared are the parameters that distributed optimizers own or no optimizer does, the state of those optimizers, the
buffers of SyncBatchNorm, and the position: the state's own values, schedulers, samplers, generators and parameter
groups. Other buffers are statistics of each rank's own. Plain numbers of type float, such as a running loss, may
differ: it is logged that one rank's counts from then on. `per_rank` exempts whatever else differs by design.

Threads: the main thread; `begin` starts one that reads the tensors while the main thread waits.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from spotfleet.train.comm.group import Group
from spotfleet.train.comm.script_lines import where_set
from spotfleet.train.gradients.optimizer_tag import is_distributed
from spotfleet.train.state import digest
from spotfleet.train.state.hyper import params_of
from spotfleet.worker.errors import StateDiverged

TEXT_CHARS = 60


@dataclass(frozen=True)
class Digests:
    """Digests of the parts of one rank's state; see `check`."""

    tensors: int = 0
    values: int = 0
    floats: int = 0  # the values once more, plain floats included


@dataclass(frozen=True)
class ComparedEntry:
    """One tensor or value that ranks compare."""

    name: str
    value: Any
    loose: bool = False  # a float here may differ


Details = dict[str, tuple[int, str]]  # digest and text, by name


# ---- what is compared

def tensors_of(state: Any) -> list[ComparedEntry]:
    """Return the live tensors that are equal on ranks of the same version."""
    plain = {id(p) for o in state._optimizers.values() if not is_distributed(o) for p in params_of(o)}
    synced = {id(b) for m in state._modules.values() for part in m.modules()
              if isinstance(part, torch.nn.SyncBatchNorm) for b in part.buffers(recurse=False)}
    buffers = {id(b) for m in state._modules.values() for b in m.buffers()} - synced
    named = {id(t): name for name, t in state._named()}
    found = [ComparedEntry(name, t) for name, t in state._named() if id(t) not in plain | buffers]
    for top, optimizer in state.owners().items():
        if is_distributed(state._optimizers[top.partition(".")[0]]):
            found += [ComparedEntry(f"{top}.{key} of {named[id(p)]}", value)
                      for p in params_of(optimizer) for key, value in sorted(optimizer.state.get(p, {}).items())
                      if isinstance(value, torch.Tensor)]
    return [e for e in found if not state.per_rank.covers(e.name)]


def values_of(state: Any) -> list[ComparedEntry]:
    """Return the values of the position held, and those of distributed optimizers that are no tensors."""
    position = state._final if state._finished else state._position
    found = [ComparedEntry(name, value, loose=True) for name, value in position.scalars.items()]
    for top, held in position.stateful.items():
        found += ([ComparedEntry(f"{top}.{key}", value) for key, value in held.items()] if isinstance(held, dict)
                  else [ComparedEntry(top, held)])
    found += [ComparedEntry(f"{top}.param_groups[{i}].{key}", value) for top, groups in position.hyper.items()
              for i, group in enumerate(groups) for key, value in group.items()]
    found += [ComparedEntry(name, value) for name, value in position.generators.items()]
    found += [ComparedEntry("the set of parameters that train", position.trained),
              ComparedEntry("the sampler in use", position.sampler)]
    named = {id(t): name for name, t in state._named()}
    for top, optimizer in state.owners().items():
        if is_distributed(state._optimizers[top.partition(".")[0]]):
            found += [ComparedEntry(f"{top}.{key} of {named[id(p)]}", value)
                      for p in params_of(optimizer) for key, value in sorted(optimizer.state.get(p, {}).items())
                      if not isinstance(value, torch.Tensor)]
    return [e for e in found if not state.per_rank.covers(e.name)]


def digests_of(state: Any, go_on: Callable[[], bool] = lambda: True) -> Digests:
    values = values_of(state)
    exact = digest.of_value([(e.name, e.value) for e in values])
    strict = [digest.of_value((e.name, e.value), floats=not e.loose) for e in values]
    return Digests(digest.of_tensors([e.value for e in tensors_of(state)], go_on), digest.of_value(strict), exact)


# ---- in the background

class DigestTask:
    """Digests of a state that rests, computed in a thread. They belong to one version and position."""

    def __init__(self, state: Any) -> None:
        self._state, self._of, self._go_on = state, _identity(state), True
        self._result: Digests | Exception = Digests()
        self._streams = [torch.cuda.current_stream(d) for d in {e.value.device for e in tensors_of(state)
                                                                if e.value.is_cuda}]
        self._thread = threading.Thread(target=self._run, name="spotfleet-digest", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with ExitStack() as streams:
                for stream in self._streams:
                    streams.enter_context(torch.cuda.stream(stream))
                self._result = digests_of(self._state, lambda: self._go_on)
        except Exception as error:  # noqa: BLE001 - it is raised in the main thread
            self._result = error

    def belongs_to(self, state: Any) -> bool:
        return self._state is state and self._of == _identity(state)

    def take(self) -> Digests:
        self._thread.join()
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def end(self) -> None:
        self._go_on = False
        self._thread.join()


def _identity(state: Any) -> tuple[Any, ...]:
    return state._version, state._made_in, state._held, state._damaged, state._finished, id(state._position)


def begin(state: Any) -> None:
    """Begin to compute the digests of a state that nothing changes until the next group synchronises it."""
    if _comparable(state):
        state.mark(digest_task=DigestTask(state))


def take(state: Any, size: int) -> Digests:
    """Return this rank's digests for a group of `size`; zeros where it holds no state or has no peer."""
    task, _ = state._digest_task, state.mark(digest_task=None)
    if size == 1 or not _comparable(state):
        if task is not None:
            task.end()
        return Digests()
    if task is not None and task.belongs_to(state):
        return task.take()
    if task is not None:
        task.end()
    return digests_of(state)


def _comparable(state: Any) -> bool:
    return state._held and not state._damaged and state._position is not None


# ---- comparison

def check(group: Group, state: Any, digests: Sequence[Digests], holders: Sequence[int], places: Sequence[Any],
          when: str) -> None:
    """Raise StateDiverged, on every rank alike, if two of `holders` differ.

    `digests` and `places` are by rank: the values of ranks at different places may differ.
    """
    compared = [r for r in holders if digests[r] != Digests()]
    peers = [[r for r in compared if places[r] == places[first]] for first in compared]
    tensors_alike = _equal(digests, compared, "tensors")
    alike = tensors_alike and all(_equal(digests, p, "values") for p in peers)
    if alike and all(_equal(digests, p, "floats") for p in peers):
        return
    damaged = state._damaged
    state.mark(damaged=damaged or not alike)  # also on a rank whose peers end before it knows why
    values = values_of(state) if group.rank in compared else []
    tensors = tensors_of(state) if group.rank in compared and not tensors_alike else []  # digests of each take longer
    details = _gather(group, (_details(tensors), _details(values, exact=False), _details(values)))
    problems = _differences(details, 0, compared)
    for at in dict.fromkeys(tuple(p) for p in peers):
        problems += _differences(details, 1, at)
        remarks = [] if problems else _differences(details, 2, at)
        if remarks and group.rank == 0:
            print(f"spotfleet: {remarks[0]}; after a change of membership one rank's value counts on all. To keep such "
                  "a value apart, leave it out of the state, or name it in TorchState(..., per_rank=(...))",
                  file=sys.stderr, flush=True)
    if not problems:
        return state.mark(damaged=damaged)  # equal values, in another order of memory
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    lines = next((f" (set at {where_set(n)})" for n in state._scalars if problems[0].startswith(f"state.{n} is ")), "")
    raise StateDiverged(
        f"{when}, ranks that should hold equal training states differ: {problems[0]}{lines}{more}. Something changes "
        "it on one rank only, or by values that differ by rank. `spotfleet train --verify` on the script finds out "
        "where; name what differs by design in TorchState(..., per_rank=(...))")


def _equal(digests: Sequence[Digests], ranks: Iterable[int], part: str) -> bool:
    return len({getattr(digests[r], part) for r in ranks}) <= 1


def _details(entries: Sequence[ComparedEntry], exact: bool = True) -> Details:
    found = {}
    for entry in entries:
        if isinstance(entry.value, torch.Tensor) and exact:
            found[entry.name] = (digest.of_tensor(entry.value), _norm(entry.value))
        else:
            text = repr(entry.value)
            short = text if len(text) <= TEXT_CHARS else text[:TEXT_CHARS] + "..."
            found[entry.name] = (digest.of_value(entry.value, floats=exact or not entry.loose), short)
    return found


def _norm(tensor: torch.Tensor) -> str:
    try:  # the sum shows a sign, which the norm does not
        norm = float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))
        return f"of norm {norm:.10g}, sum {float(tensor.detach().sum(dtype=torch.float64)):.10g}"
    except RuntimeError:
        return f"of type {tensor.dtype}"


def _differences(details: Sequence[Any], part: int, ranks: Sequence[int]) -> list[str]:
    """Return a sentence for each tensor or value in which `ranks` differ, in the order of the first of them."""
    names = dict.fromkeys(name for r in ranks for name in details[r][part])
    found = []
    for name in names:
        held: dict[tuple[int | None, str], list[int]] = {}
        for r in ranks:
            number, text = details[r][part].get(name, (None, "absent"))
            same = next((key for key in held if key[0] == number), (number, text))
            held.setdefault(same, []).append(r)
        if len(held) > 1:
            found.append(f"state.{name} is " + ", ".join(f"{text} on {_ranks(on)}" for (_, text), on in held.items()))
    return found


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _gather(group: Group, value: Any) -> list[Any]:
    """Return the JSON `value` of each rank, by rank."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [int(n) for n in group.allgather(torch.tensor([data.numel()]))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[:data.numel()] = data
    return [json.loads(part[:size].numpy().tobytes())
            for part, size in zip(group.allgather(padded), sizes, strict=True)]
