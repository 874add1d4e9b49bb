"""Memory of GPUs, for files that ask for a GPU by its memory instead of its name.

The names are those of the catalog (`catalog/data`); a plan leaves out the names that its provider does not sell.
"""

from __future__ import annotations

import re

MEMORY_GB = {
    "T4": 16, "V100": 16, "A10": 24, "A10G": 24, "L4": 24, "V100-32GB": 32, "A100": 40, "L40S": 48, "A100-80GB": 80,
    "H100": 80, "H100-MEGA": 80, "H200": 141, "B200": 180, "GB200": 186, "MI300X": 192, "B300": 288,
}
OF_AMD = frozenset({"MI300X"})
SIZE = re.compile(r"(?:(\d+)(?:GB)?)?(\.\.|\+)?(?:(\d+)(?:GB)?)?", re.I)


def with_memory(text: str = "", maker: str = "nvidia") -> list[str]:
    """Return the GPUs with so much memory: "80GB", "24GB..", "40GB+", "16GB..24GB", or "" for any."""
    found = SIZE.fullmatch(text.replace(" ", ""))
    if found is None or maker.lower() not in ("nvidia", "amd"):
        return []
    least, open_end, most = found.groups()
    low = int(least or 0)
    high = int(most) if most else None if open_end or not least else low
    return [name for name, memory in MEMORY_GB.items() if (name in OF_AMD) == (maker.lower() == "amd")
            and low <= memory and (high is None or memory <= high)]
