"""Download of the buckets in a job's `file_mounts`, in a process of its own.

`python -m spotfleet.agent.files.mount_process` runs with the job's environment, which may hold credentials: the agent
itself loads no SDK and needs no credentials.

    list --> room? --> fetch missing objects, in pieces, several at once --> link into the working directory
      '-- the objects changed meanwhile: list again, CHANGES times

stdin is one line of JSON, a `MountOrder`; stdout is lines of JSON, each a `MountReport`. The cache stores an object
under its address and etag, once for all jobs on the host. A journal beside an unfinished object lists its fetched
pieces, so that a killed process loses nothing. Every piece is checked for that etag, and sizes are compared.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotfleet.agent.processes.child import die_with_parent
from spotfleet.errors import is_full, room
from spotfleet.protocol.messages import dump, load
from spotfleet.storage import atomic, locks
from spotfleet.storage.object_store import NEEDS, gives_up, open_store, refusal
from spotfleet.storage.schemes import SCHEMES

PIECE_BYTES = 8 << 20
AT_ONCE = 8
RESERVE_BYTES = 64 << 20  # left free on the disk
CHANGES = 3
TRIES, PAUSE_S, RETRY_S = 4, 0.5, 15.0
PROGRESS_S = 0.5
PIECE_TIMEOUT = "120s"


@dataclass(frozen=True)
class MountOrder:
    mounts: dict[str, str]  # name in the working directory -> URL
    cache: str
    into: str  # the working directory


@dataclass(frozen=True)
class MountReport:
    """Progress in `why`; at the end `done` or `error`. `sure`: another host would get the same error."""

    why: str = ""
    done: str = ""
    error: str = ""
    sure: bool = False
    full: bool = False


class MountFailed(Exception):
    def __init__(self, report: MountReport) -> None:
        super().__init__(report.error)
        self.report = report


class ObjectChanged(Exception):
    """Change of an object during the download."""


@dataclass(frozen=True)
class Item:
    """One object of a bucket."""

    url: str  # the mount's URL
    path: str  # in the bucket
    name: str  # in the working directory
    size: int
    etag: str

    @property
    def id(self) -> str:
        bucket = "/".join(self.url.split("/")[:3])
        return hashlib.sha256(f"{bucket}\0{self.path}\0{self.etag}\0{self.size}".encode()).hexdigest()[:40]


@dataclass
class MountProgress:
    total: int = 0
    received: int = 0
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, size: int) -> None:
        with self.lock:
            self.received += size


def main() -> int:
    parent = os.getppid()
    die_with_parent(9)
    if os.getppid() != parent:
        return 1
    order = load(MountOrder, sys.stdin.readline())
    for store in SCHEMES.values():
        os.environ.setdefault(f"{store.prefix}_TIMEOUT", PIECE_TIMEOUT)
    try:
        send(MountReport(done=fetch_mounts(order)))
    except MountFailed as error:
        send(error.report)
    except OSError as error:
        full = is_full(error)
        text = _no_room(Path(order.cache), 0) if full else f"file_mounts: {error}"
        send(MountReport(error=text, full=full))
    return 0


def send(report: MountReport) -> None:
    print(dump(report), flush=True)


def fetch_mounts(order: MountOrder) -> str:
    """Fetch and link all mounts under the cache's lock; return a summary in words."""
    cache = Path(order.cache)
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (cache / ".lock").open("w") as lock:
        if not locks.take(lock):
            send(MountReport(why="waiting for another job's files from buckets"))
            locks.take(lock, wait=True)
        for left in reversed(range(CHANGES)):
            try:
                return _fetch_mounts(order, cache)
            except ObjectChanged as error:
                if not left:
                    raise MountFailed(MountReport(error=f"file_mounts: {error} changes while it is fetched")) from None
        raise AssertionError("unreachable")


