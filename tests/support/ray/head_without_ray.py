"""The supervisor of a Ray head on a machine without Ray: `python -m tests.support.ray.head_without_ray`."""

from __future__ import annotations

import sys

from spotfleet.ray.cluster import head

if __name__ == "__main__":
    head.ray_version = lambda: ""
    sys.exit(head.main())
