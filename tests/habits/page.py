"""docs/scripts.md, written from the table of loops: python -m tests.habits.page"""

from __future__ import annotations

from pathlib import Path

from tests.habits import (  # noqa: F401 - they fill the table
    loops_models,
    loops_optimizers,
    loops_script,
    loops_usual,
    loops_weights,
)
from tests.habits.kit import FAMILIES, TABLE, Habit
from tests.habits.loops_processes import OWN

PAGE = Path(__file__).parents[2] / "docs" / "scripts.md"

HEAD = """# Ways to write a training loop, and what becomes of each

Written by `python -m tests.habits.page` from `tests/habits`. Each loop runs there under plain torch, and on two workers
undisturbed, through the loss of one at three points of an iteration, with and without a replacement, through a notice,
and through a replacement whose other peer is then lost as well. *Exact*: weights, optimizer state, buffers, schedulers
and values end with the bits of plain torch in all of them.

*Refused*: an error says what to change, at the first moment at which going on would be wrong; often that is the loss of
a worker. *Noticed*: training goes on, and a line in the log says that a repeated iteration differs.

Loops that need a process of their own are compared with an undisturbed run of the same two workers, through a SIGKILL
and a notice, and so is one loop of each family. More that draw from the global random generators are tested one by one,
in `tests/train`: [commit.md](commit.md), Random numbers.
"""


def row(habit: Habit) -> str:
    return f"| {habit.name} | {habit.verdict} | {habit.edit} |"


def page() -> str:
    parts = [HEAD]
    for family in (*FAMILIES, "processes"):
        rows = [row(habit) for habit in TABLE + OWN if habit.family == family]
        title = family[0].upper() + family[1:]
        parts.append("\n".join([f"## {title}\n", "| loop | verdict | what to change |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
