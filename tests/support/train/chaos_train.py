"""The chaos job: everything that a wrong state, random number or sample would show in. See chaos_reference.py.

Trains whole epochs until a file exists at the end of one. `--notes DIR`: each worker appends what it trains on, before
it does; at the end it writes there what it holds. Which steps were applied by which generation is kept in the
optimizer's state: it can be neither ahead of nor behind the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import chaos_net as net
import torch

import spotfleet.train as hvd
from spotfleet.train import runtime

METRIC_EVERY, COMMIT_EVERY = 3, 4  # steps

parser = argparse.ArgumentParser()
parser.add_argument("--notes", type=Path, required=True)
parser.add_argument("--stop", type=Path, required=True, help="a file: then the epoch under way is the last")
parser.add_argument("--nap", type=float, default=0.0, help="seconds per step until --hurry exists")
parser.add_argument("--hurry", type=Path, default=Path("/nonexistent"))
args = parser.parse_args()


class Recording(torch.optim.AdamW):
    def step(self, closure=None):
        super().step(closure)
        held = self.state[self.param_groups[0]["params"][0]]
        applied = held.setdefault("applied", torch.zeros(net.MAX_STEPS))
        applied[int(held["step"]) - 1] = net.label(runtime.current().generation, hvd.size())


def linger() -> None:
    until = time.monotonic() + args.nap
    while time.monotonic() < until and not args.hurry.exists():
        time.sleep(0.005)


hvd.init()
model, optimizer = net.make()
optimizer.__class__ = Recording
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
scheduler = net.schedule(optimizer)
series, labels = net.data()
sampler = hvd.elastic.ElasticSampler(net.SAMPLES, batch_size=net.BATCH, seed=net.SEED)
notes = open(args.notes / f"{os.getpid()}-{time.time_ns()}.jsonl", "a", buffering=1)  # noqa: SIM115 - to the end


def one_step(state: hvd.elastic.TorchState, ids: list[int]) -> None:
    generation = runtime.current().generation
    counted = int(sampler.weight()[0])
    notes.write(json.dumps([state.step, generation, hvd.rank(), ids[:counted], ids]) + "\n")
    model.now = (state.step, generation, hvd.rank())
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(series[ids]), labels[ids])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), net.CLIP)
    optimizer.step()
    scheduler.step()
    sampler.record_batch(0)
    state.step += 1
    linger()
    if state.step % METRIC_EVERY == 0:
        state.loss = float(hvd.allreduce(loss))
    if state.step % COMMIT_EVERY == 0:
        state.commit()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while not state.over:
        sampler.set_epoch(state.epoch)
        for ids in sampler.batches():
            one_step(state, ids)
        state.over = hvd.broadcast_object(args.stop.exists(), 0)
        state.epoch += 1


state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=0, step=0, loss=0.0,
                               over=False)
train(state)
if state.over:  # not one who came too late to take over the final state
    applied = optimizer.state[next(model.parameters())]["applied"]
    held = {"steps": state.step, "epochs": state.epoch, "applied": applied[:state.step].tolist(),
            "lineage": model.lineage[:state.step].tolist(), "learnt": net.learnt(model, optimizer),
            "statistics": net.statistics(model), "tracked": int(model.norm1.num_batches_tracked),
            "lr": optimizer.param_groups[0]["lr"]}
    path = args.notes / f"end-{hvd.rank()}.json"
    path.with_suffix(".part").write_text(json.dumps(held))
    path.with_suffix(".part").rename(path)
    print("END", held["learnt"], held["steps"], flush=True)
hvd.shutdown()
