"""What each worker of a job is told, from what Membership and the checkpoints say."""

from __future__ import annotations

import math
from collections.abc import Iterable

from spotfleet.dispatcher.checkpoints import CheckpointStore, Offer
from spotfleet.dispatcher.membership import Membership
from spotfleet.messages import WorkerOrders


def worker_orders(membership: Membership, checkpoints: CheckpointStore, every_s: float, workers: Iterable[str],
                  save: bool, remark: str = "") -> dict[str, WorkerOrders]:
    """By worker. `save`: the job is about to end, and what it has reached is wanted. `remark` is for rank 0's log.

    While a checkpoint to restore is looked for nobody has a place in a generation: it would begin anew.
    """
    said = membership.orders_of(workers)
    offer = checkpoints.offer() if any(s.needs_restore for s in said.values()) else Offer()
    left_s = membership.leaves_s
    seconds_left = None if left_s is None else float(math.floor(left_s))  # else each look would be news to everybody
    every_s *= checkpoints.parts.stretch
    return {name: WorkerOrders(None if offer.wait else s.assignment, s.founded, s.provisional_rank, s.provisional_size,
                               every_s, s.checkpoint_now or save, offer.checkpoint, stands_in=s.stands_in,
                               checkpoint_url=checkpoints.url, checkpoint_keep=checkpoints.keep,
                               seconds_left=seconds_left if s.checkpoint_now else None,
                               remark=remark if s.assignment is not None and s.assignment.rank == 0 else "")
            for name, s in said.items()}
