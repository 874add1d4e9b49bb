"""Patterns with the wildcards * and ?, as clouds have them in filters and policies."""

from __future__ import annotations

import fnmatch
import re
from functools import cache


def fits(text: str, pattern: str) -> bool:
    """Return whether the whole `text` is as `pattern` says; brackets are no wildcards."""
    return _compiled(pattern).fullmatch(text) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(pattern.replace("[", "[[]")))
