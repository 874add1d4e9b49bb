"""A checkpoint made into a state again, when no worker holds one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.messages import Checkpoint
from spotfleet.train import distcp
from spotfleet.train.segments import digest_of
from spotfleet.train.state import Copy

if TYPE_CHECKING:
    from spotfleet.train.control import Control
    from spotfleet.train.state import State

# The last word of an error that ends a job: a traceback shows no hint.
ANEW = "To start without it, `spotfleet train` again: a new job begins at step 0 and keeps checkpoints of its own"

FETCH_LIMIT_S = 120.0  # for the agent to bring the file that its orders name
BRIEF_CHARS = 300

class CheckpointDamaged(SpotfleetError):
    """The file is not the one that was named. Nobody's script is to blame: another start fetches it again."""

    blame_peer = True


def read(named: Checkpoint) -> Copy:
    """The copy in the file that `named` tells. CheckpointDamaged if it is another file, which is then removed;
    UsageError if it is the one and cannot be read here."""
    path = Path(named.path)
    found = digest_of(path) if path.is_file() else "no file"
    if found != named.digest:
        path.unlink(missing_ok=True)  # so that the agent brings it again
        raise CheckpointDamaged(f"checkpoint {path.name} of version {named.version} is not the one that was kept: "
                                f"sha256 {found}, expected {named.digest}",
                                hint="it was cut short or changed on this host; it is fetched again")
    try:
        with distcp.in_tar(path) as opened:
            held = distcp.read(opened)
    except distcp.UNREADABLE as error:
        raise UsageError(f"checkpoint {path.name} of version {named.version} is whole, but cannot be read here: "
                         f"{type(error).__name__}: {_brief(error)}. It needs the versions of spotfleet, torch "
                         f"({torch.__version__} here) and of the script's own classes that wrote it. {ANEW}") from error
    return Copy(held.version, held.position, held.schema, held.tensors)


def install(state: State, named: Checkpoint) -> None:
    """Make `state` what the file holds; errors as in `read`, and UsageError when the script builds something else."""
    held = read(named)
    try:
        state.install(held)
    except distcp.UNREADABLE as error:
        raise UsageError(f"checkpoint {Path(named.path).name} of version {named.version} does not fit what the "
                         f"script builds now: {_brief(error)}. {ANEW}") from error


def _brief(error: Exception) -> str:
    """Its first line: torch adds advice that fits other cases."""
    return str(error).partition("\n")[0][:BRIEF_CHARS].rstrip(".")


def restore(control: Control, state: State) -> None:
    """If the orders name a checkpoint, hold what it holds."""

    def ready() -> bool:
        named = control.orders.restore
        return named is None or bool(named.path)

    with control.cv:
        if not control.cv.wait_for(ready, FETCH_LIMIT_S):
            raise SpotfleetError(f"the checkpoint to resume from has not arrived within {FETCH_LIMIT_S:g} s",
                                 hint="look at the agent's log on this host")
        named = control.orders.restore
    if named is not None:
        install(state, named)
