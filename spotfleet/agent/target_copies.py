"""Checkpoints at a mounted target, which a host reads and writes by itself, without the dispatcher.

    asked for a file --there, and its digest is right--> copied
                      '-- not there, another one, or nothing has come for STALL_S: the dispatcher is asked
    a file to be kept --the dispatcher's probe is there--> written, and put in place by the dispatcher
                      '-- no probe, an error, or nothing has moved for STALL_S: sent to the dispatcher

The host reports the probe that it reads there, so that the dispatcher knows which hosts see its own folder and no other
one. A target that hangs is not asked again while the last call has not returned. The digests come from the dispatcher,
so a file that somebody else put there is not used.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from spotfleet.agent.boot import AgentBoot
from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage import atomic
from spotfleet.storage.folder import PROBE, PROBE_BYTES, FolderStore, arriving_name, fleet_store, read_range

log = logging.getLogger("spotfleet.agent")
STALL_S = 10.0
LOOK_S = 0.05
PROBE_S = 5.0


class _Work(Protocol):
    """Work on the target in a thread of its own, which may hang for ever."""

    size: int  # bytes moved
    stopped: bool

    def run(self) -> None: ...


class TargetCopies:
    """The target of one fleet, as this host has it mounted."""

    def __init__(self, boot: AgentBoot) -> None:
        mounted = boot.target and "://" not in boot.target
        self._store = fleet_store(boot.target, boot.fleet, boot.ca) if mounted else None
        self._reading: threading.Thread | None = None
        self._writing: threading.Thread | None = None
        self._probing: threading.Thread | None = None
        self.probe = ""  # the newest that was read; "" while the target is away

    async def run(self) -> None:
        """Read the probe each PROBE_S."""
        while self._store is not None:
            read = _ReadProbe(self._store)
            if not _is_busy(self._probing):
                self._probing = _started(read)
                await asyncio.to_thread(self._probing.join, PROBE_S)
            self.probe = read.probe
            await asyncio.sleep(PROBE_S)
        await asyncio.Event().wait()

    async def put(self, job: str, made: Checkpoint, file: Path, on_bytes: Callable[[int], None]) -> bool:
        """Write one file of a checkpoint to the target; return whether it is there now."""
        if self._store is None or _is_busy(self._writing):
            return False
        write = _Write(self._store, arriving_name(job, made), file, made.digest)
        self._writing = _started(write)
        return await _moves(self._writing, write, f"{file}: the target", on_bytes) and write.whole

    async def copy(self, job: str, wanted: Checkpoint, into: Path, digest: str,
                   on_bytes: Callable[[int], None]) -> bool:
        """Copy the file of a checkpoint with the name of `into`; return whether it is there now."""
        if self._store is None or (self._reading is not None and self._reading.is_alive()):
            return False
        source = self._store.path(f"jobs/{job}/checkpoints/{wanted.version}-{wanted.generation}/{into.name}")
        draft = into.parent.with_name(f"{into.parent.name}.{into.name}.part")  # a read that hangs may write there later
        read = _Read(source, draft, digest)
        self._reading = _started(read)
        if not await _moves(self._reading, read, str(source), on_bytes):
            return False
        if read.whole:
            atomic.rename(draft, into, sync=False)  # it would be fetched again
        draft.unlink(missing_ok=True)
        return read.whole


def _is_busy(thread: threading.Thread | None) -> bool:
    return thread is not None and thread.is_alive()


def _started(work: _Work) -> threading.Thread:
    thread = threading.Thread(target=work.run, name="target", daemon=True)
    thread.start()
    return thread


async def _moves(thread: threading.Thread, work: _Work, what: str, on_bytes: Callable[[int], None]) -> bool:
    """Wait for the end of `work`; return False once nothing has moved for STALL_S."""
    seen, moved_at = 0, time.monotonic()
    try:
        while thread.is_alive():
            await asyncio.sleep(LOOK_S)
            if work.size > seen:
                on_bytes(work.size - seen)
                seen, moved_at = work.size, time.monotonic()
            elif time.monotonic() - moved_at >= STALL_S:
                log.warning("%s: nothing has moved for %g s; asking the dispatcher", what, STALL_S)
                return False
    finally:
        work.stopped = True
    on_bytes(work.size - seen)
    return True


class _ReadProbe:
    """One look at the probe."""

    def __init__(self, store: FolderStore) -> None:
        self._store = store
        self.size, self.stopped, self.probe = 0, False, ""

    def run(self) -> None:
        try:
            found = b"".join(self._store.get(PROBE, end=PROBE_BYTES)).decode()
            self.probe = found if found.isalnum() else ""
        except (OSError, ValueError):
            pass  # not mounted


class _Write:
    """One file on its way to the target."""

    def __init__(self, store: FolderStore, key: str, file: Path, digest: str) -> None:
        self._store, self._key, self._file, self._digest = store, key, file, digest
        self.size, self.whole, self.stopped = 0, False, False

    def run(self) -> None:
        try:
            if self._store.find(PROBE) is None:
                return  # this folder is on our own disk, which goes with the host
            there, size = self._store.find(self._key), self._file.stat().st_size
            self.whole = there is not None and there.stat().st_size == size
            if not self.whole:
                self.whole = self._store.put(self._key, self._chunks(), size=size) == self._digest
        except OSError as error:  # the dispatcher gets it
            log.warning("%s cannot be written at the target: %s", self._file, error)

    def _chunks(self) -> Iterator[bytes]:
        for chunk in read_range(self._file):
            if self.stopped:
                raise OSError("given up")
            yield chunk
            self.size += len(chunk)


class _Read:
    """One copy, in a thread of its own."""

    def __init__(self, source: Path, into: Path, digest: str) -> None:
        self._source, self._into, self._digest = source, into, digest
        self.size, self.whole, self.stopped = 0, False, False

    def run(self) -> None:
        sha = hashlib.sha256()
        try:
            if not self._source.is_file():
                return
            with self._into.open("wb") as out:
                for chunk in read_range(self._source):
                    if self.stopped:
                        return
                    sha.update(chunk)
                    out.write(chunk)
                    self.size += len(chunk)
        except OSError as error:  # the dispatcher is asked; if this disk is full, that download reports it
            log.warning("%s cannot be copied: %s", self._source, error)
            return
        self.whole = sha.hexdigest() == self._digest
