"""Agreement of all ranks on the order of their collectives: a difference is an error on every rank that names both.

Backends end the process, hang or mix up numbers when ranks meet in different collectives. Three guards prevent that:

    compare()   before a user's collective: one small allgather, whose rows hold each rank's operation, type, shape and
                place in the script
    stalled()   in a wait of more than STALL_S: each rank writes its newest collectives into the generation's store,
                and reads those of the next rank
    end()       instead of a collective, when the function has returned: through the store alone

    stalled, end --two ranks differ in collective n--> verdict in the store --all ranks have read it--> UsageError

With SPOTFLEET_CHECK=1 each collective, the reduction of gradients too, is preceded by a `compare`, in which the places
in the script count as well.

gloo keeps allgathers apart from allreduces, so a rank in a `compare` and another in a reduction of gradients stall.
With NCCL only SPOTFLEET_CHECK=1 finds these two. Collectives of different size without a `compare` before them
(allreduce_async, also only with SPOTFLEET_CHECK=1) end the process in gloo.

Threads: the one that begins or waits for collectives, and one of its own for each look into the store.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from spotfleet.errors import UsageError
from spotfleet.train.comm.script_lines import call_site
from spotfleet.train.comm.torch_store import TorchStore
from spotfleet.worker.activity import peer_wait

CHECK = "SPOTFLEET_CHECK"
STALL_S = 2.0
STORE_LIMIT_S = 5.0
KNOWN_LIMIT_S = 30.0  # for all ranks to read a verdict; a rank that computes reads it at its next collective
END_POLL_S = (0.002, 0.2)  # first and longest pause
CUT_LOOK_S = 0.02  # pauses from this length on look for a peer that has gone
HEADER_BYTES = 256
CALL_BYTES, SITE_BYTES = 150, 80
NEWEST = 64  # collectives that are compared when ranks stall
HINT = f"all ranks must make the same calls in the same order; {CHECK}=1 compares each call before it begins"


@dataclass(frozen=True)
class Header:
    """One rank's call of a collective."""

    call: str
    site: str
    rows: int

    def pack(self) -> torch.Tensor:
        call = _shortened(self.call, CALL_BYTES)
        data = self.rows.to_bytes(8, "little") + call + b"\0" + self.site.encode()[-SITE_BYTES:]
        return torch.frombuffer(bytearray(data.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)

    @staticmethod
    def unpack(row: torch.Tensor) -> Header:
        data = bytes(row.tolist())
        call, site = data[8:].rstrip(b"\0").partition(b"\0")[::2]
        return Header(call.decode(errors="replace"), site.decode(errors="replace"), int.from_bytes(data[:8], "little"))


def _shortened(text: str, limit: int) -> bytes:
    data = text.encode()
    return data if len(data) <= limit else data[:limit - 11] + f"... {zlib.crc32(data):08x}"[-11:].encode()


class ComparedGroup(Protocol):
    """The members of a group that its order uses."""

    rank: int
    size: int
    aborted: bool

    def begin_allgather(self, tensor: torch.Tensor) -> tuple[Any, list[torch.Tensor]]: ...
    def finish(self, works: list[Any]) -> None: ...
    def dial(self, under: str, limit_s: float) -> TorchStore: ...
    def refuse(self, problem: str) -> Exception: ...


class CallOrder:
    """Record of one rank's collectives in one generation, and their comparison with the other ranks'."""

    def __init__(self, group: ComparedGroup) -> None:
        self._group = group
        self.checks = os.environ.get(CHECK, "") not in ("", "0")
        self._number = 0
        self._newest: deque[tuple[int, str, tuple[Any, ...], str]] = deque(maxlen=NEWEST)  # ..., type and size, place
        self._looking: threading.Thread | None = None  # it may block, where its caller must see an abort at once
        self._last_look = 0.0
        self.verdict: UsageError | None = None  # the ranks differ; it explains the failure of whatever is in progress

    # Before a collective

    def begin(self, call: str, tensor: torch.Tensor) -> None:
        """Record a collective that begins now, and compare it first if each is to be compared."""
        if self.checks:
            self.compare(f"{call} of {tensor.numel()} {_name(tensor.dtype)}")
        self._record(call, tensor.dtype, tensor.numel())

    def _record(self, call: str, *detail: Any, site: str = "") -> None:
        self._number += 1
        self._newest.append((self._number, call, detail, site))

    def compare(self, call: str, rows: int = 0) -> list[int]:
        """Compare this call with those of all ranks, which call it at the same time; return the rows of each."""
        if self._group.size == 1:
            return [rows]
        handle = self.begin_compare(call, rows)
        self._group.finish([handle[0]])
        return self.end_compare(handle)

    def begin_compare(self, call: str, rows: int = 0) -> tuple[Any, list[torch.Tensor]]:
        site = call_site()
        self._record(call, site=site)
        return self._group.begin_allgather(Header(call, site, rows).pack())

    def end_compare(self, handle: tuple[Any, list[torch.Tensor]]) -> list[int]:
        headers = [Header.unpack(part) for part in handle[1]]
        calls = {h.call for h in headers}
        sites = {h.site for h in headers} if self.checks else set()
        if len(calls) > 1 or len(sites) > 1:
            raise UsageError("the ranks' collectives differ: " + _by_rank(
                {r: f"{h.call} at {h.site}" if h.site else h.call for r, h in enumerate(headers)}), hint=HINT)
        return [h.rows for h in headers]

    # While a collective waits, and at the end

    def stalled(self, waited_s: float) -> RuntimeError | None:
        """Return `verdict` if ranks wait for each other in different collectives. Never blocks; polled in a wait."""
        now = time.monotonic()
        if waited_s < STALL_S or self._group.aborted:
            return None
        if self.verdict is not None and not (self._looking and self._looking.is_alive()):
            return RuntimeError(str(self.verdict))
        if now - self._last_look > STALL_S / 2 and not (self._looking and self._looking.is_alive()):
            self._last_look = now
            self._looking = threading.Thread(target=self._look_once, args=(self._calls(),), name="spotfleet-order",
                                             daemon=True)
            self._looking.start()
        return None

    def _look_once(self, calls: list[Call]) -> None:
        try:
            with closing(self._board()) as board:
                board.write("waits", calls)
                self._look(board, calls)
        except OSError:
            return  # the store's rank is lost, or late; the next look is soon

    @peer_wait
    def end(self, what: str) -> None:
        """Wait until all ranks have come here with equally many collectives. UsageError if one never can.

        CommBroken when the generation ends meanwhile.
        """
        group, pause_s = self._group, END_POLL_S[0]
        if group.size == 1:
            return
        self._record("the end of the function", site=what)
        calls, awaited = self._calls(), list(range(group.size))
        try:
            with closing(self._board()) as board:
                board.write("end", calls)
                while awaited:
                    if group.aborted:
                        raise ConnectionAbortedError("the group was aborted")
                    if pause_s >= CUT_LOOK_S and group.is_cut():
                        raise ConnectionResetError("a peer has gone")
                    if self._look(board, calls):
                        raise self.verdict
                    if board.read(awaited[0]).state == "end":
                        awaited.pop(0)
                        continue
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, END_POLL_S[1])
        except OSError as error:
            raise group.refuse(str(error)) from error

    def _look(self, board: Board, calls: list[Call]) -> bool:
        """Compare this rank's newest collectives with the next rank's. Return whether there is a verdict, which all
        ranks know then."""
        verdict = board.verdict()
        if not verdict:
            verdict = self._differing(board, calls, (self._group.rank + 1) % self._group.size)
            if not verdict:
                return False
            board.write_verdict(verdict)
        self.verdict = UsageError(verdict, hint=HINT)
        board.write("knows", calls)
        self._await_others(board)
        return True

    def _await_others(self, board: Board) -> None:
        """Wait until all ranks know the verdict: one that leaves breaks the connections of the others."""
        deadline = time.monotonic() + KNOWN_LIMIT_S
        awaited = list(range(self._group.size))
        while awaited and time.monotonic() < deadline and not self._group.aborted:
            try:
                if board.read(awaited[0]).state == "knows":
                    awaited.pop(0)
                    continue
            except OSError:
                return  # the store's rank has left, so it knew that all others know
            time.sleep(END_POLL_S[1])

    def _differing(self, board: Board, calls: list[Call], other: int) -> str:
        """Return the difference between `calls` of this rank and those of rank `other`; "" for none."""
        theirs = {call.number: call.text for call in board.read(other).calls}
        for call in calls:
            if theirs.get(call.number, call.text) != call.text:
                rows = [calls if r == self._group.rank else board.read(r).calls for r in range(self._group.size)]
                at = {r: c for r, row in enumerate(rows) for c in row if c.number == call.number}
                return "the ranks wait for each other in different collectives: " + _by_rank(
                    {r: f"{c.text} ({c.site})" if c.site else c.text for r, c in at.items()})
        return ""

    def _calls(self) -> list[Call]:
        return [Call(number, f"{call} of {detail[1]} {_name(detail[0])}" if detail else call, site)
                for number, call, detail, site in list(self._newest)]

    def _board(self) -> Board:
        return Board(self._group.dial("order", STORE_LIMIT_S), self._group.rank)


