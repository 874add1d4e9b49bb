"""`python -m spotfleet.agent --home DIR`: the daemon on a host."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from spotfleet.agent.boot import read_boot
from spotfleet.agent.daemon import serve
from spotfleet.errors import SpotfleetError


def main() -> int:
    parser = argparse.ArgumentParser(prog="spotfleet.agent", description="The spotfleet agent: one on each host.")
    parser.add_argument("--home", type=Path, required=True, help="folder with boot.json; the agent's files go there")
    home = parser.parse_args().home.resolve()
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    try:
        asyncio.run(serve(read_boot(home), home))
    except SpotfleetError as error:
        print(f"spotfleet agent: {error}" + (f"\n  {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
