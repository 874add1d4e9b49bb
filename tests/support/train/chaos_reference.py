"""Replays a chaos job in plain torch, undisturbed: `python -m tests.support.train.chaos_reference NOTES`. No spotfleet
in here.

Taken from the job are the world size of each applied step, and whose forward passes its buffers went through; order
of samples, random numbers, weights, optimizer state and statistics are made anew and must be the same, bit for bit.
Floating-point sums depend on their order and gloo's order on the length of the tensor, so the gradients of all ranks
are summed by gloo, as one flat tensor laid out as spotfleet's: parameters in reverse order, then its tail.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.train import chaos_net as net

# a change waits, world check, a checkpoint is due, void, the position; and one use count per parameter
TAIL = 12


class Differs(AssertionError):
    """The job did not do what the reference does."""


@dataclass(frozen=True)
class Note:
    """One forward pass."""

    counted: list[int]  # samples that weigh
    used: list[int]


class Job:
    """What the workers wrote down."""

    def __init__(self, folder: Path) -> None:
        self.ends: list[dict[str, Any]] = [json.loads(p.read_text()) for p in sorted(folder.glob("end-*.json"))]
        if not self.ends:
            raise Differs(f"no worker has come to the end: {sorted(p.name for p in folder.iterdir())}")
        self.notes: dict[tuple[int, int, int], Note] = {}  # by step, generation, rank
        for path in folder.glob("*.jsonl"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # else its writer was killed in it, before the step
                    step, generation, rank, counted, used = json.loads(line)
                    self.notes[step, generation, rank] = Note(counted, used)
        first = self.ends[0]
        for key in ("steps", "epochs", "applied", "learnt", "lr"):
            if any(end[key] != first[key] for end in self.ends):
                raise Differs(f"ranks end with different {key}: {[end[key] for end in self.ends]}")
        self.steps, self.epochs = first["steps"], first["epochs"]
        self.applied = [net.unlabel(value) for value in first["applied"]]  # (generation, world size) of each step

    def check_samples(self) -> None:
        """Each sample exactly once in each epoch, by what the workers of each applied step say they used."""
        seen: Counter[int] = Counter()
        epoch = 0
        for step, (generation, world) in enumerate(self.applied):
            for rank in range(world):
                note = self.notes.get((step, generation, rank))
                if note is None:
                    raise Differs(f"step {step}: generation {generation} of {world} applied it without rank {rank}")
                seen.update(note.counted)
            if seen.total() >= net.SAMPLES:
                self._check_epoch(epoch, seen)
                epoch, seen = epoch + 1, Counter()
        if epoch != self.epochs or seen:
            raise Differs(f"{self.epochs} epochs were trained; the samples make {epoch}, and {seen.total()} more")

    def check_repeats(self) -> None:
        """While some worker with the state lives on: all ranks of a generation begin with the same step; at most one
        step of a generation is lost with it; at most one that is applied already is computed again in it."""
        begun: dict[int, dict[int, set[int]]] = {}  # generation -> rank -> steps
        for step, generation, rank in self.notes:
            begun.setdefault(generation, {}).setdefault(rank, set()).add(step)
        for generation, ranks in begun.items():
            first = {min(steps) for steps in ranks.values()}
            steps = {s for own in ranks.values() for s in own}
            lost = [s for s in steps if self.applied[s][0] > generation]
            again = [s for s in steps if self.applied[s][0] < generation]
            if len(first) > 1 or len(lost) > 1 or len(again) > 1:
                raise Differs(f"generation {generation}: ranks begin with step {sorted(first)}, steps {sorted(lost)} "
                              f"were lost with it, {sorted(again)} were applied before it")

    @staticmethod
    def _check_epoch(epoch: int, seen: Counter[int]) -> None:
        if seen != Counter(range(net.SAMPLES)):
            wrong = {i: seen[i] for i in range(net.SAMPLES) if seen[i] != 1}
            raise Differs(f"epoch {epoch}: samples not seen exactly once: {wrong}")


class Sums:
    """gloo groups of 1 to n ranks, all of them in this thread."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self._groups: dict[int, list[Any]] = {}

    def add(self, flats: list[Tensor]) -> None:
        """Sum in place, over as many ranks as there are tensors."""
        size = len(flats)
        if size not in self._groups:
            self._groups[size] = self._make(size)
        works = [group.allreduce([flat]) for group, flat in zip(self._groups[size], flats, strict=True)]
        for work in works:
            work.wait()

    def _make(self, size: int) -> list[Any]:
        """Each rank's constructor waits for the others', hence the threads."""
        from concurrent.futures import ThreadPoolExecutor

        def join(rank: int) -> Any:
            store = dist.PrefixStore(str(size), self._store)
            return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(join, range(size)))


