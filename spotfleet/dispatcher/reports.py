"""Validation of agents' reports: only their own host and its workers, with plausible numbers. Pure.

An intruder may control a host. Its false reports can harm the jobs that it works for; no report may name another host,
end the dispatcher's loop, or fill its ledger. Texts for people keep their line breaks and no other control character;
in any other text a control character is refused.
"""

from __future__ import annotations

import re
from dataclasses import is_dataclass, replace
from typing import Any

from spotfleet.codec import from_json, parse
from spotfleet.protocol.messages import AgentReport, WorkerState
from spotfleet.words import UNSEEN, harmless_lines

WORKER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}/[0-9]{1,6}/[A-Za-z0-9_.-]{1,64}")
LOG_NAME = re.compile(rf"{WORKER_NAME.pattern}|[A-Za-z0-9_.-]{{1,128}}#setup")  # a worker's, or a host's setup's
LARGEST = 1 << 53  # JSON numbers beyond it are not exact
MOST_WORKERS = 4096  # on one host, including ended ones
MOST_GPUS = 64  # on one host
TEXT_CHARS = 1024
FOR_PEOPLE = (".why", ".error", ".resize", ".diverged")
MESSAGE_CHARS = 16_384  # limit of a traceback or of a host's `why`; longer text is cut


def read(text: str | bytes) -> AgentReport:
    """Parse a report; ValueError names the invalid field."""
    parsed: AgentReport = from_json(AgentReport, parse(text))
    report = replace(parsed, why=cut(harmless_lines(parsed.why)), workers=tuple(map(_cut, parsed.workers)),
                     gpus=tuple(replace(gpu, why=harmless_lines(gpu.why)) for gpu in parsed.gpus))
    if report.notice is not None:
        report = replace(report, notice=replace(report.notice, why=harmless_lines(report.notice.why)))
    _check(report, "AgentReport")
    if report.slots < 1:
        raise ValueError(f"AgentReport.slots: {report.slots} is not 1 or more")
    if len(report.gpus) > MOST_GPUS:
        raise ValueError(f"AgentReport.gpus: expected at most {MOST_GPUS}")
    names = [w.report.worker for w in report.workers]
    if len(names) > MOST_WORKERS or len(set(names)) < len(names):
        raise ValueError(f"AgentReport.workers: expected at most {MOST_WORKERS}, each once")
    for name in names:
        if not WORKER_NAME.fullmatch(name) or name.partition("/")[0] != report.host:
            raise ValueError(f"AgentReport.workers: {name!r} is no worker of {report.host}")
    return report


def cut(text: str) -> str:
    """Shorten `text` to TALK_CHARS by dropping the middle: the end holds the most information."""
    return text if len(text) <= MESSAGE_CHARS else f"{text[:MESSAGE_CHARS // 4]}\n[...]\n{text[-MESSAGE_CHARS // 2:]}"


def _cut(worker: WorkerState) -> WorkerState:
    found = worker.report
    if not (found.error or found.resize or found.diverged):
        return worker
    return replace(worker, report=replace(
        found, error=cut(harmless_lines(found.error)), resize=harmless_lines(found.resize),
        diverged=harmless_lines(found.diverged)))


def _check(value: Any, where: str) -> None:
    """Check that numbers are from 0 to LARGEST (exit codes, seconds left and versions may be negative) and that texts
    have bounded lengths."""
    if isinstance(value, str):
        if len(value) > (MESSAGE_CHARS if where.endswith((".why", ".error")) else TEXT_CHARS):
            raise ValueError(f"{where}: {len(value)} characters are too many")
        if not where.endswith(FOR_PEOPLE) and (UNSEEN.search(value) or "\n" in value or "\r" in value):
            raise ValueError(f"{where}: {value[:40]!r} has a control character")
    elif isinstance(value, (int, float)):
        least = -LARGEST if where.endswith((".code", ".seconds_left")) else -1 if where.endswith(".version") else 0
        if not least <= value <= LARGEST:  # nor infinity, nor NaN
            raise ValueError(f"{where}: {str(value)[:40]} is no number from {least} to 2**53")
    elif isinstance(value, tuple):
        for item in value:
            _check(item, where)
    elif is_dataclass(value):
        for name, inner in vars(value).items():
            if name != "held":  # users' scripts; only a dispatcher that requested it uses it, and checks it
                _check(inner, f"{where}.{name}")
