"""Number of hosts that a fleet needs for its jobs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from spotfleet.model import Nodes, ResizeSpec


def first_workers(resize: ResizeSpec) -> int | None:
    """Return the number of workers with which a job begins; None: all that fit."""
    return resize.growth[0][1] if resize.growth else None


def hosts_wanted(nodes: Nodes, slots: int, asked: Sequence[int | None], held: Sequence[int] = ()) -> int:
    """Return the number of hosts with `slots` workers each, at least `nodes.min`.

    `asked`: the workers that each job requests, None for a job that takes all it can get. Together they never raise
    the number above `nodes.target`. `held`: workers that jobs release slowly; their hosts stay as long.
    """
    hosts = nodes.target
    if None not in asked:
        hosts = min(hosts, sum(-(-workers // max(1, slots)) for workers in asked if workers is not None))
    return max(nodes.min, hosts, min(nodes.max, sum(-(-workers // max(1, slots)) for workers in held)))
