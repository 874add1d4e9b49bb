"""The simulated fleet is made of the worlds of two other folders."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("membership", "fleet"):
    if (path := str(Path(__file__).parent.parent / folder)) not in sys.path:
        sys.path.insert(0, path)