def _fetch_mounts(order: MountOrder, cache: Path) -> str:
    buckets = {url: Bucket(name, url) for name, url in order.mounts.items()}
    items = [item for name, url in order.mounts.items() for item in buckets[url].items(name)]
    missing = {i.id: i for i in items if not _is_here(cache, i)}
    begun = {i.id: _journal(cache, i) for i in missing.values()}
    progress = MountProgress(sum(i.size for i in missing.values()), sum(
        _length(i, n) for i in missing.values() for n in begun[i.id]))
    need, free = progress.total - progress.received, shutil.disk_usage(cache).free
    if need > free - RESERVE_BYTES:
        raise MountFailed(MountReport(error=_no_room(cache, need), full=True))
    _fetch([i for i in missing.values()], begun, buckets, cache, progress)
    for item in items:
        _place(item, cache, Path(order.into))
    return (f"{len(items)} files of {len(buckets)} mounts, {_sizes(sum(i.size for i in items))}, of which "
            f"{_sizes(progress.total)} were fetched")


def _fetch(items: list[Item], begun: dict[str, set[int]], buckets: dict[str, Bucket], cache: Path,
           progress: MountProgress) -> None:
    stop, ticker = threading.Event(), threading.Event()

    def tick() -> None:
        while not ticker.wait(PROGRESS_S):
            send(MountReport(why=f"fetching {progress.url}: {_sizes(progress.received, progress.total)}"))

    def piece(item: Item, number: int) -> None:
        if not stop.is_set():
            progress.url = item.url
            _write(cache, item, number, buckets[item.url].piece(item, number, stop))
            progress.add(_length(item, number))

    ticking = threading.Thread(target=tick, daemon=True)
    ticking.start()
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            coming = [pool.submit(piece, i, n) for i in items for n in _numbers(i) if n not in begun[i.id]]
            ended, _ = wait(coming, return_when=FIRST_EXCEPTION)
            stop.set()
            for future in ended:
                if error := future.exception():
                    pool.shutdown(cancel_futures=True)
                    raise error
    finally:
        ticker.set()
        ticking.join()
    for item in items:
        _finish(cache, item)


class Bucket:
    """One mount's source."""

    def __init__(self, name: str, url: str) -> None:
        self._name, self._url = name, url
        scheme, _, rest = url.partition("://")
        root, _, prefix = rest.partition("/")
        self._prefix = prefix.strip("/")
        try:
            self._obstore: Any = importlib.import_module("obstore")
            base_error = importlib.import_module("obstore.exceptions").BaseError
            self._errors: tuple[type[BaseException], ...] = (base_error, FileNotFoundError, PermissionError)
        except ImportError:
            raise MountFailed(MountReport(
                error=f"file_mounts.{name}: {url} needs obstore on the hosts, and it is not there: add "
                      f"\"obstore>=0.6\" to `environment.packages` ({NEEDS})", sure=True)) from None
        try:
            self._store, self._prefix = (open_store(url) if scheme in ("file", "memory") else
                                         (open_store(f"{scheme}://{root}", **gives_up(RETRY_S))[0], self._prefix))
        except self._errors as error:
            raise self._failed(error) from error

    def items(self, name: str) -> list[Item]:
        """List all objects under the prefix, or the one that it names."""
        try:
            found = [m for batch in self._obstore.list(self._store, prefix=self._prefix or None) for m in batch]
            if not found and self._prefix:
                return [self._item(name, "", self._obstore.head(self._store, self._prefix))]
        except self._errors as error:
            raise self._failed(error) from error
        folders = {above for m in found for above in _above(m["path"])}
        items = [self._item(name, m["path"][len(self._prefix):].strip("/"), m) for m in found
                 if m["size"] or m["path"] not in folders | {self._prefix}]  # without folder markers
        if not items:
            raise MountFailed(MountReport(error=f"file_mounts.{self._name}: there is nothing at {self._url}",
                                          sure=True))
        if odd := next((i for i in items if i.path in folders), None):
            raise MountFailed(MountReport(
                error=f"file_mounts.{self._name}: {odd.path} is an object, and others lie under it as in a folder; a "
                      "disk cannot hold both", sure=True))
        return items

    def _item(self, name: str, below: str, meta: Any) -> Item:
        parts = below.split("/") if below else []
        if any(part in ("", ".", "..") or len(part.encode()) > 255 or "\0" in part for part in parts):
            raise MountFailed(MountReport(error=f"file_mounts.{self._name}: no file can be called {below[:200]!r}",
                                          sure=True))
        return Item(self._url, meta["path"], "/".join([name, *parts]), meta["size"],
                    meta["e_tag"] or str(meta["last_modified"]))

    def piece(self, item: Item, number: int, stop: threading.Event) -> bytes:
        start = number * PIECE_BYTES
        for left in reversed(range(TRIES)):
            try:
                got = self._obstore.get(self._store, item.path, options={
                    "range": (start, start + _length(item, number))}) if item.size else None
                data = bytes(got.bytes()) if got else b""
            except FileNotFoundError:
                raise ObjectChanged(f"{self._url}: {item.path}") from None
            except self._errors as error:
                failed = self._failed(error)
                if failed.report.sure or not left or stop.wait(PAUSE_S * (TRIES - left)):
                    raise failed from error
                continue
            if got and (got.meta["e_tag"] or str(got.meta["last_modified"])) != item.etag:
                raise ObjectChanged(f"{self._url}: {item.path}")
            if len(data) == _length(item, number):
                return data
        raise MountFailed(MountReport(error=f"file_mounts.{self._name}: {item.path} at {self._url} comes short"))

    def _failed(self, error: BaseException) -> MountFailed:
        sure = refusal(self._url, error)
        text = sure or f"{self._url} cannot be read from this host: {str(error).partition(chr(10))[0][:500]}"
        return MountFailed(MountReport(error=f"file_mounts.{self._name}: {text}", sure=bool(sure)))


