"""What an agent may say: about its own host and that host's workers only, in numbers that make sense. Pure.

A host may be in a stranger's hands. What it says of itself can cost the jobs that it works for; nothing that it says
may name another host, end the dispatcher's loop, or fill its ledger.
"""

from __future__ import annotations

import math
import re
from dataclasses import is_dataclass, replace
from typing import Any

from spotfleet.codec import from_json, parse
from spotfleet.messages import AgentReport, WorkerState

WORKER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}/[0-9]{1,6}/[A-Za-z0-9_.-]{1,64}")
LOG_NAME = re.compile(rf"{WORKER_NAME.pattern}|[A-Za-z0-9_.-]{{1,128}}#setup")  # a worker's, or that of a host's setup
LARGEST = 1 << 53  # beyond it JSON's numbers are not exact
MOST_WORKERS = 4096  # of one host, those that have ended among them
TEXT_CHARS = 1024
TALK_CHARS = 16_384  # of a traceback, or of what a host waits for: what is longer is cut


def read(text: str | bytes) -> AgentReport:
    """The report in `text`; ValueError names the field that does not fit."""
    said: AgentReport = from_json(AgentReport, parse(text))
    report = replace(said, why=cut(said.why), workers=tuple(map(_cut, said.workers)))
    _check(report, "AgentReport")
    if report.slots < 1:
        raise ValueError(f"AgentReport.slots: {report.slots} is not 1 or more")
    names = [w.report.worker for w in report.workers]
    if len(names) > MOST_WORKERS or len(set(names)) < len(names):
        raise ValueError(f"AgentReport.workers: expected at most {MOST_WORKERS}, each once")
    for name in names:
        if not WORKER_NAME.fullmatch(name) or name.partition("/")[0] != report.host:
            raise ValueError(f"AgentReport.workers: {name!r} is no worker of {report.host}")
    return report


def cut(text: str) -> str:
    """At most TALK_CHARS; the end says most, so the middle goes."""
    return text if len(text) <= TALK_CHARS else f"{text[:TALK_CHARS // 4]}\n[...]\n{text[-TALK_CHARS // 2:]}"


def _cut(worker: WorkerState) -> WorkerState:
    error = worker.report.error
    return worker if len(error) <= TALK_CHARS else replace(worker, report=replace(worker.report, error=cut(error)))


def _check(value: Any, where: str) -> None:
    """Numbers from 0 to LARGEST, but for exit codes and seconds that are over; texts of bounded length."""
    if isinstance(value, str):
        if len(value) > (TALK_CHARS if where.endswith((".why", ".error")) else TEXT_CHARS):
            raise ValueError(f"{where}: {len(value)} characters are too many")
    elif isinstance(value, (int, float)):
        least = -LARGEST if where.endswith((".code", ".seconds_left")) else -1 if where.endswith(".version") else 0
        if not (math.isfinite(value) and least <= value <= LARGEST):
            raise ValueError(f"{where}: {str(value)[:40]} is no number from {least} to 2**53")
    elif isinstance(value, tuple):
        for item in value:
            _check(item, where)
    elif is_dataclass(value):
        for name, inner in vars(value).items():
            if name != "held":  # scripts of users; believed only by a dispatcher that has asked
                _check(inner, f"{where}.{name}")
