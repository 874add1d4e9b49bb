"""Parts of hosts that trials of Ray Tune take, from what the trials publish. Pure: no Ray, no clock.

    tune/sizes.py --PlacedTrials, in the GCS--> observer.py --RayState.trials--> dispatcher/ray/trials.py --> ledger
"""

from __future__ import annotations

from collections.abc import Sequence

from spotfleet.protocol.messages import load
from spotfleet.protocol.ray_cluster import PlacedTrial, PlacedTrials, RayNode, RayTrial

EXPIRES_S = 15.0  # what is not written anew for this long does not count: its writer is gone
MOST = 500  # trials; others are not attributed
NAME_CHARS = 80
WHOLE = 10**6


class TrialReader:
    """Reader of the published trials, which any program in the cluster could write."""

    def __init__(self) -> None:
        self._beat: int | None = None
        self._since = 0.0  # when the beat has changed

    def trials(self, text: bytes | None, nodes: Sequence[RayNode], now: float) -> tuple[RayTrial, ...]:
        """Return the trials with workers on hosts of the fleet; () where `text` is malformed or old."""
        try:
            found: PlacedTrials = load(PlacedTrials, text or b"{}")
        except ValueError:
            return ()
        if found.beat != self._beat:
            self._beat, self._since = found.beat, now
        if now - self._since > EXPIRES_S:
            return ()
        by_id = {n.node_id: n for n in nodes if n.host}
        placed = [_part(trial, by_id) for trial in found.trials[:MOST]]
        return tuple(trial for trial in placed if trial.hosts)


def _part(trial: PlacedTrial, nodes: dict[str, RayNode]) -> RayTrial:
    here = {n: count for n, count in trial.nodes.items() if n in nodes and count > 0}
    hosts = {nodes[n].host: _millionths(trial, count, nodes[n].total) for n, count in here.items()}
    return RayTrial(trial.trial[:NAME_CHARS], trial.name[:NAME_CHARS], sum(here.values()), hosts)


def _millionths(trial: PlacedTrial, workers: int, total: dict[str, float]) -> int:
    """Return the part of a node that the workers take: of the resource of which they take the largest part."""
    asked = {"CPU": trial.cpus, "GPU": trial.gpus}
    share = max((workers * amount / total[r] for r, amount in asked.items() if amount > 0 and total.get(r)), default=0)
    return max(0, min(WHOLE, round(WHOLE * share)))
