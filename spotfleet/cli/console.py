"""Messages and questions to the user, all on stderr."""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from spotfleet.cli.options import Interrupted
from spotfleet.cli.tables import columns, flow
from spotfleet.errors import UsageError
from spotfleet.words import harmless, harmless_lines

READER_S = 0.5  # period of looking whether stdout is still read
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


@contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """Raise BrokenPipeError in the body once nothing reads stdout any more, also while the body only waits.

    A command that prints rarely would else run on after `| head -1`: only a write finds the pipe closed.
    """
    over, closed = threading.Event(), threading.Event()

    def watch(pipe: int, reader: int) -> None:
        poll = select.poll()
        poll.register(pipe, 0)  # an error alone is reported
        while not over.is_set():
            if poll.poll(READER_S * 1000) and not over.is_set():
                closed.set()
                signal.pthread_kill(reader, signal.SIGINT)
                return

    if (pipe := _stdout_pipe()) is not None:
        threading.Thread(target=watch, args=(pipe, threading.get_ident()), daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        if closed.is_set():
            raise BrokenPipeError from None
        raise
    finally:
        over.set()


def _stdout_pipe() -> int | None:
    """Return the descriptor of stdout if it is a pipe or a socket."""
    try:
        number = sys.stdout.fileno()
        mode = os.fstat(number).st_mode
    except (OSError, ValueError):  # closed, or replaced by an object without a descriptor
        return None
    return number if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None


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
