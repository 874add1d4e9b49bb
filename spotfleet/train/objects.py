"""Checkpoints in an object store, which workers write and read themselves: through obstore, found when one is ordered.

    URL/VERSION-GENERATION/__R_0.distcp    by rank R, streamed: one item at a time is in memory
                           manifest.json   sizes and sha256 of all files, by rank 0; its own sha256 is what is reported
                           .metadata       last of all: a folder without it is no checkpoint

    begun --every rank's file is there--> manifest --> .metadata: whole --newer ones are--> removed, .metadata first
      '-- a rank was lost: a rest, removed after a later one has become whole

A whole one is never written again. The store's own settings (region, endpoint, credentials) come from the worker's
environment, as obstore reads it: AWS_*, GOOGLE_*, AZURE_*. `file:///` and `memory://` work, too.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spotfleet.errors import UsageError
from spotfleet.messages import Checkpoint
from spotfleet.stores import open_store
from spotfleet.train import distcp
from spotfleet.train.distcp import METADATA, Shard
from spotfleet.train.exchange import Told
from spotfleet.train.segments import Times, agreed

MANIFEST = "manifest.json"
_NAME = re.compile(r"(\d{1,15})-(\d{1,15})/(.+)")


class NotTheOne(Exception):
    """What lies there is not what was named, or is not there."""


def require(url: str) -> None:
    """UsageError where this worker cannot reach any object store."""
    try:
        importlib.import_module("obstore")
    except ImportError as error:
        raise UsageError(f"checkpoints go to {url}, and the environment of this job's script has no obstore: "
                         f"pip install 'obstore>=0.6'") from error


class Folder:
    """Files under `url`. Every method raises OSError when the store does not do it; FileNotFoundError: no such file."""

    def __init__(self, url: str) -> None:
        require(url)
        self._obstore = importlib.import_module("obstore")
        with self._told():
            self._store, self._prefix = open_store(url)  # the prefix of names in the store

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except importlib.import_module("obstore.exceptions").BaseError as error:
            raise OSError(str(error).partition("\n")[0]) from error

    def _at(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def put(self, name: str, chunks: Iterable[Any]) -> tuple[int, str]:
        """Write a file; its size and sha256. It is there when this returns, whole, or not at all."""
        size, digest = 0, hashlib.sha256()

        def passing() -> Iterator[Any]:
            nonlocal size
            for chunk in chunks:
                size += len(chunk)
                digest.update(chunk)
                yield chunk

        with self._told():
            self._obstore.put(self._store, self._at(name), passing())
        return size, digest.hexdigest()

    def get(self, name: str) -> bytes:
        return b"".join(self.stream(name))

    def stream(self, name: str) -> Iterator[bytes]:
        with self._told():
            for chunk in self._obstore.get(self._store, self._at(name)).stream():
                yield bytes(chunk)

    def has(self, name: str) -> bool:
        try:
            with self._told():
                self._obstore.head(self._store, self._at(name))
        except FileNotFoundError:
            return False
        return True

    def names(self) -> list[str]:
        with self._told():
            return sorted(entry["path"] for batch in self._obstore.list(self._store) for entry in batch)

    def drop(self, name: str) -> None:
        """Remove it, if it is there."""
        try:
            with self._told():
                self._obstore.delete(self._store, self._at(name))
        except FileNotFoundError:
            pass  # a killed process had got so far, or another one is at it


def write(shard: Shard, url: str, others: Callable[[float], list[Told]],
          times: Times | None = None) -> tuple[Checkpoint | None, Told]:
    """This rank's share, in `url`; by rank 0 the checkpoint. OSError as Folder's, and whatever `others` raises."""
    times, folder = times or Times(), Folder(url)
    under = f"{shard.version}-{shard.generation}"
    if shard.rank == 0 and folder.has(f"{under}/{METADATA}"):
        return _found(shard, folder, url), Told(0, shard.version)
    items = distcp.items_of(shard)
    begun = time.monotonic()
    size, digest = folder.put(f"{under}/{distcp.file_name(shard.rank)}", items.chunks())
    times.write_s = time.monotonic() - begun
    own = Told(0, shard.version, size, digest, tuple(items.lengths), distcp.layout(shard))
    if shard.rank != 0:
        return None, own
    begun = time.monotonic()
    told = [own, *agreed(shard, others(times.write_s))]
    times.wait_s = time.monotonic() - begun
    begun = time.monotonic()
    metadata = distcp.metadata(shard, items, [t.lengths for t in told[1:]])
    files = {distcp.file_name(rank): {"bytes": t.bytes, "sha256": t.digest} for rank, t in enumerate(told)}
    files[METADATA] = {"bytes": len(metadata), "sha256": hashlib.sha256(metadata).hexdigest()}
    manifest = json.dumps({"version": shard.version, "generation": shard.generation, "files": files}, indent=1).encode()
    folder.put(f"{under}/{MANIFEST}", [manifest])
    folder.put(f"{under}/{METADATA}", [metadata])
    times.sync_s = time.monotonic() - begun
    return _checkpoint(shard, url, manifest, files), own


def _found(shard: Shard, folder: Folder, url: str) -> Checkpoint:
    manifest = folder.get(f"{shard.version}-{shard.generation}/{MANIFEST}")
    return _checkpoint(shard, url, manifest, json.loads(manifest)["files"])


def _checkpoint(shard: Shard, url: str, manifest: bytes, files: dict[str, Any]) -> Checkpoint:
    size = len(manifest) + sum(about["bytes"] for about in files.values())
    return Checkpoint(shard.version, hashlib.sha256(manifest).hexdigest(), size, shard.generation,
                      url=f"{url.rstrip('/')}/{shard.version}-{shard.generation}")


def prune(url: str, newest: Checkpoint, keep: int) -> None:
    """Remove all but `newest` and the `keep` newest whole ones, and what was begun before it and never became whole."""
    folder = Folder(url)
    found: dict[tuple[int, int], list[str]] = {}
    for name in folder.names():
        if match := _NAME.fullmatch(name):
            found.setdefault((int(match[2]), int(match[1])), []).append(match[3])
    this = (newest.generation, newest.version)
    whole = sorted((age for age, files in found.items() if METADATA in files), reverse=True)
    kept = {*whole[:max(1, keep)], this}
    doomed = [age for age, files in found.items() if age not in kept and (METADATA in files or age < this)]
    for generation, version in sorted(doomed):
        files = found[generation, version]
        for name in sorted(files, key=lambda name: name != METADATA):
            folder.drop(f"{version}-{generation}/{name}")


def newest(url: str, but: Checkpoint) -> Checkpoint | None:
    """The newest whole one in `url` besides `but`: workers that had lost their dispatcher wrote on, removed what it
    knows of, and could tell nobody."""
    folder = Folder(url)
    found = {name.rpartition("/")[0] for name in folder.names() if name.endswith(f"/{METADATA}")}
    ages = {(int(m[2]), int(m[1])): name for name in found if (m := _NAME.fullmatch(f"{name}/x"))}
    for (generation, version), name in sorted(ages.items(), reverse=True):
        try:
            manifest = folder.get(f"{name}/{MANIFEST}")
            files = json.loads(manifest)["files"]
            size = len(manifest) + sum(about["bytes"] for about in files.values())
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            continue  # no manifest of ours
        digest = hashlib.sha256(manifest).hexdigest()
        if digest != but.digest:
            return Checkpoint(version, digest, size, generation, url=f"{url.rstrip('/')}/{name}")
    return None


def fetch(named: Checkpoint, into: Path, came: Callable[[int], None] = lambda size: None) -> None:
    """Bring all files of the checkpoint at `named.url`; `came` hears of the size of each piece. NotTheOne if one is
    missing or has another digest."""
    folder = Folder(named.url)
    manifest = _whole(folder, MANIFEST)
    _compare(MANIFEST, hashlib.sha256(manifest).hexdigest(), named.digest)
    into.mkdir(parents=True, exist_ok=True)
    for name, about in json.loads(manifest)["files"].items():
        digest = hashlib.sha256()
        try:
            with open(into / Path(name).name, "wb") as file:
                for chunk in folder.stream(name):
                    digest.update(chunk)
                    file.write(chunk)
                    came(len(chunk))
        except FileNotFoundError as error:
            raise NotTheOne(f"{name} is not there") from error
        _compare(name, digest.hexdigest(), about["sha256"])


def _whole(folder: Folder, name: str) -> bytes:
    try:
        return folder.get(name)
    except FileNotFoundError as error:
        raise NotTheOne(f"{name} is not there") from error


def _compare(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise NotTheOne(f"{name} has sha256 {found}, expected {expected}")
