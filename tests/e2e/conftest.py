"""A house of its own for each test: cloud, dispatcher, agents and workers are real processes, ended with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfleet.providers.local import LocalCloud
from tests.support.e2e.e2e_stage import COUNTING, RAISING, Stage


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    (work / "counting.py").write_text(COUNTING)
    (work / "raising.py").write_text(RAISING)
    monkeypatch.setenv("SPOTFLEET_HOME", str(home))
    monkeypatch.setenv("SPOTFLEET_LOCAL_OWNER_PID", str(os.getpid()))
    monkeypatch.chdir(work)
    try:
        yield Stage(home, work)
    finally:
        LocalCloud(home).shutdown()
