"""Every test here gets its own fleet, in one event loop that ends with it."""

from tests.support.dispatcher.scenes import play  # noqa: F401
