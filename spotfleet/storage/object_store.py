"""Access to object stores for checkpoints and `file_mounts`, through obstore, which is imported on first use.

The store's own settings (region, endpoint, credentials) come from the environment, as obstore reads it: AWS_*,
GOOGLE_*, AZURE_*; the region of a bucket on S3 from S3 (`s3.py`). Workers import it too.

obstore ends a request after 30 s (AWS_TIMEOUT and the like), whole answer included, and its repetitions after three
minutes. So objects are read in pieces, several at once, and written in parts. S3 and Google Cloud Storage take 10,000
parts of an upload at most.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from spotfleet.storage import s3
from spotfleet.storage.schemes import SCHEMES
from spotfleet.storage.store import StoreEntry, check_key

NEEDS = "pip install 'obstore>=0.6'"
PIECE_BYTES, STREAMS = 8 << 20, 8  # pieces of an object that is read; this many are in memory at once
PART_BYTES, PARTS_AT_ONCE = 8 << 20, 8  # parts of an object that is written
MOST_PARTS, MIB = 10_000, 1 << 20
_memory: dict[str, Any] = {}  # contents of memory:// stores live as long as this process


def open_store(url: str, **settings: Any) -> tuple[Any, str]:
    """Open the store at `url`; return it and the prefix of its names, "" for none.

    `settings`: of obstore.store.from_url. `file:///` and `memory://` also work. Raises ImportError without obstore, and
    obstore's own errors.
    """
    stores = importlib.import_module("obstore.store")
    scheme, _, rest = url.partition("://")
    if scheme == "memory":
        root, _, prefix = rest.partition("/")
        return _memory.setdefault(root, stores.MemoryStore()), prefix
    if scheme == "file":
        return stores.LocalStore(prefix=rest, mkdir=True), ""
    if scheme == "s3":
        settings = s3.settings(url) | settings
    return stores.from_url(url, **settings), ""


def part_bytes(size: int | None) -> int:
    """Return the size of the parts in which an object of `size` bytes is written."""
    least = -(-(size or 0) // MOST_PARTS)
    return max(PART_BYTES, -(-least // MIB) * MIB)


class ObjectStore:
    """Store under a URL. Raises ImportError without obstore; the credentials are those of the environment."""

    def __init__(self, url: str) -> None:
        self._obstore = importlib.import_module("obstore")
        self._url = url
        with self._explained():
            self._store, self._prefix = open_store(url)

    def put(self, key: str, chunks: Iterable[bytes], *, size: int | None = None, at_most: int | None = None) -> str:
        sha, written = hashlib.sha256(), 0

        def counted() -> Iterator[bytes]:
            nonlocal written
            for chunk in chunks:
                written += len(chunk)
                sha.update(chunk)
                yield chunk
            if size is not None and written != size:
                raise OSError(errno.EIO, f"it has {written} bytes instead of {size}", f"{self._url}/{key}")

        with self._explained():
            try:
                self._write(key, counted(), part_bytes(size or at_most), lambda: written)
            except FileNotFoundError as error:
                if found := _no_bucket(self._url, error):
                    raise OSError(found) from error
                raise
        return sha.hexdigest()

    def _write(self, key: str, chunks: Iterator[bytes], part: int, written: Callable[[], int]) -> None:
        """Write the content by one request if it is as large as one part at most, else in parts."""
        beginning: list[bytes] = []
        for chunk in chunks:
            beginning.append(chunk)
            if written() > part:
                break
        else:
            self._obstore.put(self._store, self._path(key), b"".join(beginning), use_multipart=False)
            return
        before = self._etag(key)
        try:
            self._obstore.put(self._store, self._path(key), itertools.chain(beginning, chunks), chunk_size=part,
                              max_concurrency=PARTS_AT_ONCE)
        except FileNotFoundError:  # no such upload: the answer that completed it may have been lost
            if self._etag(key) in ("", before) or self._size(key) != written():
                raise

    def _etag(self, key: str) -> str:
        """Return the etag of the object; "" if there is none."""
        with suppress(FileNotFoundError):
            return str(self._obstore.head(self._store, self._path(key))["e_tag"])
        return ""

    def get(self, key: str, *, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        with self._explained():
            if end is not None and start >= end:
                return
            first = self._first(key, start, start + PIECE_BYTES if end is None else min(end, start + PIECE_BYTES))
            if first is None:
                return
            yield bytes(first.bytes())
            size = first.meta["size"]
            last = size if end is None else min(end, size)
            starts = range(start + PIECE_BYTES, last, PIECE_BYTES)
            if starts:
                yield from self._pieces(key, starts, last, first.meta["e_tag"])

    def _first(self, key: str, start: int, end: int) -> Any:
        """Return the answer with these bytes; None if the object ends before `start`, which stores refuse."""
        try:
            return self._obstore.get(self._store, self._path(key), options={"range": (start, end)})
        except importlib.import_module("obstore.exceptions").BaseError:
            if self._size(key) > start:
                raise
            return None

    def _pieces(self, key: str, starts: range, last: int, etag: str | None) -> Iterator[bytes]:
        """Yield the pieces of one version of the object, in their order; STREAMS of them arrive at once."""
        def read(at: int) -> bytes:
            options = {"range": (at, min(at + PIECE_BYTES, last)), **({"if_match": etag} if etag else {})}
            try:
                return bytes(self._obstore.get(self._store, self._path(key), options=options).bytes())
            except importlib.import_module("obstore.exceptions").PreconditionError as error:
                raise OSError(errno.ESTALE, "it was changed while it was read", f"{self._url}/{key}") from error

        coming: deque[Future[bytes]] = deque()
        pool = ThreadPoolExecutor(min(STREAMS, len(starts)), "object-store")
        try:
            for at in starts:
                coming.append(pool.submit(read, at))
                if len(coming) >= STREAMS:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _size(self, key: str) -> int:
        return self._obstore.head(self._store, self._path(key))["size"]

    def list(self, prefix: str = "") -> Iterator[StoreEntry]:
        under = self._path(prefix) if prefix else self._prefix
        with self._explained():
            found = [meta for batch in self._obstore.list(self._store, under or None) for meta in batch]
            if prefix:  # the store lists what lies below it alone
                with suppress(FileNotFoundError):
                    found.append(self._obstore.head(self._store, under))
            for meta in sorted(found, key=lambda meta: meta["path"]):
                key = meta["path"].removeprefix(f"{self._prefix}/" if self._prefix else "")
                yield StoreEntry(key, meta["size"], mtime=meta["last_modified"].timestamp())

    def delete(self, key: str) -> None:
        with suppress(FileNotFoundError), self._explained():
            self._obstore.delete(self._store, self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{check_key(key)}" if self._prefix else check_key(key)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the store's own errors into OSError; FileNotFoundError stays."""
        try:
            yield
        except importlib.import_module("obstore.exceptions").BaseError as error:
            raise OSError(refusal(self._url, error) or str(error).partition("\n")[0]) from error


