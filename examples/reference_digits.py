"""Replay a run of digits.py in plain torch.distributed, without spotfleet, and print the sha256 of the weights.

    python examples/reference_digits.py metrics.json

It reads the world size of each step from metrics.json, and nothing else. One process per rank runs for the whole
replay. Process r takes part in the steps whose world size is above r; when it returns after a pause, rank 0 sends it
weights and optimizer state. No process is ever lost here, so equal digests prove that interruptions changed no bit.

Floating-point sums depend on their order, and gloo's order depends on the length of the tensor it reduces. So the
gradients travel as in spotfleet: one flat tensor (the model is smaller than a bucket), parameters in reverse order,
then a tail of the same length as spotfleet's; see `spotfleet/train/gradients/reducer.py`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import digits_net as net
import torch
import torch.distributed as dist
from torch import Tensor

TAIL = 12  # two flags, the world check, a void round and the position; one use count per parameter follows


def world_sizes(worlds: list[list[int]], steps: int) -> list[int]:
    """Return the world size of each step, from stretches [first step, world size]."""
    ends = [first for first, _ in worlds[1:]] + [steps]
    return [size for (first, size), end in zip(worlds, ends, strict=True) for _ in range(first, end)]


class Replica:
    """One rank of the replay."""

    def __init__(self, rank: int, largest: int) -> None:
        self.rank = rank
        self.model, self.optimizer = net.make()
        self.params = list(self.model.parameters())
        self.images, self.labels, self.test_images, self.test_labels = net.load()
        self.groups = {n: dist.new_group(list(range(n))) for n in range(1, largest + 1)}

    def average_gradients(self, size: int) -> None:
        """Average gradients over the first `size` ranks, through one flat tensor with spotfleet's layout."""
        grads = [p.grad for p in reversed(self.params)]
        flat = torch.cat([g.flatten() for g in grads]) / size
        flat = torch.cat([flat, torch.zeros(TAIL + len(grads))])
        dist.all_reduce(flat, group=self.groups[size])
        at = 0
        for grad in grads:
            grad.copy_(flat[at : at + grad.numel()].view_as(grad))
            at += grad.numel()

    def catch_up(self, size: int) -> None:
        """Copy rank 0's weights and optimizer state to the first `size` ranks."""
        held: list[object] = [self.model.state_dict(), self.optimizer.state_dict()]
        dist.broadcast_object_list(held, src=0, group=self.groups[size])
        self.model.load_state_dict(held[0])  # type: ignore[arg-type]
        self.optimizer.load_state_dict(held[1])  # type: ignore[arg-type]

    def step(self, step: int, size: int) -> None:
        epoch, batch = divmod(step, net.batches_per_epoch(len(self.images)))
        indices: Tensor = net.samples_for(len(self.images), epoch, batch, self.rank, size)
        self.optimizer.zero_grad()
        net.loss_of(self.model(self.images[indices]), self.labels[indices], size).backward()
        self.average_gradients(size)
        self.optimizer.step()


def replay(rank: int, port: int, sizes: list[int], result: SimpleQueue) -> None:
    largest = max(sizes)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=largest)
    replica = Replica(rank, largest)
    for step, size in enumerate(sizes):
        if step and size > sizes[step - 1] and rank < size:
            replica.catch_up(size)
        if rank < size:
            replica.step(step, size)
    if rank == 0:
        found = net.accuracy(replica.model, replica.test_images, replica.test_labels)
        result.put({"sha256": net.digest(replica.model), "accuracy": found})
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("metrics", type=Path)
    metrics = json.loads(parser.parse_args().metrics.read_text())
    sizes = world_sizes(metrics["worlds"], metrics["steps"])
    spawn = multiprocessing.get_context("spawn")
    result, port = spawn.SimpleQueue(), free_port()
    ranks = [spawn.Process(target=replay, args=(r, port, sizes, result), daemon=True) for r in range(max(sizes))]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a replica failed; see above")
    print(json.dumps(result.get()))


if __name__ == "__main__":
    main()
