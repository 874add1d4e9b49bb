"""Restoration of a state from a checkpoint, when no worker holds the state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from spotfleet.errors import SpotfleetError, UsageError, is_full
from spotfleet.protocol.messages import Checkpoint
from spotfleet.protocol.proofs import MemberProof
from spotfleet.storage import verified
from spotfleet.storage.checkpoint_folder import Progress, digest_of, ignore, problem_in
from spotfleet.train.checkpoint import format, store_folder
from spotfleet.train.checkpoint.host_copy import HostCopy, HostFolder
from spotfleet.train.checkpoint.peers import NoRoomHere, complete
from spotfleet.train.state.state import Copy

if TYPE_CHECKING:
    from spotfleet.train.comm.group import Group
    from spotfleet.train.state.state import State
    from spotfleet.worker.control import AgentLine

# Ends the message of an error that ends a job: a traceback shows no hint.
RESTART = "To start without it, `spotfleet train` again: a new job begins at step 0 and keeps checkpoints of its own"

FETCH_LIMIT_S = 120.0  # for the agent to fetch the file that the orders name, and without progress from an object store
OTHER_LIMIT_S = 120.0  # for orders to name another checkpoint than the damaged one
FULL_S = 20.0  # wait for a full disk of this host, before it is blamed
RETRY_S = 1.0
REPORT_S = 1.0
BRIEF_CHARS = 300
MOST_NAMED = 5

class CheckpointDamaged(SpotfleetError):
    """The file is not the named one. The script is not at fault: another start fetches it again."""

    blame_peer = True


@contextmanager
def opened(named: Checkpoint, progress: Progress = ignore) -> Iterator[Copy]:
    """Open the copy in the folder of `named`, or in the tar of an earlier release. Its digests are compared unless the
    agent has noted that it has done so; `progress` is called with the size of each piece verified.

    CheckpointDamaged if it is another one, which is then removed; UsageError if it is the right one but cannot be
    read here.
    """
    path = Path(named.path)
    problem = _problem(path, named, progress)
    if problem:
        verified.remove(path)  # so that the agent fetches it again
        raise CheckpointDamaged(f"checkpoint {path.name} of version {named.version} is not the one that was kept: "
                                f"{problem}", hint="it was cut short or changed on this host; it is fetched again")
    with _contents(path, path.name, named) as copy:
        yield copy


def _problem(path: Path, named: Checkpoint, progress: Progress) -> str:
    """Return which file differs from those that were kept, "" if none does."""
    if verified.is_noted(path, named.digest):  # the agent has compared it for all workers here
        progress(verified.state_of(path)[0])
        return ""
    if path.is_dir():
        return problem_in(path, named.digest, progress)
    found = digest_of(path, progress) if path.is_file() else "no file"
    return "" if found == named.digest else f"sha256 {found}, expected {named.digest}"


@contextmanager
def opened_url(named: Checkpoint, place: HostFolder, progress: Progress = ignore) -> Iterator[Copy]:
    """Open the copy, as `opened` does, from an object store by way of one copy for this host.

    OSError when the store does not answer. `progress` is called with the size of each piece received.
    """
    copy = HostCopy(place.folder, named, place.readers)
    try:
        with copy.opened(lambda into, moved: store_folder.fetch(named, into, moved), progress) as folder, \
                _contents(folder, named.url, named) as held:
            yield held
    except store_folder.WrongObject as error:
        raise CheckpointDamaged(
            f"checkpoint of version {named.version} at {named.url} is not the one that was kept: {error}",
            hint="check that folder; without a whole checkpoint in it, `spotfleet train` again starts from step 0",
        ) from error


@contextmanager
def _contents(path: Path, name: str, named: Checkpoint) -> Iterator[Copy]:
    with ExitStack() as stack:
        try:
            held = format.read(stack.enter_context((format.in_folder if path.is_dir() else format.in_tar)(path)))
        except format.UNREADABLE as error:
            raise _unreadable(name, named, error) from error
        yield Copy(held.version, held.position, held.schema, held.tensors)


def _unreadable(name: str, named: Checkpoint, error: Exception) -> UsageError:
    return UsageError(f"checkpoint {name} of version {named.version} is whole, but cannot be read here: "
                      f"{type(error).__name__}: {_brief(error)}. It needs the versions of spotfleet, torch "
                      f"({torch.__version__} here) and of the script's own classes that wrote it. {RESTART}")


def install(state: State, named: Checkpoint, place: HostFolder = HostFolder(),
            progress: Progress = ignore) -> None:
    """Load the named checkpoint into `state`; errors as in `opened`, and UsageError when the script builds another."""
    with opened_url(named, place, progress) if named.url else opened(named, progress) as held:
        try:
            state.install(held)
            state.mark(made_in=named.generation)
        except format.UNREADABLE as error:
            name = named.url or Path(named.path).name
            raise UsageError(f"checkpoint {name} of version {named.version} does not fit what the script builds now: "
                             f"{_brief(error)}. {RESTART}") from error


def _brief(error: Exception) -> str:
    """Return the first line of an error: the advice that torch adds fits other cases."""
    return str(error).partition("\n")[0][:BRIEF_CHARS].rstrip(".")


def complete_with_peers(control: AgentLine, group: Group, named: Checkpoint) -> None:
    """Receive the files of `named` that this host lacks from the other ranks; errors as `peers.complete` raises."""
    complete(group, named, lambda: control.update(lacks=named.digest), _Progress(control).received)


def restore(control: AgentLine, state: State, folder: Path, proof: MemberProof = MemberProof(),
            first: Checkpoint | None = None) -> None:
    """Load the checkpoint `first`, or the one that the orders name, if they name one; from an object store by way of
    `folder`, which the job's workers on this host share.

        named --fetched--> installed
          |-- damaged at its url: reported; orders for another one are awaited for OTHER_LIMIT_S
          |-- this host's disk is full for FULL_S: NoRoomHere, so that another host restores it
          '-- its store does not answer: retried until nothing has arrived for FETCH_LIMIT_S

    The report of a damaged one names the object, and includes the newest whole checkpoint beside it, which the
    dispatcher may not know.
    """
    refused: Checkpoint | None = None
    while True:
        named, first = first or _wait_named(control, refused), None
        if named is None:
            return
        try:
            _install_with_retries(control, state, named, folder)
            return
        except CheckpointDamaged as error:
            if not named.url or named == refused:
                raise
            print(f"spotfleet: {error}; waiting for orders to take another one", flush=True)
            refused = named
            beside, foreign = _newest_beside(named, proof)
            control.update(**beside, damaged=named, damaged_why=_brief(error.__cause__ or error) + foreign)


def _wait_named(control: AgentLine, refused: Checkpoint | None) -> Checkpoint | None:
    """Wait for the checkpoint that the orders name, and return it; after OTHER_LIMIT_S, even the refused one."""

    def ready() -> bool:
        named = control.orders.restore
        return named is None or (named != refused and bool(named.path or named.url))

    with control.cv:
        limit_s = FETCH_LIMIT_S if refused is None else OTHER_LIMIT_S
        if not control.cv.wait_for(ready, limit_s) and refused is None:
            raise SpotfleetError(f"the checkpoint to resume from has not arrived within {limit_s:g} s",
                                 hint="read the agent's log on this host")
        return control.orders.restore


def _newest_beside(named: Checkpoint, proof: MemberProof) -> tuple[dict[str, Checkpoint], str]:
    """Return the field of the report about the newest one beside `named`, and a clause about newer ones that
    do not count."""
    try:
        found, foreign = store_folder.newest(named.url.rpartition("/")[0], named, proof)
    except OSError as error:
        print(f"spotfleet: what lies beside {named.url} cannot be listed: {error}", flush=True)
        return {}, ""
    why = f"; {', '.join(foreign[:MOST_NAMED])} beside it: no mark of a worker of this job" if foreign else ""
    return {"checkpoint": found} if found is not None else {}, why


class _Progress:
    """Reports of the progress of a fetch or a verification, without which the dispatcher would take this worker for
    hung."""

    def __init__(self, control: AgentLine) -> None:
        self._control, self._here, self._most = control, 0, 0
        self._reported_at = self.moved_at = time.monotonic()

    def restart(self) -> None:
        self._here = 0

    def received(self, size: int) -> None:
        self._here, now = self._here + size, time.monotonic()
        if self._here <= self._most:
            return
        self._most, self.moved_at = self._here, now
        if now - self._reported_at >= REPORT_S:
            self._reported_at = now
            self._control.update(fetched=self._most)


def _install_with_retries(control: AgentLine, state: State, named: Checkpoint, folder: Path) -> None:
    """Install the checkpoint; retry a store that does not answer until FETCH_LIMIT_S pass without progress."""
    progress, full_since, place = _Progress(control), None, control.orders.assignment
    while True:
        progress.restart()
        try:
            install(state, named, HostFolder(folder, place.local_size if place is not None else 1), progress.received)
            return
        except OSError as error:
            if is_full(error):
                full_since = full_since or time.monotonic()
                if time.monotonic() - full_since >= FULL_S:
                    raise NoRoomHere(f"checkpoint {named.version} finds no room here: {error}",
                                     hint="make room on this host, or give hosts larger disks") from error
            elif time.monotonic() > progress.moved_at + FETCH_LIMIT_S:
                raise SpotfleetError(
                    f"the checkpoint of version {named.version} cannot be fetched from {named.url} within "
                    f"{FETCH_LIMIT_S:g} s: {error}",
                    hint="give the job's script what obstore needs to read there: AWS_*, GOOGLE_* or AZURE_* variables",
                ) from error
            time.sleep(RETRY_S)
