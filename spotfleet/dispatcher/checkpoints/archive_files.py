"""Keys of the archive: its manifest, and the content of each key, read by ranges.

A key is a file's name in the archive (`archive.py`). Its digest comes from a checkpoint's record if this process has
verified the file, and is computed otherwise, while the manifest is sent. So a key names bytes: a file that grows later
still has them, and a file that is replaced is noticed by the receiver.

The ledger changes all the time. Its key is a copy, made with the manifest and kept until one with newer events.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from spotfleet.dispatcher.checkpoints import archive
from spotfleet.dispatcher.checkpoints.archive import Content
from spotfleet.dispatcher.disk import partials
from spotfleet.dispatcher.disk.records import AT_TARGET, Seen, age, lies_at_target, name_of, named, read_record, seen_at
from spotfleet.dispatcher.disk.space import is_full
from spotfleet.errors import DiskFull
from spotfleet.fleet.ledger import Ledger
from spotfleet.protocol.archive import LEDGER, ArchiveFile, ArchiveHead, line
from spotfleet.protocol.checkpoint_files import MANIFEST, is_file_name
from spotfleet.protocol.messages import NOT_COLLECTED, Checkpoint
from spotfleet.storage import atomic
from spotfleet.storage.checkpoint_folder import problem_in, read_manifest
from spotfleet.storage.folder import FolderStore, checkpoint_name
from spotfleet.storage.mirror import Piece
from spotfleet.storage.store import UnsafeKey, check_key

BLOCK_BYTES = 1 << 20
ALIVE_S = 5.0  # between two lines of the manifest
TARGET_S = 5.0  # for one look at the checkpoint target, which may hang
COPY = ".archive-ledger"  # folder of the ledger's copy; `files.sweep` removes it at the next start


class TargetGlance:
    """Looks for checkpoints at a mounted target, which may have gone away. Blocking, at most TARGET_S in all."""

    def __init__(self, store: FolderStore) -> None:
        self._store, self._hangs = store, False

    def place_of(self, job: str, checkpoint: Checkpoint) -> str:
        """Return the path of a whole copy of the checkpoint, a folder or a tar; "" if none is found."""
        found: list[str] = []
        if not self._hangs:
            look = threading.Thread(target=self._look, args=(job, checkpoint, found), name="target", daemon=True)
            look.start()
            look.join(TARGET_S)
            self._hangs = look.is_alive()
        return found[0] if found else ""

    def _look(self, job: str, checkpoint: Checkpoint, found: list[str]) -> None:
        tar = self._store.path(checkpoint_name(job, checkpoint.version, checkpoint.generation))
        place = tar.with_suffix("") if checkpoint.name else tar
        record, seen = read_record(tar.with_suffix(".json")), seen_at(place)
        if record is not None and seen is not None and record.digest == checkpoint.digest \
                and seen[0] == checkpoint.bytes:
            found.append(str(place))


class ArchiveFiles:
    """The keys of one dispatcher. Blocking; called from several threads."""

    def __init__(self, home: Path, ledger: Ledger) -> None:
        self._home, self._ledger = home, ledger
        self._lock = threading.Lock()
        self._copied: tuple[int, Content] | None = None  # the ledger's newest event in the copy, and the copy

    # ---- manifest

    def send_manifest(self, send: Callable[[bytes], None], verified: Mapping[Path, Seen], target: TargetGlance | None,
                      now: float, job: str = "") -> None:
        """Send the manifest; with `job` only of the outputs of that job. `verified`: checkpoint files that this process
        has compared with their records, as they were then."""
        sizes = [content.size() for _, content in self._plain(job)]
        newest = [found[0] for folder in ([] if job else self._jobs("")) if (found := _records(folder))]
        sizes += [checkpoint.bytes for checkpoint in newest if not checkpoint.url or lies_at_target(checkpoint)]
        send(line(ArchiveHead(len(sizes), sum(sizes), now)))
        sent_at = time.monotonic()

        def alive() -> None:
            nonlocal sent_at
            if time.monotonic() - sent_at >= ALIVE_S:
                send(b"\n")
                sent_at = time.monotonic()

        for found in self._entries(verified, target, job, alive):
            send(line(found))
            sent_at = time.monotonic()
        send(line(None))

    def _entries(self, verified: Mapping[Path, Seen], target: TargetGlance | None, job: str,
                 alive: Callable[[], None]) -> Iterator[ArchiveFile]:
        """Yield the keys: checkpoints first, as their digests are known."""
        for folder in [] if job else self._jobs(""):
            yield from _newest_checkpoint(folder, verified, target, alive)
        for key, content in self._plain(job):
            size = content.size()
            yield ArchiveFile(key, size, _digest(content, size, alive))

    def _plain(self, job: str) -> Iterator[tuple[str, Content]]:
        """Yield all keys but those of checkpoints, with their contents."""
        if not job:
            yield LEDGER, self._ledger_copy()
            if (missing := self._missing()) is not None:
                yield NOT_COLLECTED, missing
        for folder in self._jobs(job):
            for name, head, files in [] if job else archive.logs_in(folder):
                yield f"jobs/{folder.name}/logs/{name}", Content(files, head)
            for name, path in archive.outputs(folder):
                yield f"jobs/{folder.name}/outputs/{name}", Content([path])

    def _jobs(self, job: str) -> list[Path]:
        return [folder for folder in archive.job_folders(self._home) if job in ("", folder.name)]

    def _ledger_copy(self) -> Content:
        """Return a copy of the ledger: on our disk, or in memory if the disk is full."""
        with self._lock:
            newest = self._ledger.append()
            if self._copied is None or self._copied[0] != newest or not all(p.exists() for p in self._copied[1].files):
                self._copied = newest, self._copy_ledger()
            return self._copied[1]

    def _copy_ledger(self) -> Content:
        place = self._home / COPY / LEDGER
        draft = place.with_suffix(".new")
        try:
            place.parent.mkdir(exist_ok=True, mode=0o700)
            self._ledger.copy_to(draft)
            atomic.rename(draft, place, sync=False)  # made again at need
            return Content([place])
        except (OSError, DiskFull) as error:
            if not is_full(error):
                raise
            draft.unlink(missing_ok=True)
            return Content([], self._ledger.copy_of())

    def _missing(self) -> Content | None:
        missing = archive.not_collected(self._home, self._ledger.state().lost)
        return None if missing is None else Content([], json.dumps(missing, indent=1).encode())

    # ---- content

    def contents(self, keys: Iterable[str]) -> list[Content]:
        """Return the contents of keys. Raises FileNotFoundError for all that is no key, such as a job's secrets."""
        logs: dict[Path, dict[str, Content]] = {}  # a job may have thousands: they are listed once for all keys
        return [self._content(key, logs) for key in keys]

    def _content(self, key: str, logs: dict[Path, dict[str, Content]]) -> Content:
        try:
            parts = check_key(key).split("/")
        except UnsafeKey as error:
            raise FileNotFoundError(str(error)) from None
        if key == LEDGER:
            with self._lock:
                if self._copied is not None:
                    return self._copied[1]
        elif key == NOT_COLLECTED and (missing := self._missing()) is not None:
            return missing
        elif len(parts) >= 4 and parts[0] == "jobs":
            folder = next((f for at in ("jobs", "past") if (f := self._home / at / parts[1]).is_dir()), None)
            if folder is not None and (found := _content_of(folder, parts[2], parts[3:], logs)) is not None:
                return found
        raise FileNotFoundError(f"the archive has no {key[:200]!r}")


