"""Messages and questions to the user, all on stderr."""

from __future__ import annotations

import sys

from spotfleet.cli.tables import columns, flow
from spotfleet.errors import UsageError


def print_message(line: str) -> None:
    """Print a message, wrapped at spaces on a narrower terminal."""
    print(flow(line, columns(sys.stderr)), file=sys.stderr, flush=True)


def print_step(line: str) -> None:
    """Print one line of progress."""
    print_message(f"  {line}")


def next_command(*commands: str) -> None:
    """Print the commands to type next, never wrapped, so that they can be copied."""
    print("next: " + "\n      ".join(commands), file=sys.stderr, flush=True)


def confirm(question: str, yes: bool) -> bool:
    """Ask the user, unless `yes`. Raises UsageError without a terminal."""
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{question} Nobody can be asked: this is no terminal", hint="add -y to go on without asking")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not agreed:
        print_message("nothing was changed")
    return agreed
