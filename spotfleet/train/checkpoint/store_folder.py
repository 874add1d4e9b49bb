"""Checkpoints as folders of a store, in the layout of `protocol/checkpoint_files.py`.

    URL/VERSION-GENERATION/__R_0.distcp    by rank R, streamed: one item at a time is in memory
                           manifest.json   sizes and sha256 of all files, by rank 0, with the mark of a member
                                           (`protocol/proofs.py`); its own sha256 is reported
                           .metadata       written last: a folder without it is no checkpoint

    begun --every rank's file is there--> manifest --> .metadata: whole --newer ones are--> removed, .metadata first
      '-- a rank was lost: incomplete, removed after a later one has become whole

In an object store all ranks write to one folder, and a whole checkpoint is never written again. Without one each worker
has a folder of its own, from which its agent sends the files to the dispatcher.

An object store's own settings (region, endpoint, credentials) come from the worker's environment, as obstore reads it:
AWS_*, GOOGLE_*, AZURE_*. `file:///` and `memory://` work, too.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spotfleet.errors import UsageError
from spotfleet.protocol.checkpoint_files import MANIFEST, MARK, METADATA, piece_name
from spotfleet.protocol.messages import Checkpoint
from spotfleet.protocol.proofs import MemberProof
from spotfleet.storage.checkpoint_folder import digest_of
from spotfleet.storage.folder import FolderStore
from spotfleet.storage.object_store import ObjectStore
from spotfleet.storage.store import DurableStore
from spotfleet.train.checkpoint import format
from spotfleet.train.checkpoint.exchange import PartReport, PeerFailed
from spotfleet.train.checkpoint.format import Items, Shard

_NAME = re.compile(r"(\d{1,15})-(\d{1,15})/(.+)")


class WrongObject(Exception):
    """An object is missing or has another digest than expected."""


def require(url: str) -> None:
    """Check that this worker has obstore; UsageError where it has not."""
    try:
        importlib.import_module("obstore")
    except ImportError as error:
        raise UsageError(f"checkpoints go to {url}, and the environment of this job's script has no obstore: "
                         f"pip install 'obstore>=0.6'") from error


def opened(url: str) -> DurableStore:
    """Open the store at `url`. Its methods raise OSError when it fails; FileNotFoundError: no such file."""
    require(url)
    return ObjectStore(url)


@dataclass
class Times:
    """Durations of the phases of one checkpoint, in seconds."""

    copy_s: float = 0.0  # training waited
    write_s: float = 0.0
    wait_s: float = 0.0  # for the other ranks
    sync_s: float = 0.0  # for the manifest and `.metadata`

    @property
    def total_s(self) -> float:
        return self.copy_s + self.write_s + self.wait_s + self.sync_s


# Waits for the reports of ranks 1, 2, ... and returns them; the argument is the time that this rank's own part took.
Others = Callable[[float], list[PartReport]]


def no_others(own_s: float) -> list[PartReport]:
    return []


def write(shard: Shard, url: str, others: Others = no_others, times: Times | None = None,
          proof: MemberProof = MemberProof()) -> tuple[Checkpoint | None, PartReport]:
    """Write this rank's share to `url`; rank 0 completes the checkpoint and returns it.

    OSError as in `opened`, and the exceptions of `others`.
    """
    store = opened(url)
    if shard.rank == 0 and (found := _found(shard, store, url, proof)) is not None:
        return found, PartReport(0, shard.version)
    manifest, own = _write(shard, store, others, times or Times(), proof)
    return (None if shard.rank else _checkpoint(shard, url, manifest, json.loads(manifest)["files"])), own


def write_here(shard: Shard, folder: Path, others: Others = no_others, times: Times | None = None,
               proof: MemberProof = MemberProof()) -> tuple[Checkpoint, PartReport]:
    """Write this rank's share to a folder of its own below `folder`, and return its file, on rank 0 the manifest. No
    file is left when the disk fails (OSError) or `others` raises."""
    name = f"{shard.version}-{shard.generation}"
    try:
        manifest, own = _write(shard, FolderStore(folder), others, times or Times(), proof)
    except BaseException:
        shutil.rmtree(folder / name, ignore_errors=True)
        raise
    part, file = (shard.rank - 1) % shard.world, MANIFEST if shard.rank == 0 else piece_name(shard.rank)
    digest, size = own.digest, own.bytes
    if shard.rank == 0:
        digest = hashlib.sha256(manifest).hexdigest()
        size = len(manifest) + sum(entry["bytes"] for entry in json.loads(manifest)["files"].values())
    return Checkpoint(shard.version, digest, size, shard.generation, str(folder / name / file), part, shard.world,
                      name=file), own


def _write(shard: Shard, store: DurableStore, others: Others, times: Times,
           proof: MemberProof) -> tuple[bytes, PartReport]:
    """Write this rank's files; return rank 0's manifest, and the report of the piece."""
    under, items = f"{shard.version}-{shard.generation}", format.items_of(shard)
    begun = time.monotonic()
    digest = store.put(f"{under}/{piece_name(shard.rank)}", items.chunks(), at_most=items.at_most)
    times.write_s = time.monotonic() - begun
    own = PartReport(0, shard.version, sum(items.lengths), digest, tuple(items.lengths), format.layout(shard))
    if shard.rank != 0:
        return b"", own
    begun = time.monotonic()
    reports = [own, *check_parts(shard, others(times.write_s))]
    times.wait_s = time.monotonic() - begun
    begun = time.monotonic()
    manifest, metadata = _index(shard, items, reports, proof)
    store.put(f"{under}/{MANIFEST}", [manifest])
    store.put(f"{under}/{METADATA}", [metadata])
    times.sync_s = time.monotonic() - begun
    return manifest, own


def _index(shard: Shard, items: Items, reports: Sequence[PartReport], proof: MemberProof) -> tuple[bytes, bytes]:
    """Return the manifest and `.metadata` of a checkpoint of which rank R wrote the piece in `reports[R]`."""
    metadata = format.metadata(shard, items, [t.lengths for t in reports[1:]])
    files = {piece_name(rank): {"bytes": t.bytes, "sha256": t.digest} for rank, t in enumerate(reports)}
    files[METADATA] = {"bytes": len(metadata), "sha256": hashlib.sha256(metadata).hexdigest()}
    about = {"version": shard.version, "generation": shard.generation, "files": files, "grant": proof.grant}
    return json.dumps({**about, MARK: proof.of_manifest(about)}, indent=1).encode(), metadata


def check_parts(shard: Shard, reports: list[PartReport]) -> list[PartReport]:
    """Return `reports`; PeerFailed if a rank wrote pieces of another version or of other tensors."""
    expected = (shard.version, format.layout(shard))
    for rank, report in enumerate(reports, 1):
        if (report.version, report.layout) != expected:
            raise PeerFailed(f"rank {rank} holds other tensors than rank 0, or those of another version")
    return reports


def _found(shard: Shard, store: DurableStore, url: str, proof: MemberProof) -> Checkpoint | None:
    """Return the whole checkpoint that a member of the job has written there; None for none, or another's."""
    under = f"{shard.version}-{shard.generation}"
    if not any(store.list(f"{under}/{METADATA}")):
        return None
    try:
        manifest = _read(store, f"{under}/{MANIFEST}")
        about = json.loads(manifest)
        return _checkpoint(shard, url, manifest, about["files"]) if not proof.key or _is_marked(about, proof) else None
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None  # not a manifest of this format: it is written again


