"""Exchange of a checkpoint's files between the hosts that restore it, each of which has downloaded a share of them.

Each restoring rank announces, while its generation forms, which files its host has. All ranks then derive the same
messages from these announcements: of each file that some host lacks, one host that has it sends it to all of those. The
lowest restoring rank of a host exchanges for it; the others wait for its files.

    some files missing here --received, digest is right--> renamed into the folder --all are here--> read
                              |-- a peer was lost: CommBroken; the next generation begins with the files that are whole
                              |-- another digest, or nobody has a file: reported, so that the agent fetches all; the
                              |   generation ends
                              '-- this disk is full: NoRoomHere, so that another host restores it

Memory: at most WINDOW messages of CHUNK_BYTES in flight. Threads: the main thread.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from spotfleet.errors import SpotfleetError, is_full
from spotfleet.protocol.checkpoint_files import MANIFEST, CheckpointFile
from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage import atomic, verified
from spotfleet.storage.checkpoint_folder import Progress, digest_of, ignore, read_manifest
from spotfleet.train.comm.group import Group
from spotfleet.worker.errors import CommBroken

CHUNK_BYTES = 8 << 20
WINDOW = 4
POLL_S = 0.05
NOTE_S = 2.0  # wait for the note that all files were compared, once they are there


class NoRoomHere(SpotfleetError):
    """This host has no room for the checkpoint: another one may have."""

    blame_host = True


@dataclass(frozen=True)
class FileSend:
    """One file on its way from a rank to others."""

    name: str
    sender: int
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class Exchange:
    """All that the ranks of a generation send one another. Equal on all of them."""

    leaders: Mapping[str, int]  # by host
    sends: tuple[FileSend, ...]
    missing: tuple[str, ...] = ()  # files that no host has


def announcement(named: Checkpoint) -> str:
    """Return the announcement of a rank that is to restore `named`; "" for one that is read from elsewhere."""
    folder = Path(named.path)
    if named.url or not named.path or not folder.is_dir():
        return ""
    try:
        if digest_of(folder / MANIFEST) != named.digest:
            return ""
        files = read_manifest(folder).files
    except (OSError, ValueError):
        return ""
    bits = sum(_is_here(folder / name, files[name]) << i for i, name in enumerate(sorted(files)))
    return f"{named.digest}:{bits:x}"


def _is_here(path: Path, entry: CheckpointFile) -> bool:
    try:
        return path.stat().st_size == entry.bytes
    except OSError:
        return False


def plan(files: Mapping[str, CheckpointFile], digest: str, announced: Sequence[str], hosts: Sequence[str]) -> Exchange:
    """Plan the exchange of a checkpoint whose manifest has this digest. `announced`, `hosts`: by rank. Pure."""
    has: dict[int, int] = {}
    leaders: dict[str, int] = {}
    for rank, (text, host) in enumerate(zip(announced, hosts, strict=True)):
        named, _, bits = text.partition(":")
        if named == digest:
            leader = leaders.setdefault(host, rank)
            has[leader] = has.get(leader, 0) | int(bits, 16)
    sends, missing, loads = [], [], dict.fromkeys(leaders.values(), 0)
    for i, name in sorted(enumerate(sorted(files)), key=lambda numbered: -files[numbered[1]].bytes):
        lacking = tuple(r for r in has if not has[r] >> i & 1)
        holders = [r for r in has if r not in lacking]
        if lacking and holders:
            sender = min(holders, key=lambda r: (loads[r], r))
            loads[sender] += files[name].bytes * len(lacking)
            sends.append(FileSend(name, sender, lacking))
        elif lacking:
            missing.append(name)
    return Exchange(leaders, tuple(sends), tuple(missing))


def complete(group: Group, named: Checkpoint, lacks: Callable[[], None], progress: Progress = ignore) -> None:
    """Receive the missing files of `named`, which this rank has announced to `group`, into its folder.

    `lacks` is called before the generation ends because some files cannot be received from peers. Raises CommBroken
    where a peer is lost or files cannot be received, and NoRoomHere where this disk is full.
    """
    folder = Path(named.path)
    try:
        files = read_manifest(folder).files
    except (OSError, ValueError) as error:
        raise group.refuse(f"{folder}: {error}") from error
    exchange = plan(files, named.digest, group.announced, group.hosts)
    if exchange.missing:
        lacks()
        raise group.refuse(f"no host has {exchange.missing[0]} of checkpoint {named.version}")
    leader = exchange.leaders[group.hosts[group.rank]]
    receives = any(leader in send.receivers for send in exchange.sends)
    if group.rank != leader:
        return _await(group, folder, files, named.digest) if receives else None
    try:
        _Exchanger(group, folder, files, exchange.sends, progress).run()
        if receives:
            verified.note(folder, named.digest)
    except _Damaged as error:
        lacks()
        raise group.refuse(f"checkpoint {named.version}: {error}") from error
    except OSError as error:
        broken = group.refuse(f"checkpoint {named.version}: {error}")
        if is_full(error):
            raise NoRoomHere(f"checkpoint {named.version} finds no room here: {error}",
                             hint="make room on this host, or give hosts larger disks") from error
        raise broken from error


def _await(group: Group, folder: Path, files: Mapping[str, CheckpointFile], digest: str) -> None:
    """Wait until the rank that exchanges for this host has all files."""
    here_since: float | None = None
    while not verified.is_noted(folder, digest):
        group.raise_if_aborted()
        if here_since is None and all(_is_here(folder / name, entry) for name, entry in files.items()):
            here_since = time.monotonic()
        if here_since is not None and time.monotonic() - here_since >= NOTE_S:
            return  # its reader compares the digests
        time.sleep(POLL_S)


class _Damaged(Exception):
    """A file has arrived with another digest."""


class _Exchanger:
    """One rank's part of an exchange."""

    def __init__(self, group: Group, folder: Path, files: Mapping[str, CheckpointFile], sends: Sequence[FileSend],
                 progress: Progress) -> None:
        self._group, self._folder, self._files, self._progress = group, folder, files, progress
        self._sends = sends
        self._under_way: deque[_Chunk] = deque()

    def run(self) -> None:
        """Send and receive all files. Every rank goes through the chunks in the same order, so none waits for another
        one that waits for it."""
        opened: dict[str, _File] = {}
        try:
            for tag, (send, start, stop) in enumerate(_chunks(self._sends, self._files)):
                rank = self._group.rank
                if rank != send.sender and rank not in send.receivers:
                    continue
                if send.name not in opened:
                    opened[send.name] = _File(self._folder / send.name, self._files[send.name], rank == send.sender)
                if len(self._under_way) == WINDOW:
                    self._arrive()
                self._under_way.append(_Chunk(self._group, opened[send.name], send, start, stop, tag))
            while self._under_way:
                self._arrive()
        except (CommBroken, OSError, _Damaged):
            self._group.drain([work for chunk in self._under_way for work in chunk.works])
            raise
        finally:
            for file in opened.values():
                file.close()

    def _arrive(self) -> None:
        chunk = self._under_way[0]
        self._group.finish(chunk.works)
        self._under_way.popleft()
        chunk.keep()
        self._progress(chunk.bytes)
        if chunk.is_last:
            chunk.file.close()


