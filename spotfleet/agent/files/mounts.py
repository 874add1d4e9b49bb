"""Runner of `agent/files/mount_process.py` with a job's environment; forwards its progress."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from spotfleet.agent.files.mount_process import MountOrder, MountReport
from spotfleet.protocol.messages import dump, load

log = logging.getLogger("spotfleet.agent")

LINE_BYTES = 1 << 20
STALL_S = 300.0  # without a progress line; the process writes two a second


async def fetch(order: MountOrder, env: dict[str, str], progress: Callable[[str], None]) -> MountReport:
    """Run the process and return its final report. A cancellation ends the process; fetched pieces are kept."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "spotfleet.agent.files.mount_process", env=_environment(env),
        cwd=Path(order.cache).parent,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=LINE_BYTES)
    assert process.stdin is not None and process.stdout is not None
    last = MountReport()
    try:
        process.stdin.write(dump(order).encode() + b"\n")
        while line := await asyncio.wait_for(process.stdout.readline(), STALL_S):
            last = load(MountReport, line)
            if last.why:
                progress(last.why)
        code = await process.wait()
    except TimeoutError:
        return MountReport(error=f"file_mounts: nothing has been heard for {STALL_S:g} s of what fetches them")
    except (ConnectionError, ValueError) as error:
        return MountReport(error=f"file_mounts: what fetches them broke off: {error}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if not (last.done or last.error):
        return MountReport(error=f"file_mounts: what fetches them ended with {code}")
    log.info("file_mounts: %s", last.done or last.error)
    return last


def _environment(env: dict[str, str]) -> dict[str, str]:
    """Return the job's environment with the agent's PYTHON* variables: the user's are for the script."""
    paths = {k: v for k, v in os.environ.items() if k.startswith("PYTHON")}
    return {**{k: v for k, v in env.items() if not k.startswith("PYTHON")}, **paths}
