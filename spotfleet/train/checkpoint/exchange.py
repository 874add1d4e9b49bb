"""Reports of written checkpoint parts to rank 0, over the generation's bootstrap store.

Each rank sets one key of its own to its newest report, so the store does not grow. Rank 0 polls until every report is
of the turn that it waits for. The caller opens its own connections: no collective is used, and training does not wait.

    waiting --all have reported--> list of PartReport
        |-- a rank reports a failure --> PeerFailed
        |-- the limit, or GRACE_S after a peer was lost --> PeerTimeout

Threads: the thread that writes a checkpoint.
"""

from __future__ import annotations

import array
import json
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spotfleet.worker.store import StoreClient

LIMIT_S = 30.0  # for all ranks to write their parts; SLOWER times the duration of rank 0's own is added
SLOWER = 4
GRACE_S = 2.0  # after a peer was lost: reports of parts written by then may still arrive
POLL_S = 0.02
REQUEST_S = 0.5  # for one request, which is repeated on a new connection
MOST_BYTES = 1 << 20  # limit for a value in the store
LENGTH_TYPE = "Q"


class PeerTimeout(Exception):
    """A rank has not written its part, so the other parts of this version are no checkpoint."""


class PeerFailed(PeerTimeout):
    """A rank is alive and reports that it could not write its part."""


@dataclass(frozen=True)
class PartReport:
    """One rank's report of the part that it has written, or of its failure."""

    turn: int  # number of the checkpoint in this generation
    version: int
    bytes: int = 0  # size of the file
    digest: str = ""  # sha256 of the file
    lengths: tuple[int, ...] = ()  # sizes of its items
    layout: str = ""  # digest of the whole state's layout on this rank
    problem: str = ""  # why there is no file


def pack(report: PartReport) -> bytes:
    fields = json.dumps({**asdict(report), "lengths": None}).encode()
    lengths = array.array(LENGTH_TYPE, report.lengths).tobytes()
    data = zlib.compress(len(fields).to_bytes(4, "big") + fields + lengths, 1)
    if len(data) > MOST_BYTES:
        problem = f"{len(report.lengths)} items do not fit into a report"
        return pack(PartReport(report.turn, report.version, problem=problem))
    return data


def unpack(data: bytes) -> PartReport:
    plain = zlib.decompress(data)
    end = 4 + int.from_bytes(plain[:4], "big")
    fields: dict[str, Any] = json.loads(plain[4:end])
    lengths = array.array(LENGTH_TYPE)
    lengths.frombytes(plain[end:])
    return PartReport(**{**fields, "lengths": tuple(lengths)})


def send_report(dial: Callable[[float], StoreClient], rank: int, report: PartReport) -> None:
    """Send the report to rank 0. OSError when the store has gone: then no rank waits for it."""
    client = dial(REQUEST_S * 10)
    try:
        client.set(f"part/{rank}", pack(report))
        client.get(f"part/{rank}")  # it has arrived
    finally:
        client.close()


def receive_reports(dial: Callable[[float], StoreClient], world: int, turn: int, limit_s: float,
                    broken: Callable[[], bool]) -> list[PartReport]:
    """Receive the reports of ranks 1 to `world` - 1 for this `turn`; PeerTimeout if one is missing.

    `broken` returns whether a peer was lost.
    """
    deadline, lost = time.monotonic() + limit_s, False
    reports: dict[int, PartReport] = {}
    client: StoreClient | None = None
    try:
        while len(reports) < world - 1:
            if not lost and broken():
                lost, deadline = True, min(deadline, time.monotonic() + GRACE_S)
            missing = next(r for r in range(1, world) if r not in reports)
            if time.monotonic() > deadline:
                raise PeerTimeout(f"rank {missing} did not report its part" + (" before it was lost" if lost else ""))
            try:
                client = client or dial(REQUEST_S)
                report = unpack(client.get(f"part/{missing}"))
            except TimeoutError:
                if client is not None:
                    client.close()
                client = None
                continue
            except OSError as error:
                raise PeerTimeout(f"the generation's store has gone: {error}") from error
            if report.turn != turn:
                time.sleep(POLL_S)
            elif report.problem:
                raise PeerFailed(f"rank {missing}: {report.problem}")
            else:
                reports[missing] = report
    finally:
        if client is not None:
            client.close()
    return [reports[r] for r in range(1, world)]
