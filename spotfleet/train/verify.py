"""Command `python -m spotfleet.train.verify SCRIPT [ARGS]`: `spotfleet.verify` under the name of the engine."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("spotfleet.verify", run_name="__main__", alter_sys=True)
