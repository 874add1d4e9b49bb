"""Train a small CNN on handwritten digits, through interruptions.

    python examples/digits.py                          alone, without a fleet
    spotfleet train examples/digits.py --np 2:3        on the fleet, with two or three workers

Writes metrics.json (accuracy, sha256 of the weights, the world size of each step) to the job's output folder.
`reference_digits.py` replays the run in plain torch.distributed and must reach the same bits.
"""
# ruff: noqa: B020  `for state.epoch in range(state.epoch, ...)` starts a loop at the position of training

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import digits_net as net

import spotfleet.train as hvd


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep in each step")
    return parser.parse_args()


args = parse()
hvd.init()
images, labels, test_images, test_labels = net.load()
model, optimizer = net.make()
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
batches = net.batches_per_epoch(len(images))


def note_world_size(state: hvd.elastic.TorchState) -> None:
    """Keep [first step, world size] for each stretch of steps. A repeated step counts with its last world size."""
    step = state.epoch * batches + state.batch
    worlds = [stretch for stretch in state.worlds if stretch[0] < step]
    if not worlds or worlds[-1][1] != hvd.size():
        worlds.append([step, hvd.size()])
    state.worlds = worlds


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    for state.epoch in range(state.epoch, args.epochs):
        for state.batch in range(state.batch, batches):
            note_world_size(state)
            indices = net.samples_for(len(images), state.epoch, state.batch, hvd.rank(), hvd.size())
            optimizer.zero_grad()
            loss = net.loss_of(model(images[indices]), labels[indices], hvd.size())
            loss.backward()
            optimizer.step()
            state.commit()
            time.sleep(args.step_delay)
        if hvd.rank() == 0:
            right = net.accuracy(model, test_images, test_labels)
            print(f"epoch {state.epoch + 1:3d}/{args.epochs}  workers {hvd.size()}  accuracy {right:.4f}", flush=True)
        state.batch = 0


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, batch=0, worlds=[])
state.register_reset_callbacks([lambda: print(f"now rank {hvd.rank()} of {hvd.size()}", flush=True)])
train(state)

if hvd.rank() == 0:
    metrics = {
        "accuracy": net.accuracy(model, test_images, test_labels),
        "sha256": net.digest(model),
        "steps": args.epochs * batches,
        "worlds": state.worlds,
    }
    out = Path(os.environ.get("SPOTFLEET_OUTPUT", "."))
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    print(f"test accuracy {metrics['accuracy']:.4f} after {metrics['steps']} steps", flush=True)
hvd.shutdown()
