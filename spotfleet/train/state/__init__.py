"""Training state: version, position, and their synchronisation at the start of a generation.

In *step mode*, which needs exactly one optimizer in the state, a DistributedOptimizer:

- *version*: optimizer steps applied. Nothing in `optimizer.step()` communicates after the gradients are reduced, so a
  failure leaves each survivor whole at version k or k+1. One allgather of integers finds the newest version that any
  survivor holds. It wins, and only ranks behind it receive tensors.
- *position*: loop variables (`state.epoch`, `state.batch`, ...), sampler, scheduler and optimizer hyper-parameters as
  they were at the first gradient hook after version k, when they name the batch being computed; generators in the state
  as after the last step, or the commit that came later. Buffers are kept as before the iteration's first forward pass:
  see buffers.py. Planned changes interrupt at that hook, so no applied step is repeated.
- *replay*: a failure in a user's own collective between a step and the next gradient finds a position that is one step
  older than the version. That iteration runs again with its `optimizer.step()` suppressed, so nothing is applied twice.
- A checkpoint needs a *copy* of the rank's share only.

In *copy mode*, all other states, the version counts commits. `commit()` copies everything, with the position at that
moment; planned changes interrupt there, and a failure goes back to the newest copy. See `docs/commit.md`.

Pickles in checkpoints name `spotfleet.train.state.Position`, `.Schema` and `.HeldTensor`, which must stay importable
from here.
"""

from __future__ import annotations

from spotfleet.train.state.position import HeldTensor, Position, Schema

__all__ = ["HeldTensor", "Position", "Schema"]

for _kind in (Position, Schema, HeldTensor):
    _kind.__module__ = __name__  # the path in the checkpoints of every release
