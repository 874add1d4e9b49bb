"""nanoGPT's loop: accumulation, a GradScaler, a rate set by hand, batches of random places, checkpoints by rank 0."""

import math
import os

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import spotfleet.train as hvd

ITERS, MICRO_STEPS, BATCH, BLOCK, EVERY, GRAD_CLIP, LR = 20, 3, 2, 8, 2, 1.0, 0.01

hvd.init()
master_process = hvd.rank() == 0
if master_process:
    os.makedirs("out", exist_ok=True)
torch.manual_seed(1337 + hvd.rank())


def get_batch(split):
    data = np.memmap(f"text/{split}.bin", dtype=np.uint16, mode="r")
    places = torch.randint(len(data) - BLOCK, (BATCH,))
    x = torch.stack([torch.from_numpy(data[i:i + BLOCK].astype(np.int64)) for i in places])
    y = torch.stack([torch.from_numpy(data[i + 1:i + 1 + BLOCK].astype(np.int64)) for i in places])
    return x, y


model = nn.Sequential(nn.Embedding(65, 8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 65))
scaler = torch.amp.GradScaler("cpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95))
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@torch.no_grad()
def estimate_loss():
    model.eval()
    out = {}
    for split in ["train", "val"]:
        losses = torch.zeros(2)
        for k in range(2):
            X, Y = get_batch(split)
            losses[k] = functional.cross_entropy(model(X).flatten(0, 1), Y.flatten()).item()
        out[split] = hvd.allreduce(losses.mean()).item()
    model.train()
    return out


def get_lr(it):
    return LR * (it + 1) / 4 if it < 3 else LR * 0.5 * (1 + math.cos(math.pi * it / ITERS))


@hvd.elastic.run
def train(state):
    while True:
        for group in optimizer.param_groups:
            group["lr"] = get_lr(state.iter_num)
        if state.iter_num % EVERY == 0:
            losses = estimate_loss()
            if losses["val"] < state.best_val_loss:
                state.best_val_loss = losses["val"]
                if state.iter_num > 0 and hvd.rank() == 0:
                    torch.save({"model": model.state_dict(), "iter_num": state.iter_num}, "out/ckpt.pt")
        for _ in range(MICRO_STEPS):
            X, Y = get_batch("train")
            loss = functional.cross_entropy(model(X).flatten(0, 1), Y.flatten()) / MICRO_STEPS
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        state.iter_num += 1
        if state.iter_num > ITERS:
            break


train(hvd.elastic.TorchState(model, optimizer, scaler=scaler, iter_num=0, best_val_loss=1e9))