# ---- the cache


def _numbers(item: Item) -> range:
    return range(max(1, -(-item.size // PIECE_BYTES)))


def _length(item: Item, number: int) -> int:
    return min(PIECE_BYTES, item.size - number * PIECE_BYTES)


def _is_here(cache: Path, item: Item) -> bool:
    """Return whether the object is in the cache, whole and unchanged: a privileged script may have written to it."""
    path = cache / item.id
    try:
        about = path.stat()
        return about.st_size == item.size and (cache / f"{item.id}.json").read_bytes() == b"%d" % about.st_mtime_ns
    except FileNotFoundError:
        return False


def _journal(cache: Path, item: Item) -> set[int]:
    """Read the numbers of an unfinished object's fetched pieces."""
    try:
        lines = (cache / f"{item.id}.pieces").read_text(errors="replace").split("\n")[:-1]
        return {int(line) for line in lines if line.isdigit() and int(line) in _numbers(item)}
    except FileNotFoundError:
        return set()


def _write(cache: Path, item: Item, number: int, data: bytes) -> None:
    descriptor = os.open(cache / f"{item.id}.part", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        view, at = memoryview(data), number * PIECE_BYTES
        while view:
            done = os.pwrite(descriptor, view, at)
            view, at = view[done:], at + done
        os.fsync(descriptor)  # a power failure could keep the journal's line, and lose this
    finally:
        os.close(descriptor)
    journal = os.open(cache / f"{item.id}.pieces", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(journal, f"{number}\n".encode())
    finally:
        os.close(journal)


def _finish(cache: Path, item: Item) -> None:
    part, path = cache / f"{item.id}.part", cache / item.id
    if part.stat().st_size != item.size:
        (cache / f"{item.id}.pieces").unlink()
        raise MountFailed(MountReport(
            error=f"file_mounts: {item.path} has {part.stat().st_size} bytes here, expected {item.size}"))
    part.chmod(0o444)
    atomic.rename(part, path, sync=False)  # fetched again from the bucket
    (cache / f"{item.id}.json").write_text(str(path.stat().st_mtime_ns))
    (cache / f"{item.id}.pieces").unlink()


def _place(item: Item, cache: Path, into: Path) -> None:
    place = into / item.name
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.parent.resolve().is_relative_to(into.resolve()) or (place.is_dir() and not place.is_symlink()):
        raise MountFailed(MountReport(error=f"file_mounts: {item.name} is a folder or a link in the working directory",
                                      sure=True))
    place.unlink(missing_ok=True)
    os.link(cache / item.id, place)


def _above(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _no_room(cache: Path, need: int) -> str:
    usage = shutil.disk_usage(cache)
    return f"file_mounts need {_sizes(need)} more, and this host's disk is full: {room(usage.free, usage.total)}"


def _sizes(*sizes: int) -> str:
    """Format sizes in one unit, such as "1.2 of 4.0 GB"."""
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if max(sizes) >= u), (1e3, "kB"))
    return " of ".join(f"{size / unit:.1f}" for size in sizes) + f" {name}"


if __name__ == "__main__":
    sys.exit(main())
