"""Conversion of a machine's report on its hosts to lines of a listing. Pure.

    no state yet, installing --> PENDING     running --> RUNNING     off, failed, taken --> TERMINATED
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from spotfleet.codec import from_json, to_json
from spotfleet.model import CloudHost, CloudState

FILES = "files"  # extra key in listing.json: the names of Boot.files
SECOND_S = 1e-3  # an ended run is longer than nothing, whatever the resolution of the machine's clock


@dataclass(frozen=True)
class ListedHost:
    """A host on its machine."""

    request_id: str
    line: CloudHost
    files: tuple[str, ...] = ()  # names of Boot.files
    failed: str = ""  # reason, if its launch failed


@dataclass(frozen=True)
class Report:
    """One machine's report. A claim without a host is a launch in progress, or a dead one."""

    at: float  # by the machine's clock
    hosts: tuple[ListedHost, ...] = ()
    claim: str = ""
    broken: tuple[str, ...] = ()  # folders with an unreadable listing
    answers: dict[str, str] = field(default_factory=dict)  # the other lines: key -> value of the last

    @property
    def free(self) -> bool:
        """Return whether another host may be launched here; an ended one is cleaned up by the launch."""
        return not self.claim or any(h.request_id == self.claim and ended(h.line) for h in self.hosts)


def ended(line: CloudHost) -> bool:
    return line.state is CloudState.TERMINATED


def written(line: CloudHost, files: Iterable[str]) -> str:
    """Format listing.json."""
    return json.dumps({**to_json(line), FILES: sorted(files)})


def read(text: str) -> Report:
    """Parse the output of a script of `scripts.py`."""
    at, hosts, broken, answers = 0.0, [], [], {}
    block: dict[str, str] = {}
    for line in [*text.splitlines(), "host "]:
        key, _, value = line.partition(" ")
        if key == "host":
            if block:
                found = _held(block, at)
                hosts += [found] if found else []
                broken += [] if found else [block["host"]]
            block = {"host": value}
        elif key in ("listing", "state", "taken", "ending", "unstarted"):
            block[key] = value
        elif key == "time":
            at = _number(value)
        elif key:
            answers[key] = value
    return Report(at, tuple(hosts), answers.get("claim", ""), tuple(broken), answers)


def _held(block: dict[str, str], at: float) -> ListedHost | None:
    try:
        data = json.loads(block.get("listing", ""))
        line, files = from_json(CloudHost, data), tuple(map(str, data.get(FILES, ())))
    except (ValueError, AttributeError, TypeError):
        return None
    return ListedHost(block["host"], _line(line, block, at), files, _failed(block))


def _failed(block: dict[str, str]) -> str:
    state, _, why = _state(block)
    return "" if "taken" in block or "ending" in block or state != "failed" else why or "no reason given"


def _state(block: dict[str, str]) -> tuple[str, float, str]:
    """Parse a line of file `state`: (state, since, why)."""
    if "unstarted" in block:
        return "failed", 0.0, "its launch was cut off before it began"
    state, _, rest = block.get("state", "").partition(" ")
    at, _, why = rest.partition(" ")
    return state, _number(at), why


def _line(line: CloudHost, block: dict[str, str], now: float) -> CloudHost:
    """Update `line`, as written at the launch, with the host's present state."""
    if "taken" in block:
        at, _, why = block["taken"].partition(" ")
        return closed(line, _number(at) or now, why or "it was taken away", taken=True)
    state, at, why = _state(block)
    if "ending" in block:
        return replace(line, state=CloudState.RUNNING, why="it is being ended")
    match state:
        case "running":
            return replace(line, state=CloudState.RUNNING, why=why if "it ended with status" in why else "")
        case "off":
            return closed(line, at, "it has ended itself")
        case "failed":
            return closed(line, at, why)
    return replace(line, state=CloudState.PENDING, why=f"installing: {why}" if why else "")


def closed(line: CloudHost, at: float, why: str, *, taken: bool = False) -> CloudHost:
    """Return `line` as that of an ended host."""
    runs = tuple(replace(r, ended_at=max(at, r.started_at + SECOND_S), taken=taken) if r.ended_at is None else r
                 for r in line.runs)
    return replace(line, state=CloudState.TERMINATED, runs=runs, why=why)


def away(line: CloudHost, why: str) -> CloudHost:
    """Return `line` of a host whose machine does not answer. Its run stays open: its end is unknown."""
    return replace(line, state=CloudState.STOPPED, why=why)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
