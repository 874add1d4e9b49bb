"""The working directory as a .tar.gz whose sha256 depends on names, contents and executable bits only.

Left out, always: `.git`, `__pycache__`, `.venv` and any other virtual environment, spotfleet's own house, sockets
and devices, symbolic links that lead out of the directory, and files that contain the value of a secret.

Left out by `.gitignore` and `.spotfleetignore`, in any folder, with this part of git's rules (the later line wins,
`.spotfleetignore` after `.gitignore`, deeper folders after higher ones):

    name        a file or folder of that name, here and below       # comment
    name/       folders only                                        *  ?  [abc]   within one name
    /a/b  a/b   that path from the folder of the ignore file        **            across folders
    !pattern    brought back (not from inside a folder that is left out)
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from spotfleet.errors import UsageError

ALWAYS = frozenset({".git", "__pycache__", ".venv"})
IGNORE_FILES = (".gitignore", ".spotfleetignore")
SHORTEST_SECRET = 6  # a shorter one would be found in innocent files by chance
LIMIT_BYTES = 4 << 30  # largest that a dispatcher takes
CHUNK = 1 << 20


@dataclass(frozen=True)
class Bundle:
    path: Path
    sha256: str
    bytes: int
    files: int
    left_out: tuple[str, ...]  # "NAME: why", for what the user might miss; ignored files are not listed


@dataclass(frozen=True)
class _Rule:
    pattern: re.Pattern[str]
    folders_only: bool
    keep: bool


def build(workdir: Path, out: Path, *, mounts: Mapping[str, Path] | None = None,
          houses: Iterable[Path] = (), secrets: Iterable[str] = ()) -> Bundle:
    """Write the archive of `workdir` to `out`.

    `mounts` puts further files or folders at names inside the archive; `houses` are spotfleet's own folders.
    Raises UsageError when something named does not exist.
    """
    if not workdir.is_dir():
        raise UsageError(f"workdir: {workdir} is not a folder", hint="set `workdir` in the fleet file")
    needles = tuple(s.encode() for s in secrets if len(s) >= SHORTEST_SECRET)
    shut = frozenset(h.resolve() for h in houses) | {out.resolve()}
    entries: dict[str, Path] = dict(_walk(workdir.resolve(), "", shut, ()))
    for name, source in sorted((mounts or {}).items()):
        entries.update(_mounted(name, source, shut))
    left_out: list[str] = []
    files = 0
    with out.open("wb") as raw, gzip.GzipFile("", "wb", mtime=0, fileobj=raw, compresslevel=6) as zipped:
        with tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name in sorted(entries):
                why = _add(tar, name, entries[name], needles)
                if why:
                    left_out.append(f"{name}: {why}")
                else:
                    files += not entries[name].is_dir()
    return Bundle(out, digest(out), out.stat().st_size, files, tuple(left_out))


def digest(path: Path) -> str:
    """sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def extract(archive: Path, into: Path, look: Callable[[int], object] | None = None) -> None:
    """Unpack; nothing is written outside `into`. Raises ValueError for an archive that tries, or is none.

    `look` hears the size of each member before it is written, and may raise.
    """
    def taken(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
        if look is not None:
            look(member.size)
        return _inside(member, path)

    into.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive, "r:*") as tar:
            tar.extractall(into, filter=taken)
    except tarfile.FilterError as error:
        raise ValueError(f"unsafe archive: {error}") from error
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"not an archive: {error}") from error


def _inside(member: tarfile.TarInfo, into: str) -> tarfile.TarInfo:
    """tarfile's data filter, but an absolute name is an attack, not something to repair, and nothing is unpacked by way
    of a link: in Python before 3.11.13 and 3.12.11 a long chain of links leads out past that filter (CVE-2025-4517)."""
    if member.name.startswith(("/", "\\")):
        raise tarfile.AbsolutePathError(member)
    kept = tarfile.data_filter(member, into)
    for name in (kept.name, kept.linkname) if kept.islnk() else (kept.name,):
        parts = Path(name).parts
        if ".." in parts or any(Path(into, *parts[:n]).is_symlink() for n in range(1, len(parts) + 1)):
            raise tarfile.OutsideDestinationError(member, name)
    if not kept.issym():
        return kept
    here = os.path.dirname(kept.name)
    target = os.path.normpath(os.path.join(here, kept.linkname))  # links on the way to it count for nothing
    if target.split("/")[0] == "..":
        raise tarfile.LinkOutsideDestinationError(member, target)
    return kept.replace(linkname=os.path.relpath(target, here or "."))


