"""Bad days need both stages: a user in front of the command line, and a dispatcher with a fleet of fake agents."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

sys.path[1:1] = [str(Path(__file__).parent.parent / folder) for folder in ("cli", "dispatcher")]

from cli_user import up, user  # noqa: E402, F401
from fake_fleet import Stage, spec  # noqa: E402

from spotfleet.model import FleetSpec  # noqa: E402


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    """Runs a scene, `async def scene(stage)`, with a fleet of the spec that is given."""

    def run(scene: Callable[[Stage], Awaitable[None]], fleet: FleetSpec | None = None) -> None:
        async def main() -> None:
            async with Stage(tmp_path / "dispatcher", fleet or spec()) as stage:
                await scene(stage)

        asyncio.run(main())

    return run
