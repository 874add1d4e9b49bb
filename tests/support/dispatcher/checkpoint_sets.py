"""Files of checkpoints, as workers write them, with any bytes in place of tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from spotfleet.protocol.checkpoint_files import MANIFEST, METADATA, in_order, piece_name
from spotfleet.protocol.messages import Checkpoint
from spotfleet.protocol.proofs import MemberProof


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def files_of(version: int, generation: int = 1, pieces: Sequence[bytes] = (b"weights",),
             proof: MemberProof = MemberProof()) -> dict[str, bytes]:
    """Return the content of each file, in the order in which they are put in place."""
    found = {piece_name(rank): data for rank, data in enumerate(pieces)} | {METADATA: b"index of %d" % version}
    about = {"version": version, "generation": generation, "grant": proof.grant,
             "files": {name: {"bytes": len(data), "sha256": sha(data)} for name, data in found.items()}}
    found[MANIFEST] = json.dumps({**about, "mark": proof.of_manifest(about)}).encode()
    return {name: found[name] for name in in_order(found)}


def whole(files: dict[str, bytes]) -> Checkpoint:
    """Return the checkpoint that has these files, as the dispatcher keeps it."""
    about = json.loads(files[MANIFEST])
    return Checkpoint(about["version"], sha(files[MANIFEST]), sum(map(len, files.values())), about["generation"],
                      name=MANIFEST)


def file_of(files: dict[str, bytes], name: str) -> Checkpoint:
    """Return one file of it, as its host sends it."""
    made = whole(files)
    return Checkpoint(made.version, sha(files[name]), 0, made.generation, name=name)


def write(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in in_order(dict.fromkeys(p.name for p in folder.iterdir()))}
