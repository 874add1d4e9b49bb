"""Mapping whose unread keys are reported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Converted:
    """Fleet file, and a line for each thing that it could not take along."""

    data: dict[str, Any]
    left_out: tuple[str, ...] = ()


class ForeignKeys:
    """Reader of one mapping of another program's file. A key that nobody takes is left out, with its path."""

    def __init__(self, data: Any, path: str = "", left_out: list[str] | None = None) -> None:
        self.data = dict(data) if isinstance(data, Mapping) else {}
        self.path = path
        self.left_out: list[str] = [] if left_out is None else left_out

    def take(self, key: str, default: Any = None) -> Any:
        value = self.data.pop(key, default)
        return default if value is None else value

    def section(self, key: str) -> ForeignKeys:
        return ForeignKeys(self.take(key, {}), f"{self.path}{key}.", self.left_out)

    def leave(self, key: str, why: str) -> None:
        """Leave out a key with a reason, if the file has it and it says something."""
        if self.take(key) not in (None, "", [], {}, False):
            self.note(key, why)

    def note(self, key: str, why: str) -> None:
        self.left_out.append(f"{self.path}{key}: {why}")

    def finish(self) -> None:
        """Report every key that nobody has taken."""
        for key in list(self.data):
            self.leave(key, "has no counterpart in a fleet file")


def name(text: Any) -> str:
    """Return a fleet's name for another program's name."""
    found = re.sub(r"[^a-z0-9-]+", "-", str(text or "").lower()).strip("-")[:40].strip("-")
    return found if found[:1].isalpha() else f"fleet-{found}".strip("-")


def without_empty(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that have a value."""
    return {key: value for key, value in data.items() if value not in (None, "", [], {}, ())}


def script(*parts: Any) -> str:
    """Join lists of shell commands to one text, a command a line."""
    lines = [line for part in parts for line in (part if isinstance(part, list) else [part] if part else [])]
    words = {True: "true", False: "false"}  # commands that YAML reads as truth values
    return "".join(str(words[line] if isinstance(line, bool) else line).rstrip("\n") + "\n" for line in lines)
