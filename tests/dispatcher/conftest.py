"""Every test here gets its own fleet, in one event loop that ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fake_fleet import Stage, spec

from spotfleet.model import FleetSpec


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    """Runs a scene, `async def scene(stage)`, with a fleet of the spec that is given."""

    def run(scene: Callable[[Stage], Awaitable[None]], fleet: FleetSpec | None = None) -> None:
        async def main() -> None:
            async with Stage(tmp_path / "dispatcher", fleet or spec()) as stage:
                await scene(stage)

        asyncio.run(main())

    return run
