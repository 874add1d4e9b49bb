"""Bundles: a working directory in content-addressed pieces, so that only changed pieces travel.

    tree.py      lists the files: `.gitignore`, `file_mounts`, links        ignore.py    ignore rules for names
    grouping.py  orders the files and cuts them into pieces
    blob.py      compresses a group of files to a blob; a cache on this machine saves reading the files again
    manifest.py  maps pieces to files: the bundle's own blob, with the sha256 that is `JobSpec.bundle`
    unpack.py    makes a folder on a host from manifest and pieces           archive.py   does the same from a .tar.gz
    scripts.py   facts about the training script, from its source

Manifest and pieces depend on names, contents and executable bits only: the same content has the same digest. All of
them travel as blobs of one kind (`/v1/bundles/SHA256`); laptop: `api/lifecycle/upload.py`, host:
`agent/files/blobs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spotfleet.bundle.archive import extract
from spotfleet.bundle.blob import SHORTEST_SECRET, PackedGroup, PieceCache, SecretValues, make
from spotfleet.bundle.grouping import Group, group
from spotfleet.bundle.manifest import BundlePiece, FileEntry, Manifest, dump, is_manifest, load, pieces_of
from spotfleet.bundle.tree import Tree, scan
from spotfleet.bundle.unpack import DamagedPiece, unpack

__all__ = [
    "SHORTEST_SECRET",
    "BundlePiece",
    "DamagedPiece",
    "FileEntry",
    "Group",
    "Manifest",
    "Packed",
    "PackedGroup",
    "PieceCache",
    "SecretValues",
    "Tree",
    "assemble",
    "dump",
    "extract",
    "group",
    "is_manifest",
    "load",
    "make",
    "pack",
    "pieces_of",
    "scan",
    "unpack",
]


@dataclass(frozen=True)
class Packed:
    manifest: Manifest
    left_out: tuple[str, ...]


def assemble(tree: Tree, groups: Sequence[Group], made: Sequence[PackedGroup]) -> Packed:
    """Return the manifest of the files that were read from `tree`; `made` has one `PackedGroup` for each group."""
    sizes: dict[str, int] = {}
    order: list[tuple[str, bool]] = []
    left_out = list(tree.left_out)
    for members, result in zip(groups, made, strict=True):
        left_out += result.left_out
        for piece, size in zip(members, result.sizes, strict=True):
            if piece.file.name not in sizes:
                order.append((piece.file.name, piece.file.runs))
            before = sizes.get(piece.file.name, 0)
            sizes[piece.file.name] = -1 if -1 in (before, size) else before + size
    gone = {name for name, size in sizes.items() if size < 0}
    pieces = tuple(result.piece for members, result in zip(groups, made, strict=True)
                   if result.piece is not None and not (len(members) == 1 and members[0].file.name in gone))
    files = tuple(FileEntry(name, sizes[name], runs) for name, runs in order if sizes[name] >= 0)
    return Packed(Manifest(pieces, tree.folders, tree.links, files), tuple(sorted(set(left_out))))


def pack(tree: Tree, put: Callable[[PackedGroup], object], *, needles: SecretValues = SecretValues()) -> Packed:
    """Pack all of `tree` and pass each piece to `put`. `api/lifecycle/upload.py` adds a cache and threads."""
    groups, made = group(tree.files), []
    for members in groups:
        result = make(members, needles)
        if result.piece is not None:
            put(result)
        made.append(result)
    return assemble(tree, groups, made)
