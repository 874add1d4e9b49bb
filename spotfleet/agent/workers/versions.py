"""Versions of Ray and Python on this host, which have to equal the head's."""

from __future__ import annotations

import sys
from importlib import metadata


def ray_version() -> str:
    """Return the version of Ray that is installed here; "" for none. It is not imported."""
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        return ""


def python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
