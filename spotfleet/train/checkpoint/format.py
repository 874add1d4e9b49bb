"""Checkpoints in the format of torch.distributed.checkpoint, written and read without its planners.

    FOLDER/__R_0.distcp    rank R's file: items one after another, each the torch.save of one piece
    FOLDER/.metadata       index of the pieces of each tensor; written last

`torch.distributed.checkpoint.format_utils.dcp_to_torch_save(FOLDER, file)` reads it. Earlier releases kept a tar of
that folder, whose members are read in place (`in_tar`, to be removed two releases after 0.1).

With a free-standing process group DCP acts as a single process, so the pieces are planned (shards.py) and the metadata
is joined here. Tensors are read with weights_only. `.metadata` and the position are pickles: they are opened only after
the digest that the dispatcher vouches for has been verified.

Keys: tensors under the script's names ("model" -> "0.weight", "optimizer" -> "state" -> "0.weight" -> "exp_avg"), its
values under their names, and this module's own entries under "spotfleet".
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import pickle
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from spotfleet.errors import UsageError
from spotfleet.protocol.checkpoint_files import METADATA, is_file_name, piece_name
from spotfleet.train.checkpoint.shards import Path, ShardBox, TensorRow, plan

FORMAT = 2
OWN_KEY = "spotfleet"
AROUND_BYTES = 4096  # that torch.save adds to a tensor, at most
FORMAT_KEY, VERSION_KEY, ABOUT_KEY = f"{OWN_KEY}.format", f"{OWN_KEY}.version", f"{OWN_KEY}.about"
# Errors of torch and pickle for a value that cannot be written, or be read without the script's classes.
PICKLE_ERRORS = (pickle.PicklingError, pickle.UnpicklingError, RuntimeError, AttributeError, TypeError, ValueError)
# Errors of torch and pickle, and of a file with another layout, when it is read.
UNREADABLE = (*PICKLE_ERRORS, UsageError, ImportError, LookupError, EOFError, OSError, tarfile.TarError)


@dataclass(frozen=True)
class Shard:
    """One rank's part of one version; no other code touches its tensors."""

    version: int
    generation: int
    rank: int
    world: int
    rows: Sequence[TensorRow]  # all tensors of the state
    values: Sequence[torch.Tensor]  # this rank's pieces
    about: tuple[Any, Any] = (None, None)  # position and schema
    plain: dict[Path, Any] = field(default_factory=dict)  # values that users can read without spotfleet; rank 0's only


@dataclass
class Items:
    """Contents of a shard's file: items one after another, and the length of each."""

    values: Sequence[torch.Tensor]
    about: torch.Tensor | None = None  # rank 0's
    plain: dict[Path, bytes] = field(default_factory=dict)  # rank 0's
    lengths: list[int] = field(default_factory=list)

    @property
    def at_most(self) -> int:
        """Size that the file does not exceed."""
        values = [*self.values, *([] if self.about is None else [self.about])]
        return sum(v.numel() * v.element_size() + AROUND_BYTES for v in values) + sum(map(len, self.plain.values()))

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the file; one item at a time is in memory."""
        for item in self._each():
            if not isinstance(item, bytes):
                out = io.BytesIO()
                torch.save(item, out)
                item = out.getbuffer()
            self.lengths.append(len(item))
            yield item

    def _each(self) -> Iterator[torch.Tensor | bytes]:
        for value in self.values:
            yield _compact(value)
        if self.about is not None:
            yield self.about
            yield from self.plain.values()


def items_of(shard: Shard) -> Items:
    if shard.rank != 0:
        return Items(shard.values)
    about = pickle.dumps((*shard.about, [_key(row.paths[0]) for row in shard.rows]))
    return Items(shard.values, torch.frombuffer(bytearray(about), dtype=torch.uint8), _plain(shard))


def layout(shard: Shard) -> str:
    """Return a digest that is the same on ranks with the same tensors under the same names."""
    return hashlib.sha256(repr(list(shard.rows)).encode()).hexdigest()[:16]


def _key(path: Path) -> str:
    return ".".join(path)


def _compact(value: torch.Tensor) -> torch.Tensor:
    """Return the value on the CPU and in a storage of its own: torch.save writes whole storages."""
    value = value.detach().cpu()
    return value if value.untyped_storage().nbytes() == value.numel() * value.element_size() else value.clone()


def _plain(shard: Shard) -> dict[Path, bytes]:
    """Return the values that can be read without the script's classes; the others are in the position alone."""
    found = {}
    for path, value in {(OWN_KEY, "format"): FORMAT, (OWN_KEY, "version"): shard.version, **shard.plain}.items():
        out = io.BytesIO()
        try:
            torch.save(value, out)
            torch.load(io.BytesIO(out.getvalue()), weights_only=True)
        except PICKLE_ERRORS:
            continue
        found[path] = out.getvalue()
    return found


