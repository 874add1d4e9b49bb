"""Order of the files of a tree, and the cuts between pieces.

    small files, by name, one after the other    |..piece..|....piece....|.piece.|
    large files, by name, each by itself         |piece|piece|piece|  |piece|

A cut between small files depends on sizes and on the name of the file before it, without its folder. It depends neither
on distant files nor on contents. So a changed file changes one piece, and an inserted one moves only the cuts near it.
A renamed folder keeps its pieces except the first and the last. Large files are cut every RANGE_BYTES: a change in
place sends the changed ranges, and an insertion also sends everything after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from spotfleet.bundle.tree import File

LEAST_BYTES = 256 << 10  # a piece has at least this size
USUAL_BYTES = 1 << 20  # expected size beyond LEAST_BYTES
MOST_BYTES = 4 << 20  # a piece has at most this size
LARGE_BYTES = 2 << 20  # a file of this size gets its own pieces
RANGE_BYTES = 16 << 20
ENTRY_BYTES = 256  # overhead of a file in addition to its bytes: even an empty file has to be opened
LARGEST_PIECE_BYTES = RANGE_BYTES  # before compression

_SPAN = 1 << 64


class Slice(NamedTuple):
    file: File
    start: int
    bytes: int


Group = tuple[Slice, ...]  # the slices of one piece, in order


def group(files: Sequence[File]) -> list[Group]:
    """Cut `files`, sorted by name, into pieces: small files first, then large ones."""
    small = [file for file in files if file.bytes < LARGE_BYTES]
    cuts = _cuts([(file.name, file.bytes + ENTRY_BYTES) for file in small])
    found = [tuple(Slice(file, 0, file.bytes) for file in small[begin:end])
             for begin, end in pairwise([0, *cuts])]
    for file in files:
        if file.bytes >= LARGE_BYTES:
            found += [(Slice(file, start, min(RANGE_BYTES, file.bytes - start)),)
                      for start in range(0, file.bytes, RANGE_BYTES)]
    return found


def _cuts(weights: Iterable[tuple[str, int]]) -> list[int]:
    """Return the number of files after which each piece ends. Each weight is a name and a size in bytes."""
    weights = list(weights)
    cuts: list[int] = []
    begin, filled = 0, 0
    best, best_at = (_SPAN, _SPAN), 0  # forced cut: the position after the name with the lowest hash
    at = 0
    while at < len(weights):
        name, weight = weights[at]
        filled += weight
        at += 1
        if filled < LEAST_BYTES:
            continue
        number = _number(name.rpartition("/")[2])
        if (rank := (number, _number("/".join(name.rsplit("/", 2)[-2:])))) < best:
            best, best_at = rank, at
        if number * USUAL_BYTES < weight * _SPAN:
            best_at = at
        elif filled < MOST_BYTES:
            continue
        cuts.append(best_at)
        begin, filled, best = best_at, 0, (_SPAN, _SPAN)
        at = begin
    if begin < len(weights):
        cuts.append(len(weights))
    return cuts


def _number(text: str) -> int:
    digest = hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
