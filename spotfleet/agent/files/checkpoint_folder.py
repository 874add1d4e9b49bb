"""Checkpoint folder of a job that is started anew at each change: its files follow the job to new hosts.

    before a round   the dispatcher's newest bundle of it --fetched--> the folder, on each host, equal to the bundle
    in a round       on rank 0's host: folder --complete files--> staged copy --packed, new pieces sent--> dispatcher
    after it         the same once more, before the end of rank 0's process is reported

With a pattern only the files of that folder, not of folders below it, whose names match it are sent and replaced. A
script may thus write checkpoints to the folder in which it runs.

A file is complete once it has not changed for QUIET_S, or, if it changes all the time, when no process has it open for
writing. When the process has ended in order, every file is complete. The staged copy keeps the last complete version of
a file that is being written, so a host that dies in the middle leaves a complete one. The dispatcher accepts a bundle
only when all of its pieces are there.
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from spotfleet import bundle
from spotfleet.agent.files.blobs import Blobs, Progress
from spotfleet.agent.transfer import FIRST_BACKOFF_S, LAST_BACKOFF_S, RETRYABLE, Transfers
from spotfleet.bundle.tree import File
from spotfleet.retry import Backoff
from spotfleet.storage import atomic

log = logging.getLogger("spotfleet.agent")

PERIOD_S, QUIET_S, PATIENCE_S = 1.0, 1.0, 3.0
SEARCH_SHARE = 50  # length of a pause, in durations of the search before it
ROUNDS = 5  # attempts to send missing pieces, as this host's own blobs may be removed meanwhile

Seen = tuple[int, int, int]  # inode, size, time of the last change in ns


class CheckpointFolder:
    """The folder of one job on this host. `write_log` writes a line to the log of the worker that sends."""

    def __init__(self, transfers: Transfers, blobs: Blobs, job: str, folder: Path, staged: Path,
                 pattern: str = "") -> None:
        self.folder, self._pattern = folder, pattern
        self.sent = 0  # pieces that have arrived
        self._transfers, self._blobs, self._job, self._staged = transfers, blobs, job, staged
        self._waits: dict[str, float] = {}  # files that change all the time -> since when, monotonic
        self._postponed_at: float | None = None  # monotonic: since when nothing is copied
        self._searched_s = 0.0  # duration of the last search for changed files
        self._lock = asyncio.Lock()
        self._fetched: tuple[int, str] | None = None  # start of the job, bundle
        self._copied: dict[str, Seen] = {}  # files of the staged copy, as they were in the folder
        self._packed: dict[bundle.Group, bundle.PackedGroup] = {}
        self._held = ""  # the dispatcher's newest bundle, if this host sent it

    async def fetch(self, start: int, digest: str, progress: Progress) -> None:
        """Make the folder equal to the bundle `digest`, once for the job's `start`; "": leave it as it is."""
        async with self._lock:
            if self._fetched == (start, digest):
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            if digest:
                fresh = Path(tempfile.mkdtemp(prefix=".fetched-", dir=self.folder.parent))
                try:
                    await self._blobs.fill(f"{self._job}#checkpoints", digest, fresh, progress)
                    await asyncio.to_thread(_put, fresh, self.folder, self._pattern)
                finally:
                    shutil.rmtree(fresh, ignore_errors=True)
            self._fetched = (start, digest)

    async def follow(self, worker: str, generation: int, write_log: Callable[[str], None]) -> None:
        """Send what changes, until cancelled."""
        while True:
            await self._send(worker, generation, QUIET_S, write_log, runs=True)
            await asyncio.sleep(max(PERIOD_S, SEARCH_SHARE * self._searched_s))

    async def finish(self, worker: str, generation: int, write_log: Callable[[str], None], *, killed: bool) -> None:
        """Send the rest once the process has ended; `killed`: perhaps while it wrote a file."""
        await self._send(worker, generation, QUIET_S if killed else 0.0, write_log)

    # ----

    async def _send(self, worker: str, generation: int, quiet_s: float, write_log: Callable[[str], None], *,
                    runs: bool = False) -> None:
        async with self._lock:
            try:
                if not await asyncio.to_thread(self._stage, quiet_s, runs) and self._held:
                    return
                if not self._copied:
                    return
                digest = await asyncio.to_thread(self._pack)
            except OSError as error:
                write_log(f"checkpoint folder: {error}; tried again")
                return
            if digest != self._held and (refused := await self._deliver(worker, generation, digest)):
                write_log(f"checkpoint folder: not kept: {refused}")

    async def _deliver(self, worker: str, generation: int, digest: str) -> str:
        """Send the bundle; return why it was refused, or ""."""
        backoff = Backoff(FIRST_BACKOFF_S, LAST_BACKOFF_S)
        left = ROUNDS
        while left:
            try:
                body = self._blobs.path(digest).read_bytes()
                status, answer = await self._transfers.offer_checkpoints(self._job, worker, generation, body)
                if status != 200:
                    return str(answer.get("error") or f"the dispatcher answered {status}")
                if not answer["missing"]:
                    self._held = digest
                    return ""
                left -= 1
                for piece in answer["missing"]:
                    if (status := await self._transfers.put_bundle(piece, self._blobs.path(piece))) >= 400:
                        return f"the dispatcher answered {status}"
                    self.sent += 1
            except FileNotFoundError:
                self._packed.clear()
                digest = await asyncio.to_thread(self._pack)
            except RETRYABLE as error:
                if backoff.is_fresh:
                    log.warning("checkpoint folder of %s: %s; trying again", self._job, error or type(error).__name__)
                await asyncio.sleep(backoff.next_s())
        return "its pieces did not stay on this host"

    def _stage(self, quiet_s: float, runs: bool) -> bool:
        """Copy the files that are complete and have changed, drop those that are gone; return whether any was.

        While the process `runs`, nothing is copied for a while if a file is not complete: it may belong to the others.
        """
        begun = time.monotonic()
        found = dict(_files(self.folder, self._pattern))
        self._searched_s = time.monotonic() - begun
        before = dict(self._copied)
        news = {name: seen for name, seen in found.items() if self._copied.get(name) != seen}
        quiet_ns = time.time_ns() - int(quiet_s * 1e9)
        busy = {name for name, seen in news.items() if seen[2] > quiet_ns}
        self._waits = {name: self._waits.get(name, begun) for name in busy}
        late = {name for name, since in self._waits.items() if runs and begun - since >= PATIENCE_S}
        if runs and busy - late and begun - (self._postponed_at or begun) < PATIENCE_S:
            self._postponed_at = self._postponed_at or begun
            return False
        self._postponed_at = None
        writing = _written({self.folder / name for name in late}) if late else set()
        for name, seen in news.items():
            if name not in busy or (name in late and self.folder / name not in writing):
                self._copy(name, seen)
        for name in self._copied.keys() - found.keys():
            (self._staged / name).unlink(missing_ok=True)
            del self._copied[name]
        return before != self._copied

    def _copy(self, name: str, seen: Seen) -> None:
        source, target = self.folder / name, self._staged / name
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = target.with_name(f".{len(self._copied)}.part")
        try:
            shutil.copyfile(source, part)
            shutil.copymode(source, part)
            if _seen(source.stat()) == seen:
                atomic.rename(part, target, sync=False)
                self._copied[name] = seen
        except FileNotFoundError:
            pass  # removed meanwhile
        finally:
            part.unlink(missing_ok=True)

    def _pack(self) -> str:
        """Pack the staged copy into this host's blobs; return the bundle's digest."""
        tree = self._tree()
        groups = bundle.group(tree.files)
        made = {group: self._packed[group] if group in self._packed else self._make(group) for group in groups}
        self._packed = made
        text = bundle.dump(bundle.assemble(tree, groups, [made[group] for group in groups]).manifest)
        digest = hashlib.sha256(text).hexdigest()
        self._blobs.keep(digest, text)
        return digest

    def _make(self, group: bundle.Group) -> bundle.PackedGroup:
        made = bundle.make(group)
        if made.piece is not None:
            self._blobs.keep(made.piece.sha256, made.blob)
        return bundle.PackedGroup(made.piece, made.sizes, made.left_out, made.steady)  # without its bytes

    def _tree(self) -> bundle.Tree:
        files, folders = [], set[str]()
        for name in sorted(self._copied):
            path = self._staged / name
            found = path.stat()
            files.append(File(name, str(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino,
                              bool(found.st_mode & stat.S_IXUSR)))
            parts = name.split("/")
            folders |= {"/".join(parts[:end]) for end in range(1, len(parts))}
        return bundle.Tree(tuple(sorted(folders)), (), tuple(files), ())


def _files(folder: Path, pattern: str) -> Iterator[tuple[str, Seen]]:
    """Yield the regular files in a folder; links and special files are skipped. With `pattern` only those of that name,
    and none in its folders."""
    left = [""]
    while left:
        prefix = left.pop()
        try:
            entries = list(os.scandir(folder / prefix))
        except FileNotFoundError:
            continue
        for entry in entries:
            try:
                about = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if pattern and not (stat.S_ISREG(about.st_mode) and fnmatch.fnmatchcase(entry.name, pattern)):
                continue
            if stat.S_ISDIR(about.st_mode):
                left.append(f"{prefix}{entry.name}/")
            elif stat.S_ISREG(about.st_mode):
                yield f"{prefix}{entry.name}", _seen(about)


def _written(paths: set[Path]) -> set[Path]:
    """Return those of `paths` that a process has open for writing, as far as this one may look."""
    found = {}
    for path in paths:
        with suppress(FileNotFoundError):
            about = path.stat()
            found[(about.st_dev, about.st_ino)] = path
    written = set()
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):
            for entry in os.scandir(folder):
                with suppress(OSError):
                    about = os.stat(entry.path)
                    path = found.get((about.st_dev, about.st_ino))
                    if path is not None and _writes(folder.parent / "fdinfo" / entry.name):
                        written.add(path)
    return written


def _writes(info: Path) -> bool:
    """Return whether a descriptor was opened for writing."""
    flags = next((line.split()[1] for line in info.read_text().splitlines() if line.startswith("flags:")), "0")
    return bool(int(flags, 8) & (os.O_WRONLY | os.O_RDWR))


def _seen(about: os.stat_result) -> Seen:
    return about.st_ino, about.st_size, about.st_mtime_ns


def _put(fresh: Path, folder: Path, pattern: str) -> None:
    """Put `fresh` in the place of `folder`, or of its files whose names match `pattern`."""
    if pattern:
        for name, _ in _files(folder, pattern):
            (folder / name).unlink(missing_ok=True)
        for path in fresh.iterdir():
            atomic.rename(path, folder / path.name, sync=False)
        return
    old = Path(tempfile.mkdtemp(prefix=".old-", dir=folder.parent))
    fresh.chmod(stat.S_IMODE(folder.stat().st_mode))
    atomic.rename(folder, old / "folder", sync=False)
    atomic.rename(fresh, folder, sync=False)
    shutil.rmtree(old, ignore_errors=True)
