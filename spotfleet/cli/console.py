"""Messages and questions to the user, all on stderr."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from spotfleet.cli.options import Interrupted
from spotfleet.cli.tables import columns, flow
from spotfleet.errors import UsageError
from spotfleet.words import harmless, harmless_lines

SLOW_S = 2.0  # a command that shows nothing for longer is taken for hanging


def print_message(line: str) -> None:
    """Print a message of one line, wrapped at spaces on a narrower terminal."""
    before = "\n" if line.startswith("\n") else ""  # after a ^C of the terminal
    print_block(before + harmless(line.removeprefix("\n")))


def print_block(text: str) -> None:
    """Print lines, each wrapped at spaces on a narrower terminal."""
    print(flow(text, columns(sys.stderr)), file=sys.stderr, flush=True)


def print_step(line: str) -> None:
    """Print one line of progress."""
    print_message(f"  {line}")


@contextmanager
def told_if_slow(line: str) -> Iterator[None]:
    """Print `line` if the body runs longer than SLOW_S."""
    timer = threading.Timer(SLOW_S, print_message, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def next_command(*commands: str) -> None:
    """Print the commands to type next, never wrapped, so that they can be copied."""
    print("next: " + "\n      ".join(map(harmless, commands)), file=sys.stderr, flush=True)


def confirm(question: str, yes: bool) -> bool:
    """Ask the user, unless `yes`. Raises UsageError without a terminal."""
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{question} Nobody can be asked: this is no terminal", hint="add -y to go on without asking")
    print(f"{harmless_lines(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        print_message("\ninterrupted: nothing was changed")
        raise Interrupted from None
    if not agreed:
        print_message("nothing was changed")
    return agreed