class Call(NamedTuple):
    """A collective that a rank has begun."""

    number: int
    text: str
    site: str


class Standing(NamedTuple):
    """What a rank has published: "" (nothing yet), "waits", "end" or "knows" (the verdict), and its newest calls."""

    state: str
    calls: list[Call]


class Board:
    """The ranks' standings and their verdict in the generation's store, over a connection of its own."""

    def __init__(self, store: TorchStore, rank: int) -> None:
        self._store, self._rank = store, rank

    def write(self, state: str, calls: list[Call]) -> None:
        self._store.set(f"rank/{self._rank}", json.dumps([state, calls]))

    def read(self, rank: int) -> Standing:
        state, calls = json.loads(self._store.get(f"rank/{rank}"))
        return Standing(state, [Call(*call) for call in calls])

    def verdict(self) -> str:
        return self._store.get("verdict").decode()

    def write_verdict(self, text: str) -> None:
        self._store.set("verdict", text)

    def close(self) -> None:
        self._store.close()


def prepare(put: Callable[[str, str], None], rank: int) -> None:
    """Write this rank's keys, before the members meet: a `get` of a key that nobody has written would wait."""
    put(f"order/rank/{rank}", json.dumps(["", []]))
    if rank == 0:
        put("order/verdict", "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _by_rank(texts: dict[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {text}"
                     for text, who in ranks.items())
