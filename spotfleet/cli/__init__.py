"""The command line: a thin shell over `spotfleet.api`.

    app.py         commands, their options and help; imports nothing heavy, so that `--help` is quick
    options.py     options of several commands             console.py  messages and questions on stderr
    render.py      values -> tables and lines              tables.py   tables that fit the terminal
    event_text.py  events -> sentences
    commands/      one module per group of commands: `write` has up, train, cancel, drain, chaos, revoke, down;
                   `read` has status, hosts, jobs, events, logs, outputs; `cost_options` has help and options of the
                   commands about money

stdout is data; messages go to stderr. Exit codes: 0 done, 1 failed, 2 usage, 3 needs a person, 130 interrupted,
143 terminated.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the console script."""
    try:
        from spotfleet.cli.app import handle_sigterm, run

        handle_sigterm()
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # while modules are imported
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)
