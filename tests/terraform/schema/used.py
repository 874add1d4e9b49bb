"""Resources and data sources that the modules use."""

from __future__ import annotations

import re
from pathlib import Path

MODULES = Path(__file__).parents[3] / "terraform"
BLOCK = re.compile(r'^(resource|data) "(\w+)" "\w+"', re.M)


def named(prefix: str) -> list[tuple[str, str]]:
    """Return ("resource" or "data", type) of each one that begins with `prefix`, in order."""
    found = {match for file in MODULES.rglob("*.tf") for match in BLOCK.findall(file.read_text())}
    return sorted(match for match in found if match[1].startswith(prefix))
