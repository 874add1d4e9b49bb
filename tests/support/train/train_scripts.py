"""Scripts that the tests run as worker processes, and what they may do at a chosen point."""

from __future__ import annotations

from pathlib import Path

HERE = str(Path(__file__).parent)

FAULTS = '''
import hashlib, os, signal, sys, time
import torch
import spotfleet.train as hvd
from spotfleet.worker import control
from spotfleet.train import runtime
control.PERIOD_S = 0.02  # so that tests see versions soon
ME = os.environ["SPOTFLEET_WORKER"]

def env(name, default):
    return type(default)(os.environ.get(name, default))

def die_at(point, **now):
    """SIGKILL to this process alone, if it is the one that DIE=WORKER:POINT:STEP names."""
    who, _, rest = os.environ.get("DIE", "").partition(":")
    if who == ME and rest == point + ":" + str(now.get("step", 0)):
        os.kill(os.getpid(), signal.SIGKILL)

def digest(tensors):
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.detach().contiguous().numpy().tobytes())
    return h.hexdigest()[:16]
'''

# A parameter that falls by exactly 1 per applied step, in nested loops, committed now and then.
COUNT = FAULTS + '''
hvd.init()
EVERY, E, B, NAP = env("EVERY", 1), env("EPOCHS", 4), env("BATCHES", 30), env("NAP", 0.003)
model = torch.nn.Linear(1, 1, bias=False)
with torch.no_grad():
    model.weight.fill_(0.0 if env("EQUAL", 1) or hvd.rank() == 0 else 77.0)
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters())

@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, E):
        for state.batch in range(state.batch, B):
            step = state.epoch * B + state.batch
            opt.zero_grad()
            loss = model(torch.ones(1, 1)).sum()
            die_at("forward", step=step)
            loss.backward()
            die_at("reduced", step=step)
            opt.step()
            die_at("stepped", step=step)
            time.sleep(NAP)
            if env("METRIC", 0):
                hvd.allreduce(torch.ones(1))
            if (step + 1) % EVERY == 0:
                state.commit()
        state.batch = 0
    return "done"

state = hvd.elastic.TorchState(model, opt, epoch=0, batch=0)
state.register_reset_callbacks([lambda: print("RESET", hvd.size(), flush=True)])
print("RETURNED", train(state), flush=True)
print("WEIGHT", model.weight.item(), flush=True)
'''


def chaos_script(notes: Path, stop: Path, first: str = "train_scripts") -> str:
    """The chaos job, with a module `first` imported first."""
    return f'''
import runpy, sys
from spotfleet.worker import control
control.PERIOD_S = 0.02
sys.path.insert(0, {HERE!r})
import {first}
sys.argv += ["--notes", {str(notes)!r}, "--stop", {str(stop)!r}, "--nap", "0.002"]
runpy.run_path({HERE!r} + "/chaos_train.py", run_name="__main__")
'''