def reset() -> None:
    """Clear all memory:// stores, as at the start of a new process."""
    _memory.clear()


def gives_up(after_s: float) -> Mapping[str, Any]:
    """Return settings for a store whose caller retries by itself."""
    return {"retry_config": {"max_retries": 3, "retry_timeout": timedelta(seconds=after_s)}}


def refusal(url: str, error: BaseException) -> str:
    """Explain a store's error that another machine with these settings would also get.

    Returns "" for a transport problem, after which a retry may help.
    """
    scheme, text, kind = url.partition("://")[0], str(error), type(error).__name__
    denied = f"access is denied: these credentials may not use {url} ({_credentials(scheme)}, or the machine's role)"
    if found := _no_bucket(url, error):
        return found
    if "RequestTimeTooSkewed" in text:  # this machine's clock is wrong
        return ""
    if found := _on_s3(url, text):
        return found
    if any(word in text for word in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken")):
        return f"the credentials are refused: check {_credentials(scheme)}"
    if isinstance(error, PermissionError) or kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return denied
    if any(word in text.lower() for word in ("credential", "169.254.169.254", "metadata", "/latest/api/token")):
        return f"there are no credentials: set {_credentials(scheme)} under `secrets`, or give the machine a role"
    if "401 Unauthorized" in text or "403 Forbidden" in text:  # a listing's error has no class of its own
        return denied
    if isinstance(error, FileNotFoundError):
        return f"there is nothing at {url}"
    if kind in ("InvalidPathError", "NotSupportedError", "UnknownConfigurationKeyError"):
        return text.partition("\n")[0]
    return ""


def _on_s3(url: str, text: str) -> str:
    """Explain what only S3 answers; "" for another error."""
    if "redirect without LOCATION" in text or "AuthorizationHeaderMalformed" in text:
        return s3.other_region(url)
    if "ExpiredToken" in text:
        return ("the credentials have expired: keys with an AWS_SESSION_TOKEN hold for hours; use the machine's role, "
                "or the key of an IAM user")
    if found := re.search(r"\bkms:\w+", text) or re.search(r"<Code>KMS\.\w+", text):
        return (f"the KMS key that encrypts {url} cannot be used ({found.group().removeprefix('<Code>')}): allow the "
                "machine's role kms:GenerateDataKey and kms:Decrypt, in its policy and in the key's")
    if "InvalidObjectState" in text:
        return (f"the object at {url} is archived (Glacier): restore it first, or take the prefix out of that "
                "lifecycle rule")
    if "Object Lock parameters" in text:
        return (f"the bucket of {url} has Object Lock, which needs checksums: set AWS_CHECKSUM_ALGORITHM to sha256 "
                "under `envs`")
    return ""


def _no_bucket(url: str, error: BaseException) -> str:
    if not any(code in str(error) for code in ("NoSuchBucket", "ContainerNotFound")):
        return ""
    scheme, _, rest = url.partition("://")
    where = SCHEMES[scheme].place if scheme in SCHEMES else "its settings"
    return f"there is no bucket {rest.split('/')[0]!r} (looked up with {where})"


def _credentials(scheme: str) -> str:
    return SCHEMES[scheme].credentials if scheme in SCHEMES else "its credentials"
