from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.conftest import dispatcher, stage  # noqa: F401
from tests.support.containers import root_fs


@pytest.fixture(scope="session")
def root() -> Iterator[Path]:
    """The root file system of an image with Python, without torch."""
    if missing := root_fs.why_not():
        pytest.skip(missing)
    try:
        yield root_fs.make()
    except OSError as error:
        pytest.skip(f"no root file system can be made here: {error}")
