"""The command `launch`: `up`, then the file's `setup` and `run` as a job, as `sky launch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spotfleet.api import Fleet
from spotfleet.api.fleet import UP_TIMEOUT_S
from spotfleet.cli.commands import write
from spotfleet.cli.console import next_command, print_message
from spotfleet.config import Given
from spotfleet.errors import UsageError

WITHOUT_LIMIT_S = 10 * 365 * 86400.0  # --retry-until-up


def launch(file: Path, *, cluster: str, down: bool, detach: bool, yes: bool, env: Sequence[str],
           secret: Sequence[str], dryrun: bool, infra: str, num_nodes: int, env_file: Path | None, retry: bool,
           resources: Mapping[str, Any]) -> None:
    variables = (of_file(env_file) if env_file else {}) | write.variables(env)
    over = {key: value for key, value in resources.items() if value not in (None, "")}
    given = Given(infra, variables, write.secrets(secret), name=cluster, resources=over, num_nodes=num_nodes)
    if dryrun:
        write.show_plan(file, given)
        return
    loaded = write.load_file(file, given)
    fleet = write.bring_up(loaded, file, yes=yes, timeout_s=WITHOUT_LIMIT_S if retry else UP_TIMEOUT_S)
    if not loaded.spec.run:
        print_message(f"{file} has no `run`: fleet {fleet.name} is up, and runs nothing")
        next_command(f"spotfleet train SCRIPT.py -c {fleet.name}", f"spotfleet down {fleet.name}")
        return
    _run(fleet, down=down, detach=detach)


def _run(fleet: Fleet, *, down: bool, detach: bool) -> None:
    write.train(fleet.name, "", (), detach=detach, down=down, np="", wait=False, env=(), secret=(), name_of_job="",
                spares=0, slots=0, priority=0, resize_policy="", growth="", deadline="", work="",
                restarts=("", "", "", 0, "30s", False))


def of_file(path: Path) -> dict[str, str]:
    """Return the variables of a file with a line NAME=VALUE each, as `.env` files have them."""
    found = {}
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--env-file {path} cannot be read: {error}") from None
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.removeprefix("export ").partition("=")
        if not equals or not name.strip().isidentifier():
            raise UsageError(f"--env-file {path}:{number}: expected NAME=VALUE")  # the line may hold a secret
        value = value.strip()
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        found[name.strip()] = value[1:-1] if quoted else value
    return found
