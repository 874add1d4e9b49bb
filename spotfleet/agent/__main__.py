"""Entry point of the agent, the daemon on a host: `python -m spotfleet.agent --home DIR`.

Exit status 0 asks the parent process to power off the machine: the local cloud ends it, and `bootstrap.sh` powers off
a cloud's machine. After any other status the parent process restarts the agent.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from spotfleet.agent.boot import read_boot
from spotfleet.agent.daemon import serve
from spotfleet.agent.link import AgentRefused
from spotfleet.agent.shutdown.controller import is_useless
from spotfleet.errors import SpotfleetError
from spotfleet.storage import daemon_logs


def main() -> int:
    parser = argparse.ArgumentParser(prog="spotfleet.agent", description="The spotfleet agent: one on each host.")
    parser.add_argument("--home", type=Path, required=True, help="folder with boot.json; the agent's files go there")
    home = parser.parse_args().home.resolve()
    os.umask(0o077)
    daemon_logs.start("%(asctime)s %(message)s")
    try:
        asyncio.run(serve(read_boot(home), home))
    except AgentRefused as error:  # sent over TLS that only our own dispatcher can serve: the machine is not needed
        logging.warning("powering off: %s", error)
    except SpotfleetError as error:
        print(f"spotfleet agent: {error}" + (f"\n  {error.hint}" if error.hint else ""), file=sys.stderr)
        if not home.is_dir() or not is_useless(home):
            return error.exit_code
    return power_off()


def power_off() -> int:
    """Return the exit status that powers the machine off, which also ends its bill."""
    return 0


if __name__ == "__main__":
    sys.exit(main())
