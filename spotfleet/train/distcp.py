"""Checkpoints in the format of torch.distributed.checkpoint, written and read without its planners.

    FOLDER/__R_0.distcp    what rank R wrote: items one after another, each what torch.save makes of one piece
    FOLDER/.metadata       which piece of which tensor lies where; written last

`torch.distributed.checkpoint.format_utils.dcp_to_torch_save(FOLDER, file)` reads it. Through the agent it travels as a
tar of that folder: rank R's *segment* is one member with its header, rank 0's comes last and ends the tar, so the
segments joined in the order 1, 2, ..., 0 are the tar. Members are read where they lie, without unpacking.

With a free-standing process group DCP takes itself for a single process, so the pieces are planned (shards.py) and the
metadata is joined here. Tensors are read with weights_only. `.metadata` and our own position are pickles: they are
opened only after the digest that the dispatcher vouches for has been found right.

Keys: tensors as the script knows them ("model" -> "0.weight", "optimizer" -> "state" -> "0.weight" -> "exp_avg"), its
values under their names, and ours under "spotfleet".
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import pickle
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from spotfleet.train.shards import Path, Piece, Row, plan

FORMAT = 2
METADATA = ".metadata"
OURS = "spotfleet"
FORMAT_KEY, VERSION_KEY, ABOUT_KEY = f"{OURS}.format", f"{OURS}.version", f"{OURS}.about"
# What torch and pickle raise for a value that not everybody can read.
UNSPEAKABLE = (pickle.PicklingError, pickle.UnpicklingError, RuntimeError, AttributeError, TypeError, ValueError)
# What they and a file of another layout raise when it is read.
UNREADABLE = (*UNSPEAKABLE, UsageError, ImportError, LookupError, EOFError, OSError, tarfile.TarError)
BLOCK = 512
TAR_END = bytes(2 * BLOCK)


@dataclass(frozen=True)
class Shard:
    """What one rank writes of one version; nobody else touches its tensors."""

    version: int
    generation: int
    rank: int
    world: int
    rows: Sequence[Row]  # of the whole state
    values: Sequence[torch.Tensor]  # of this rank's pieces
    about: tuple[Any, Any] = (None, None)  # position and schema
    plain: dict[Path, Any] = field(default_factory=dict)  # what users may want to read without us; rank 0's only


def file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


@dataclass
class Items:
    """What a shard is in its file: items one after another, and how long each became."""

    values: Sequence[torch.Tensor]
    about: torch.Tensor | None = None  # rank 0's
    plain: dict[Path, bytes] = field(default_factory=dict)  # rank 0's
    lengths: list[int] = field(default_factory=list)

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The bytes of the file; one item at a time is in memory."""
        for item in self._each():
            if not isinstance(item, bytes):
                out = io.BytesIO()
                torch.save(item, out)
                item = out.getbuffer()
            self.lengths.append(len(item))
            yield item

    def _each(self) -> Iterator[torch.Tensor | bytes]:
        for value in self.values:
            yield _alone(value)
        if self.about is not None:
            yield self.about
            yield from self.plain.values()


def items_of(shard: Shard) -> Items:
    if shard.rank != 0:
        return Items(shard.values)
    about = pickle.dumps((*shard.about, [_key(row.paths[0]) for row in shard.rows]))
    return Items(shard.values, torch.frombuffer(bytearray(about), dtype=torch.uint8), _plain(shard))


def layout(shard: Shard) -> str:
    """The same on ranks that hold the same tensors under the same names."""
    return hashlib.sha256(repr(list(shard.rows)).encode()).hexdigest()[:16]


def _key(path: Path) -> str:
    return ".".join(path)


def _alone(value: torch.Tensor) -> torch.Tensor:
    """On the CPU and in a storage of its own: torch.save writes whole storages."""
    value = value.detach().cpu()
    return value if value.untyped_storage().nbytes() == value.numel() * value.element_size() else value.clone()


def _plain(shard: Shard) -> dict[Path, bytes]:
    """Values that anybody can read, without the classes of the script; the others are in the position alone."""
    found = {}
    for path, value in {(OURS, "format"): FORMAT, (OURS, "version"): shard.version, **shard.plain}.items():
        out = io.BytesIO()
        try:
            torch.save(value, out)
            torch.load(io.BytesIO(out.getvalue()), weights_only=True)
        except UNSPEAKABLE:
            continue
        found[path] = out.getvalue()
    return found


