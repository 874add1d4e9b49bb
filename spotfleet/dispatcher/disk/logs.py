"""Log files of workers on the dispatcher's disk: one per worker, and a copy by rank.

`jobs/JOB/logs/HOST@SLOT@INCARNATION.log` is appended at an offset from the agent: a repeated chunk is harmless.
`rank-N.log`, shown by `logs --rank N`, is the output of all workers that held rank N, in order of arrival.
`HOST#setup.log` is the output of `setup` on a host.
A host may store LIMIT_BYTES in one job, for any number of workers. Further output is dropped, with a line in the log.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from spotfleet.dispatcher.disk import space

CHUNK_BYTES = 1 << 20  # largest answer to one read
LIMIT_BYTES = 1 << 30  # limit of one host in one job
FILE_BYTES = 4096  # least disk space of a file


@dataclass(frozen=True)
class LogPiece:
    """Data of a log, and the offset of the next piece."""

    data: bytes
    next_offset: int


class JobLogs:
    """Log files of one job."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = folder
        self._limit_bytes = limit_bytes

    def append(self, worker: str, rank: int, offset: int, data: bytes) -> int:
        """Append `data` if it continues the file of `worker`; return the size held, from which the sender continues.

        Beyond the limit the data is dropped and the answer reports it as stored, so that the sender does not retry
        forever.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path, host = self._worker_path(worker), _host(worker)
        size, taken = _size(path), self._taken.get(host, 0)
        room = self._limit_bytes - taken
        if room <= 0:
            return offset + len(data)
        if not offset <= size < offset + len(data):
            return size
        fresh = data[size - offset:]
        space.refuse_if_full(self.folder, 2 * len(fresh))
        kept = fresh[:room]
        taken += len(kept) + (0 if size else FILE_BYTES)
        if taken >= self._limit_bytes:
            kept += self._limit_line(host)
        for target in (path, self.folder / f"rank-{rank}.log") if rank >= 0 else (path,):
            _append(target, kept)
        self._taken[host] = taken
        return size + len(fresh)

    def _limit_line(self, host: str) -> bytes:
        return (f"\nspotfleet: {host} has written {self._limit_bytes} bytes of output in this job; what follows is not"
                " kept\n").encode()

    @cached_property
    def _taken(self) -> dict[str, int]:
        """Host -> bytes of its files."""
        found: dict[str, int] = {}
        for path in self._files():
            host = _host(path.name)
            found[host] = found.get(host, 0) + _size(path) + FILE_BYTES
        return found

    def read(self, source: int | str, offset: int) -> LogPiece:
        """Read up to CHUNK_BYTES from `offset` of a rank's (int) or a worker's (str) output."""
        path = self.folder / f"rank-{source}.log" if isinstance(source, int) else self._worker_path(source)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(CHUNK_BYTES)
        except FileNotFoundError:
            data = b""
        return LogPiece(data, offset + len(data))

    def workers(self) -> dict[str, int]:
        """Return every worker with output, and the bytes held."""
        files = sorted(self._files(), key=lambda p: (p.stat().st_mtime, p.name))
        return {p.name.removesuffix(".log").replace("@", "/"): p.stat().st_size for p in files}

    def _files(self) -> list[Path]:
        return [*self.folder.glob("*@*@*.log"), *self.folder.glob("*#setup.log")]

    def _worker_path(self, worker: str) -> Path:
        return self.folder / f"{worker.replace('/', '@')}.log"


def _host(name: str) -> str:
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
