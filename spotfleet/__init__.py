"""spotfleet: train PyTorch models on spot machines without losing work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spotfleet.version import __version__

if TYPE_CHECKING:
    from spotfleet.api import Fleet, Job

__all__ = ["Fleet", "Job", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the Python API on first use, so that workers and hosts do not pay for it."""
    if name in ("Fleet", "Job"):
        from spotfleet import api

        return getattr(api, name)
    raise AttributeError(f"module 'spotfleet' has no attribute {name!r}")
