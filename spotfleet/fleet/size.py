"""How many hosts a fleet needs for what its jobs ask for. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from spotfleet.model import Nodes, ResizeSpec


def first_workers(resize: ResizeSpec) -> int | None:
    """With how many workers a job begins; None: with all that fit."""
    return resize.growth[0][1] if resize.growth else None


def hosts_wanted(nodes: Nodes, slots: int, asked: Sequence[int | None], held: Sequence[int] = ()) -> int:
    """Hosts with `slots` workers each, `nodes.min` at least.

    `asked`: the workers that each job asks for, None for one that takes all it can get. Together they never raise the
    number above `nodes.target`. `held`: workers that jobs let go of slowly; their hosts stay as long.
    """
    hosts = nodes.target
    if None not in asked:
        hosts = min(hosts, sum(-(-workers // max(1, slots)) for workers in asked if workers is not None))
    return max(nodes.min, hosts, min(nodes.max, sum(-(-workers // max(1, slots)) for workers in held)))
