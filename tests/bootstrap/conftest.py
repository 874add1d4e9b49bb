from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfleet.bootstrap import Wheel
from tests.support.bootstrap.existing_machine import ExistingMachine, stand_in


@pytest.fixture(scope="session")
def idle_wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    return stand_in(tmp_path_factory.mktemp("stand-in"))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[ExistingMachine]:
    """Whatever the test leaves is removed by the product's own means, and must be gone then."""
    made = ExistingMachine(tmp_path)
    yield made
    for settings in made.root.glob("*/settings.sh"):
        assert made.remove(settings.parent.name).stderr == ""
        assert made.processes(settings.parent.name) == {}
