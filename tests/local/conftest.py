"""A whole emulated cloud for each test that wants one; nothing of it outlives the test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_house import House

from spotfleet.providers.local import LocalCloud

MACHINES = str(Path(__file__).parent / "machines")


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in (MACHINES, os.environ.get("PYTHONPATH", "")) if p))
    monkeypatch.setenv("SPOTFLEET_LOCAL_OWNER_PID", str(os.getpid()))
    yield House(tmp_path)
    LocalCloud(tmp_path).shutdown()
