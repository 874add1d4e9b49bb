"""Orders to a job's workers, made from membership and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from spotfleet.dispatcher.checkpoints.store import CheckpointStore, RestoreInstruction
from spotfleet.membership import Membership, desk
from spotfleet.protocol.messages import Assignment, WorkerOrders


def worker_orders(membership: Membership, checkpoints: CheckpointStore, every_s: float, workers: Iterable[str],
                  save: bool, remark: str = "") -> dict[str, WorkerOrders]:
    """Return the orders by worker. `save`: request a checkpoint now, as the job is about to end or its host may be
    taken. `remark` is for rank 0's log.

    While the checkpoint to restore is unknown, no worker gets an assignment: it would start from scratch.
    """
    instructions = membership.orders_of(workers)
    offer = checkpoints.offer() if any(s.needs_restore for s in instructions.values()) else RestoreInstruction()
    left_s = membership.leaves_s
    seconds_left = None if left_s is None else float(math.floor(left_s))  # else each step changes it
    every_s *= checkpoints.parts.stretch
    shared = offer.checkpoint is not None and not offer.checkpoint.url  # each host reads an object store by itself
    sharers = tuple(sorted({name.partition("/")[0] for name in instructions})) if shared else ()
    return {name: replace(desk.worker_orders(s, every_s),
                          assignment=None if offer.wait else _granted(s.assignment, checkpoints),
                          checkpoint_now=s.checkpoint_now or save, restore=offer.checkpoint,
                          checkpoint_url=checkpoints.url, checkpoint_keep=checkpoints.keep,
                          seconds_left=seconds_left if s.checkpoint_now else None,
                          remark=remark if s.assignment is not None and s.assignment.rank == 0 else "",
                          sharers=sharers)
            for name, s in instructions.items()}


def restart_orders(membership: Membership, workers: Iterable[str]) -> dict[str, WorkerOrders]:
    """Return the orders of a job whose processes are started anew at each change: only their places."""
    return {name: WorkerOrders(s.assignment, checkpoint_every_s=0.0, backend=s.backend)
            for name, s in membership.orders_of(workers).items()}


def _granted(assignment: Assignment | None, checkpoints: CheckpointStore) -> Assignment | None:
    if assignment is None or checkpoints.seals is None:
        return assignment
    return replace(assignment, grant=checkpoints.seals.grant(assignment.generation))
