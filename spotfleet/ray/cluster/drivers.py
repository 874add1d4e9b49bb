"""Drivers of `spotfleet ray submit`: each a process beside the head, in a folder that the dispatcher has prepared.

    FOLDER/start.json   DriverStart: command and environment, 0600; removed when it starts
    FOLDER/command      the command alone; written last
    FOLDER/work/        the working directory as it was shipped
    FOLDER/log          link to its output, a file among the outputs of the job
    FOLDER/begun        once it has been started: it is never started twice
    FOLDER/exit         its exit status, once it has ended

A driver has the highest score of the kernel's out-of-memory killer: the dispatcher beside it must live.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

from spotfleet.codec import from_json
from spotfleet.protocol.ray_cluster import DriverStart
from spotfleet.ray.cluster import processes
from spotfleet.storage import atomic, json_file

log = logging.getLogger("spotfleet.ray")
END_S = 5.0  # from SIGTERM to SIGKILL
LOST = 137  # as a shell reports SIGKILL: it ended with the supervisor that started it


class Drivers:
    """Drivers of this cluster, by folder."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def match(self, wanted: tuple[str, ...]) -> None:
        """Start the drivers that are new, and end those that are not wanted any more."""
        for folder in wanted:
            if folder not in self._running and not (Path(folder) / "exit").exists():
                self._start(Path(folder))  # or, after the loss of an earlier supervisor, record its end
        for folder in [f for f, p in self._running.items() if f not in wanted and p.poll() is None]:
            threading.Thread(target=_end, args=(self._running[folder],), daemon=True).start()

    def _start(self, folder: Path) -> None:
        if (folder / "begun").exists():
            (folder / "exit").write_text(str(LOST))
            return
        (folder / "begun").touch()
        try:
            given = from_json(DriverStart, json_file.read(folder / "start.json"))
            (folder / "start.json").unlink()  # it holds secrets
            descriptor = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with open(descriptor, "ab") as output:
                process = subprocess.Popen(
                    ["bash", "-c", given.command], cwd=folder / "work", env={**self._env, **given.envs},
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, preexec_fn=_begin)
        except (OSError, ValueError) as error:
            log.error("driver %s: %s", folder.name, error)
            (folder / "exit").write_text("1")
            return
        self._running[str(folder)] = process
        threading.Thread(target=self._wait, args=(folder, process), daemon=True).start()

    def _wait(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        part = folder / "exit.part"
        part.write_text(str(status if status >= 0 else 128 - status))
        atomic.rename(part, folder / "exit", sync=False)


def _begin() -> None:
    os.setsid()
    processes.die_with_parent()
    Path("/proc/self/oom_score_adj").write_text("1000")


def _end(process: subprocess.Popen[bytes]) -> None:
    for number, wait_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return
