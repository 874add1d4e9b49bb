"""Access to this process's runtime for modules that the runtime itself imports.

`runtime.py` registers itself when it is imported. States and samplers use only the few members below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from spotfleet.protocol.messages import RankInfo


class CurrentRuntime(Protocol):
    """The members of the runtime that states and samplers use."""

    place: RankInfo

    def sync(self, state: Any) -> None: ...
    def commit_copy(self, state: Any) -> None: ...
    def check_change(self) -> None: ...
    def sampler_of(self, state: Any) -> str: ...
    def restart_draws(self) -> None: ...
    def loader_begins(self) -> None: ...


def _unregistered() -> CurrentRuntime:
    raise AssertionError("spotfleet.train.runtime has not been imported")


_find: Callable[[], CurrentRuntime] = _unregistered


def register(find: Callable[[], CurrentRuntime]) -> None:
    """Make `runtime` call `find` each time and return its result."""
    global _find
    _find = find


def runtime() -> CurrentRuntime:
    """Return the one runtime of this process."""
    return _find()