class Replay:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.model, self.optimizer = net.make()
        self.schedule = net.schedule(self.optimizer)
        self.params = list(self.model.parameters())
        self.series, self.labels = net.data()
        self.sums = Sums()
        self.epoch = self.position = 0
        self.order = net.permutation(0)
        self.live = [b for name, b in self.model.named_buffers() if name != "lineage"]
        # Statistics by the ranks that end with them: one for all, parted where their lineages part.
        self.lines = {tuple(range(len(job.ends))): [b.clone() for b in self.live]}

    def run(self) -> None:
        for step, (_, world) in enumerate(self.job.applied):
            self.step(step, world)
        job, learnt = self.job, net.learnt(self.model, self.optimizer)
        if (self.epoch, self.position) != (job.epochs, 0):
            raise Differs(f"the last step ends at sample {self.position} of epoch {self.epoch}, not of {job.epochs}")
        if (learnt, self.optimizer.param_groups[0]["lr"]) != (job.ends[0]["learnt"], job.ends[0]["lr"]):
            raise Differs(f"weights {job.ends[0]['learnt']} after {job.steps} steps, the reference has {learnt}")
        for ranks, line in self.lines.items():
            for rank in ranks:
                end = job.ends[rank]
                if end["statistics"] != net.digest(line):
                    raise Differs(f"rank {rank} ends with other batch-norm statistics than the reference, after "
                                  f"{end['tracked']} forward passes in {job.steps} steps")

    def step(self, step: int, world: int) -> None:
        shares = net.shares(self.position, world)
        total = sum(end - start for start, end in shares)
        flats, sources = [], self.part_lines(step)
        for rank, (start, end) in enumerate(shares):
            used = self.order[start:end] or [self.order[self.position]]
            note = self.job.notes[step, self.job.applied[step][0], rank]
            if (note.counted, note.used) != (self.order[start:end], used):
                raise Differs(f"step {step}, rank {rank} of {world}: trained on {note}, not on {used}")
            self.follow(sources.get((self.job.applied[step][0], rank), []), step, rank, used)
            flats.append(self.gradient(step, rank, used, total / (end - start) if end > start else 0.0))
        self.apply(flats)
        for (generation, rank), lines in sources.items():  # replayed: the weights were new already
            if generation != self.job.applied[step][0]:
                self.follow(lines, step, rank, self.job.notes[step, generation, rank].used)
        self.position += total
        if self.position == net.SAMPLES:
            self.epoch, self.position = self.epoch + 1, 0
            self.order = net.permutation(self.epoch)

    def forward(self, step: int, rank: int, used: list[int]) -> Tensor:
        net.reseed(rank, step)
        return self.model(self.series[used])

    def gradient(self, step: int, rank: int, used: list[int], divisor: float) -> Tensor:
        """What rank `rank` sends; `divisor` 0: it has no sample left, and its gradient counts nothing."""
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.forward(step, rank, used), self.labels[used]).backward()
        grads = [p.grad for p in reversed(self.params)]
        parts = [g.flatten() / divisor if divisor else torch.zeros(g.numel()) for g in grads]
        return torch.cat([*parts, torch.ones(TAIL + len(grads))])

    def part_lines(self, step: int) -> dict[tuple[int, int], list[list[Tensor]]]:
        """The statistics that went through the forward pass of each (generation, rank) in this step."""
        sources: dict[tuple[int, int], list[list[Tensor]]] = {}
        for ranks, line in list(self.lines.items()):
            del self.lines[ranks]
            labels = {self.job.ends[r]["lineage"][step] for r in ranks}
            for value in labels:
                mine = line if len(labels) == 1 else [b.clone() for b in line]
                self.lines[tuple(r for r in ranks if self.job.ends[r]["lineage"][step] == value)] = mine
                sources.setdefault(net.unlabel(value), []).append(mine)
        return sources

    @torch.no_grad()
    def follow(self, lines: list[list[Tensor]], step: int, rank: int, used: list[int]) -> None:
        for line in lines:
            for live, mine in zip(self.live, line, strict=True):
                live.copy_(mine)
            self.forward(step, rank, used)
            for live, mine in zip(self.live, line, strict=True):
                mine.copy_(live)

    def apply(self, flats: list[Tensor]) -> None:
        if len(flats) > 1:
            self.sums.add(flats)
        at = 0
        for p in reversed(self.params):
            p.grad = flats[0][at:at + p.numel()].view(p.shape)
            at += p.numel()
        torch.nn.utils.clip_grad_norm_(self.params, net.CLIP)
        self.optimizer.step()
        self.schedule.step()


def check(folder: Path) -> Job:
    """Raises Differs unless the job in `folder` did what an undisturbed one does."""
    job = Job(folder)
    job.check_samples()
    Replay(job).run()
    return job


if __name__ == "__main__":
    checked = check(Path(sys.argv[1]))
    print(f"{checked.steps} steps, {checked.epochs} epochs: the same, bit for bit, as in plain torch")
