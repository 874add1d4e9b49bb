"""Entry point of the dispatcher's process: `python -m spotfleet.dispatcher --home DIR`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
import sys
from pathlib import Path

from spotfleet import providers
from spotfleet.dispatcher.daemon import DispatcherDaemon
from spotfleet.dispatcher.http.failed_start import explain
from spotfleet.errors import SpotfleetError
from spotfleet.storage import daemon_logs
from spotfleet.transport.boot import listen_at, read_boot


async def serve(home: Path) -> None:
    boot = read_boot(home)
    daemon = DispatcherDaemon(boot, home, providers.load(boot.spec.provider, boot.provider_config))
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    working, stopping = asyncio.create_task(_work(daemon)), asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            if not daemon.listens and (error := working.exception()) is not None:
                explaining = asyncio.create_task(explain(boot, *listen_at(), error))
                await asyncio.wait({explaining, stopping}, return_when=asyncio.FIRST_COMPLETED)
                explaining.cancel()
                await asyncio.gather(explaining, return_exceptions=True)
            working.result()
    finally:
        stopping.cancel()
        working.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
        await daemon.stop()


async def _work(daemon: DispatcherDaemon) -> None:
    await daemon.start(*listen_at())
    await daemon.wait()


def raise_file_limit() -> None:
    """Raise the limit of open files: each agent holds a connection, and many machines allow 1024 by default."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m spotfleet.dispatcher", description=__doc__)
    parser.add_argument("--home", type=Path, required=True, help="the folder with boot.json; all state is kept there")
    home = parser.parse_args().home
    raise_file_limit()
    os.umask(0o077)  # only the owner may read ledger, logs and outputs
    if not home.is_dir():
        print(f"--home: {home} is no folder", file=sys.stderr)
        return 2
    daemon_logs.start("%(asctime)s %(name)s %(levelname)s %(message)s", home / "dispatcher.log")
    try:
        asyncio.run(serve(home))
    except SpotfleetError as error:
        logging.error("%s (%s)", error, error.hint)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
