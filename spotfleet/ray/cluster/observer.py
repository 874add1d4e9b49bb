"""Observer of a Ray cluster: prints a `RayState` per line, and drains nodes that its input names.

`python -m spotfleet.ray.cluster.observer ADDRESS`, a process of its own: a crash in Ray's C++ code ends only this one.
Input: lines of `RayWish`. It ends with its input.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import replace

from spotfleet.protocol.messages import dump, load
from spotfleet.protocol.ray_cluster import RayDrain, RayNode, RayState, RayWish
from spotfleet.ray.cluster.gcs import Gcs
from spotfleet.ray.cluster.trials import TrialReader

POLL_S = 0.25
REST = 1.0  # pause after a look, in durations of that look: a large cluster's state is read less often
AGAIN_S = 5.0  # before a node whose raylet does not answer is asked again
EARLIER_S = 2.0  # a host's end that comes so much earlier is news


class Drainer:
    """Drains that are wanted, of which each is asked for until Ray has accepted it, and again with an earlier end."""

    def __init__(self) -> None:
        self.wanted: dict[str, RayDrain] = {}  # by host
        self.releases: frozenset[str] = frozenset()
        self._ends: dict[str, float] = {}  # node -> the end that Ray has accepted, monotonic
        self._later: dict[str, float] = {}  # node whose raylet does not answer -> when it is asked again

    def ask(self, gcs: Gcs, nodes: tuple[RayNode, ...]) -> bool:
        """Drain the nodes of hosts that leave and do not drain yet; return whether one was drained.

        A node of a host that nobody takes at a given time is asked to end, which Ray refuses while something runs
        there; then it drains as well, and goes on until that has ended. A node that drains already is asked again where
        its host goes earlier than Ray knows.
        """
        changed = False
        for node in nodes:
            if time.monotonic() < self._later.get(node.node_id, 0.0):
                continue
            try:
                changed |= self._ask(gcs, node)
            except ConnectionError:  # the raylet does not answer, or the head, which `state` reports
                self._later[node.node_id] = time.monotonic() + AGAIN_S
        return changed

    def _ask(self, gcs: Gcs, node: RayNode) -> bool:
        drain = self.wanted.get(node.host) if node.host else None
        if drain is None:
            released = node.host in self.releases and not node.draining
            return released and not gcs.drain(node.node_id, "no task needs this host", 0.0, idle_only=True)
        end = time.monotonic() + drain.left_s
        known = self._ends.get(node.node_id, float("-inf") if drain.idle_only else float("inf"))
        if node.draining and end > known - EARLIER_S:
            return False
        may_idle, refused = drain.idle_only and not node.draining, ""
        if not may_idle or gcs.drain(node.node_id, drain.why, drain.left_s, idle_only=True):
            refused = gcs.drain(node.node_id, drain.why, drain.left_s, idle_only=False)
        if not refused:
            self._ends[node.node_id] = end
        return True


    def marked(self, nodes: tuple[RayNode, ...]) -> tuple[RayNode, ...]:
        """Return the nodes, with those as draining whose drain Ray has accepted: its own state shows that later."""
        return tuple(replace(n, draining=n.draining or n.node_id in self._ends) for n in nodes)


def _read(drainer: Drainer, news: threading.Event) -> None:
    for line in sys.stdin:
        wish: RayWish = load(RayWish, line)
        drainer.wanted = {drain.host: drain for drain in wish.drains}
        drainer.releases = frozenset(wish.releases)
        news.set()
    os._exit(0)


def main(address: str) -> None:
    drainer, reader, news, gcs = Drainer(), TrialReader(), threading.Event(), None
    threading.Thread(target=_read, args=(drainer, news), daemon=True).start()
    while True:
        began = time.monotonic()
        try:
            gcs = gcs or Gcs(address)
            state = gcs.state()
            if drainer.ask(gcs, state.nodes):
                state = gcs.state()
            trials = reader.trials(gcs.trials(), state.nodes, began)
            state = replace(state, nodes=drainer.marked(state.nodes), trials=trials)
        except ConnectionError as error:
            gcs, state = None, RayState(False, problem=f"the head does not answer: {error}".partition("\n")[0])
        print(dump(state), flush=True)
        took_s = time.monotonic() - began
        news.wait(max(REST * took_s, POLL_S - took_s))
        news.clear()


if __name__ == "__main__":
    main(sys.argv[1])
