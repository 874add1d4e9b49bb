"""Conversion of other programs' files to fleet files. Pure: values in, values out.

    ray.py      cluster files of Ray's `ray up`         dstack.py   fleets, tasks and dev environments of dstack
    horovod.py  lists of hosts, as horovodrun takes them            source.py   a mapping whose unread keys are reported

Whatever a fleet file cannot have is a line in `Converted.left_out`. A task file of SkyPilot needs no conversion: `up`
reads it (`config/skypilot.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spotfleet.config.foreign import dstack, ray
from spotfleet.config.foreign.source import Converted

DSTACK_TYPES = ("fleet", "task", "dev-environment", "service", "gateway", "volume")


def kind_of(data: Mapping[str, Any]) -> str:
    """Return the program whose file this is, "Ray" or "dstack"; "" if it is neither's."""
    if isinstance(data.get("provider"), dict) and ("cluster_name" in data or "available_node_types" in data):
        return "Ray"
    return "dstack" if data.get("type") in DSTACK_TYPES else ""


def convert(data: Mapping[str, Any]) -> Converted | None:
    """Return the fleet file for a file of Ray or dstack; None for any other."""
    match kind_of(data):
        case "Ray":
            return ray.convert(data)
        case "dstack":
            return dstack.convert(data)
    return None
