"""One SPOTFLEET_HOME with its cloud, as tests see it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from spotfleet.model import CloudHost, CloudState, Need, Offer, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.local import LocalCloud, LocalMachine, LocalProvider

T = TypeVar("T")


def eventually(look: Callable[[], T], limit_s: float = 30.0) -> T:
    """The first true value of `look()`."""
    deadline = time.monotonic() + limit_s
    while not (value := look()):
        assert time.monotonic() < deadline, f"still {value!r} after {limit_s} s"
        time.sleep(0.01)
    return value


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class LocalHome:
    home: Path

    @property
    def provider(self) -> LocalProvider:
        return LocalProvider({"home": str(self.home)})

    @property
    def cloud(self) -> LocalCloud:
        return LocalCloud(self.home)

    @property
    def local(self) -> Path:
        return self.home / "local"

    def daemon_pid(self) -> int:
        return json.loads((self.local / "cloud.json").read_text())["pid"]

    def offer(self) -> Offer:
        return self.provider.offers(Need(accelerator="EMU", accelerator_count=1))[0]

    def launch(self, request_id: str = "f-1", behavior: str = "terminate", **files: str) -> LocalMachine:
        """A host on which the idler runs."""
        self.provider.launch(LaunchRequest(request_id, "f", Role.WORKER, self.offer(), Boot("idler", files), behavior))
        self.born(request_id)
        return self.machine(request_id)

    def folder(self, request_id: str = "f-1") -> Path:
        return self.local / "hosts" / request_id

    def born(self, request_id: str = "f-1", after: int = 0) -> dict[str, Any]:
        """What the present process on the host says of itself, once its pid is not `after`."""
        path = self.folder(request_id) / "born.json"
        eventually(lambda: path.exists() and json.loads(path.read_text())["pid"] != after)
        return json.loads(path.read_text())

    def pids(self, request_id: str = "f-1") -> list[int]:
        born = self.born(request_id)
        return [born["pid"], *born["children"]]

    def machine(self, request_id: str = "f-1") -> LocalMachine:
        return next(m for m in self.cloud.truth() if m.request_id == request_id)

    def line(self, request_id: str = "f-1") -> CloudHost:
        return next(h for h in self.provider.hosts("f") if h.request_id == request_id)

    def until(self, state: CloudState, request_id: str = "f-1") -> CloudHost:
        eventually(lambda: self.line(request_id).state is state)
        return self.line(request_id)

    def console(self, request_id: str = "f-1") -> str:
        return (self.folder(request_id) / "console.log").read_text()
