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

Threads: the one that begins or waits for collectives.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from spotfleet.errors import UsageError
from spotfleet.train.comm.torch_store import TorchStore
from spotfleet.worker.activity import peer_wait

CHECK = "SPOTFLEET_CHECK"
STALL_S = 2.0
STORE_LIMIT_S = 5.0
KNOWN_LIMIT_S = 30.0  # for all ranks to read a verdict; a rank that computes reads it at its next collective
END_POLL_S = (0.002, 0.2)  # first and longest pause
HEADER_BYTES = 256
CALL_BYTES, SITE_BYTES = 150, 80
NEWEST = 64  # collectives that are compared when ranks stall
HINT = f"all ranks must make the same calls in the same order; {CHECK}=1 compares each call before it begins"
_NOT_THE_SCRIPT = (f"{Path(__file__).parents[2]}/", f"{Path(torch.__file__).parent}/", "<")


class OutOfOrder(RuntimeError):
    """Verdict that ends a wait; callers raise its `error`."""

    def __init__(self, error: UsageError) -> None:
        super().__init__(str(error))
        self.error = error


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


def call_site() -> str:
    """Return "folder/file:line" of the newest call outside torch and this package; "" if there is none."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_SCRIPT):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return ""
    return "/".join(frame.f_code.co_filename.split("/")[-2:]) + f":{frame.f_lineno}"


class ComparedGroup(Protocol):
    """The members of a group that its order uses."""

    rank: int
    size: int
    aborted: bool

    def begin_allgather(self, tensor: torch.Tensor) -> tuple[Any, list[torch.Tensor]]: ...
    def finish(self, works: list[Any]) -> None: ...
    def dial(self, under: str, limit_s: float) -> TorchStore: ...
    def refuse(self, problem: str) -> RuntimeError: ...


class CallOrder:
    """Record of one rank's collectives in one generation, and their comparison with the other ranks'."""

    def __init__(self, group: ComparedGroup) -> None:
        self._group = group
        self.checks = os.environ.get(CHECK, "") not in ("", "0")
        self._number = 0
        self._newest: deque[tuple[int, str, tuple[Any, ...], str]] = deque(maxlen=NEWEST)  # ..., type and size, place
        self._store: TorchStore | None = None
        self._last_look = 0.0

    # Before a collective

    def begin(self, call: str, tensor: torch.Tensor) -> None:
        """Record a collective that begins now, and compare it first if each is to be compared."""
        if self.checks:
            self.compare(f"{call} of {tensor.numel()} {_name(tensor.dtype)}", check_site=True)
        self._record(call, tensor.dtype, tensor.numel())

    def _record(self, call: str, *detail: Any, site: str = "") -> None:
        self._number += 1
        self._newest.append((self._number, call, detail, site))

    def compare(self, call: str, rows: int = 0, check_site: bool = False) -> list[int]:
        """Compare this call with those of all ranks, which call it at the same time; return the rows of each."""
        if self._group.size == 1:
            return [rows]
        handle = self.begin_compare(call, rows)
        self._group.finish([handle[0]])
        return self.end_compare(handle, check_site)

    def begin_compare(self, call: str, rows: int = 0) -> tuple[Any, list[torch.Tensor]]:
        site = call_site()
        self._record(call, site=site)
        return self._group.begin_allgather(Header(call, site, rows).pack())

    def end_compare(self, handle: tuple[Any, list[torch.Tensor]], check_site: bool = False) -> list[int]:
        headers = [Header.unpack(part) for part in handle[1]]
        calls = {h.call for h in headers}
        sites = {h.site for h in headers} if check_site or self.checks else set()
        if len(calls) > 1 or len(sites) > 1:
            raise UsageError("the ranks' collectives differ: " + _by_rank(
                {r: f"{h.call} at {h.site}" if h.site else h.call for r, h in enumerate(headers)}), hint=HINT)
        return [h.rows for h in headers]

    # While a collective waits, and at the end

    def stalled(self, waited_s: float) -> OutOfOrder | None:
        """Return the verdict if ranks wait for each other in different collectives. Callers poll this in a wait."""
        now = time.monotonic()
        if waited_s < STALL_S or now - self._last_look < STALL_S / 2 or self._group.aborted:
            return None
        self._last_look = now
        try:
            return self._look()
        except OSError:
            self.close()  # the store's rank is lost, or late
            return None

    @peer_wait
    def end(self, what: str) -> None:
        """Wait until all ranks have come here with equally many collectives. UsageError if one never can.

        CommBroken when the generation ends meanwhile.
        """
        group, pause_s = self._group, END_POLL_S[0]
        if group.size == 1:
            return
        self._record("the end of the function", site=what)
        awaited = list(range(group.size))
        try:
            self._write("end")
            while awaited:
                if group.aborted:
                    raise ConnectionAbortedError("the group was aborted")
                if verdict := self._look("end"):
                    raise verdict.error
                if self._read(awaited[0])["state"] == "end":
                    awaited.pop(0)
                    continue
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, END_POLL_S[1])
        except OSError as error:
            self.close()
            raise group.refuse(str(error)) from error

    def _look(self, state: str = "waits") -> OutOfOrder | None:
        """Publish this rank's newest collectives, compare them with the next rank's, and look for a verdict."""
        if state == "waits":
            self._write(state)
        verdict = self._connect().get("verdict").decode()
        if not verdict:
            verdict = self._differing((self._group.rank + 1) % self._group.size)
            if not verdict:
                return None
            self._connect().set("verdict", verdict)
        self._write("knows")
        self._await_others()
        return OutOfOrder(UsageError(verdict, hint=HINT))

    def _await_others(self) -> None:
        """Wait until all ranks know the verdict: one that leaves breaks the connections of the others."""
        deadline = time.monotonic() + KNOWN_LIMIT_S
        awaited = list(range(self._group.size))
        while awaited and time.monotonic() < deadline and not self._group.aborted:
            try:
                if self._read(awaited[0])["state"] == "knows":
                    awaited.pop(0)
                    continue
            except OSError:
                return  # the store's rank has left, which waits longest
            time.sleep(END_POLL_S[1])

    def _differing(self, other: int) -> str:
        """Return the difference between this rank's collectives and those of rank `other`; "" for none."""
        theirs = {number: text for number, text, _ in self._read(other)["calls"]}
        for number, text, _ in self._calls():
            if theirs.get(number, text) != text:
                return self._describe(number)
        return ""

    def _describe(self, number: int) -> str:
        found = {}
        for rank in range(self._group.size):
            calls = self._calls() if rank == self._group.rank else self._read(rank)["calls"]
            at = next((f"{text} ({site})" if site else text for n, text, site in calls if n == number), "")
            if at:
                found[rank] = at
        return f"the ranks wait for each other in different collectives: {_by_rank(found)}"

    def _calls(self) -> list[tuple[int, str, str]]:
        return [(number, _text(call, detail), site) for number, call, detail, site in self._newest]

    def _write(self, state: str) -> None:
        value = json.dumps({"state": state, "calls": self._calls()})
        self._connect().set(f"rank/{self._group.rank}", value)

    def _read(self, rank: int) -> dict[str, Any]:
        return json.loads(self._connect().get(f"rank/{rank}"))

    def _connect(self) -> TorchStore:
        if self._store is None:
            self._store = self._group.dial("order", STORE_LIMIT_S)
        return self._store

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


def prepare(put: Callable[[str, str], None], rank: int) -> None:
    """Write this rank's keys, before the members meet: a `get` of a key that nobody has written would wait."""
    put(f"order/rank/{rank}", json.dumps({"state": "", "calls": []}))
    if rank == 0:
        put("order/verdict", "")


def _text(call: str, detail: Any) -> str:
    return f"{call} of {detail[1]} {_name(detail[0])}" if detail else call


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _by_rank(texts: dict[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {text}"
                     for text, who in ranks.items())
