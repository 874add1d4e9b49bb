"""Upload of the working directory to the dispatcher: only missing pieces are read and sent.

    list names and times --> ask which known pieces are missing --> read, compress, send the others --> the manifest

Several threads do the third step, each with its own connection. The digests of known pieces are kept in the home
directory, also when `train` is interrupted or fails: the next try continues there.
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
from spotfleet.errors import UsageError
from spotfleet.transport.client import DispatcherClient, PersistentClient
from spotfleet.words import counted, size, speed

LIMIT_BYTES = manifest.LIMIT_BYTES
THREADS = 3
REPORT_S = 2.0
LONG_BYTES = 16 << 20  # a larger amount to read is announced first
HINT = "name data and results in .spotfleetignore; large data come by `file_mounts` from a bucket, or in `setup`"


@dataclass(frozen=True)
class Shipped:
    """Result of an upload."""

    sha256: str
    left_out: tuple[str, ...]
    blobs: tuple[str, ...]  # the manifest and its pieces


class Shipment:
    """Upload of one working directory."""

    def __init__(self, client: DispatcherClient, cache: bundle.PieceCache, secrets: bundle.SecretValues,
                 progress: Progress) -> None:
        self._client, self._cache, self._secrets, self._progress = client, cache, secrets, progress
        self._local = threading.local()
        self._connections: list[PersistentClient] = []
        self._lock = threading.Lock()
        self._read = self._sent = 0  # bytes
        self._begun = time.monotonic()

    def send(self, tree: bundle.Tree) -> Shipped:
        """Upload `tree` to the dispatcher. Raises UsageError for one that is too large."""
        refuse_too_large(tree)
        groups = bundle.group(tree.files)
        known = [self._cache.find(members) for members in groups]
        missing = self._client.missing_blobs([m.piece.sha256 for m in known if m is not None and m.piece is not None])
        todo = [i for i, made in enumerate(known)
                if made is None or (made.piece is not None and made.piece.sha256 in missing)]
        to_read = sum(s.bytes for i in todo for s in groups[i])
        if to_read >= LONG_BYTES:
            self._progress(f"shipping the working directory: {size(to_read)} of {size(tree.bytes)} to be read")
        try:
            made = {i: m for i, m in enumerate(known) if m is not None} | dict(self._all(groups, todo))
        finally:
            self._cache.save()
            for connection in self._connections:
                connection.close()
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
        what = f"{counted(len(packed.manifest.files), 'file')}, {size(packed.manifest.bytes)} ({digest[:12]})"
        self._progress(f"shipped {what}: {self._rate()}")
        return Shipped(digest, packed.left_out, blobs)

    def _all(self, groups: Sequence[bundle.Group], todo: Sequence[int]) -> Iterator[tuple[int, bundle.PackedGroup]]:
        """Yield each index of `todo` with its packed group, once that is at the dispatcher."""
        total, reported_at = sum(s.bytes for i in todo for s in groups[i]), time.monotonic()
        pool = ThreadPoolExecutor(THREADS, "ship")
        left = iter(todo)
        running: dict[Future[bundle.PackedGroup], int] = {}
        try:
            while True:
                while len(running) < 2 * THREADS and (index := next(left, None)) is not None:
                    running[pool.submit(self._one, groups[index])] = index
                if not running:
                    return
                done, _ = wait(running, timeout=REPORT_S, return_when="FIRST_COMPLETED")
                for future in done:
                    yield running.pop(future), future.result()
                if time.monotonic() - reported_at >= REPORT_S:
                    reported_at = time.monotonic()
                    self._progress(f"shipping: {size(self._read)} of {size(total)} read, {self._rate()}")
                    self._cache.save()
        except BaseException:
            for connection in self._connections:
                connection.abort()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _one(self, members: bundle.Group) -> bundle.PackedGroup:
        """Read and compress one group, send it unless the dispatcher has it, then cache it. Runs in a thread."""
        made = bundle.make(members, self._secrets)
        sent = 0
        if made.piece is not None:
            connection = self._connection()
            if not connection.has_bundle(made.piece.sha256):
                connection.put_blob(made.piece.sha256, made.blob)
                sent = len(made.blob)
        self._cache.keep(members, made)
        with self._lock:
            self._read += sum(s.bytes for s in members)
            self._sent += sent
        return bundle.PackedGroup(made.piece, made.sizes, made.left_out, made.steady)  # without its bytes

    def _connection(self) -> PersistentClient:
        if not hasattr(self._local, "connection"):
            self._local.connection = self._client.persistent()
            with self._lock:
                self._connections.append(self._local.connection)
        return self._local.connection

    def _rate(self) -> str:
        return f"{size(self._sent)} sent, {speed(self._sent, time.monotonic() - self._begun)}"


def ship(client: DispatcherClient, workdir: Path, mounts: dict[str, Path], home: Path, secrets: Sequence[str],
         progress: Progress) -> Shipped:
    """Upload `workdir`, with `mounts` at their names, to the dispatcher."""
    secret_values, reported_at = bundle.SecretValues.of(secrets), time.monotonic()

    def report(count: int) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at >= REPORT_S:
            reported_at = time.monotonic()
            progress(f"looking at the working directory: {count} files so far")

    tree = bundle.scan(workdir, mounts=mounts, houses=[home], tell=report)
    cache = bundle.PieceCache(home / "cache" / "pieces.json", secret_values)
    return Shipment(client, cache, secret_values, progress).send(tree)


def refuse_too_large(tree: bundle.Tree) -> None:
    entries = len(tree.files) + len(tree.folders) + len(tree.links)
    for have, most, what in ((tree.bytes / 1e9, LIMIT_BYTES / 1e9, "GB"),
                             (entries, manifest.LIMIT_ENTRIES, "files and folders")):
        if have > most:
            raise UsageError(f"the working directory has {have:.6g} {what}; a fleet takes at most {most:.6g}",
                             hint=HINT)