def _checkpoint(shard: Shard, url: str, manifest: bytes, files: dict[str, Any]) -> Checkpoint:
    size = len(manifest) + sum(entry["bytes"] for entry in files.values())
    return Checkpoint(shard.version, hashlib.sha256(manifest).hexdigest(), size, shard.generation,
                      url=f"{url.rstrip('/')}/{shard.version}-{shard.generation}")


def prune(url: str, newest: Checkpoint, keep: int) -> None:
    """Remove all whole checkpoints but `newest` and the `keep` newest, and incomplete ones begun before `newest`."""
    store = opened(url)
    found: dict[tuple[int, int], list[str]] = {}
    for name in [entry.key for entry in store.list()]:
        if match := _NAME.fullmatch(name):
            found.setdefault((int(match[2]), int(match[1])), []).append(match[3])
    this = (newest.generation, newest.version)
    whole = sorted((age for age, files in found.items() if METADATA in files), reverse=True)
    kept = {*whole[:max(1, keep)], this}
    doomed = [age for age, files in found.items() if age not in kept and (METADATA in files or age < this)]
    for generation, version in sorted(doomed):
        files = found[generation, version]
        for name in sorted(files, key=lambda name: name != METADATA):
            store.delete(f"{version}-{generation}/{name}")


def newest(url: str, but: Checkpoint, proof: MemberProof) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest whole checkpoint in `url` besides `but` that a member of the job wrote, and the names of newer
    ones that do not show it.

    Workers that have lost their dispatcher write on, remove the checkpoints that it knows of, and cannot report theirs.
    Anybody with the store's credentials could put one there. If `but` has no seal, the job comes from a release
    without marks, and none is required.
    """
    refused: list[str] = []
    store = opened(url)
    found = {entry.key.rpartition("/")[0] for entry in store.list() if entry.key.endswith(f"/{METADATA}")}
    ages = {(int(m[2]), int(m[1])): name for name in found if (m := _NAME.fullmatch(f"{name}/x"))}
    for (generation, version), name in sorted(ages.items(), reverse=True):
        try:
            manifest = _read(store, f"{name}/{MANIFEST}")
            about = json.loads(manifest)
            size = len(manifest) + sum(entry["bytes"] for entry in about["files"].values())
            made_here = (about["version"], about["generation"]) == (version, generation) and _is_marked(about, proof)
            grant = str(about.get("grant", ""))
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            continue  # not a manifest of this format
        digest = hashlib.sha256(manifest).hexdigest()
        if digest == but.digest:
            continue
        if made_here or not but.seal:
            found = Checkpoint(version, digest, size, generation, url=f"{url.rstrip('/')}/{name}")
            return replace(proof, grant=grant).marked(found), refused
        refused.append(name)
    return None, refused


def _is_marked(about: dict[str, Any], proof: MemberProof) -> bool:
    return proof.has_manifest(about, str(about.get(MARK, "")))


def fetch(named: Checkpoint, into: Path, progress: Callable[[int], None] = lambda size: None) -> None:
    """Fetch all files of the checkpoint at `named.url` that are not whole in `into` already; `progress` is called with
    the size of each piece received, or read.

    WrongObject if a file is missing or has another digest.
    """
    store = opened(named.url)
    try:
        manifest = _read(store, MANIFEST)
    except FileNotFoundError as error:
        raise WrongObject(f"{MANIFEST} is not there") from error
    _compare(MANIFEST, hashlib.sha256(manifest).hexdigest(), named.digest)
    into.mkdir(parents=True, exist_ok=True)
    for name, entry in json.loads(manifest)["files"].items():
        if _digest(into, name, progress) == entry["sha256"]:
            continue
        digest = hashlib.sha256()
        try:
            with open(into / Path(name).name, "wb") as file:
                for chunk in store.get(name):
                    digest.update(chunk)
                    file.write(chunk)
                    progress(len(chunk))
        except FileNotFoundError as error:
            raise WrongObject(f"{name} is not there") from error
        _compare(name, digest.hexdigest(), entry["sha256"])


def _digest(folder: Path, name: str, progress: Callable[[int], None]) -> str:
    """Return the sha256 of a file; "" if there is none."""
    path = folder / Path(name).name
    return digest_of(path, progress) if path.is_file() else ""


def _read(store: DurableStore, key: str) -> bytes:
    return b"".join(store.get(key))


def _compare(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise WrongObject(f"{name} has sha256 {found}, expected {expected}")
