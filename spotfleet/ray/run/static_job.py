"""Fixed number of workers for `RayExecutor`: they keep their processes over many calls, and no loss is survived."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any

from spotfleet.errors import SpotfleetError
from spotfleet.protocol.messages import JOB_KEY
from spotfleet.ray import drains
from spotfleet.ray.installed import About, check_same, connected_ray, own_python
from spotfleet.ray.params import ElasticParams
from spotfleet.ray.run.coordinator import JOB, Coordinator
from spotfleet.ray.run.elastic_job import NAME_CHARS, TICK_S
from spotfleet.ray.run.pool import ActorPool, ActorSpec
from spotfleet.ray.run.staffing import room_on


class StaticJob:
    """As many actors as `params.min_workers`, placed and named; calls reach all of them, in the order of ranks.

    Raises SpotfleetError if they are not placed within `placement_timeout_s`, and from a call whose worker is lost.
    """

    def __init__(self, params: ElasticParams, env: dict[str, str], placement_timeout_s: float) -> None:
        self._ray = connected_ray()
        self._params, self._count = params, params.min_workers
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._key = secrets.token_hex(16)
        self._pool = ActorPool(ActorSpec(params.cpus_per_worker, params.gpus, env), self._wake.set)
        self._coordinator: Coordinator | None = None
        try:
            self._handles = self._place(placement_timeout_s)
        except SpotfleetError:
            self._pool.close()
            raise
        self._thread = threading.Thread(target=self._loop, name="spotfleet-static-job", daemon=True)
        self._thread.start()

    def create(self, cls: type | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._get([h.create.remote(cls, args, kwargs) for h in self._handles])

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call the function in all workers; return references to the results, by rank."""
        return [h.call.remote(function, args, kwargs) for h in self._handles]

    def execute(self, function: Callable[[Any], Any], only: int | None = None) -> list[Any]:
        handles = self._handles if only is None else self._handles[only:only + 1]
        return self._get([h.execute.remote(function) for h in handles])

    def results(self, refs: list[Any]) -> list[Any]:
        return self._get(refs)

    def shutdown(self) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join()
        if self._coordinator is not None:
            self._coordinator.close()
        self._pool.close()

    def _get(self, refs: list[Any]) -> list[Any]:
        try:
            return self._ray.get(refs)
        except self._ray.exceptions.RayActorError as error:
            raise SpotfleetError(f"a worker was lost: {str(error).strip()}"[:2000],
                                 hint="ElasticExecutor goes on without it") from error

    def _place(self, limit_s: float) -> list[Any]:
        numbers = [self._pool.number() for _ in range(self._count)]
        for number in numbers:
            self._pool.ask(number)
        refs = [self._pool.handle(n).about.remote() for n in numbers]
        ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=limit_s)
        if len(ready) < len(refs):
            rooms = [room_on(r, self._params.cpus_per_worker, self._params.gpus) for r in drains.alive_nodes().values()]
            raise SpotfleetError(f"{len(ready)} of {len(refs)} workers were placed within {limit_s:g} s; the cluster "
                                 f"has room for {sum(rooms)}", hint="add nodes, or ask for fewer or smaller workers")
        abouts: list[About] = self._get(refs)
        for about in abouts:
            check_same(about, self._ray.__version__, own_python())
        address = self._ray.util.get_node_ip_address()
        self._coordinator = Coordinator(address, self._key, self._count, self._count, self._wake.set, lambda *_: None)
        nodes = list(dict.fromkeys(a.node for a in abouts))
        order = sorted(zip(numbers, abouts, strict=True), key=lambda pair: (nodes.index(pair[1].node), pair[0]))
        return [self._name(number, about, [a.node for _, a in order[:rank]])
                for rank, (number, about) in enumerate(order)]

    def _name(self, number: int, about: About, before: list[str]) -> Any:
        assert self._coordinator is not None
        slot, host, handle = before.count(about.node), about.node[:NAME_CHARS], self._pool.handle(number)
        name = f"{host}/{slot}/{number}"
        self._coordinator.add(name, host, slot)
        self._ray.get(handle.place.remote({
            "SPOTFLEET_SOCKET": self._coordinator.path, "SPOTFLEET_WORKER": name, "SPOTFLEET_JOB": JOB,
            "SPOTFLEET_ADDRESS": about.address, "SPOTFLEET_LOCAL_RANK": str(slot), JOB_KEY: self._key,
            "SPOTFLEET_WORKERS": f"{self._count}:{self._count}"}))
        return handle

    def _loop(self) -> None:
        assert self._coordinator is not None
        while not self._stop.is_set():
            self._wake.wait(TICK_S)
            self._wake.clear()
            self._coordinator.step(0)
