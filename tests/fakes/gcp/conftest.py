"""The fake of Google Cloud as its own tests use it: one server for a module, as new for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fakes.gcp import GcpCloud


class Moved:
    """A clock that a test moves."""

    now = 1_790_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def server() -> Iterator[GcpCloud]:
    with GcpCloud(clock=Moved()) as cloud:
        yield cloud


@pytest.fixture
def cloud(server: GcpCloud) -> Iterator[GcpCloud]:
    server.clock.now = Moved.now
    server.reset()
    yield server
    assert not server.bugs, server.bugs[0]
    assert not server.findings, server.findings[:10]


@pytest.fixture
def pass_s(cloud: GcpCloud):
    """pass_s(120): so long passes."""

    def move(seconds: float) -> None:
        cloud.clock.now += seconds
        cloud.tick()

    return move