def blocks(contents: Sequence[Content], pieces: Sequence[Piece]) -> Iterator[bytes]:
    """Yield the bytes of all pieces, one after the other, in blocks of about BLOCK_BYTES. Each piece is a range of the
    content beside it. Raises FileNotFoundError for a content that has become shorter."""
    held, size = [], 0
    for content, piece in zip(contents, pieces, strict=True):
        for chunk in content.read(piece.start, piece.end):
            held.append(chunk)
            size += len(chunk)
            if size >= BLOCK_BYTES:
                yield b"".join(held) if len(held) > 1 else chunk
                held, size = [], 0
    if held:
        yield b"".join(held)


def _content_of(folder: Path, kind: str, names: list[str], logs: dict[Path, dict[str, Content]]) -> Content | None:
    """Return the content of a job's log, output or checkpoint. `logs`: the logs that were listed, by folder."""
    if kind == "logs" and len(names) == 1:
        if folder not in logs:
            logs[folder] = {name: Content(files, head) for name, head, files in archive.logs_in(folder)}
        return logs[folder].get(names[0])
    if kind == "checkpoints" and ((len(names) == 1 and names[0].endswith(".ckpt"))
                                  or (len(names) == 2 and named(names[0]) is not None and is_file_name(names[1]))):
        path = folder / kind / "/".join(names)
        record = read_record(folder / kind / f"{names[0]}.json") if len(names) == 2 else None
        if record is not None and lies_at_target(record):
            path = _place_of(folder, record) / names[1]
        return Content([path]) if path.is_file() else None
    if kind == "outputs" and len(names) >= 2 and names[0] == archive.FOLDER:
        path = folder.joinpath(*names)
        return Content([path]) if path.is_file() else None
    if kind == "outputs" and len(names) >= 2 and "@" in names[0] and not names[0].startswith("."):
        path = partials.find(folder / kind / names[0], "/".join(names[1:]))
        return Content([path]) if path is not None else None
    return None