def metadata(shard: Shard, own: Items, lengths: Sequence[Sequence[int]]) -> bytes:
    """Return `.metadata`, on rank 0, whose items are `own`; `lengths` are those of ranks 1, 2, ..."""
    kinds: dict[Path, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    chunks: dict[int, list[ShardBox]] = {}
    for rank, pieces in enumerate(plan(shard.rows, shard.world)):
        infos = _infos(piece_name(rank), own.lengths if rank == 0 else lengths[rank - 1])
        for piece, info in zip(pieces, infos, strict=False):
            chunks.setdefault(piece.row, []).append(piece)
            for path in shard.rows[piece.row].paths:
                stored[MetadataIndex(_key(path), piece.offsets)] = info
        if rank == 0 and own.about is not None:
            rest = infos[len(pieces):]
            shape = (own.about.numel(),)
            kinds[(OWN_KEY, "about")] = _tensor_metadata(torch.uint8, shape, [ShardBox(0, (0,), shape)])
            stored[MetadataIndex(ABOUT_KEY, (0,))] = rest[0]
            for path, info in zip(own.plain, rest[1:], strict=True):
                kinds[path], stored[MetadataIndex(_key(path))] = BytesStorageMetadata(), info
    for i, row in enumerate(shard.rows):
        for path in row.paths:
            kinds[path] = _tensor_metadata(row.dtype, row.shape, chunks[i])
    return pickle.dumps(Metadata({_key(path): kind for path, kind in kinds.items()},
                                 planner_data={_key(path): path for path in kinds}, storage_data=stored))


def _infos(name: str, lengths: Sequence[int]) -> list[_StorageInfo]:
    begins = itertools.accumulate(lengths, initial=0)
    return [_StorageInfo(name, begin, length) for begin, length in zip(begins, lengths, strict=False)]


def _tensor_metadata(dtype: torch.dtype, shape: tuple[int, ...], pieces: Sequence[ShardBox]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in pieces]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)


# Reading


Member = tuple[BinaryIO, int]  # a file, and the offset of the member in it
OpenMember = Callable[[str], Member]


class StoredTensors(Sequence[torch.Tensor]):
    """Tensors of a checkpoint, each read when it is asked for: one at a time is in memory."""

    def __init__(self, member: OpenMember, meta: Metadata, keys: Sequence[str]) -> None:
        self._member, self._meta, self._keys = member, meta, keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: Any) -> Any:
        return _tensor(self._member, self._meta, self._keys[index])


@dataclass(frozen=True)
class CheckpointContents:
    """Contents of a checkpoint."""

    version: int
    position: Any
    schema: Any
    tensors: Sequence[torch.Tensor]  # read while the checkpoint is open


@contextmanager
def in_tar(path: str | os.PathLike[str]) -> Iterator[OpenMember]:
    """Open a tar and yield access to its members in place."""
    with open(path, "rb") as file:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            begins = {member.name: member.offset_data for member in tar}
        yield lambda name: (file, begins[name])


@contextmanager
def in_folder(folder: str | os.PathLike[str]) -> Iterator[OpenMember]:
    """Open the files of a folder and yield access to them; they may be removed meanwhile."""
    with ExitStack() as stack:
        files = {entry.name: stack.enter_context(open(entry.path, "rb")) for entry in os.scandir(folder)
                 if is_file_name(entry.name)}
        yield lambda name: (files[name], 0)


def read(member: OpenMember) -> CheckpointContents:
    """Read a checkpoint, its tensors when they are asked for. UsageError for another format; exceptions of torch and
    pickle for other files.

    Call it only after the digest of every byte has been verified.
    """
    file, begin = member(METADATA)
    file.seek(begin)
    meta: Metadata = pickle.load(file)
    found: dict[str, int] = {}
    for key in (FORMAT_KEY, VERSION_KEY):
        found[key] = _item(member, meta.storage_data[MetadataIndex(key)])
        if found[FORMAT_KEY] != FORMAT:
            raise UsageError(f"format {found[FORMAT_KEY]} where {FORMAT} is understood")
    about = _tensor(member, meta, ABOUT_KEY)
    position, schema, keys = pickle.loads(about.numpy().tobytes())
    return CheckpointContents(found[VERSION_KEY], position, schema, StoredTensors(member, meta, keys))


def _tensor(member: OpenMember, meta: Metadata, key: str) -> torch.Tensor:
    kind = meta.state_dict_metadata[key]
    infos = [meta.storage_data[MetadataIndex(key, chunk.offsets)] for chunk in kind.chunks]
    if len(infos) == 1:
        return _item(member, infos[0])
    whole = torch.empty(kind.size, dtype=kind.properties.dtype)
    for chunk, info in zip(kind.chunks, infos, strict=True):
        ShardBox(0, tuple(chunk.offsets), tuple(chunk.sizes)).view_of(whole).copy_(_item(member, info))
    return whole


def _item(member: OpenMember, info: _StorageInfo) -> Any:
    file, begin = member(info.relative_path)
    return torch.load(_Window(file, begin + info.offset, info.length), map_location="cpu", weights_only=True)


class _Window(io.RawIOBase):
    """Part of a file, as a file of its own: torch reads from it straight into a tensor's memory."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._descriptor, self._begin, self._length, self._at = file.fileno(), begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[:max(0, self._length - self._at)]
        read = os.preadv(self._descriptor, [view], self._begin + self._at) if len(view) else 0
        self._at += read
        return read
