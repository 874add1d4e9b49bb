"""The fixtures of the runtime, whose tests start the same processes."""

from tests.train.conftest import alone, fleets, no_store_left, ranks, zygote  # noqa: F401
