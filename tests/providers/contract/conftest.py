from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.aws.aws_world import AwsWorld
from tests.support.contract.lambda_world import LambdaWorld
from tests.support.contract.provider_worlds import InProcessWorld, LocalWorld, SshWorld, World
from tests.support.gcp.gcp_world import GcpWorld
from tests.support.toy.toy_world import ToyWorld

WORLDS = {
    "in process": lambda tmp_path, monkeypatch: InProcessWorld(),
    "local": LocalWorld,
    "ssh": SshWorld,
    "aws": AwsWorld,
    "gcp": GcpWorld,
    "toy": ToyWorld,
    "lambda": LambdaWorld,
}


REAL = {"local", "ssh"}  # start processes


@pytest.fixture(params=[pytest.param(n, marks=[pytest.mark.processes] if n in REAL else []) for n in WORLDS])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = WORLDS[request.param](tmp_path, monkeypatch)
    yield made
    made.close()
