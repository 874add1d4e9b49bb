"""Watch of the host's GPUs by nvidia-smi, where the host has it."""

from __future__ import annotations

import asyncio
import logging
import shutil
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process

from spotfleet.protocol.messages import GpuReading

log = logging.getLogger("spotfleet.agent")

PERIOD_S = 10.0
ANSWER_S = 8.0  # a driver with a lost GPU may take for ever
MOST = 64  # GPUs in one report
FIELDS = ("index", "utilization.gpu", "memory.used", "memory.total", "temperature.gpu",
          "ecc.errors.uncorrected.volatile.total")
NO_ANSWER = f"nvidia-smi does not answer within {ANSWER_S:g} s"


class GpuWatch:
    """Newest reading of each GPU; none on a host without nvidia-smi."""

    def __init__(self, program: str = "nvidia-smi") -> None:
        self._program = program
        self.readings: tuple[GpuReading, ...] = ()

    async def run(self) -> None:
        """Read each PERIOD_S until cancelled."""
        program = shutil.which(self._program)
        if program is None:
            await asyncio.Event().wait()
            return
        while True:
            self.readings = await self._read(program)
            await asyncio.sleep(PERIOD_S)

    async def _read(self, program: str) -> tuple[GpuReading, ...]:
        try:
            process = await asyncio.create_subprocess_exec(
                program, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits",
                stdin=DEVNULL, stdout=PIPE, stderr=STDOUT)
        except OSError as error:
            return (GpuReading(0, why=f"nvidia-smi cannot be run: {error.strerror}"),)
        try:
            async with asyncio.timeout(ANSWER_S):
                output, _ = await process.communicate()
        except TimeoutError:
            self.readings = (GpuReading(0, why=NO_ANSWER),)  # it may not end for long
            return self.readings
        finally:
            await _end(process)
        return parse(output.decode(errors="replace"), process.returncode or 0)


async def _end(process: Process) -> None:
    """End a process that still runs. One that the kernel cannot end is awaited: a second one would hang as well."""
    if process.returncode is None:
        process.kill()
        await process.wait()


def parse(output: str, status: int) -> tuple[GpuReading, ...]:
    """Parse the answer of nvidia-smi. A line that is no reading is the driver's message about a GPU that it lost."""
    found, messages = [], []
    for line in filter(None, map(str.strip, output.splitlines())):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(FIELDS) and cells[0].isdecimal():
            found.append(GpuReading(int(cells[0]), *map(_number, cells[1:])))
        else:
            messages.append(line)
    if status and not messages and not found:
        messages = [f"nvidia-smi ended with status {status}"]
    if messages:
        lost = next(n for n in range(len(found) + 1) if all(gpu.index != n for gpu in found))
        found.append(GpuReading(lost, why="; ".join(messages)[:300]))
    return tuple(found[:MOST])


def _number(cell: str) -> int | None:
    """Return the number; None for [N/A], [Not Supported], [Unknown Error]."""
    return int(cell) if cell.isdecimal() else None
