"""What is said to people, all on stderr, and what is asked of them."""

from __future__ import annotations

import sys

from spotfleet.errors import UsageError


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def step(line: str) -> None:
    """One line of progress."""
    say(f"  {line}")


def next_command(*commands: str) -> None:
    """What to type next."""
    say("next: " + "\n      ".join(commands))


def confirm(question: str, yes: bool) -> bool:
    """Ask, unless `yes`. Raises UsageError where nobody can answer."""
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{question} Nobody can be asked: this is no terminal", hint="add -y to go on without asking")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not agreed:
        say("nothing was changed")
    return agreed