def _records(folder: Path) -> list[Checkpoint]:
    """Return the records of a job's checkpoints, newest first."""
    found = [c for path in (folder / "checkpoints").glob("*.json") if (c := read_record(path)) is not None]
    return sorted(found, key=age, reverse=True)


def _newest_checkpoint(folder: Path, verified: Mapping[Path, Seen], target: TargetGlance | None,
                       alive: Callable[[], None]) -> list[ArchiveFile]:
    """Return the files of the newest checkpoint whose files have the digests of its record, or that lies in an object
    store."""
    for checkpoint in _records(folder):
        key = f"jobs/{folder.name}/checkpoints/{name_of(checkpoint)}"
        if checkpoint.url and not lies_at_target(checkpoint):
            return [ArchiveFile(key, checkpoint.bytes, checkpoint.digest, checkpoint.url)]
        if lies_at_target(checkpoint) and target is not None:
            if at := target.place_of(folder.name, checkpoint):
                return [ArchiveFile(key, checkpoint.bytes, checkpoint.digest, at)]
            continue
        place = _place_of(folder, checkpoint)
        seen = seen_at(place)
        if seen is None:
            continue
        if verified.get(place) != seen and not _is_whole(place, checkpoint, alive):
            continue
        at = target.place_of(folder.name, checkpoint) if target is not None else ""
        if not checkpoint.name:
            return [ArchiveFile(f"{key}.ckpt", seen[0], checkpoint.digest, at)]
        if at:
            return [ArchiveFile(key, checkpoint.bytes, checkpoint.digest, at)]
        manifest = ArchiveFile(f"{key}/{MANIFEST}", (place / MANIFEST).stat().st_size, checkpoint.digest)
        return [manifest, *(ArchiveFile(f"{key}/{name}", entry.bytes, entry.sha256)
                            for name, entry in read_manifest(place).files.items())]
    return []


def _place_of(folder: Path, checkpoint: Checkpoint) -> Path:
    """Return the folder or the tar of a job's checkpoint: here, or at the mounted target."""
    if lies_at_target(checkpoint):
        return Path(checkpoint.url.removeprefix(AT_TARGET))
    return folder / "checkpoints" / f"{name_of(checkpoint)}{'' if checkpoint.name else '.ckpt'}"


def _is_whole(place: Path, checkpoint: Checkpoint, alive: Callable[[], None]) -> bool:
    if place.is_dir():
        return not problem_in(place, checkpoint.digest, lambda size: alive())
    return _digest(Content([place]), place.stat().st_size, alive) == checkpoint.digest


def _digest(content: Content, size: int, alive: Callable[[], None]) -> str:
    sha = hashlib.sha256()
    for chunk in content.read(0, size):
        sha.update(chunk)
        alive()
    return sha.hexdigest()
