"""`python -m spotfleet.agent --home DIR`: the daemon on a host.

A status of 0 is the host's own wish to power off, for whoever started us: the local cloud ends the machine, and
`bootstrap.sh` powers off one that a cloud lent. After any other we are to be started again.
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
from spotfleet.agent.keeper import is_useless
from spotfleet.agent.link import Refused
from spotfleet.errors import SpotfleetError


def main() -> int:
    parser = argparse.ArgumentParser(prog="spotfleet.agent", description="The spotfleet agent: one on each host.")
    parser.add_argument("--home", type=Path, required=True, help="folder with boot.json; the agent's files go there")
    home = parser.parse_args().home.resolve()
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    try:
        asyncio.run(serve(read_boot(home), home))
    except Refused as error:  # said over TLS that only our own dispatcher can speak: nobody needs this machine
        logging.warning("powering off: %s", error)
    except SpotfleetError as error:
        print(f"spotfleet agent: {error}" + (f"\n  {error.hint}" if error.hint else ""), file=sys.stderr)
        if not home.is_dir() or not is_useless(home):
            return error.exit_code
    return power_off()


def power_off() -> int:
    """The status to leave with when this machine is to stop, and with it the bill."""
    return 0


if __name__ == "__main__":
    sys.exit(main())
