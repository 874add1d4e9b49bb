"""Every worker's output on the dispatcher's disk, as the worker wrote it, and once more by rank.

`jobs/JOB/logs/HOST@SLOT@INCARNATION.log` is appended at an offset that the agent names: a repeated chunk is harmless.
`rank-N.log` is what `logs --rank N` shows: the output of whoever held rank N, in the order in which it arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 20  # most that one read answers


@dataclass(frozen=True)
class Piece:
    data: bytes
    next_offset: int


class JobLogs:
    """The log files of one job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def append(self, worker: str, rank: int, offset: int, data: bytes) -> int:
        """Append `data` if it starts where the file of `worker` ends; the size held, which the sender goes on from."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._worker_path(worker)
        size = _size(path)
        if not offset <= size < offset + len(data):
            return size
        fresh = data[size - offset:]
        for target in (path, self.folder / f"rank-{rank}.log") if rank >= 0 else (path,):
            with target.open("ab") as file:
                file.write(fresh)
        return size + len(fresh)

    def read(self, source: int | str, offset: int) -> Piece:
        """Up to CHUNK_BYTES from `offset` of a rank's (int) or a worker's (str) output."""
        path = self.folder / f"rank-{source}.log" if isinstance(source, int) else self._worker_path(source)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(CHUNK_BYTES)
        except FileNotFoundError:
            data = b""
        return Piece(data, offset + len(data))

    def workers(self) -> dict[str, int]:
        """Every worker that has written something, with the bytes held."""
        files = sorted(self.folder.glob("*@*@*.log"), key=lambda p: (p.stat().st_mtime, p.name))
        return {p.name.removesuffix(".log").replace("@", "/"): p.stat().st_size for p in files}

    def _worker_path(self, worker: str) -> Path:
        return self.folder / f"{worker.replace('/', '@')}.log"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
