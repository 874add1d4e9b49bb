"""Three ranks on one device over gloo: one is killed, a spare takes its place, and the bits equal an undisturbed run's.

    python bench/gpu/several.py [--device cuda]     a row of JSON; status 1 if the bits differ

It runs real worker processes under the tests' own small dispatcher (tests/support/train/train_stage.py). NCCL itself
refuses two ranks on one device.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

TOP = Path(__file__).parent.parent.parent
sys.path.insert(0, str(TOP))

from spotfleet.protocol.messages import Stage  # noqa: E402
from tests.support.train.train_scripts import FAULTS  # noqa: E402
from tests.support.train.train_stage import Fleet, Zygote  # noqa: E402

FOUNDERS = ["h0/0/1", "h1/0/1", "h2/0/1"]
STEPS, KILLED_AT = 60, 30
LIMIT_S = 180.0

SCRIPT = FAULTS + '''
hvd.init()
torch.use_deterministic_algorithms(True)
torch.manual_seed(1 + hvd.rank())
device = torch.device(os.environ["DEVICE"])
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.BatchNorm1d(512), torch.nn.Dropout(0.3),
                            torch.nn.Linear(512, 4)).to(device)
opt = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

@hvd.elastic.run
def train(state):
    while state.batch < env("STEPS", 0):
        g = torch.Generator().manual_seed(1000 * state.batch + hvd.rank())
        x, y = torch.randn(16, 256, generator=g).to(device), torch.randint(0, 4, (16,), generator=g).to(device)
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        die_at("reduced", step=state.batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        state.batch += 1
        state.commit()

train(hvd.elastic.TorchState(model, opt, batch=0))
held = [opt.state[p][k] for p in model.parameters() for k in ("exp_avg", "exp_avg_sq")]
print("DIGEST", digest([t.cpu() for t in [*model.parameters(), *held]]), flush=True)
'''


def train(zygote: Zygote, folder: Path, device: str, spares: int, **env: str) -> dict[str, Any]:
    """Run one training and return the workers' results."""
    folder.mkdir()
    fleet = Fleet(zygote, folder, SCRIPT)
    env |= {"DEVICE": device, "STEPS": str(STEPS), "SPOTFLEET_BACKEND": "gloo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    try:
        fleet.hold = True
        for _ in range(len(FOUNDERS) + spares):
            fleet.start(**env)
        fleet.wait(lambda: all(fleet.report(n).stage is Stage.INIT for n in FOUNDERS), LIMIT_S, "founders")
        fleet.form(tuple(FOUNDERS), "start")
        others = [n for n in fleet.workers if n not in FOUNDERS]
        fleet.wait(lambda: all(fleet.report(n).stage is Stage.READY for n in others), LIMIT_S, "spares")
        fleet.hold = False
        fleet.wait_end(LIMIT_S)
        return {"digests": fleet.lines("DIGEST"), "members": fleet.members, "story": fleet.story(),
                "pause_ms": round(1e3 * fleet.report("h0/0/1").pause_s, 1),
                "repeated": [fleet.report(n).repeated for n in fleet.members]}
    finally:
        fleet.close()


def compare(device: str, folder: Path) -> dict[str, Any]:
    zygote = Zygote()
    try:
        quiet = train(zygote, folder / "quiet", device, spares=0)
        killed = train(zygote, folder / "killed", device, spares=1, DIE=f"h1/0/1:reduced:{KILLED_AT}")
    finally:
        zygote.close()
    same = len(set(quiet["digests"])) == 1 and set(killed["digests"]) == set(quiet["digests"])
    row = {"what": "kill one of three on one device", "device": device, "bits_equal": same,
           "pause_ms": killed["pause_ms"], "repeated": killed["repeated"], "members": killed["members"]}
    return row if same else {**row, "stories": [quiet["story"], killed["story"]]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    with tempfile.TemporaryDirectory() as scratch:
        found = compare(parser.parse_args().device, Path(scratch))
    print(json.dumps(found), flush=True)
    sys.exit(not found["bits_equal"])
