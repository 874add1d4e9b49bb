"""The outcome of a command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str
