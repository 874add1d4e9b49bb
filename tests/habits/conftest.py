from __future__ import annotations

import pytest

from spotfleet.worker import store


@pytest.fixture(autouse=True)
def no_store_left():
    """Bootstrap stores serve as long as their process, which here is that of all tests."""
    yield
    store.close_all()
