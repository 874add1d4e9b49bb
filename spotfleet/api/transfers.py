"""Transfer of a dispatcher's files to this machine, by the archive's manifest: resumed, and checked.

    manifest --several streams, see `storage/mirror.py`--> all keys whole --> a folder
        ^---- some keys were replaced or damaged: at most ROUNDS times ----'
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from spotfleet.errors import DispatcherUnreachable, SpotfleetError
from spotfleet.protocol.archive import ArchiveFile, ArchiveHead, ManifestCut, RefusedFile, parse
from spotfleet.storage.mirror import STREAMS, Mirror, StoreReader, Tally
from spotfleet.storage.object_store import NEEDS, ObjectStore
from spotfleet.storage.store import StoreEntry, UnsafeKey, check_key
from spotfleet.transport.archive import ArchiveReader, LinkRate
from spotfleet.transport.client import DispatcherClient
from spotfleet.words import counted, size, span, speed

ROUNDS = 4
MANIFEST = "manifest.json"  # lists the files of a checkpoint in an object store
LEAVE = "`spotfleet down` without --bring-checkpoints leaves it where it is"
CHECKPOINT = re.compile(r"jobs/[^/]+/checkpoints/[^/]+")
WAITING_LINES = 500_000  # lines of a manifest in memory
LINE_S = 2.0  # between two lines of progress
RATE_S = 5.0  # the rate on screen is that of so many seconds
LEAST_BYTES = 1 << 20  # a transfer with limited patience is given up when fewer arrive in that time

Progress = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Fetched:
    """What a transfer has brought."""

    files: Path  # the folder with all of it
    moved: int  # bytes that came over the wire
    at: float  # dispatcher's time of the manifest
    elsewhere: tuple[ArchiveFile, ...] = ()  # checkpoints that stay where they are
    refused: tuple[RefusedFile, ...] = ()  # files that are not in `files` under their keys


class _Screen:
    """Lines about a transfer: bytes, rate, time left."""

    def __init__(self, progress: Progress, what: str, patience_s: float = math.inf) -> None:
        self._progress, self._what, self._patience_s = progress, what, patience_s
        self._begun = self._said_at = self._advanced_at = time.monotonic()
        self._seen: list[tuple[float, int]] = [(self._begun, 0)]
        self._here = 0

    def wait(self) -> None:
        """Note that the dispatcher reads a large file meanwhile."""
        self._advanced_at = time.monotonic()

    def show(self, tally: Tally) -> None:
        """Raise SpotfleetError once less than LEAST_BYTES have arrived in `patience_s`."""
        now = time.monotonic()
        if abs(tally.here - self._here) >= LEAST_BYTES:  # each round counts from 0
            self._here, self._advanced_at = tally.here, now
        elif now - self._advanced_at >= self._patience_s:
            raise SpotfleetError(f"{self._what} is given up: less than {size(LEAST_BYTES)} arrived whole in "
                                 f"{span(self._patience_s)}", hint="a faster link brings it")
        self._seen.append((now, tally.moved))
        while len(self._seen) > 2 and now - self._seen[1][0] >= RATE_S:
            del self._seen[0]
        if now - self._said_at < LINE_S:
            return
        self._said_at = now
        (since, before), total = self._seen[0], max(tally.total, tally.here)
        moved, took_s = max(0, tally.moved - before), max(now - since, 1e-3)
        left = f", {span((total - tally.here) * took_s / moved)} left" if moved and total > tally.here else ""
        pace = f", {speed(moved, took_s)}" if moved else ""
        self._progress(f"{self._what}: {size(tally.here)} of {size(total)}{pace}{left}")

    def end(self, tally: Tally) -> None:
        took_s = max(time.monotonic() - self._begun, 1e-3)
        here = f", {size(tally.present)} were here" if tally.present else ""
        self._progress(f"{self._what}: {counted(tally.files, 'file')}, {size(tally.moved)} copied in {span(took_s)} "
                       f"({speed(tally.moved, took_s)}){here}")


def fetch(client: DispatcherClient, draft: Path, progress: Progress, what: str, *, outputs: str = "",
          seed: Callable[[str], Path] | None = None, bring_checkpoints: bool = False,
          patience_s: float = math.inf) -> Fetched | None:
    """Copy the archive, or with `outputs` the outputs of that job, to a folder in `draft`; the caller moves it on. None
    if the dispatcher has no manifest: an older one, or one that does not know the job. `seed` returns the path where
    an earlier call may have left a key; what is there is not copied again. A transfer of which less than LEAST_BYTES
    arrive in `patience_s` is given up.

    Raises SpotfleetError for a manifest that leads out of the folder and for files that never arrive whole. After each
    error what is in `draft` counts for the next call.
    """
    screen = _Screen(progress, what, patience_s)
    mirror, wrong = Mirror(draft, screen.show, seed=seed), list[str]()
    with ExitStack() as stack:
        link = LinkRate(client.streams)
        readers = [ArchiveReader(client, link, outputs) for _ in range(client.streams)]
        for reader in readers:
            stack.callback(reader.close)
        for _ in range(ROUNDS):
            lines = client.archive_manifest(outputs=outputs, check=bool(wrong), bring=bring_checkpoints)
            if lines is None:
                return None
            listed = _Listed(
                lines if client.streams == 1 else _drained(lines, lambda: screen.show(mirror.tally)), mirror.tally,
                bring_checkpoints, lambda: (screen.wait(), screen.show(mirror.tally)))
            try:
                wrong = mirror.copy(listed.entries(), readers)
            except UnsafeKey as error:
                raise SpotfleetError(f"the dispatcher sends an unsafe list of files: {error}",
                                     hint="nothing was written outside its folder; is that machine in other hands?",
                                     ) from None
            except OSError as error:
                raise SpotfleetError(f"the files cannot be written to {draft}: {error.strerror or error}",
                                     hint="make room or a folder of your own there, and try again") from None
            except ManifestCut as error:
                raise DispatcherUnreachable(str(error), hint="try again: it goes on where it stopped") from None
            if not wrong:
                screen.end(mirror.tally)
                refused = (RefusedFile(key, mirror.path_in_files(key), why) for key, why in mirror.refused.items())
                return Fetched(mirror.files, mirror.moved, listed.at, tuple(listed.elsewhere), tuple(refused))
    raise SpotfleetError(f"{counted(len(wrong), 'file')} did not arrive whole in {ROUNDS} tries: {wrong[0]}",
                         hint="they change while they are copied, or are damaged on the dispatcher; try again")


def bring(checkpoint: ArchiveFile, draft: Path, progress: Progress, seed: Path) -> Path:
    """Copy a checkpoint from its object store to a folder in `draft`, by its own manifest; return that folder. What is
    there or in the folder `seed` already is not copied again. Raises SpotfleetError."""
    store = _object_store(checkpoint.at)
    try:
        manifest = b"".join(store.get(MANIFEST))
        if sha256(manifest).hexdigest() != checkpoint.sha256:
            raise SpotfleetError(f"{checkpoint.at} is not the checkpoint that the dispatcher knows: another manifest",
                                 hint=LEAVE)
        entries = [StoreEntry(MANIFEST, len(manifest), checkpoint.sha256), *(
            StoreEntry(str(name), int(of["bytes"]), str(of["sha256"]))
            for name, of in json.loads(manifest)["files"].items())]
        screen = _Screen(progress, f"copying {checkpoint.at}")
        mirror = Mirror(draft, screen.show, seed=lambda key: seed / key)
        mirror.tally.total = sum(entry.bytes for entry in entries)
        wrong = mirror.copy(entries, [StoreReader(store) for _ in range(STREAMS)])
    except OSError as error:
        raise SpotfleetError(f"{checkpoint.at} cannot be read from this machine: {error}", hint=LEAVE) from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SpotfleetError(f"the manifest of {checkpoint.at} cannot be used: {error}", hint=LEAVE) from None
    if wrong:
        raise SpotfleetError(f"{checkpoint.at} is not whole: {wrong[0]}", hint=LEAVE)
    screen.end(mirror.tally)
    return mirror.files


def _object_store(url: str) -> ObjectStore:
    try:
        return ObjectStore(url)
    except ImportError:
        raise SpotfleetError(f"{url} cannot be read from this machine, which has no obstore",
                             hint=f"{NEEDS}, or {LEAVE}") from None
    except OSError as error:
        raise SpotfleetError(f"{url} cannot be read from this machine: {error}", hint=LEAVE) from None


def _drained(lines: Iterator[bytes], show: Callable[[], None]) -> Iterator[bytes]:
    """Yield the lines, which a thread reads at once: the dispatcher disconnects a reader that waits for a transfer.
    `show` is called while no line comes."""
    read: SimpleQueue[bytes | DispatcherUnreachable | None] = SimpleQueue()
    closed = threading.Event()

    def drain() -> None:
        try:
            for text in lines:
                read.put(text)
                while read.qsize() >= WAITING_LINES and not closed.wait(0.1):
                    pass
                if closed.is_set():
                    return
            read.put(None)
        except DispatcherUnreachable as error:
            read.put(error)

    threading.Thread(target=drain, name="manifest", daemon=True).start()
    try:
        while (found := _next_of(read, show)) is not None:
            if isinstance(found, DispatcherUnreachable):
                raise found
            yield found
    finally:
        closed.set()


def _next_of(read: SimpleQueue[T], show: Callable[[], None]) -> T:
    while True:
        try:
            return read.get(timeout=LINE_S)
        except Empty:
            show()


class _Listed:
    """Files of one manifest, as they arrive."""

    def __init__(self, lines: Iterator[bytes], tally: Tally, bring_checkpoints: bool,
                 show: Callable[[], object]) -> None:
        """`show` is called while the dispatcher reads a large file."""
        self._lines, self._tally, self._bring, self._show = lines, tally, bring_checkpoints, show
        self.at = 0.0
        self.elsewhere: list[ArchiveFile] = []

    def entries(self) -> Iterator[StoreEntry | None]:
        for found in parse(self._lines):
            if found is None:
                self._show()
                yield None
            elif isinstance(found, ArchiveHead):
                self.at, self._tally.total = found.at, found.bytes
            elif found.at and (found.is_elsewhere_only or not self._bring):
                if not CHECKPOINT.fullmatch(check_key(found.key)):
                    raise UnsafeKey(f"{found.key[:200]!r} is no checkpoint")
                self.elsewhere.append(found)
                self._tally.total -= 0 if found.is_elsewhere_only else found.bytes
            else:
                yield StoreEntry(found.key, found.bytes, found.sha256)
