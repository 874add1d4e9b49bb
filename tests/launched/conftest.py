"""A home of its own for each test, and scenes with a dispatcher in the test's process."""

from tests.e2e.conftest import stage  # noqa: F401
from tests.support.dispatcher.scenes import play  # noqa: F401
