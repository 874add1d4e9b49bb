"""`spotfleet train --verify`: proof that a script survives changes, on this machine and without a fleet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import typer

from spotfleet.bundle import scripts
from spotfleet.cli.commands.write import variables, workers
from spotfleet.errors import UsageError
from spotfleet.verify.__main__ import run
from spotfleet.verify.scenarios import DISTURBED

WORKERS, STEPS = 2, 12


def verify(script: str, args: Sequence[str], *, np: str, env: Sequence[str]) -> None:
    """Verify with MIN of `--np` workers, 2 by default, and leave with the status of the verdict."""
    if not script:
        raise UsageError("--verify needs a script", hint="spotfleet train --verify SCRIPT.py")
    if Path(script).is_file() and (kind := scripts.kind_of(scripts.read(Path(script)))).gang:
        raise UsageError(f"--verify compares elastic jobs, and {script} is a script for torchrun: {kind.why}",
                         hint=f"`spotfleet train {script}` starts it anew from its own checkpoints (docs/jobs.md); "
                              "README, \"Make a script elastic\", is the way to jobs that --verify compares")
    os.environ.update(variables(env))
    count = max(WORKERS, workers(np)[0]) if np else WORKERS
    raise typer.Exit(run(Path(script), args, count, STEPS, tuple(DISTURBED), as_json=False))
