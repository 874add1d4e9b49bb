from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from aws_world import AwsWorld
from provider_worlds import InProcessWorld, LocalWorld, SshWorld, World

WORLDS = {
    "in process": lambda tmp_path, monkeypatch: InProcessWorld(),
    "local": LocalWorld,
    "ssh": SshWorld,
    "aws": AwsWorld,
}


SLOW = {"local"}


@pytest.fixture(params=[pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in WORLDS])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = WORLDS[request.param](tmp_path, monkeypatch)
    yield made
    made.close()
