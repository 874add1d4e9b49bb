"""The fixture that plays a scene with a fleet of its own, for all tests that have a dispatcher in their process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from spotfleet.model import FleetSpec
from tests.support.dispatcher.fake_fleet import Stage, spec


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a scene, `async def scene(stage)`, with a fleet of the spec that is given.

    The waits for what never comes here are short: a last checkpoint of workers that write none, and requests that stay
    open when a dispatcher is stopped.
    """
    monkeypatch.setattr("spotfleet.dispatcher.dispatcher.SAVE_S", 1.0)
    monkeypatch.setattr("spotfleet.dispatcher.daemon.CLOSE_S", 0.1)

    def run(scene: Callable[[Stage], Awaitable[None]], fleet: FleetSpec | None = None) -> None:
        async def main() -> None:
            async with Stage(tmp_path / "dispatcher", fleet or spec()) as stage:
                await scene(stage)

        asyncio.run(main())

    return run
