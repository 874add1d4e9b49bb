"""Versions on disk: written in the background by rank 0, read back when no worker holds the state.

A file is `ckpt-VERSION.pt` in SPOTFLEET_WORK: written under another name, synced, then renamed, so it is whole or
absent. It is announced in the report with its sha256 and generation; the agent carries it to the dispatcher. Only
tensors and plain values are read by torch (weights_only); the position inside is a pickle, opened only after the
digest that the dispatcher vouches for has been found right.

Threads: the main thread copies the state (`at_boundary`, `final`); one writer thread at a time turns a copy, which
nobody else touches, into a file. The report is the only thing both change, through `Control.update`.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.messages import Checkpoint
from spotfleet.train.state import Copy

if TYPE_CHECKING:
    from spotfleet.train.runtime import Runtime
    from spotfleet.train.state import State

# The last word of an error that ends a job: a traceback shows no hint.
ANEW = "To start without it, `spotfleet train` again: a new job begins at step 0 and keeps checkpoints of its own"

KEEP = 2
RETRY_S = 10.0  # after one that could not be written
AGAIN_S = 5.0  # while `checkpoint_now` stands: how often
FETCH_LIMIT_S = 120.0  # for the agent to bring the file that its orders name
FORMAT = 1
BRIEF_CHARS = 300
# What torch, pickle and a file of another layout raise.
UNREADABLE = (UsageError, RuntimeError, pickle.UnpicklingError, AttributeError, ImportError, LookupError, TypeError,
              ValueError, EOFError, OSError)


class CheckpointDamaged(SpotfleetError):
    """The file is not the one that was named. Nobody's script is to blame: another start fetches it again."""

    blame_peer = True


def write(held: Copy, folder: Path, generation: int) -> Checkpoint:
    """`held` as a file in `folder`, whole and synced. OSError, and nothing is left, when the disk refuses it."""
    folder.mkdir(parents=True, exist_ok=True)
    path, part = folder / f"ckpt-{held.version}.pt", folder / f".ckpt-{held.version}.part"
    about = pickle.dumps((held.position, held.schema))
    try:
        with open(part, "wb") as file:
            torch.save({"format": FORMAT, "version": held.version, "tensors": held.tensors,
                        "about": torch.frombuffer(bytearray(about), dtype=torch.uint8)}, file)
            file.flush()
            os.fsync(file.fileno())
        digest = digest_of(part)
        os.replace(part, path)
    except RuntimeError as error:  # torch's writer says only that it could not go on
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    finally:
        part.unlink(missing_ok=True)
    folder_fd = os.open(folder, os.O_RDONLY)
    os.fsync(folder_fd)
    os.close(folder_fd)
    return Checkpoint(held.version, digest, path.stat().st_size, generation, str(path))


def digest_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
        held: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if held["format"] != FORMAT:
            raise UsageError(f"format {held['format']} where {FORMAT} is understood")
        position, schema = pickle.loads(held["about"].numpy().tobytes())
        return Copy(held["version"], position, schema, held["tensors"])
    except UNREADABLE as error:
        raise UsageError(f"checkpoint {path.name} of version {named.version} is whole, but cannot be read here: "
                         f"{type(error).__name__}: {_brief(error)}. It needs the versions of spotfleet, torch "
                         f"({torch.__version__} here) and of the script's own classes that wrote it. {ANEW}") from error


def install(state: State, named: Checkpoint) -> None:
    """Make `state` what the file holds; errors as in `read`, and UsageError when the script builds something else."""
    held = read(named)
    try:
        state.install(held)
    except UNREADABLE as error:
        raise UsageError(f"checkpoint {Path(named.path).name} of version {named.version} does not fit what the "
                         f"script builds now: {_brief(error)}. {ANEW}") from error


def _brief(error: Exception) -> str:
    """Its first line: torch adds advice that fits other cases."""
    return str(error).partition("\n")[0][:BRIEF_CHARS].rstrip(".")


class Checkpointer:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._due_from = time.monotonic()
        self._now_ordered = False
        self._writer: threading.Thread | None = None
        self._written: list[Path] = []
        self._failed_at: float | None = None  # when the last one could not be written
        self._rested = (0, 0)  # generation and version that were written last at rest

    def at_boundary(self, state: State) -> None:
        """Called by every rank when its tensors and position are whole; rank 0 begins a checkpoint if one is due."""
        runtime = self._runtime
        if runtime.place.rank != 0 or not runtime.work:
            return
        if (self._writer is not None and self._writer.is_alive()) or not self._due():
            return
        self._due_from = time.monotonic()
        self._start(state.copy())

    def _due(self) -> bool:
        control = self._runtime.control
        assert control is not None
        orders = control.orders
        first, self._now_ordered = orders.checkpoint_now and not self._now_ordered, orders.checkpoint_now
        every_s = orders.checkpoint_every_s
        if orders.checkpoint_now:
            every_s = min(every_s, AGAIN_S) if every_s > 0 else AGAIN_S
        if self._failed_at is not None and time.monotonic() - self._failed_at >= min(RETRY_S, every_s):
            return True
        return first or (every_s > 0 and time.monotonic() - self._due_from >= every_s)

    def is_wanted_at_rest(self, state: State) -> bool:
        """Between two generations: what is held here is to be written, and has not been since the last one."""
        runtime, control = self._runtime, self._runtime.control
        assert control is not None
        leads = runtime.place.rank == 0 or control.orders.stands_in
        wanted = control.orders.checkpoint_now and leads and bool(runtime.work) and state.reported_version > 0
        return wanted and self._rested != (runtime.generation, state.version)

    def at_rest(self, state: State) -> None:
        """Write what is held, and wait for it."""
        self._rested = (self._runtime.generation, state.version)
        if self._writer is not None:
            self._writer.join()
        self._start(state.copy())
        assert self._writer is not None
        self._writer.join()

    def final(self, state: State) -> None:
        """Write the finished state and wait for it, on rank 0."""
        runtime = self._runtime
        control = runtime.control
        assert control is not None
        if runtime.place.rank != 0 or not runtime.work or control.orders.checkpoint_every_s <= 0:
            return
        if self._writer is not None:
            self._writer.join()
        self._start(state.copy())
        assert self._writer is not None
        self._writer.join()

    def _start(self, held: Copy) -> None:
        generation = self._runtime.generation
        self._writer = threading.Thread(target=self._write, args=(held, generation), name="spotfleet-checkpoint")
        self._writer.start()

    def _write(self, held: Copy, generation: int) -> None:
        control = self._runtime.control
        assert control is not None
        try:
            done = write(held, Path(self._runtime.work), generation)
        except OSError as error:  # a full disk must not end training; the next one may fit
            self._say(f"spotfleet: checkpoint of version {held.version} cannot be written: {error.strerror or error}; "
                      f"training goes on, and it is tried again within {RETRY_S:g} s")
            self._failed_at = time.monotonic()
            return
        self._failed_at = None
        control.update(checkpoint=done)
        self._written = [p for p in self._written if p != Path(done.path)] + [Path(done.path)]
        for old in self._written[:-KEEP]:
            old.unlink(missing_ok=True)
        self._written = self._written[-KEEP:]

    def _say(self, line: str) -> None:
        try:
            print(line, flush=True)
        except OSError:
            pass  # the log lies on the same disk

    def restore(self, state: State) -> None:
        """If the orders name a checkpoint, hold what it holds."""
        control = self._runtime.control
        assert control is not None

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