def metadata(shard: Shard, own: Items, lengths: Sequence[Sequence[int]]) -> bytes:
    """`.metadata`, by rank 0, whose items are `own`; `lengths` are those of ranks 1, 2, ..."""
    kinds: dict[Path, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    chunks: dict[int, list[Piece]] = {}
    for rank, pieces in enumerate(plan(shard.rows, shard.world)):
        infos = _infos(file_name(rank), own.lengths if rank == 0 else lengths[rank - 1])
        for piece, info in zip(pieces, infos, strict=False):
            chunks.setdefault(piece.row, []).append(piece)
            for path in shard.rows[piece.row].paths:
                stored[MetadataIndex(_key(path), piece.offsets)] = info
        if rank == 0 and own.about is not None:
            rest = infos[len(pieces):]
            shape = (own.about.numel(),)
            kinds[(OURS, "about")] = _described(torch.uint8, shape, [Piece(0, (0,), shape)])
            stored[MetadataIndex(ABOUT_KEY, (0,))] = rest[0]
            for path, info in zip(own.plain, rest[1:], strict=True):
                kinds[path], stored[MetadataIndex(_key(path))] = BytesStorageMetadata(), info
    for i, row in enumerate(shard.rows):
        for path in row.paths:
            kinds[path] = _described(row.dtype, row.shape, chunks[i])
    return pickle.dumps(Metadata({_key(path): kind for path, kind in kinds.items()},
                                 planner_data={_key(path): path for path in kinds}, storage_data=stored))


def _infos(name: str, lengths: Sequence[int]) -> list[_StorageInfo]:
    begins = itertools.accumulate(lengths, initial=0)
    return [_StorageInfo(name, begin, length) for begin, length in zip(begins, lengths, strict=False)]


def _described(dtype: torch.dtype, shape: tuple[int, ...], pieces: Sequence[Piece]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in pieces]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)


# A tar of the folder


def header(name: str, size: int) -> bytes:
    """The block before a member; the same for the same member, wherever and whenever it is made."""
    about = tarfile.TarInfo(name)
    about.size, about.mode = size, 0o644
    return about.tobuf(tarfile.GNU_FORMAT)


def padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


# Reading


@dataclass(frozen=True)
class Held:
    """What a checkpoint holds."""

    version: int
    position: Any
    schema: Any
    tensors: list[torch.Tensor]


Opened = Callable[[str], AbstractContextManager[tuple[BinaryIO, int]]]  # a member's name: a file, and where it begins


@contextmanager
def in_tar(path: str | os.PathLike[str]) -> Iterator[Opened]:
    """The members of a tar, where they lie in it."""
    with open(path, "rb") as file:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            begins = {member.name: member.offset_data for member in tar}

        @contextmanager
        def member(name: str) -> Iterator[tuple[BinaryIO, int]]:
            if name not in begins:
                raise UsageError(f"there is no {name} in it")
            yield file, begins[name]

        yield member


@contextmanager
def in_folder(folder: str | os.PathLike[str]) -> Iterator[Opened]:
    """The members as files."""

    @contextmanager
    def member(name: str) -> Iterator[tuple[BinaryIO, int]]:
        with open(os.path.join(folder, name), "rb") as file:
            yield file, 0

    yield member


def read(opened: Opened) -> Held:
    """What lies there. Whatever torch and pickle raise for what is none of ours; UsageError for another format.

    To be called only once somebody has vouched for every byte.
    """
    with opened(METADATA) as (file, begin):
        file.seek(begin)
        meta: Metadata = pickle.load(file)
    found: dict[str, int] = {}
    for key in (FORMAT_KEY, VERSION_KEY):
        found[key] = _item(opened, meta.storage_data[MetadataIndex(key)])
        if found[FORMAT_KEY] != FORMAT:
            raise UsageError(f"format {found[FORMAT_KEY]} where {FORMAT} is understood")
    about = _tensor(opened, meta, ABOUT_KEY)
    position, schema, keys = pickle.loads(about.numpy().tobytes())
    return Held(found[VERSION_KEY], position, schema, [_tensor(opened, meta, key) for key in keys])


def _tensor(opened: Opened, meta: Metadata, key: str) -> torch.Tensor:
    kind = meta.state_dict_metadata[key]
    infos = [meta.storage_data[MetadataIndex(key, chunk.offsets)] for chunk in kind.chunks]
    if len(infos) == 1:
        return _item(opened, infos[0])
    whole = torch.empty(kind.size, dtype=kind.properties.dtype)
    for chunk, info in zip(kind.chunks, infos, strict=True):
        Piece(0, tuple(chunk.offsets), tuple(chunk.sizes)).of(whole).copy_(_item(opened, info))
    return whole


def _item(opened: Opened, info: _StorageInfo) -> Any:
    with opened(info.relative_path) as (file, begin):
        file.seek(begin + info.offset)
        return torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
