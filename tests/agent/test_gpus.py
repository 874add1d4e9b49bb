"""The answer of nvidia-smi as readings, and a driver that has lost a GPU or does not answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from spotfleet.agent import gpus
from spotfleet.agent.gpus import FIELDS, GpuWatch, parse
from spotfleet.protocol.messages import GpuReading

TWO = "0, 97, 71234, 81559, 64, 0\n1, 3, 512, 81559, 41, 2\n"


def test_each_gpu_has_its_use_memory_temperature_and_errors():
    assert parse(TWO, 0) == (GpuReading(0, 97, 71234, 81559, 64, 0), GpuReading(1, 3, 512, 81559, 41, 2))


def test_values_that_a_gpu_does_not_report_are_unknown():
    assert parse("0, [N/A], 10, 16384, [Not Supported], [N/A]\n", 0) == (GpuReading(0, None, 10, 16384),)


def test_a_lost_gpu_is_named_with_the_drivers_message_beside_the_others():
    said = "Unable to determine the device handle for GPU 0000:10:1C.0: Unknown Error"
    assert parse(f"1, 3, 512, 81559, 41, 2\n{said}\n", 255) == (
        GpuReading(1, 3, 512, 81559, 41, 2), GpuReading(0, why=said))
    assert parse("", 9) == (GpuReading(0, why="nvidia-smi ended with status 9"),)


def program(folder: Path, text: str) -> GpuWatch:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return GpuWatch(str(path))


def read_once(watch: GpuWatch) -> tuple[GpuReading, ...]:
    async def main() -> tuple[GpuReading, ...]:
        running = asyncio.create_task(watch.run())
        while not watch.readings:
            await asyncio.sleep(0.01)
            assert not running.done(), running.result()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return watch.readings

    return asyncio.run(main())


def test_the_watch_asks_for_these_fields_as_plain_numbers(tmp_path: Path):
    asked = tmp_path / "asked"
    watch = program(tmp_path, f'echo "$@" > {asked}\nprintf "{TWO.encode("unicode_escape").decode()}"')
    assert read_once(watch) == parse(TWO, 0)
    assert asked.read_text() == f"--query-gpu={','.join(FIELDS)} --format=csv,noheader,nounits\n"


def test_a_driver_that_does_not_answer_is_reported_and_its_process_ended(tmp_path: Path,
                                                                         monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpus, "ANSWER_S", 0.05)
    assert read_once(program(tmp_path, "exec sleep 600")) == (GpuReading(0, why=gpus.NO_ANSWER),)


def test_a_host_without_it_reports_none(tmp_path: Path):
    watch = GpuWatch(str(tmp_path / "missing"))

    async def main() -> None:
        running = asyncio.create_task(watch.run())
        await asyncio.sleep(0)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    assert watch.readings == ()
