"""A whole emulated cloud for each test that wants one; nothing of it outlives the test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfleet.providers.local import LocalCloud
from tests.support.local.local_home import LocalHome

MACHINES = str(Path(__file__).parents[2] / "support" / "local" / "machines")


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHome]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in (MACHINES, os.environ.get("PYTHONPATH", "")) if p))
    monkeypatch.setenv("SPOTFLEET_LOCAL_OWNER_PID", str(os.getpid()))
    yield LocalHome(tmp_path)
    LocalCloud(tmp_path).shutdown()
