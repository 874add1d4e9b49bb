"""Keys of a search space that `elastic` reads itself: those below "elastic" in a trial's config. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from spotfleet.errors import UsageError
from spotfleet.membership.pace import Pace
from spotfleet.ray.params import check_count

KEY = "elastic"


@dataclass(frozen=True)
class TrialSpace:
    """Limits of one trial: the arguments of `elastic`, or the trial's own."""

    min_workers: int
    max_workers: int
    growth: Mapping[int, int] = field(default_factory=dict)  # from this training_iteration on: number of workers
    pace: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        check_count("min_workers", self.min_workers)
        check_count("max_workers", self.max_workers)
        if self.max_workers < self.min_workers:
            raise UsageError(f"max_workers is {self.max_workers} and min_workers is {self.min_workers}",
                             hint="set max_workers to min_workers or more")

    def of(self, config: Mapping[str, Any]) -> TrialSpace:
        """Return the limits of the trial with this config. UsageError names the key that is wrong."""
        given = config.get(KEY, {})
        if not isinstance(given, Mapping):
            raise UsageError(f"{KEY} is {given!r} in the trial's config",
                             hint=f'give a dict: "{KEY}": {{"max_join": tune.choice([1, 2])}}')
        known = {"min_workers", "max_workers", "growth", "max_join", "max_leave", "every_s"}
        for name in given:
            if name not in known:
                raise UsageError(f"{KEY}.{name} is not a key that elastic() reads", hint=", ".join(sorted(known)))
        pace = {name: _whole(name, given[name]) for name in ("max_join", "max_leave") if name in given}
        if "every_s" in given:
            pace["every_s"] = _seconds("every_s", given["every_s"])
        limits = {name: given[name] for name in ("min_workers", "max_workers") if name in given}
        growth = given.get("growth")
        return replace(self, **limits, growth=self.growth if growth is None else _growth(growth),
                       pace=replace(self.pace, **pace))


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{KEY}.{name} is {value!r}", hint="set it to a whole number; 0: no limit")
    return value


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UsageError(f"{KEY}.{name} is {value!r}", hint="set it to a number of seconds")
    return float(value)


def _growth(value: Any) -> dict[int, int]:
    if not isinstance(value, Mapping) or not all(
            isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value):
        raise UsageError(f"{KEY}.growth is {value!r}",
                         hint='give {training_iteration: workers}, such as {0: 1, 30: 4}')
    for workers in value.values():
        check_count(f"{KEY}.growth", workers)
    return dict(value)
