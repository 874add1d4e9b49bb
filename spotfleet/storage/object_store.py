"""Access to object stores for checkpoints and `file_mounts`, through obstore, which is imported on first use.

The store's own settings (region, endpoint, credentials) come from the environment, as obstore reads it: AWS_*,
GOOGLE_*, AZURE_*. Workers import it too.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from spotfleet.storage.schemes import SCHEMES

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
    scheme, _, rest = url.partition("://")
    text, kind = str(error), type(error).__name__
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        where = SCHEMES[scheme].place if scheme in SCHEMES else "its settings"
        return f"there is no bucket {rest.split('/')[0]!r} (looked up with {where})"
    if any(word in text for word in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken")):
        return f"the credentials are refused: check {_credentials(scheme)}"
    if isinstance(error, PermissionError) or kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return f"access is denied: these credentials may not read {url} ({_credentials(scheme)}, or the machine's role)"
    if any(word in text.lower() for word in ("credential", "169.254.169.254", "metadata", "/latest/api/token")):
        return f"there are no credentials: set {_credentials(scheme)} under `secrets`, or give the machine a role"
    if isinstance(error, FileNotFoundError):
        return f"there is nothing at {url}"
    if kind in ("InvalidPathError", "NotSupportedError", "UnknownConfigurationKeyError"):
        return text.partition("\n")[0]
    return ""


def _credentials(scheme: str) -> str:
    return SCHEMES[scheme].credentials if scheme in SCHEMES else "its credentials"
