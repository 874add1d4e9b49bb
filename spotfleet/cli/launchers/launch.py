"""The command `launch`: `up`, then the file's `setup` and `run` as a job, as `sky launch`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spotfleet.api import Fleet
from spotfleet.api.fleet import UP_TIMEOUT_S
from spotfleet.cli.commands import write
from spotfleet.cli.console import next_command, print_message
from spotfleet.config import Given


def launch(file: Path, *, cluster: str, down: bool, detach: bool, yes: bool, env: Sequence[str],
           secret: Sequence[str], dryrun: bool, infra: str) -> None:
    given = Given(infra, write.variables(env), write.secrets(secret), name=cluster)
    if dryrun:
        write.show_plan(file, given)
        return
    loaded = write.load_file(file, given)
    fleet = write.bring_up(loaded, file, yes=yes, timeout_s=UP_TIMEOUT_S)
    if not loaded.spec.run:
        print_message(f"{file} has no `run`: fleet {fleet.name} is up, and runs nothing")
        next_command(f"spotfleet train SCRIPT.py -c {fleet.name}", f"spotfleet down {fleet.name}")
        return
    _run(fleet, down=down, detach=detach)


def _run(fleet: Fleet, *, down: bool, detach: bool) -> None:
    write.train(fleet.name, "", (), detach=detach, down=down, np="", wait=False, env=(), secret=(), name_of_job="",
                spares=0, slots=0, priority=0, resize_policy="", growth="", deadline="", work="",
                restarts=("", "", "", 0, "30s", False))
