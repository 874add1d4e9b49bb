"""What ranks tell rank 0 of the parts they have written, over the generation's bootstrap store.

Each rank sets the one key that is its own to its newest word, so that the store does not grow; rank 0 asks until every
word is about the turn that it waits for. Connections are the caller's own: no collective, no wait of training.

    hear: waiting --all have told--> list of Told
              |-- one tells that it failed: Refused
              |-- the limit, or GRACE_S after a peer was lost --> Unheard

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
    from spotfleet.train.store import Client

LIMIT_S = 30.0  # for all ranks to have written their parts, and SLOWER times as long as rank 0's own took
SLOWER = 4
GRACE_S = 2.0  # after a peer was lost: what is written by then may still be told
POLL_S = 0.02
ASK_S = 0.5  # one question; asked again on a new connection
MOST_BYTES = 1 << 20  # of a value in the store
WIDE = "Q"


class Unheard(Exception):
    """Somebody has not written their part; what was written of this version is nobody's checkpoint."""


class Refused(Unheard):
    """Somebody is there and says that they could not."""


@dataclass(frozen=True)
class Told:
    turn: int  # the how manieth of this generation
    version: int
    bytes: int = 0  # of the file
    digest: str = ""  # its sha256
    lengths: tuple[int, ...] = ()  # of its items
    layout: str = ""  # of the whole state, as this rank knows it
    problem: str = ""  # why there is no file


def pack(told: Told) -> bytes:
    about = json.dumps({**asdict(told), "lengths": None}).encode()
    data = zlib.compress(len(about).to_bytes(4, "big") + about + array.array(WIDE, told.lengths).tobytes(), 1)
    if len(data) > MOST_BYTES:
        return pack(Told(told.turn, told.version, problem=f"{len(told.lengths)} items are more than can be told"))
    return data


def unpack(data: bytes) -> Told:
    plain = zlib.decompress(data)
    end = 4 + int.from_bytes(plain[:4], "big")
    fields: dict[str, Any] = json.loads(plain[4:end])
    lengths = array.array(WIDE)
    lengths.frombytes(plain[end:])
    return Told(**{**fields, "lengths": tuple(lengths)})


def tell(dial: Callable[[float], Client], rank: int, told: Told) -> None:
    """Say it to rank 0. OSError when the store has gone: then nobody waits for it."""
    client = dial(ASK_S * 10)
    try:
        client.set(f"part/{rank}", pack(told))
        client.get(f"part/{rank}")  # it has arrived
    finally:
        client.close()


def hear(dial: Callable[[float], Client], world: int, turn: int, limit_s: float,
         broken: Callable[[], bool]) -> list[Told]:
    """What ranks 1 to `world` - 1 wrote in this `turn`; Unheard if one of them did not. `broken`: a peer was lost."""
    deadline, lost = time.monotonic() + limit_s, False
    heard: dict[int, Told] = {}
    client: Client | None = None
    try:
        while len(heard) < world - 1:
            if not lost and broken():
                lost, deadline = True, min(deadline, time.monotonic() + GRACE_S)
            missing = next(r for r in range(1, world) if r not in heard)
            if time.monotonic() > deadline:
                raise Unheard(f"rank {missing} did not tell of its part" + (" before it was lost" if lost else ""))
            try:
                client = client or dial(ASK_S)
                told = unpack(client.get(f"part/{missing}"))
            except TimeoutError:
                if client is not None:
                    client.close()
                client = None
                continue
            except OSError as error:
                raise Unheard(f"the generation's store has gone: {error}") from error
            if told.turn != turn:
                time.sleep(POLL_S)
            elif told.problem:
                raise Refused(f"rank {missing}: {told.problem}")
            else:
                heard[missing] = told
    finally:
        if client is not None:
            client.close()
    return [heard[r] for r in range(1, world)]
