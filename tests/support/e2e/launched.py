"""Scripts that torchrun starts, with checkpoints of their own, for tests of jobs that are started anew."""

from __future__ import annotations

# Saves each fifth step in the way of many scripts. Each rank checks that all ranks hold equal weights. Steps are slow
# until the file `hurry` exists.
DDP = """
import argparse, os, signal, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--hurry", default="")
parser.add_argument("--resume", default="")
args = parser.parse_args()
wanted = False

def on_term(*_):
    global wanted
    wanted = True

signal.signal(signal.SIGTERM, on_term)
dist.init_process_group("gloo")
rank, size, path = dist.get_rank(), dist.get_world_size(), "out/last.pt"
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
if args.resume:
    saved = torch.load(args.resume, weights_only=True)
    model.load_state_dict(saved["model"])
    step = saved["step"]
ddp = DistributedDataParallel(model)
print(f"begins at {step}: rank {rank} of {size}, restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)

def save():
    os.makedirs("out", exist_ok=True)
    torch.save({"model": model.state_dict(), "step": step}, path + ".tmp")
    os.replace(path + ".tmp", path)

while step < args.steps:
    optimizer.zero_grad()
    ddp(torch.full((2, 4), 1.0 + step % 3)).pow(2).mean().backward()
    optimizer.step()
    step += 1
    ends = torch.tensor(float(wanted))
    dist.all_reduce(ends)
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    others = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(others, own)
    assert all(torch.equal(own, other) for other in others), "ranks differ"
    if rank == 0 and (step % 5 == 0 or ends > 0):
        save()
        print(f"saved {step}", flush=True)
    if ends > 0:
        dist.barrier()
        sys.exit(0)
    for _ in range(20):
        if not os.path.exists(args.hurry):
            time.sleep(0.01)
print(f"done at {step}: rank {rank} of {size}", flush=True)
dist.destroy_process_group()
"""

# A script for Horovod with one import changed, without hvd.elastic.run, and with checkpoints of its own.
HVD = """
import argparse, os, time
import torch
import spotfleet.train as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--hurry", default="")
args = parser.parse_args()
hvd.init()
path = os.path.join(os.environ["SPOTFLEET_CHECKPOINT_DIR"], "last.pt")
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01),
                                     named_parameters=model.named_parameters())
step = 0
if os.path.exists(path):
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    step = saved["step"]
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
print(f"begins at {step}: rank {hvd.rank()} of {hvd.size()}, restart {os.environ['RESTART_COUNT']}", flush=True)
while step < args.steps:
    optimizer.zero_grad()
    model(torch.full((2, 4), 1.0 + step % 3)).pow(2).mean().backward()
    optimizer.step()
    step += 1
    if hvd.rank() == 0 and step % 5 == 0:
        torch.save({"model": model.state_dict(), "step": step}, path + ".tmp")
        os.replace(path + ".tmp", path)
    for _ in range(20):
        if not os.path.exists(args.hurry):
            time.sleep(0.01)
print(f"done at {step}: rank {hvd.rank()} of {hvd.size()}", flush=True)
"""

# A script for Hugging Face Accelerate with its own save_state and load_state. Each rank checks that all ranks hold
# equal weights. The folder of a checkpoint appears whole, under a new name.
ACCELERATED = """
import argparse, os, shutil, time
import torch
from accelerate import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--hurry", default="")
parser.add_argument("--resume", default="")
args = parser.parse_args()

class Progress:
    step = 0
    def state_dict(self):
        return {"step": self.step}
    def load_state_dict(self, saved):
        self.step = saved["step"]

def saved_steps():
    return sorted(int(name) for name in os.listdir("out") if os.path.isfile(f"out/{name}/custom_checkpoint_0.pkl"))

accelerator = Accelerator()
rank, size, progress = accelerator.process_index, accelerator.num_processes, Progress()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.DataLoader(torch.arange(48.0).remainder(5).reshape(12, 4), batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
accelerator.register_for_checkpointing(progress)
if args.resume:
    accelerator.load_state(f"{args.resume}/{saved_steps()[-1]}")
print(f"begins at {progress.step}: rank {rank} of {size}, restart {os.environ['RESTART_COUNT']}", flush=True)

def save():
    accelerator.save_state("saving")
    accelerator.wait_for_everyone()
    if rank == 0:
        os.makedirs("out", exist_ok=True)
        os.replace("saving", f"out/{progress.step}")
        for old in saved_steps()[:-2]:
            shutil.rmtree(f"out/{old}")

while progress.step < args.steps:
    for batch in data:
        optimizer.zero_grad()
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        progress.step += 1
        own = torch.cat([p.detach().flatten() for p in model.parameters()])
        all_of_them = accelerator.gather(own.unsqueeze(0))
        assert len(all_of_them) == size and all(torch.equal(own, other) for other in all_of_them), "ranks differ"
        if progress.step % 5 == 0:
            save()
        for _ in range(20):
            if not os.path.exists(args.hurry):
                time.sleep(0.01)
        if progress.step == args.steps:
            break
print(f"done at {progress.step}: rank {rank} of {size}", flush=True)
accelerator.end_training()
"""

# Stand-in for DeepSpeed's launcher, by its documentation and its `launcher/runner.py` and `launch.py`: with --no_ssh it
# is started on each host, takes its place from --node_rank, and starts a process for each slot of its line of the file.
DEEPSPEED = """#!/usr/bin/env python3
import argparse, os, signal, subprocess, sys
parser = argparse.ArgumentParser()
parser.add_argument("--hostfile", required=True)
parser.add_argument("--no_ssh", action="store_true", required=True)
parser.add_argument("--node_rank", type=int, default=-1)
parser.add_argument("--master_addr", required=True)
parser.add_argument("--master_port", type=int, default=29500)
parser.add_argument("--no_local_rank", action="store_true")
parser.add_argument("script")
parser.add_argument("args", nargs=argparse.REMAINDER)
given = parser.parse_args()
hosts = {}
for line in open(given.hostfile):
    name, slots = line.split()
    assert slots.startswith("slots=") and name not in hosts, f"bad hostfile: {line}"
    hosts[name] = int(slots.removeprefix("slots="))
assert 0 <= given.node_rank < len(hosts), "Launching training without ssh, but --node_rank is not set correctly."
counts = [*hosts.values()]
first, size = sum(counts[:given.node_rank]), counts[given.node_rank]
started = []
for local in range(size):
    env = {**os.environ, "MASTER_ADDR": given.master_addr, "MASTER_PORT": str(given.master_port),
           "WORLD_SIZE": str(sum(counts)), "RANK": str(first + local), "LOCAL_RANK": str(local),
           "CROSS_RANK": str(given.node_rank), "CROSS_SIZE": str(len(hosts)), "LOCAL_SIZE": str(size)}
    local_rank = [] if given.no_local_rank else [f"--local_rank={local}"]
    started.append(subprocess.Popen([sys.executable, "-u", given.script, *local_rank, *given.args], env=env))
signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in started])
sys.exit(max(abs(process.wait()) for process in started))
"""
