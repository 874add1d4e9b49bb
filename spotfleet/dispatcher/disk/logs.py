"""Log files of workers on the dispatcher's disk: one per worker, and a copy by rank.

A log is one file after the other, each of at most SEGMENT_BYTES (a chunk more), with the offset of its first byte in
its name. Data is appended at an offset from the agent: a repeated chunk is harmless.

    jobs/JOB/logs/HOST@SLOT@INCARNATION.log   then ....log.8388608 and so on
    jobs/JOB/logs/rank-N.log                  output of all workers that held rank N, in order of arrival: `logs --rank`
    jobs/JOB/logs/HOST#setup.log              output of `setup` on a host

One job keeps LIMIT_BYTES, the newest. Beyond it the oldest file goes of the host, or the rank, that has stored the
most: a host that prints without end removes its own output only. A reader gets a line in place of what is gone.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from spotfleet.dispatcher.disk import space
from spotfleet.fleet.domain.events import Event, LogsCut
from spotfleet.words import size as in_words

CHUNK_BYTES = 1 << 20  # largest answer to one read
LIMIT_BYTES = 2 << 30  # limit of one job; the copy by rank counts too
SEGMENT_BYTES = 8 << 20
TAIL_BYTES = 16 << 20  # how far back `tail` looks for lines
BLOCK_BYTES = 1 << 16
SPAN_S, SPANS = 5.0, 64  # shortest time between two noted arrivals of one log, and how many are noted
FILE_BYTES = 1 << 16  # what each file counts in addition to its bytes, so that a job has at most 32,768 of them
SEGMENT_NAME = re.compile(r"(.+)\.log(?:\.(\d{1,18}))?")

Segment = tuple[str, int]  # the log's name in file names, and the offset of the file's first byte


@dataclass
class _Arrivals:
    """A part of a log, from `offset` to the next part, and when its first and its last byte arrived (monotonic)."""

    offset: int
    first_at: float
    last_at: float


@dataclass(frozen=True)
class LogPiece:
    """Data of a log, and the offset of the next piece."""

    data: bytes
    next_offset: int


class JobLogs:
    """Log files of one job."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self._limit_bytes, self._segment_bytes = limit_bytes, segment_bytes
        self._cut: dict[str, int] = {}  # host or rank -> bytes removed by this process
        self._news: list[Callable[[str, float], Event]] = []
        self._arrived: dict[str, list[_Arrivals]] = {}  # log -> what this process received, oldest first

    @property
    def remark(self) -> str:
        """Message for users once output was removed; else empty."""
        return (f"its oldest output is removed ({', '.join(sorted(self._cut))}): logs of a job may take "
                f"{in_words(self._limit_bytes)}") if self._cut else ""

    def take_news(self, job: str, unix: float) -> list[Event]:
        """Return the events since the last call: the first removal of each host's or rank's output."""
        news, self._news = self._news, []
        return [event(job, unix) for event in news]

    def append(self, worker: str, rank: int, offset: int, data: bytes) -> int:
        """Append `data` if it continues the log of `worker`; return the size so far, from which the sender continues.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = _file_name(worker)
        size = self._end(name)
        if not offset <= size < offset + len(data):
            return size
        fresh = data[size - offset:]
        space.refuse_if_full(self.folder, 2 * len(fresh))
        for target in (name, f"rank-{rank}") if rank >= 0 else (name,):
            self._append(target, fresh)
        self._remove_oldest()
        return size + len(fresh)

    def read(self, source: int | str, offset: int) -> LogPiece:
        """Read up to CHUNK_BYTES from `offset` of a rank's (int) or a worker's (str) output."""
        name = f"rank-{source}" if isinstance(source, int) else _file_name(source)
        starts = self._starts.get(name, [])
        if starts and offset < starts[0]:
            return LogPiece(gap_line(starts[0] - offset, self._limit_bytes), starts[0])
        start = max((s for s in starts if s <= offset), default=0)
        try:
            with self._path((name, start)).open("rb") as file:
                file.seek(offset - start)
                data = file.read(CHUNK_BYTES)
        except FileNotFoundError:
            data = b""
        later = min((s for s in starts if s > offset), default=offset)
        return LogPiece(data, offset + len(data) if data else later)

    def start(self, source: int | str, *, lines: int | None = None, since_s: float = 0.0) -> int:
        """Return the offset at which the last `lines` lines begin, and not before the output of the last `since_s`
        seconds. The latter is known to seconds for what this process received, else to a file of SEGMENT_BYTES."""
        name = f"rank-{source}" if isinstance(source, int) else _file_name(source)
        if not (starts := self._starts.get(name)):
            return 0
        start = self._since(name, since_s) if since_s > 0 else starts[0]
        return start if lines is None else max(start, self._last_lines(name, lines))

    def _since(self, name: str, since_s: float) -> int:
        now, arrived = time.monotonic(), self._arrived.get(name, [])
        first = arrived[0].offset if arrived else self._end(name)
        for start in self._starts[name]:
            if start < first and time.time() - self._path((name, start)).stat().st_mtime <= since_s:
                return start
        return next((part.offset for part in arrived if now - part.last_at <= since_s), self._end(name))

    def _last_lines(self, name: str, lines: int) -> int:
        end = position = self._end(name)
        if not lines:
            return end
        for start in reversed(self._starts[name]):
            while position > start and end - position < TAIL_BYTES:
                begin = max(start, position - BLOCK_BYTES)
                with self._path((name, start)).open("rb") as file:
                    file.seek(begin - start)
                    data = file.read(position - begin)
                at = len(data)
                while (at := data.rfind(b"\n", 0, at)) >= 0:
                    if begin + at + 1 < end:  # the last line's own end is no line more
                        lines -= 1
                    if lines <= 0:
                        return begin + at + 1
                position = begin
        return position

    def workers(self) -> dict[str, int]:
        """Return every worker with output, oldest first, and the bytes that it has written."""
        ends = {name: self._path((name, starts[-1])).stat() for name, starts in self._starts.items()
                if not name.startswith("rank-")}
        return {name.replace("@", "/"): self._starts[name][-1] + stat.st_size
                for name, stat in sorted(ends.items(), key=lambda item: (item[1].st_mtime, item[0]))}

    # ---- the files

    @cached_property
    def _sizes(self) -> dict[str, dict[Segment, int]]:
        """Host or rank -> the sizes of its files, oldest first."""
        found: dict[str, dict[Segment, int]] = {}
        files = [(path.stat(), segment) for path in self.folder.glob("*.log*") if (segment := segment_of(path.name))]
        for stat, segment in sorted(files, key=lambda file: (file[0].st_mtime, file[1])):
            found.setdefault(_owner(segment[0]), {})[segment] = stat.st_size
        return found

    @cached_property
    def _starts(self) -> dict[str, list[int]]:
        """Log -> the offsets at which its files begin, in order."""
        found: dict[str, list[int]] = {}
        for name, start in sorted(segment for sizes in self._sizes.values() for segment in sizes):
            found.setdefault(name, []).append(start)
        return found

    @cached_property
    def _totals(self) -> dict[str, int]:
        """Host or rank -> what its files count."""
        return {owner: sum(size + FILE_BYTES for size in sizes.values()) for owner, sizes in self._sizes.items()}

    def size(self, worker: str) -> int:
        """Return how many bytes of this worker's log have arrived."""
        return self._end(_file_name(worker))

    def _end(self, name: str) -> int:
        starts = self._starts.get(name)
        return starts[-1] + self._sizes[_owner(name)][name, starts[-1]] if starts else 0

    def _append(self, name: str, data: bytes) -> None:
        end, starts = self._end(name), self._starts.get(name, [])
        start = starts[-1] if starts and end - starts[-1] < self._segment_bytes else end
        _append(self._path((name, start)), data)
        self._note_arrival(name, end)
        if start not in starts:
            self._starts[name] = [*starts, start]
        self._note((name, start), end - start + len(data))

    def _note_arrival(self, name: str, offset: int) -> None:
        parts, now = self._arrived.setdefault(name, []), time.monotonic()
        if parts and now - parts[-1].first_at < SPAN_S:
            parts[-1].last_at = now
            return
        parts.append(_Arrivals(offset, now, now))
        if len(parts) > SPANS:  # join pairs of the older half: old output is found less exactly
            for at in range(SPANS // 4):
                parts[at].last_at = parts.pop(at + 1).last_at

    def _note(self, segment: Segment, size: int | None) -> None:
        """Note the size of a file; None: it is removed."""
        owner = _owner(segment[0])
        sizes, total = self._sizes.setdefault(owner, {}), self._totals.get(owner, 0)
        before = sizes.pop(segment) + FILE_BYTES if size is None else sizes.get(segment, -FILE_BYTES) + FILE_BYTES
        if size is not None:
            sizes[segment] = size
        self._totals[owner] = total - before + (0 if size is None else size + FILE_BYTES)

    def _remove_oldest(self) -> None:
        """Remove the oldest files until the rest is within the limit. The end of a log stays as an empty file at first:
        its sender continues there."""
        while (total := sum(self._totals.values())) > self._limit_bytes:
            owner = max(self._totals, key=lambda one: (self._totals[one], one))
            segment, size = next(iter(self._sizes[owner].items()))
            name, start = segment
            if total - size - FILE_BYTES <= 0:
                return  # the only file
            if size and self._starts[name] == [start]:
                _append(self._path((name, start + size)), b"")
                self._starts[name].append(start + size)
                self._note((name, start + size), 0)
            self._path(segment).unlink(missing_ok=True)
            self._starts[name].remove(start)
            self._note(segment, None)
            if not self._starts[name]:
                del self._starts[name]
            self._report(owner, size)

    def _report(self, owner: str, size: int) -> None:
        if owner not in self._cut:
            limit = self._limit_bytes
            self._news.append(lambda job, unix: LogsCut(unix, job, owner, limit))
        self._cut[owner] = self._cut.get(owner, 0) + size

    def _path(self, segment: Segment) -> Path:
        name, start = segment
        return self.folder / (f"{name}.log.{start}" if start else f"{name}.log")


def gap_line(size: int, limit_bytes: int = LIMIT_BYTES) -> bytes:
    """Return the line that stands for removed output."""
    return (f"spotfleet: {in_words(size)} of older output are not kept: the logs of a job may take "
            f"{in_words(limit_bytes)}\n").encode()


def whole_logs(folder: Path) -> Iterator[tuple[str, bytes, list[Path]]]:
    """Yield for each log in a job's `logs`: its file name as one file, the line for what is gone, and its files."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in folder.glob("*.log*"):
        if segment := segment_of(path.name):
            found.setdefault(segment[0], []).append((segment[1], path))
    for name, files in sorted(found.items()):
        files.sort()
        yield f"{name}.log", gap_line(files[0][0]) if files[0][0] else b"", [path for _, path in files]


def segment_of(file_name: str) -> Segment | None:
    """Parse the name of a log's file; None for a foreign one."""
    found = SEGMENT_NAME.fullmatch(file_name)
    return (found[1], int(found[2] or 0)) if found else None


def _file_name(worker: str) -> str:
    return worker.replace("/", "@")


def _owner(name: str) -> str:
    """Return the host, or the rank, whose output this log is."""
    return re.split("[/@#]", name, maxsplit=1)[0]


def _append(path: Path, data: bytes) -> None:
    """Append all of `data` or nothing: after an error its sender sends it again."""
    before = _size(path)
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
            file.write(data)
    except OSError:
        os.truncate(path, before)
        raise


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
