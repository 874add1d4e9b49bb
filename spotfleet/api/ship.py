"""The working directory from this machine to the dispatcher: only what it lacks is read, and only that is sent.

    look at names and times --> ask which known pieces it lacks --> read, compress, send the others --> the manifest

Several threads do the third step, each over a connection of its own. What is known is kept in the house, also when
`train` is interrupted or fails: the next try goes on where this one was.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from spotfleet import bundle
from spotfleet.api.machine import Progress
from spotfleet.bundle import manifest
from spotfleet.client import Client, Line
from spotfleet.errors import UsageError

LIMIT_BYTES = manifest.LIMIT_BYTES
THREADS = 3
TELL_S = 2.0
LONG_BYTES = 16 << 20  # to be read: worth a word before
HINT = "name data and results in .spotfleetignore; large data come by `file_mounts` from a bucket, or in `setup`"


@dataclass(frozen=True)
class Shipped:
    sha256: str
    left_out: tuple[str, ...]
    blobs: tuple[str, ...]  # the manifest and its pieces


class Shipment:
    def __init__(self, client: Client, memory: bundle.Memory, needles: bundle.Needles, progress: Progress) -> None:
        self._client, self._memory, self._needles, self._progress = client, memory, needles, progress
        self._lines = threading.local()
        self._open: list[Line] = []
        self._lock = threading.Lock()
        self._read = self._sent = 0  # bytes
        self._begun = time.monotonic()

    def send(self, tree: bundle.Tree) -> Shipped:
        """Bring `tree` to the dispatcher. UsageError for one that is too large."""
        refuse_too_large(tree)
        groups = bundle.group(tree.files)
        known = [self._memory.find(members) for members in groups]
        lacking = self._client.lacking([m.piece.sha256 for m in known if m is not None and m.piece is not None])
        todo = [i for i, made in enumerate(known)
                if made is None or (made.piece is not None and made.piece.sha256 in lacking)]
        size = sum(s.bytes for i in todo for s in groups[i])
        if size >= LONG_BYTES:
            self._progress(f"shipping the working directory: {megabytes(size)} of {megabytes(tree.bytes)} to be read")
        try:
            made = {i: m for i, m in enumerate(known) if m is not None} | dict(self._all(groups, todo))
        finally:
            self._memory.save()
            for line in self._open:
                line.close()
        return self._finish(bundle.assemble(tree, groups, [made[i] for i in range(len(groups))]))

    def _finish(self, packed: bundle.Packed) -> Shipped:
        text = bundle.dump(packed.manifest)
        digest = hashlib.sha256(text).hexdigest()
        blobs = (digest, *dict.fromkeys(piece.sha256 for piece in packed.manifest.pieces))
        if self._client.has_bundle(digest) and not self._sent:
            self._progress(f"working directory {digest[:12]} is there already")
            return Shipped(digest, packed.left_out, blobs)
        self._client.put_blob(digest, text)
        self._sent += len(text)
        what = f"{len(packed.manifest.files)} files, {megabytes(packed.manifest.bytes)} ({digest[:12]})"
        self._progress(f"shipped {what}: {self._rate()}")
        return Shipped(digest, packed.left_out, blobs)

    def _all(self, groups: Sequence[bundle.Group], todo: Sequence[int]) -> Iterator[tuple[int, bundle.Made]]:
        """Each of `todo` and what it became, once it is at the dispatcher."""
        total, told_at = sum(s.bytes for i in todo for s in groups[i]), time.monotonic()
        pool = ThreadPoolExecutor(THREADS, "ship")
        left = iter(todo)
        running: dict[Future[bundle.Made], int] = {}
        try:
            while True:
                while len(running) < 2 * THREADS and (index := next(left, None)) is not None:
                    running[pool.submit(self._one, groups[index])] = index
                if not running:
                    return
                done, _ = wait(running, timeout=TELL_S, return_when="FIRST_COMPLETED")
                for future in done:
                    yield running.pop(future), future.result()
                if time.monotonic() - told_at >= TELL_S:
                    told_at = time.monotonic()
                    self._progress(f"shipping: {megabytes(self._read)} of {megabytes(total)} read, {self._rate()}")
                    self._memory.save()
        except BaseException:
            for line in self._open:
                line.abort()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _one(self, members: bundle.Group) -> bundle.Made:
        """In a thread: read, compress, send unless it is there, and only then remember it."""
        made = bundle.make(members, self._needles)
        sent = 0
        if made.piece is not None:
            line = self._line()
            if not line.has_bundle(made.piece.sha256):
                line.put_blob(made.piece.sha256, made.blob)
                sent = len(made.blob)
        self._memory.keep(members, made)
        with self._lock:
            self._read += sum(s.bytes for s in members)
            self._sent += sent
        return bundle.Made(made.piece, made.sizes, made.left_out, made.steady)  # without its bytes

    def _line(self) -> Line:
        if not hasattr(self._lines, "mine"):
            self._lines.mine = self._client.line()
            with self._lock:
                self._open.append(self._lines.mine)
        return self._lines.mine

    def _rate(self) -> str:
        took_s = max(time.monotonic() - self._begun, 0.01)
        return f"{megabytes(self._sent)} sent, {self._sent / 1e6 / took_s:.1f} MB/s"


def ship(client: Client, workdir: Path, mounts: dict[str, Path], house: Path, secrets: Sequence[str],
         progress: Progress) -> Shipped:
    """Bring `workdir`, with `mounts` at their names, to the dispatcher."""
    needles, told_at = bundle.Needles.of(secrets), time.monotonic()

    def tell(count: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= TELL_S:
            told_at = time.monotonic()
            progress(f"looking at the working directory: {count} files so far")

    tree = bundle.scan(workdir, mounts=mounts, houses=[house], tell=tell)
    return Shipment(client, bundle.Memory(house / "cache" / "pieces.json", needles), needles, progress).send(tree)


def refuse_too_large(tree: bundle.Tree) -> None:
    entries = len(tree.files) + len(tree.folders) + len(tree.links)
    for have, most, what in ((tree.bytes / 1e9, LIMIT_BYTES / 1e9, "GB"),
                             (entries, manifest.LIMIT_ENTRIES, "files and folders")):
        if have > most:
            raise UsageError(f"the working directory has {have:.6g} {what}; a fleet takes at most {most:.6g}",
                             hint=HINT)


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
