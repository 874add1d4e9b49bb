"""From what a machine says of its hosts to lines of a listing. Pure.

    no state yet, installing --> PENDING     running --> RUNNING     off, failed, taken --> TERMINATED
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from spotfleet.codec import from_json, to_json
from spotfleet.model import CloudHost, CloudState, Run

FILES = "files"  # beside a CloudHost's own keys in listing.json: the names of Boot.files
SECOND_S = 1e-3  # a run that has ended is longer than nothing, whatever the machine's clock can tell apart


@dataclass(frozen=True)
class Held:
    """A host on its machine."""

    request_id: str
    line: CloudHost
    files: tuple[str, ...] = ()  # names of Boot.files
    failed: str = ""  # why it could not be made, if that is how it ended


@dataclass(frozen=True)
class Report:
    """What one machine says. A claim without a host is a launch under way, or one that died."""

    at: float  # by the machine's clock
    hosts: tuple[Held, ...] = ()
    claim: str = ""
    broken: tuple[str, ...] = ()  # folders whose listing cannot be read
    answers: dict[str, str] = field(default_factory=dict)  # the other lines: key -> value of the last

    @property
    def free(self) -> bool:
        """May another host come here? One that has ended is cleaned up on the way."""
        return not self.claim or any(h.request_id == self.claim and ended(h.line) for h in self.hosts)


def ended(line: CloudHost) -> bool:
    return line.state is CloudState.TERMINATED


def written(line: CloudHost, files: Iterable[str]) -> str:
    """listing.json."""
    return json.dumps({**to_json(line), FILES: sorted(files)})


def read(text: str) -> Report:
    """What a script of `scripts.py` said."""
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


def _held(block: dict[str, str], at: float) -> Held | None:
    try:
        data = json.loads(block.get("listing", ""))
        line, files = from_json(CloudHost, data), tuple(map(str, data.get(FILES, ())))
    except (ValueError, AttributeError, TypeError):
        return None
    return Held(block["host"], _line(line, block, at), files, _failed(block))


def _failed(block: dict[str, str]) -> str:
    state, _, why = _state(block)
    return "" if "taken" in block or "ending" in block or state != "failed" else why or "no reason given"


def _state(block: dict[str, str]) -> tuple[str, float, str]:
    """(state, since, why) of a line of file `state`."""
    if "unstarted" in block:
        return "failed", 0.0, "its launch was cut off before it began"
    state, _, rest = block.get("state", "").partition(" ")
    at, _, why = rest.partition(" ")
    return state, _number(at), why


def _line(line: CloudHost, block: dict[str, str], now: float) -> CloudHost:
    """`line`, as it was at its launch, as the host is now."""
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
    """`line` of a host that has ended."""
    runs = tuple(replace(r, ended_at=max(at, r.started_at + SECOND_S), taken=taken) if r.ended_at is None else r
                 for r in line.runs)
    return replace(line, state=CloudState.TERMINATED, runs=runs, why=why)


def away(line: CloudHost, why: str) -> CloudHost:
    """`line` of a host whose machine does not answer. Its run is not closed: nobody knows whether it has ended."""
    return replace(line, state=CloudState.STOPPED, why=why)


def begun(line: CloudHost, at: float) -> CloudHost:
    return replace(line, state=CloudState.PENDING, runs=(Run(at),))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
