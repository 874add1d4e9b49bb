"""Names for files whose own names cannot be used: too long for a file system, or taken. Pure."""

from __future__ import annotations

import errno
import hashlib
import unicodedata
from collections.abc import Callable

NAME_BYTES = 255
ASIDE = "set-aside"  # folder in an archive for files that its file system does not take under their own names
REFUSALS = frozenset({errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EINVAL,
                      errno.EILSEQ, errno.ELOOP})


def refuses_name(error: OSError) -> bool:
    """Return whether a file system refuses a name: too long, in the way of another, or of characters it does not take.
    """
    return error.errno in REFUSALS


def with_suffix(name: str, suffix: str, taken: Callable[[str], bool]) -> str:
    """Return `name` with `suffix`; where that is too long or `taken`, the beginning of `name` with its digest."""
    above, slash, last = name.rpartition("/")
    found, number = last + suffix, 0
    while len(found.encode()) > NAME_BYTES or taken(f"{above}{slash}{found}"):
        end = f"~{digest_of(name)}{f'-{number}' if number else ''}{suffix}"
        stem = last.encode()[:NAME_BYTES - len(end.encode())].decode(errors="ignore")
        found, number = stem + end, number + 1
    return f"{above}{slash}{found}"


class SameNames:
    """Names that a file system takes for one: they differ in case, or in how a letter with its accent is written."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}  # folded name -> name
        self._folders: dict[str, str] = {}

    def other(self, name: str) -> str:
        """Note the name of a file; return an earlier one that has its place, "" for none."""
        own = folded(name)
        parts = own.split("/")
        above = ["/".join(parts[:n]) for n in range(1, len(parts))]
        taken = next((self._files[path] for path in (own, *above) if path in self._files), self._folders.get(own, ""))
        if not taken:
            self._files[own] = name
            self._folders.update((path, name) for path in above)
        return taken


def folded(name: str) -> str:
    """Return what names have in common that such a file system takes for one."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def aside(name: str) -> str:
    """Return the name under which a file whose own name is refused is set aside."""
    return f"{ASIDE}/{digest_of(name)}"


def digest_of(name: str) -> str:
    """Return the digest that stands for a name."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()
