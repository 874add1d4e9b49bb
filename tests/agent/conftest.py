from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_dispatcher import FakeDispatcher
from agent_stage import Stage


@pytest.fixture
def dispatcher(tmp_path: Path) -> Iterator[FakeDispatcher]:
    fake = FakeDispatcher(tmp_path)
    fake.start()
    yield fake
    fake.close()


@pytest.fixture
def stage(tmp_path: Path, dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """An agent without torch: its zygote is ready at once. See `warm_stage` for the other."""
    stage = Stage(tmp_path / "home", dispatcher)
    block = tmp_path / "without_torch"
    for name in ("torch", "numpy"):
        (block / name).mkdir(parents=True)
        (block / name / "__init__.py").write_text("raise ImportError('hidden by this test')\n")
    stage.env["PYTHONPATH"] = os.pathsep.join([str(block), os.environ.get("PYTHONPATH", "")])
    yield stage
    stage.end()


@pytest.fixture
def warm_stage(tmp_path: Path, dispatcher: FakeDispatcher) -> Iterator[Stage]:
    """An agent whose zygote imports torch."""
    stage = Stage(tmp_path / "home", dispatcher)
    yield stage
    stage.end()
