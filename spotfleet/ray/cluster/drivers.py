"""Drivers of `spotfleet ray submit`: each a process beside the head, in a folder that the dispatcher has prepared.

    FOLDER/start.json   DriverStart: command and environment, 0600; removed when it starts
    FOLDER/command      the command alone; written last
    FOLDER/work/        the working directory as it was shipped; moved to PLACE where it runs as another user
    FOLDER/begun        once it has been started: it is never started twice
    FOLDER/exit         its exit status, once it has ended
    FOLDER/cancelled    by the dispatcher: it is to end, or never to begin
    FOLDER/../logs/     output of all drivers, at most DRIVER_LOG_BYTES (`dispatcher/disk/logs.py`); the archive has it

A driver has the highest score of the kernel's out-of-memory killer: the dispatcher beside it must live.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from spotfleet.codec import from_json
from spotfleet.dispatcher.disk.logs import JobLogs
from spotfleet.errors import SpotfleetError, is_full
from spotfleet.protocol.ray_cluster import DRIVER_LOG_BYTES, DRIVER_LOGS, LOST, OUTPUT, DriverStart
from spotfleet.ray.cluster import processes
from spotfleet.ray.cluster.account import HeadUser
from spotfleet.storage import atomic, json_file

log = logging.getLogger("spotfleet.ray")
END_S, POLL_S = 5.0, 0.05  # from SIGTERM to SIGKILL, and between two looks
REST_S = 2.0  # for output that is still in the pipe, which a process of the driver may hold open
AGAIN_S = 1.0  # before a status that could not be written is written again
PIECE_BYTES = 1 << 16


class Drivers:
    """Drivers of this cluster, by folder."""

    def __init__(self, env: Mapping[str, str], user: HeadUser | None = None, place: Path = Path()) -> None:
        """`place`: folder of the working directories of drivers that run as another `user`."""
        self._env, self._user, self._place = env, user, place
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[Path, JobLogs] = {}
        self._lock = threading.Lock()  # guards `_logs`

    def match(self, wanted: tuple[str, ...]) -> None:
        """Start the drivers that are new, and end those that are not wanted any more."""
        for folder in wanted:
            try:
                if folder not in self._running and not (Path(folder) / "exit").exists():
                    self._start(Path(folder))  # or, after the loss of an earlier supervisor, record its end
            except OSError as error:  # a full disk: it is tried again, and the drains must not wait
                log.error("driver %s: %s", folder, error)
        for folder in [f for f, p in self._running.items() if f not in wanted and p.poll() is None]:
            threading.Thread(target=_end, args=(self._running[folder],), daemon=True).start()

    def _start(self, folder: Path) -> None:
        if (folder / "begun").exists():
            _record(folder, LOST)
            return
        (folder / "begun").touch()
        try:
            given = from_json(DriverStart, json_file.read(folder / "start.json"))
            (folder / "start.json").unlink()  # it holds secrets
            work, env, user = folder / "work", {**self._env, **given.envs}, self._user
            if user is not None:
                work, user = self._give(folder, Path(env[OUTPUT]), user)
                env[OUTPUT] = user.seen[0][1]
            process = subprocess.Popen(
                ["bash", "-c", given.command], cwd=work, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, preexec_fn=partial(_begin, user))
        except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            log.error("driver %s: %s", folder.name, error)
            self._keep(folder, 0, f"spotfleet: the script was not started: {error}\n".encode())
            _record(folder, 1)
            return
        self._running[str(folder)] = process
        threading.Thread(target=self._wait, args=(folder, process), daemon=True).start()

    def _give(self, folder: Path, output: Path, user: HeadUser) -> tuple[Path, HeadUser]:
        """Give a driver's folders to its user; return its working directory, and the user with a view of `output`."""
        place = self._place / folder.name
        place.mkdir(mode=0o700)
        shutil.copytree(folder / "work", place / "work", symlinks=True)
        shutil.rmtree(folder / "work")
        (place / "output").mkdir()
        user.give(place)
        user.give(output)
        return place / "work", replace(user, seen=((str(output), str(place / "output")),))

    def _wait(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        keeping = threading.Thread(target=self._keep_output, args=(folder, process), daemon=True)
        keeping.start()
        status = process.wait()
        keeping.join(REST_S)
        while folder.exists():
            try:
                _record(folder, status if status >= 0 else 128 - status)
                return
            except OSError as error:  # a full disk: its user waits for the status
                log.error("driver %s: %s", folder.name, error)
                time.sleep(AGAIN_S)

    def _keep_output(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        at = 0
        with process.stdout as pipe:
            while data := os.read(pipe.fileno(), PIECE_BYTES):
                at = self._keep(folder, at, data)

    def _keep(self, folder: Path, at: int, data: bytes) -> int:
        """Append output of a driver; return the size of its log. While the disk is full, output is lost."""
        with self._lock:
            logs = self._logs.setdefault(folder.parent, JobLogs(folder.parent / DRIVER_LOGS, DRIVER_LOG_BYTES))
            try:
                return logs.append(folder.name, -1, at, data)
            except (SpotfleetError, OSError) as error:
                if not is_full(error):
                    raise
                return at


def _record(folder: Path, status: int) -> None:
    part = folder / "exit.part"
    part.write_text(str(status))
    atomic.rename(part, folder / "exit", sync=False)


def _begin(user: HeadUser | None) -> None:
    os.setsid()
    Path("/proc/self/oom_score_adj").write_text("1000")
    if user is not None:
        user.enter()
    processes.die_with_parent()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a driver and its children: what a shell has started may take END_S as well, although the shell ends at once.
    """
    end = time.monotonic() + END_S
    try:
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < end:
            os.killpg(process.pid, 0)
            time.sleep(POLL_S)
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
