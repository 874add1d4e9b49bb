"""The report of scripts/smoke-aws and scripts/smoke-gcp: what was done, said and measured, without private data."""

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
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), "PERSON"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b"), lambda m: m[0] if PRIVATE.match(m[0]) else "ADDRESS"),
)


def hide(text: str) -> str:
    """Without account numbers, users, access keys and public addresses."""
    for pattern, by in HIDDEN:
        text = pattern.sub(by, text)
    return text


class Report:
    """On screen as it is; in the file hidden, line by line, so that it is there whatever happens."""

    def __init__(self, path: Path, hidden: str = "") -> None:
        """`hidden`: a word of the account that the file does not have, such as the name of its project."""
        self.path, self.hidden, self.begun = path, hidden, time.monotonic()
        self.failed: list[str] = []
        path.write_text("")

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        self.note(line)

    def note(self, text: str) -> None:
        """For the file alone."""
        text = text.replace(self.hidden, "PROJECT") if self.hidden else text
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
