"""What this process does now, for the watchdog: asked once a second, so that steps pay nothing for it."""

from __future__ import annotations

import os
import sys

_HERE = os.path.dirname(__file__)
_WAIT = "_wait"  # every wait for a peer goes through a method of this name


def waits_for_peers() -> bool:
    """Is any thread in a collective of ours? Else the process is in the user's code, or hangs in something else."""
    for frame in sys._current_frames().values():
        at = frame
        while at is not None:
            if at.f_code.co_name == _WAIT and os.path.dirname(at.f_code.co_filename) == _HERE:
                return True
            at = at.f_back
    return False
