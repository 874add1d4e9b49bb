"""Parameters of executors, under the names of both generations of Horovod on Ray. Checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from spotfleet.errors import UsageError
from spotfleet.membership.pace import Pace


class HostSource(Protocol):
    """A source of hosts in place of the cluster itself, as `settings.discovery` with `override_discovery=False`."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the slots of each Ray node that may have workers, by node id."""


@dataclass(frozen=True)
class ElasticParams:
    """Size and resources of an elastic run."""

    min_workers: int = 1
    max_workers: int | None = None  # None: as many as the cluster's nodes have room for
    reset_limit: int | None = None  # changes of membership before the run fails; None: any number
    cooldown_range: tuple[float, float] | None = None  # seconds before a lost worker is replaced; doubled in between
    elastic_timeout: float = 600.0  # time with fewer than `min_workers` before the run fails
    override_discovery: bool = True  # False: ask `settings.discovery` for hosts
    checkpoint_target: str = ""  # folder or URL, see run/checkpoints.py; empty: no checkpoints
    checkpoint_every_s: float = 60.0
    cpus_per_worker: float = 1
    use_gpu: bool = False
    gpus_per_worker: float | None = None  # with `use_gpu`; None: 1
    pace: Pace = field(default_factory=Pace)  # limits on one change of membership that we choose

    def __post_init__(self) -> None:
        check_count("min_workers", self.min_workers)
        if self.max_workers is not None:
            check_count("max_workers", self.max_workers)
            if self.max_workers < self.min_workers:
                raise UsageError(f"max_workers is {self.max_workers} and min_workers is {self.min_workers}",
                                 hint="set max_workers to min_workers or more, or leave it out")
        check_resources(self.cpus_per_worker, self.use_gpu, self.gpus_per_worker)
        if self.cooldown_range is not None:
            low, high = self.cooldown_range
            if not 0 < low <= high:
                raise UsageError(f"cooldown_range is {self.cooldown_range}",
                                 hint="give the shortest and the longest wait in seconds, such as (1, 60)")

    @property
    def gpus(self) -> float:
        return (1 if self.gpus_per_worker is None else self.gpus_per_worker) if self.use_gpu else 0


@dataclass
class RaySettings:
    """Settings that both executors take; `discovery` may be set later."""

    verbose: int = 0  # 1: print each change of membership
    min_num_proc: int | None = None
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600.0
    timeout_s: float = 30.0
    placement_timeout_s: float = 100.0  # time for all workers of a static executor to be placed
    discovery: HostSource | None = field(default=None, repr=False)


def create_settings(timeout_s: float = 30.0, ssh_identity_file: str | None = None, ssh_str: str | None = None,
                    placement_group_timeout_s: float = 100.0, nics: Any = None, min_num_proc: int | None = None,
                    max_num_proc: int | None = None, reset_limit: int | None = None, elastic_timeout: float = 600.0,
                    min_np: int | None = None, max_np: int | None = None, verbose: int | bool = 0) -> RaySettings:
    """Return settings. `min_np` and `max_np` are earlier names of the numbers of processes. Ray connects to its nodes
    itself, so `timeout_s`, the SSH key and the network interfaces of Horovod's signature are accepted and not used."""
    least = min_num_proc if min_num_proc is not None else min_np
    most = max_num_proc if max_num_proc is not None else max_np
    return RaySettings(int(verbose), least, most, reset_limit, elastic_timeout, timeout_s, placement_group_timeout_s)


def check_count(name: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"{name} is {count!r}", hint=f"set {name} to a whole number, 1 or more")


def check_resources(cpus: float, use_gpu: bool, gpus: float | None) -> None:
    if cpus <= 0:
        raise UsageError(f"cpus_per_worker is {cpus!r}", hint="set it to a number above 0")
    if gpus is not None and not use_gpu:
        raise UsageError(f"gpus_per_worker is {gpus!r} and use_gpu is not set", hint="add use_gpu=True")
    if gpus is not None and gpus <= 0:
        raise UsageError(f"gpus_per_worker is {gpus!r}", hint="set it to a number above 0, or leave it out")
