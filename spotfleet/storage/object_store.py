"""Access to object stores for checkpoints and `file_mounts`, through obstore, which is imported on first use.

The store's own settings (region, endpoint, credentials) come from the environment, as obstore reads it: AWS_*,
GOOGLE_*, AZURE_*. Workers import it too.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from spotfleet.storage.schemes import SCHEMES
from spotfleet.storage.store import StoreEntry, check_key

NEEDS = "pip install 'obstore>=0.6'"
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
    return stores.from_url(url, **settings), ""


class ObjectStore:
    """Store under a URL. Raises ImportError without obstore; the credentials are those of the environment."""

    def __init__(self, url: str) -> None:
        self._obstore = importlib.import_module("obstore")
        self._url = url
        with self._explained():
            self._store, self._prefix = open_store(url)

    def put(self, key: str, chunks: Iterable[bytes], *, size: int | None = None) -> str:
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
                self._obstore.put(self._store, self._path(key), counted())
            except FileNotFoundError as error:
                if found := _no_bucket(self._url, error):
                    raise OSError(found) from error
                raise
        return sha.hexdigest()

    def get(self, key: str, *, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        with self._explained():
            if start == 0 and end is None:
                for chunk in self._obstore.get(self._store, self._path(key)).stream():
                    yield bytes(chunk)
                return
            if end is None:
                end = self._size(key)
            try:
                yield from self._range(key, start, end)
            except importlib.import_module("obstore.exceptions").BaseError:
                if (size := self._size(key)) >= end:
                    raise
                yield from self._range(key, start, size)  # it asked for more than there is, which stores refuse

    def _range(self, key: str, start: int, end: int) -> list[bytes]:
        if start >= end:
            return []
        return [bytes(self._obstore.get_range(self._store, self._path(key), start=start, end=end))]

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
    if any(word in text for word in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken")):
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


def _no_bucket(url: str, error: BaseException) -> str:
    if not any(code in str(error) for code in ("NoSuchBucket", "ContainerNotFound")):
        return ""
    scheme, _, rest = url.partition("://")
    where = SCHEMES[scheme].place if scheme in SCHEMES else "its settings"
    return f"there is no bucket {rest.split('/')[0]!r} (looked up with {where})"


def _credentials(scheme: str) -> str:
    return SCHEMES[scheme].credentials if scheme in SCHEMES else "its credentials"
