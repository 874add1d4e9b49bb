"""A host that falls silent: its network link goes down, its processes live on. Needs root, for network namespaces."""

from __future__ import annotations

import os
from typing import Any


def measure(rounds: int) -> tuple[str, list[dict[str, Any]]]:
    """(why it was not measured, rows)."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces", []
    return f"not measured ({rounds} rounds asked)", []
