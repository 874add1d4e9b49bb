"""Streams of a transfer from the dispatcher: each has a connection of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from spotfleet.protocol.archive import packs
from spotfleet.storage.mirror import Piece
from spotfleet.transport.client import DispatcherClient

SLOW_BYTES_S = 30e6  # below, deflating text takes less time than sending it plain
MEASURED_BYTES, MEASURED_S = 1 << 20, 0.5  # smaller answers show the round trip, not the link


class LinkRate:
    """Rate of a transfer over all its streams."""

    def __init__(self, streams: int) -> None:
        self._lock, self._streams = threading.Lock(), streams
        self._bytes, self._took_s = 0, 0.0  # summed over the streams

    def note(self, count: int, took_s: float) -> None:
        if count >= MEASURED_BYTES:
            with self._lock:
                self._bytes, self._took_s = self._bytes + count, self._took_s + took_s

    @property
    def is_slow(self) -> bool:
        """Whether the link is known to be slower than the dispatcher deflates."""
        with self._lock:
            return self._took_s >= MEASURED_S and self._streams * self._bytes / self._took_s < SLOW_BYTES_S


class ArchiveReader:
    """One stream: pieces of the archive, over a persistent connection."""

    def __init__(self, client: DispatcherClient, rate: LinkRate, outputs: str = "") -> None:
        """`outputs`: the job whose outputs are read; "" for the whole archive."""
        self._client, self._rate, self._outputs = client.persistent(), rate, outputs

    def read(self, pieces: Sequence[Piece]) -> bytes:
        packed = self._rate.is_slow and all(packs(piece.key) for piece in pieces)
        began = time.monotonic()
        data = self._client.archive_pieces(pieces, outputs=self._outputs, packed=packed)
        if not packed:  # else the link carried less
            self._rate.note(len(data), time.monotonic() - began)
        return data

    def abort(self) -> None:
        self._client.abort()

    def close(self) -> None:
        self._client.close()
