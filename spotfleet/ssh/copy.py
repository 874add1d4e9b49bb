"""File copies to and from a machine: by rsync over our ssh, or by tar where either side lacks rsync.

rsync's own rules hold. A source that ends in `/` (or is `.` or `..`, or ends in one of them) means its contents; any
other source means the folder itself. Nothing is left out, no .gitignore counts. Far paths are relative to the user's
home directory there, also with `~/`. tar follows these rules, without patterns such as `*.pt`, and copies everything
anew, but goes on with what an interrupted `down` has brought: its digest must be that of the same bytes there. Sources
are compressed on their way up. Results are tensors mostly, which hardly shrink, and are not.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from spotfleet import bundle
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.ssh import openssh
from spotfleet.ssh.fanout import SSH_FAILED, FanoutTarget
from spotfleet.storage import atomic, locks

NO_RSYNC = (12, 127)  # rsync's status when the far shell finds none
CHECK_PATH = "correct the path; paths on a host are relative to its user's home directory"
CHUNK = 1 << 20
REPORT_EVERY_S = 1.0
TAKE_FILE = """t={into}
case $t in */) mkdir -p "$t";; esac
if [ -d "$t" ]; then tar -C "$t" -xf -; else tar -xOf - >"$t.part" && chmod {mode} "$t.part" && mv "$t.part" "$t"; fi"""

Progress = Callable[[str], None]


def up(place: FanoutTarget, source: str, target: str, extra: Sequence[str] = (),
       progress: Progress = lambda _line: None,
       ) -> None:
    """Copy `source` here to `target` there; `extra` are words for rsync. Raises SpotfleetError."""
    if not os.path.lexists(source):
        raise UsageError(f"{source} does not exist here")
    if not _rsync(place, [_near(source)], f"{place.alias}:{_far(target)}", extra, progress, "-az"):
        _tar_up(place, source, _far(target), progress)


def down(place: FanoutTarget, source: str, target: str, extra: Sequence[str] = (),
         progress: Progress = lambda _line: None,
         ) -> None:
    """Copy `source` there to `target` here. Raises SpotfleetError."""
    if not _rsync(place, [f"{place.alias}:{_far(source)}"], _near(target), extra, progress, "-a"):
        _tar_down(place, _far(source), target, progress)


def _near(path: str) -> str:
    """Return a path that rsync takes neither for an option nor for a remote path."""
    return path if path.startswith(("/", "./", "../")) else f"./{path}"


def _far(path: str) -> str:
    if path in ("~", "~/", "", "."):
        return "./"
    path = path.removeprefix("~/")
    return f"./{path}" if path.startswith("-") else path


# --- rsync


def _rsync(place: FanoutTarget, sources: Sequence[str], target: str, extra: Sequence[str], progress: Progress,
           mode: str) -> bool:
    """Copy by rsync. Returns False if one side lacks rsync and the request needs no feature of rsync."""
    if shutil.which("rsync") is None:
        return _without("there is no rsync on this machine", extra, progress)
    shell = " ".join(_word(word) for word in place.command())
    line = ["rsync", mode, "--partial", *_modern(), *extra, "-e", shell, "--", *sources, target]
    with tempfile.TemporaryFile() as said:
        code = subprocess.run(line, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), stderr=said).returncode
        said.seek(0)
        words = said.read().decode(errors="replace")
    if code in NO_RSYNC and re.search(r"rsync:.*not found|not found.*rsync|No such file.*rsync", words):
        return _without(f"{place.alias} has no rsync", extra, progress)
    if code == SSH_FAILED or re.search(r"connection unexpectedly closed", words):
        found = openssh.meaning(words.partition("rsync:")[0], place.alias)
        raise SpotfleetError(found.why, hint=found.hint)
    if missing := re.search(r'link_stat "(.*)" failed: No such file', words):
        raise SpotfleetError(f"no such file: {missing[1]}", hint=CHECK_PATH)
    if code:
        raise SpotfleetError(f"rsync with {place.alias} has failed ({code}): {words.strip() or 'without a word'}",
                             hint="copied files stay; the same command continues")
    if words.strip():
        progress(words.strip())
    return True


def _without(why: str, extra: Sequence[str], progress: Progress) -> bool:
    if extra:
        raise SpotfleetError(f"{why}, which {' '.join(extra)} is meant for", hint="install rsync on both sides")
    progress(f"{why}: copying with tar")
    return False


def _modern() -> list[str]:
    """Return options that an old rsync, such as a Mac's, does not know: blanks in far paths are kept, progress."""
    said = subprocess.run(["rsync", "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    found = re.search(r"version (\d+)\.(\d+)", said)
    if found is None or (int(found[1]), int(found[2])) < (3, 1):
        return []
    return ["-s", "--info=progress2"] if sys.stderr.isatty() else ["-s"]


def _word(text: str) -> str:
    """Quote a word for rsync's -e, which knows quotes but no backslash: a doubled quote inside quotes is one quote."""
    return text if re.fullmatch(r"[\w@%+=:,./-]+", text) else '"' + text.replace('"', '""') + '"'


# --- tar


def _inner(source: str) -> bool:
    """Return whether the path means the folder's contents."""
    return source.rpartition("/")[2] in ("", ".", "..")


def _tar_up(place: FanoutTarget, source: str, target: str, progress: Progress) -> None:
    path = Path(source)
    into = shlex.quote(target)
    if path.is_dir():
        script = f"mkdir -p {into} && tar -C {into} -xf -"
        name = "." if _inner(source) else path.resolve().name
    else:
        script = TAKE_FILE.format(into=into, mode=f"{path.stat().st_mode & 0o777:o}")
        name = path.name
    with _Ssh(place, script) as ssh:
        assert ssh.process.stdin is not None
        try:
            with tarfile.open(fileobj=_Counted(ssh.process.stdin, progress), mode="w|", bufsize=CHUNK) as tar:
                tar.add(path, name)
            ssh.process.stdin.close()
        except BrokenPipeError:
            pass  # its status and output give the reason
        ssh.check(f"copying {source} to {place.alias}:{target}")


def _tar_down(place: FanoutTarget, source: str, target: str, progress: Progress) -> None:
    """Copy by tar through a file, to check the archive before it is unpacked: the other side may be compromised."""
    folder, name = os.path.split(source)
    script = f"tar -C {shlex.quote(folder or '.')} -cf - -- {shlex.quote(name)}"
    if _inner(source):
        script = f"tar -C {shlex.quote(source)} -cf - ."
    near = Path(target)
    to_folder = target.endswith("/") or near.is_dir()
    beside = near if near.is_dir() else near.parent
    digits = hashlib.sha256(f"{place.host}:{source}".encode()).hexdigest()[:12]
    packed = beside / f".spotfleet-{digits}.part"  # stays when this is interrupted, until all is in its place
    with locks.alone(packed.with_suffix(".lock"), f"copying {place.alias}:{source} to {beside}"):
        _fetch_tar(place, source, script, packed, progress)
        with tempfile.TemporaryDirectory(prefix=".spotfleet-", dir=beside) as work:
            unpacked = Path(work, "files")
            try:
                bundle.extract(packed, unpacked)
            except ValueError as error:
                packed.unlink()
                raise SpotfleetError(f"what {place.alias} sends for {source} is not unpacked: {error}") from None
            except OSError:
                packed.unlink()  # there may be no room for both
                raise
            single = unpacked / name
            if not _inner(source) and not to_folder and not single.is_dir():
                atomic.rename(single, near, sync=False)  # a copy: the original stays
            else:  # moved, so that no file in `near` is ever a beginning only
                shutil.copytree(unpacked, near, symlinks=True, dirs_exist_ok=True, copy_function=shutil.move)
        packed.unlink()


def _fetch_tar(place: FanoutTarget, source: str, script: str, packed: Path, progress: Progress) -> None:
    """Write the output of `script` to `packed`, after what is there of it already."""
    what, here = f"copying {place.alias}:{source}", packed.stat().st_size if packed.exists() else 0
    if here and _far_digest(place, f"{script} | head -c {here}") != _digest(packed):
        here = 0
    if here:
        progress(f"{here / 1e6:.0f} MB are here already")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_APPEND if here else os.O_TRUNC)
    with _Ssh(place, _rest(script, here) if here else script) as ssh, open(
            os.open(packed, flags, 0o600), "ab" if here else "wb") as out:
        assert ssh.process.stdout is not None
        try:
            shutil.copyfileobj(ssh.process.stdout, _Counted(out, progress), CHUNK)
            ssh.check(what)
        except SpotfleetError:
            if ssh.process.returncode != SSH_FAILED:  # tar's own failure is not repaired by more of its output
                packed.unlink()
            raise
    if here and _far_digest(place, script) != _digest(packed):  # files changed meanwhile
        packed.unlink()
        _fetch_tar(place, source, script, packed, progress)


def _rest(script: str, start: int) -> str:
    """Return a script that prints the output of `script` from byte `start` on, with its status: a pipe has that of its
    last command, and without tar's own an unreadable file would be missing without an error."""
    return f"exec 4>&1; e=$({{ {{ {script}; echo $? >&3; }} | tail -c +{start + 1} >&4; }} 3>&1); exit $e"


def _far_digest(place: FanoutTarget, script: str) -> str:
    """Return the sha256 of what the script prints there; "" if that machine cannot compute it."""
    with _Ssh(place, f"({script}) | sha256sum") as ssh:
        assert ssh.process.stdout is not None
        return ssh.process.stdout.read(64).decode(errors="replace")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Ssh:
    """Shell script on the far side, with pipes."""

    def __init__(self, place: FanoutTarget, script: str) -> None:
        self.place = place
        self.said = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self.process = subprocess.Popen(
            place.command("-o", "BatchMode=yes", "-T", place.alias, f"sh -c {shlex.quote(script)}"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said)

    def __enter__(self) -> _Ssh:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        self.process.wait()
        self.said.close()

    def check(self, what: str) -> None:
        code = self.process.wait()
        self.said.seek(0)
        words = self.said.read().decode(errors="replace").strip()
        if code == SSH_FAILED:
            found = openssh.meaning(words, self.place.alias)
            raise SpotfleetError(found.why, hint=found.hint)
        if code:
            raise SpotfleetError(f"{what} has failed ({code}): {words or 'without a word'}")


class _Counted:
    """File that reports how much has been written."""

    def __init__(self, out: BinaryIO, progress: Progress) -> None:
        self.out, self.progress = out, progress
        self.bytes, self.begun_at, self.reported_at = 0, time.monotonic(), time.monotonic()

    def write(self, data: bytes) -> int:
        self.out.write(data)
        self.bytes += len(data)
        if time.monotonic() - self.reported_at >= REPORT_EVERY_S:
            self.reported_at = time.monotonic()
            rate = self.bytes / (self.reported_at - self.begun_at)
            self.progress(f"{self.bytes / 1e6:.0f} MB, {rate / 1e6:.1f} MB/s")
        return len(data)
