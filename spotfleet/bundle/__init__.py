"""The working directory in pieces by digest, so that after a change only what has changed travels.

    tree.py      what belongs to it: `.gitignore`, `file_mounts`, links        ignore.py    which names are left out
    grouping.py  how its files are laid in a row and cut into pieces
    blob.py      a group of files -> a compressed blob; what this machine remembers, so that it need not read again
    manifest.py  which pieces make which files: the bundle's own blob, whose sha256 is `JobSpec.bundle`
    unpack.py    manifest and pieces -> a folder on a host                     archive.py   the same for a .tar.gz

Manifest and pieces depend on names, contents and executable bits only: the same content has the same digest. They are
blobs of one kind for everybody on the way (`/v1/bundles/SHA256`); laptop: `api/ship.py`, host: `agent/blobs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spotfleet.bundle.archive import extract
from spotfleet.bundle.blob import SHORTEST_SECRET, Made, Memory, Needles, make
from spotfleet.bundle.grouping import Group, group
from spotfleet.bundle.manifest import FileEntry, Manifest, Piece, dump, is_manifest, load, pieces_of
from spotfleet.bundle.tree import Tree, scan
from spotfleet.bundle.unpack import DamagedPiece, unpack

__all__ = ["SHORTEST_SECRET", "DamagedPiece", "FileEntry", "Group", "Made", "Manifest", "Memory", "Needles", "Packed",
           "Piece", "Tree", "assemble", "dump", "extract", "group", "is_manifest", "load", "make", "pack", "pieces_of",
           "scan", "unpack"]


@dataclass(frozen=True)
class Packed:
    manifest: Manifest
    left_out: tuple[str, ...]


def assemble(tree: Tree, groups: Sequence[Group], made: Sequence[Made]) -> Packed:
    """The manifest of what was read of `tree`, one `Made` for each group."""
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


def pack(tree: Tree, put: Callable[[Made], object], *, needles: Needles = Needles()) -> Packed:
    """All of `tree`, each piece given to `put`: the plain way of what `api/ship.py` does with memory and threads."""
    groups, made = group(tree.files), []
    for members in groups:
        result = make(members, needles)
        if result.piece is not None:
            put(result)
        made.append(result)
    return assemble(tree, groups, made)
