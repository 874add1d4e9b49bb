"""A checkpoint made into a state again, when no worker holds one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.messages import Checkpoint
from spotfleet.train import distcp, objects
from spotfleet.train.segments import digest_of
from spotfleet.train.state import Copy

if TYPE_CHECKING:
    from spotfleet.train.control import Control
    from spotfleet.train.state import State

# The last word of an error that ends a job: a traceback shows no hint.
ANEW = "To start without it, `spotfleet train` again: a new job begins at step 0 and keeps checkpoints of its own"

FETCH_LIMIT_S = 120.0  # for the agent to bring the file that its orders name
OTHER_LIMIT_S = 120.0  # for orders to name another one than what was found damaged
RETRY_S = 1.0
TELL_S = 1.0
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
        raise _unreadable(path.name, named, error) from error
    return Copy(held.version, held.position, held.schema, held.tensors)


def read_url(named: Checkpoint, work: Path, came: Callable[[int], None] = lambda size: None) -> Copy:
    """As `read`, from an object store by way of a folder in `work`. OSError when the store does not answer. `came`
    hears of the size of each piece."""
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="restore-", dir=work) as folder:
        try:
            objects.fetch(named, Path(folder), came)
        except objects.NotTheOne as error:
            raise CheckpointDamaged(
                f"checkpoint of version {named.version} at {named.url} is not the one that was kept: {error}",
                hint="look at that folder; without a whole checkpoint there, `spotfleet train` again begins anew",
            ) from error
        try:
            with distcp.in_folder(folder) as opened:
                held = distcp.read(opened)
        except distcp.UNREADABLE as error:
            raise _unreadable(named.url, named, error) from error
    return Copy(held.version, held.position, held.schema, held.tensors)


def _unreadable(name: str, named: Checkpoint, error: Exception) -> UsageError:
    return UsageError(f"checkpoint {name} of version {named.version} is whole, but cannot be read here: "
                      f"{type(error).__name__}: {_brief(error)}. It needs the versions of spotfleet, torch "
                      f"({torch.__version__} here) and of the script's own classes that wrote it. {ANEW}")


def install(state: State, named: Checkpoint, work: Path = Path(),
            came: Callable[[int], None] = lambda size: None) -> None:
    """Make `state` what is kept; errors as in `read`, and UsageError when the script builds something else."""
    held = read_url(named, work, came) if named.url else read(named)
    try:
        state.install(held)
        state.mark(made_in=named.generation)
    except distcp.UNREADABLE as error:
        name = named.url or Path(named.path).name
        raise UsageError(f"checkpoint {name} of version {named.version} does not fit what the script builds now: "
                         f"{_brief(error)}. {ANEW}") from error


def _brief(error: Exception) -> str:
    """Its first line: torch adds advice that fits other cases."""
    return str(error).partition("\n")[0][:BRIEF_CHARS].rstrip(".")


def restore(control: Control, state: State, work: Path) -> None:
    """If the orders name a checkpoint, hold what it holds.

        named --here--> installed
          '-- the one at its url is damaged: told, and another one is waited for, OTHER_LIMIT_S
          '-- its store does not answer: asked again, until nothing has come for FETCH_LIMIT_S

    With what is damaged the newest whole one beside it is told, which nobody may know of.
    """
    refused: Checkpoint | None = None
    while True:
        named = _wait_named(control, refused)
        if named is None:
            return
        try:
            _install_at_length(control, state, named, work)
            return
        except CheckpointDamaged as error:
            if not named.url or named == refused:
                raise
            print(f"spotfleet: {error}; waiting for orders to take another one", flush=True)
            refused = named
            control.update(**_beside(named), damaged=named)


def _wait_named(control: Control, refused: Checkpoint | None) -> Checkpoint | None:
    """What the orders name, once it is here; after OTHER_LIMIT_S again what was refused, if they name nothing else."""

    def ready() -> bool:
        named = control.orders.restore
        return named is None or (named != refused and bool(named.path or named.url))

    with control.cv:
        limit_s = FETCH_LIMIT_S if refused is None else OTHER_LIMIT_S
        if not control.cv.wait_for(ready, limit_s) and refused is None:
            raise SpotfleetError(f"the checkpoint to resume from has not arrived within {limit_s:g} s",
                                 hint="look at the agent's log on this host")
        return control.orders.restore


def _beside(named: Checkpoint) -> dict[str, Checkpoint]:
    try:
        found = objects.newest(named.url.rpartition("/")[0], named)
    except OSError as error:
        print(f"spotfleet: what lies beside {named.url} cannot be listed: {error}", flush=True)
        return {}
    return {"checkpoint": found} if found is not None else {}


class _Progress:
    """Tells the dispatcher that a checkpoint still comes, so that nobody takes this worker for hung."""

    def __init__(self, control: Control) -> None:
        self._control, self._here, self._best = control, 0, 0
        self._told_at = self.moved_at = time.monotonic()

    def again(self) -> None:
        self._here = 0

    def came(self, size: int) -> None:
        self._here, now = self._here + size, time.monotonic()
        if self._here <= self._best:
            return
        self._best, self.moved_at = self._here, now
        if now - self._told_at >= TELL_S:
            self._told_at = now
            self._control.update(fetched=self._best)


def _install_at_length(control: Control, state: State, named: Checkpoint, work: Path) -> None:
    """Install it; a store that does not answer is asked again for a while."""
    progress = _Progress(control)
    while True:
        progress.again()
        try:
            install(state, named, work, progress.came)
            return
        except OSError as error:
            if time.monotonic() > progress.moved_at + FETCH_LIMIT_S:
                raise SpotfleetError(
                    f"the checkpoint of version {named.version} cannot be fetched from {named.url} within "
                    f"{FETCH_LIMIT_S:g} s: {error}",
                    hint="give the job's script what obstore needs to read there: AWS_*, GOOGLE_* or AZURE_* variables",
                ) from error
            time.sleep(RETRY_S)
