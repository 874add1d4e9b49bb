"""The report of scripts/smoke-aws: what was done, said and measured, without what is nobody else's business."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PRIVATE = re.compile(r"(10|127|169\.254|192\.168|172\.(1[6-9]|2\d|3[01]))\.")
HIDDEN: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{12,}"), r"\1***"),
    (re.compile(r"\b\d{12}\b"), "ACCOUNT"),
    (re.compile(r"(:user/|:assumed-role/|:role/(?!aws-service-role|spotfleet))[\w+=,.@/-]+"), r"\1***"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b"), lambda m: m[0] if PRIVATE.match(m[0]) else "ADDRESS"),
)


def hide(text: str) -> str:
    """Without account numbers, users, access keys and public addresses."""
    for pattern, by in HIDDEN:
        text = pattern.sub(by, text)
    return text


class Report:
    """On screen as it is; in the file hidden, line by line, so that it is there whatever happens."""

    def __init__(self, path: Path) -> None:
        self.path, self.begun = path, time.monotonic()
        self.failed: list[str] = []
        path.write_text("")

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        self.note(line)

    def note(self, text: str) -> None:
        """For the file alone."""
        with self.path.open("a") as file:
            file.writelines(f"{time.monotonic() - self.begun:7.1f} {hide(line)}\n" for line in text.splitlines())

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Say how it ended and how long it took."""
        begun = time.monotonic()
        self.say(f"== {what}")
        try:
            yield
        except BaseException as error:
            self.failed.append(what)
            self.say(f"== FAILED after {time.monotonic() - begun:.0f} s: {what}: {error or type(error).__name__}")
            raise
        self.say(f"== ok after {time.monotonic() - begun:.0f} s: {what}")