def _walk(folder: Path, prefix: str, shut: frozenset[Path], rules: Sequence[_Rule]) -> Iterator[tuple[str, Path]]:
    """Names inside the archive and their files; `folder` is resolved, so that `shut` can be compared."""
    rules = [*rules, *_rules(folder, prefix)]
    for path in sorted(folder.iterdir(), key=lambda p: p.name):
        name = prefix + path.name
        is_folder = path.is_dir() and not path.is_symlink()
        if path.name in ALWAYS or path in shut or _ignored(name, is_folder, rules):
            continue
        if is_folder:
            if (path / "pyvenv.cfg").exists():
                continue
            yield name, path
            yield from _walk(path, name + "/", shut, rules)
        else:
            yield name, path


def _mounted(name: str, source: Path, shut: frozenset[Path]) -> Iterator[tuple[str, Path]]:
    if not source.exists():
        raise UsageError(f"file_mounts.{name}: {source} does not exist",
                             hint="make it, or change `file_mounts` in the fleet file and `spotfleet up FILE` again")
    parent = ""
    for part in name.split("/")[:-1]:
        parent += part
        yield parent, source.parent  # any folder: only its being one is read
        parent += "/"
    yield name, source
    if source.is_dir():
        yield from _walk(source.resolve(), name + "/", shut, ())


def _add(tar: tarfile.TarFile, name: str, path: Path, needles: Sequence[bytes]) -> str:
    """Add one entry; the answer says why not, "" if it was added."""
    info = tarfile.TarInfo(name)
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        target = os.readlink(path)
        inside = os.path.normpath(os.path.join(os.path.dirname(name), target))
        if os.path.isabs(target) or inside == ".." or inside.startswith("../"):
            return f"a link out of the working directory (to {target})"
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, target, 0o777
        tar.addfile(info)
    elif stat.S_ISDIR(mode):
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(info)
    elif stat.S_ISREG(mode):
        with path.open("rb") as file:
            if needles and _contains(file, needles):
                return "holds the value of a secret"
            info.size, info.mode = os.fstat(file.fileno()).st_size, 0o755 if mode & stat.S_IXUSR else 0o644
            file.seek(0)
            tar.addfile(info, file)
    else:
        return "neither file nor folder"
    return ""


def _contains(file: BinaryIO, needles: Sequence[bytes]) -> bool:
    overlap, tail = max(map(len, needles)) - 1, b""
    while chunk := file.read(CHUNK):
        window = tail + chunk
        if any(n in window for n in needles):
            return True
        tail = window[-overlap:]
    return False


def _rules(folder: Path, prefix: str) -> list[_Rule]:
    rules = []
    for name in IGNORE_FILES:
        file = folder / name
        if file.is_file():
            for number, line in enumerate(file.read_text("utf-8", errors="replace").splitlines(), 1):
                try:
                    rule = _rule(line, prefix)
                except re.error as error:
                    raise UsageError(f"{file}:{number}: '{line}' is no pattern: {error}",
                                     hint="quote nothing and use only * ? [abc] **") from None
                rules += [rule] if rule else []
    return rules


def _rule(line: str, prefix: str) -> _Rule | None:
    text = line.strip()
    if not text or text.startswith("#"):
        return None
    keep = text.startswith("!")
    text = text.removeprefix("!")
    folders_only, text = text.endswith("/"), text.rstrip("/")
    anchored = "/" in text
    body = _regex(text.lstrip("/"))
    here = re.escape(prefix)
    return _Rule(re.compile(here + ("" if anchored else "(?:.*/)?") + body), folders_only, keep)


def _regex(pattern: str) -> str:
    pieces = re.split(r"(\*\*/|/\*\*$|\*\*|\*|\?|\[[^\]/]+\])", pattern)
    words = {"**/": "(?:.*/)?", "/**": "/.*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    out = ""
    for piece in pieces:
        if piece in words:
            out += words[piece]
        elif piece.startswith("[") and piece.endswith("]") and len(piece) > 2:
            out += "[" + piece[1:-1].replace("\\", r"\\").replace("[", r"\[").replace("!", "^", piece[1] == "!") + "]"
        else:
            out += re.escape(piece)
    return out


def _ignored(name: str, is_folder: bool, rules: Sequence[_Rule]) -> bool:
    for rule in reversed(rules):
        if (is_folder or not rule.folders_only) and rule.pattern.fullmatch(name):
            return not rule.keep
    return False
