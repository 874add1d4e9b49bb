"""The command line: a thin shell over `spotfleet.api`.

    app.py      commands, their options and help; imports nothing heavy, so that `--help` is quick
    money.py    the same, of commands about money
    change.py   up, train, cancel, drain, chaos, down      talk.py     what is said, asked and confirmed
    look.py     status, hosts, jobs, events, logs          render.py   values -> tables and lines
    attend.py   what an attached job waits for             story.py    events -> sentences
    options.py  arguments of several commands              check.py    check
    offers.py   offers                                     catalog.py  catalog, catalog update

stdout is data, stderr is talk. Exit codes: 0 done, 1 failed, 2 usage, 3 needs a person, 130 interrupted,
143 terminated.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The console script."""
    from spotfleet.cli.app import heed_sigterm, run

    heed_sigterm()
    sys.exit(run(sys.argv[1:]))
