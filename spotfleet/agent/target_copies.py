"""Copies of checkpoints at a mounted target, which a host reads by itself, without the dispatcher.

    asked for a file --there, and its digest is right--> copied
                      '-- not there, another one, or nothing has come for STALL_S: the dispatcher is asked

A target that hangs is not asked again while the last read has not returned. The digests come from the dispatcher, so a
file that somebody else put there is not used.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from spotfleet.agent.boot import AgentBoot
from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage import atomic
from spotfleet.storage.folder import fleet_store, read_range

log = logging.getLogger("spotfleet.agent")
STALL_S = 10.0
LOOK_S = 0.05


class TargetCopies:
    """The target of one fleet, as this host has it mounted."""

    def __init__(self, boot: AgentBoot) -> None:
        mounted = boot.target and "://" not in boot.target
        self._store = fleet_store(boot.target, boot.fleet, boot.ca) if mounted else None
        self._reading: threading.Thread | None = None

    async def copy(self, job: str, wanted: Checkpoint, into: Path, digest: str,
                   on_bytes: Callable[[int], None]) -> bool:
        """Copy the file of a checkpoint with the name of `into`; return whether it is there now."""
        if self._store is None or (self._reading is not None and self._reading.is_alive()):
            return False
        source = self._store.path(f"jobs/{job}/checkpoints/{wanted.version}-{wanted.generation}/{into.name}")
        draft = into.parent.with_name(f"{into.parent.name}.{into.name}.part")  # a read that hangs may write there later
        read = _Read(source, draft, digest)
        self._reading = threading.Thread(target=read.run, name="target", daemon=True)  # it may hang for ever
        self._reading.start()
        seen, moved_at = 0, time.monotonic()
        try:
            while self._reading.is_alive():
                await asyncio.sleep(LOOK_S)
                if read.size > seen:
                    on_bytes(read.size - seen)
                    seen, moved_at = read.size, time.monotonic()
                elif time.monotonic() - moved_at >= STALL_S:
                    log.warning("%s: nothing has come for %g s; asking the dispatcher", source, STALL_S)
                    return False
        finally:
            read.stopped = True
        on_bytes(read.size - seen)
        if read.whole:
            atomic.rename(draft, into, sync=False)  # it would be fetched again
        draft.unlink(missing_ok=True)
        return read.whole


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
