from __future__ import annotations

import pytest
from train_stage import Fleet


@pytest.fixture
def fleets(tmp_path):
    """Make fleets: fleets(script, ...); all their processes are gone when the test ends."""
    made: list[Fleet] = []

    def make(script: str, **options) -> Fleet:
        folder = tmp_path / f"fleet{len(made)}"
        folder.mkdir()
        made.append(Fleet(folder, script, **options))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()
