"""`TestDiscovery`: hosts that come and go at random, to try a script against changes of membership."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from spotfleet.errors import UsageError
from spotfleet.ray import drains
from spotfleet.ray.run.staffing import room_on


class TestDiscovery:
    """Between `min_hosts` and `max_hosts` of the cluster's nodes, one more or one less at each change.

    At the most a host goes, at the least one comes, and in between a coin decides. Set it as `settings.discovery`, and
    create the executor with `override_discovery=False`.
    """

    __test__ = False  # no test, for pytest

    def __init__(self, min_hosts: int, max_hosts: int, change_frequency_s: float, use_gpu: bool = False,
                 cpus_per_slot: float = 1, gpus_per_slot: float = 1, verbose: bool = True, seed: int | None = None,
                 nodes: Callable[[], dict[str, dict[str, float]]] = drains.alive_nodes,
                 clock: Callable[[], float] = time.monotonic) -> None:
        if not 1 <= min_hosts <= max_hosts:
            raise UsageError(f"TestDiscovery: min_hosts is {min_hosts} and max_hosts is {max_hosts}",
                             hint="min_hosts is 1 or more, and max_hosts not below it")
        self._least, self._most, self._every_s, self._verbose = min_hosts, max_hosts, change_frequency_s, verbose
        self._cpus, self._gpus = cpus_per_slot, gpus_per_slot if use_gpu else 0
        self._seed, self._random = seed, random.Random(seed)
        self._nodes, self._clock = nodes, clock
        self._hosts: list[str] = []
        self._next = clock()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        rooms = {n: room for n, r in self._nodes().items() if (room := room_on(r, self._cpus, self._gpus))}
        self._hosts = [h for h in self._hosts if h in rooms]
        while len(self._hosts) < self._least and len(self._hosts) < len(rooms):
            self._hosts.append(self._choose([n for n in rooms if n not in self._hosts]))
        if self._clock() >= self._next:
            self._next = self._clock() + self._every_s
            self._change(list(rooms))
        return {h: rooms[h] for h in self._hosts}

    def _change(self, nodes: Sequence[str]) -> None:
        free = [n for n in nodes if n not in self._hosts]
        grow = bool(free) and len(self._hosts) < self._most
        shrink = len(self._hosts) > self._least
        if grow and (not shrink or self._random.random() < 0.5):
            self._hosts.append(self._choose(free))
        elif shrink:
            self._hosts.remove(self._choose(self._hosts))

    def _choose(self, nodes: Sequence[str]) -> str:
        return self._random.choice(sorted(nodes))

    def __reduce__(self) -> tuple:
        return TestDiscovery, (self._least, self._most, self._every_s, self._gpus > 0, self._cpus, self._gpus or 1,
                               self._verbose, self._seed)
