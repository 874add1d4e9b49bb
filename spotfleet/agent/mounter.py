"""The agent's side of `agent/mounts.py`: starts it with a job's environment, and hears how far it has come."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from spotfleet.agent.mounts import Order, Said
from spotfleet.messages import dump, load

log = logging.getLogger("spotfleet.agent")

LINE_BYTES = 1 << 20
STALL_S = 300.0  # it says how far it is twice a second


async def fetch(order: Order, env: dict[str, str], say: Callable[[str], None]) -> Said:
    """Its last word. Cancelled, it ends the process; what has come is kept."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "spotfleet.agent.mounts", env=_environment(env), cwd=Path(order.cache).parent,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=LINE_BYTES)
    assert process.stdin is not None and process.stdout is not None
    last = Said()
    try:
        process.stdin.write(dump(order).encode() + b"\n")
        while line := await asyncio.wait_for(process.stdout.readline(), STALL_S):
            last = load(Said, line)
            if last.why:
                say(last.why)
        code = await process.wait()
    except TimeoutError:
        return Said(error=f"file_mounts: nothing has been heard for {STALL_S:g} s of what fetches them")
    except (ConnectionError, ValueError) as error:
        return Said(error=f"file_mounts: what fetches them broke off: {error}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if not (last.done or last.error):
        return Said(error=f"file_mounts: what fetches them ended with {code}")
    log.info("file_mounts: %s", last.done or last.error)
    return last


def _environment(env: dict[str, str]) -> dict[str, str]:
    """The job's, but the interpreter's paths are the agent's: what the user puts there is for the script."""
    paths = {k: v for k, v in os.environ.items() if k.startswith("PYTHON")}
    return {**{k: v for k, v in env.items() if not k.startswith("PYTHON")}, **paths}
