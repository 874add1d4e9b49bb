from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sshd_machines import Machines, why_not


@pytest.fixture
def machines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machines]:
    """A machine for the dispatcher and one for workers, or as many as the module's WORKERS says, which the fleet's key
    opens."""
    if missing := why_not():
        pytest.skip(missing)
    workers = [f"w{n}" for n in range(getattr(request.module, "WORKERS", 1))]
    with Machines(tmp_path / "machines", ["head", *workers]) as made:
        made.admit()
        yield made