def _chunks(sends: Sequence[FileSend], files: Mapping[str, CheckpointFile]) -> list[tuple[FileSend, int, int]]:
    """Return the chunks of all files, those of different senders in turn; each file's keep their order."""
    queues: dict[int, list[tuple[FileSend, int, int]]] = {}
    for send in sends:
        size = files[send.name].bytes
        queues.setdefault(send.sender, []).extend(
            (send, start, min(size, start + CHUNK_BYTES)) for start in range(0, max(1, size), CHUNK_BYTES))
    longest = max(map(len, queues.values()), default=0)
    return [queue[i] for i in range(longest) for _, queue in sorted(queues.items()) if i < len(queue)]


class _File:
    """A file that is read here, or arrives and gets its name once it is whole."""

    def __init__(self, path: Path, entry: CheckpointFile, sends: bool) -> None:
        self._path, self._entry, self._sends = path, entry, sends
        self._draft = path.with_name(f".{path.name}.peer")
        self._file: BinaryIO = path.open("rb") if sends else self._draft.open("wb")
        self._seen, self._size = hashlib.sha256(), 0

    @property
    def bytes(self) -> int:
        return self._entry.bytes

    def read(self, into: memoryview, start: int) -> None:
        if os.preadv(self._file.fileno(), [into], start) != len(into):
            raise OSError(f"{self._path} is shorter than its manifest says")

    def append(self, data: memoryview) -> None:
        self._file.write(data)
        self._seen.update(data)
        self._size += len(data)
        if self._size == self._entry.bytes:
            self._file.flush()
            if self._seen.hexdigest() != self._entry.sha256:
                raise _Damaged(f"{self._path.name} has arrived from a peer with sha256 {self._seen.hexdigest()}")
            atomic.rename(self._draft, self._path, sync=False)  # it would be fetched again

    def close(self) -> None:
        self._file.close()
        if not self._sends:
            self._draft.unlink(missing_ok=True)


class _Chunk:
    """Part of a file in transfer."""

    def __init__(self, group: Group, file: _File, send: FileSend, start: int, stop: int, tag: int) -> None:
        self.file, self._sends, self.bytes = file, send.sender == group.rank, stop - start
        self.is_last = stop == file.bytes
        self._body = torch.empty(max(1, self.bytes), dtype=torch.uint8)
        if self._sends:
            file.read(self._view(), start)
        self._carried = self._body.to(group.device)
        self.works: list[Any] = ([group.send(self._carried, to, tag) for to in send.receivers] if self._sends
                                 else [group.receive(self._carried, send.sender, tag)])

    def keep(self) -> None:
        """Store what has arrived."""
        if not self._sends:
            self._body = self._carried.cpu()
            self.file.append(self._view())

    def _view(self) -> memoryview:
        return memoryview(self._body.numpy())[:self.bytes]
