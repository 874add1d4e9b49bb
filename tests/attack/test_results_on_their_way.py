"""Kills while the archive travels: of `spotfleet down` by SIGKILL, then of the dispatcher under the next `down`.

Only real processes show that what a kill leaves is used: files on disk, a dispatcher that starts again, the lock.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.e2e.e2e_stage import CLI, LIMIT_S, Stage, output, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]
FILES, FILE_BYTES = 4, 60_000_000
SIZE = r"([\d.]+ (?:bytes|kB|MB))"
NAME = "way"


def bytes_in(folder: Path) -> int:
    """How many bytes lie there now."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            found += path.stat().st_size if path.is_file() else 0
    return found


def hosts(stage: Stage) -> dict[str, list[int]]:
    """The machines that run, with their processes."""
    return {m.request_id: m.processes for m in stage.cloud.truth() if m.processes}


def in_bytes(size: str) -> float:
    number, unit = size.split()
    return float(number) * {"bytes": 1, "kB": 1e3, "MB": 1e6}[unit]


def down_until(stage: Stage, draft: Path, size: int, errors: Path) -> subprocess.Popen[bytes]:
    """`spotfleet down` that has so many bytes here."""
    with errors.open("wb") as said:
        process = subprocess.Popen([CLI, "down", NAME, "-y"], cwd=stage.work, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, stderr=said)
    end = time.monotonic() + LIMIT_S
    while bytes_in(draft) < size:
        assert process.poll() is None, f"it ended before {size} bytes were here: {errors.read_text()}"
        assert time.monotonic() < end, f"{size} bytes: not within {LIMIT_S:.0f} s"
        time.sleep(0.002)
    return process


def test_a_killed_down_goes_on_where_it_stopped_also_when_the_dispatcher_is_killed_then(stage: Stage):
    (stage.work / "one.py").write_text("print('done', flush=True)\n")
    job = stage.fleet(NAME, 1, 1).train("one.py", np=(1, 1), detach=True)
    wait_for("its last line", lambda: "done" in output(job))
    folder, digests = stage.home / "local/hosts" / f"{NAME}-d-0/jobs" / job.id / "outputs" / f"{NAME}-0@0@9", {}
    folder.mkdir(parents=True)
    for number in range(FILES):  # on the dispatcher's disk, as if a worker had sent them
        data = os.urandom(FILE_BYTES)
        (folder / f"{number}.bin").write_bytes(data)
        digests[f"{number}.bin"] = hashlib.sha256(data).hexdigest()
    draft, errors = stage.home / "fleets" / NAME / ".archive.part", stage.work / "said"
    total = FILES * FILE_BYTES

    first = down_until(stage, draft, total // 4, errors)
    assert set(hosts(stage)) == {f"{NAME}-d-0"}  # no host is paid for while bytes travel
    first.send_signal(signal.SIGKILL)
    first.wait()
    here = bytes_in(draft)
    assert total // 4 <= here < total

    second = down_until(stage, draft, here + (total - here) // 3, errors)
    os.kill(hosts(stage)[f"{NAME}-d-0"][0], signal.SIGKILL)
    assert second.wait(LIMIT_S) == 0, errors.read_text()

    archive = stage.home / "fleets" / NAME / "archive"
    got = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in archive.rglob("*.bin")}
    assert got == digests and "done" in "".join(p.read_text() for p in archive.rglob("rank-0.log"))
    said = errors.read_text()
    (moved, present), *_ = re.findall(rf"files, {SIZE} copied in .*, {SIZE} were here", said)
    assert in_bytes(present) >= here - 100_000 and in_bytes(moved) <= total - here + 1_000_000, said
    assert hosts(stage) == {} and not draft.exists()
