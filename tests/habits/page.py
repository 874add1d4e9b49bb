"""docs/scripts.md, written from the table of loops: python -m tests.habits.page"""
# ruff: noqa: E501  a row of a table is one line

from __future__ import annotations

from pathlib import Path

from tests.foreign.files import FILES
from tests.foreign.standins import EXACT, ForeignScript
from tests.habits import (  # noqa: F401 - they fill the table
    loops_models,
    loops_optimizers,
    loops_script,
    loops_usual,
    loops_weights,
)
from tests.habits.kit import FAMILIES, TABLE, Habit
from tests.habits.loops_processes import OWN

PAGE = Path(__file__).parents[2] / "docs" / "scripts.md"

HEAD = """# Ways to write a training loop, and what becomes of each

Written by `python -m tests.habits.page` from `tests/habits`. Each loop runs there under plain torch, and on two workers
undisturbed, through the loss of one at three points of an iteration, with and without a replacement, through a notice,
and through a replacement whose other peer is then lost as well. *Exact*: weights, optimizer state, buffers, schedulers
and values end with the bits of plain torch in all of them.

*Refused*: an error says what to change, at the first moment at which going on would be wrong; often that is the loss of
a worker. *Noticed*: training goes on, and a line in the log says that a repeated iteration differs.

Loops that need a process of their own are compared with an undisturbed run of the same two workers, through a SIGKILL
and a notice, and so is one loop of each family. More that draw from the global random generators are tested one by one,
in `tests/train`: [commit.md](commit.md), Random numbers.
"""

EDIT = """## The edit for a script that you have

A script for Elastic Horovod needs one other import. One for torchrun with `DistributedDataParallel`, or for a single
process, needs this:

| where the script has | write |
|---|---|
| `init_process_group(...)`, `destroy_process_group()` | `import spotfleet.train as hvd` and `hvd.init()`; nothing at the end |
| `RANK`, `LOCAL_RANK`, `WORLD_SIZE` from `os.environ`, before the loop | `hvd.rank()`, `hvd.local_rank()`, `hvd.size()` |
| `model = DDP(model, ...)` and `model.module` | `optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())`, and `model` |
| `no_sync()` or `require_backward_grad_sync` | nothing: gradients may be accumulated as they are |
| `DistributedSampler(data)` or `shuffle=True`, for training | `sampler = hvd.elastic.ElasticSampler(data, batch_size=B)`; `sampler.record_batch()` after each `step()`; `sampler.set_epoch(epoch)` before the epoch's first batch |
| `for b, x in enumerate(loader)`, where `b` ends the epoch, accumulates or sets the rate | `enumerate(loader, sampler.batches_done)`, as the loader begins in mid-epoch after a change; `if b >= LIMIT: break` before the batch is used; `sampler.processed_num / sampler.total` is the part of the epoch that is done at any world size |
| the loop | a function as below; its variables, scheduler, sampler and GradScaler in the state |
| a batch drawn before the loop, and the next one in it | draw at the top of the iteration, or of the microbatch, that uses it |
| a value for later that rank 0 alone computes (a best loss) | compute it on all ranks, averaged by `hvd.allreduce`, and keep it in the state |
| `if rank == 0:` around files, in the loop | `if hvd.rank() == 0:`; keep files in `$SPOTFLEET_OUTPUT` ([files.md](files.md)) |

```python
@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, epochs):
        sampler.set_epoch(state.epoch)
        for x, y in loader:
            ...                                  # forward, backward, optimizer.step(), as before
            sampler.record_batch()
        scheduler.step()

train(hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=0))
```

Without an `ElasticSampler` the state must name the batch: `for state.batch in range(state.batch, batches)`.
`len(loader)` is that of a whole epoch at the present world size, wherever the loop stands in it.

These scripts were edited so and run with three workers through a kill and a notice (`tests/foreign`). A refusal
names the line:

| script | verdict | how |
|---|---|---|
"""


def script_row(entry: ForeignScript) -> str:
    return f"| `{entry.script}` | {EXACT if entry.verdict == EXACT else 'refused'} | {entry.note} |"


def row(habit: Habit) -> str:
    return f"| {habit.name} | {habit.verdict} | {habit.edit} |"


def page() -> str:
    parts = [HEAD, EDIT + "".join(f"{script_row(entry)}\n" for entry in FILES.values() if entry.note)]
    for family in (*FAMILIES, "processes"):
        rows = [row(habit) for habit in TABLE + OWN if habit.family == family]
        title = family[0].upper() + family[1:]
        parts.append("\n".join([f"## {title}\n", "| loop | verdict | what to change |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
