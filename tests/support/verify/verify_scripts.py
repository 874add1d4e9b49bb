"""Training scripts as users write them: with one fault each, or right only because the runtime puts something right."""

from __future__ import annotations

HEAD = '''
import torch
from torch import nn
import spotfleet.train as hvd

hvd.init()
torch.manual_seed(0)
{setup}
model = {model}
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

def batch(step):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))

@hvd.elastic.run
def train(state):
    {top}
    while state.step < 40:
{loop}
        state.step += 1
        state.commit()

train(hvd.elastic.TorchState(model, optimizer, step=0{values}))
'''
PLAIN = """
        optimizer.zero_grad()
        model(batch(state.step)).square().mean().backward()
        optimizer.step()
"""
CENTRED = """
class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("center", torch.zeros(1))

    def forward(self, x):
        y = self.linear(x)
        out = y - self.center
        self.center += 0.1 * y.detach().mean()
        return out
"""


def script(loop: str = PLAIN, setup: str = "", model: str = "nn.Linear(3, 1)", top: str = "pass",
           values: str = "") -> str:
    return HEAD.format(loop=loop.strip("\n"), setup=setup, model=model, top=top, values=values)


SOUND = script()
DRAWN_AHEAD = script("""
        optimizer.zero_grad()
        loss = model(x).square().mean()
        x = torch.randn(4, 3)
        loss.backward()
        optimizer.step()
""", top="x = torch.randn(4, 3)")
WEIGHTS_TOUCHED = script(PLAIN + """
        with torch.no_grad():
            model.weight.mul_(0.9)
        float(hvd.allreduce(torch.ones(1)))
""")
COUNTER_OUTSIDE = script("""
        seen["n"] += 1
        optimizer.zero_grad()
        (model(batch(state.step)) * seen["n"]).square().mean().backward()
        optimizer.step()
""", setup='seen = {"n": 0}')
BUFFER_OF_EACH_RANK = script(setup=CENTRED, model="Centred()")
MADE_FROM_RANK = script("""
        optimizer.zero_grad()
        (model(batch(state.step)) * scale).square().mean().backward()
        optimizer.step()
""", setup="scale = 1.0 + hvd.rank()")
COUNTED_BEFORE_THE_GRADIENT = script("""
        state.seen += 1
        optimizer.zero_grad()
        (model(batch(state.step)) * state.seen).square().mean().backward()
        optimizer.step()
""", values=", seen=0")
LIST_BEFORE_THE_GRADIENT = script("""
        state.seen.append(state.step)
        optimizer.zero_grad()
        (model(batch(state.step)) * len(state.seen)).square().mean().backward()
        optimizer.step()
""", values=", seen=[]")
STATISTICS = script(model="nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))")
RESUMES = script("""
        if hvd.rank() == 0 and state.step % 2:
            torch.save(model.state_dict(), "model.pt")
"""[1:] + PLAIN, setup="import os", top="pass", values=", start=os.path.exists('model.pt')")
UNSEEDED = script(setup="torch.seed()")
NOT_ELASTIC = "import spotfleet.train as hvd\nhvd.init()\nhvd.shutdown()\n"
RAISES = script(setup="raise ValueError('no data')")


# ---- right as long as the runtime has its fixes

ACCUMULATION = script("""
        model(batch(state.step)).square().mean().backward()
        if state.step % 2:
            optimizer.step()
            optimizer.zero_grad()
""")
METRIC = """
        hvd.allreduce(torch.ones(1))
"""[1:]
COUNTING = """
class Counting(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.k = 0

    def step(self, closure=None):
        self.k += 1
        self.param_groups[0]["lr"] = 0.1 / self.k
        super().step()
"""
OPTIMIZER_THAT_COUNTS = script(PLAIN + METRIC, setup=COUNTING).replace("torch.optim.Adam(", "Counting(")
GROUP_THAT_COUNTS = OPTIMIZER_THAT_COUNTS.replace("self.k", 'self.param_groups[0]["k"]')
EXTRA_STATE = script(PLAIN + """
        model.held["scale"] *= 0.9
"""[1:], setup="""
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.held = nn.Linear(3, 1), {"scale": 1.0}

    def forward(self, x):
        return self.linear(x) * self.held["scale"]

    def get_extra_state(self):
        return dict(self.held)

    def set_extra_state(self, state):
        self.held = dict(state)
""", model="Scaled()")
CENTRED_MEAN = script(setup=CENTRED.replace("y.detach().mean()", "hvd.allreduce(y.detach().mean().view(1))"),
                      model="Centred()")
CENTRED_ANEW = CENTRED_MEAN.replace("self.center += ", "self.center = self.center + ")
CENTRED_ALIKE = script(setup=CENTRED, model="Centred()").replace("+ hvd.rank()", "")
SCHEDULED_FIRST = script("""
        scheduler.step()
"""[1:] + PLAIN, values=", scheduler=scheduler").replace(
    "@hvd.elastic.run", "scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)\n\n@hvd.elastic.run")
FROM_THE_START = SOUND.replace("while state.step < 40:", "for state.step in range(40):").replace(
    "        state.step += 1\n", "")
