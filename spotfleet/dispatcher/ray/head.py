"""Link to the supervisor of the Ray head: its process, its reports, and the wishes that it gets.

The process outlives this dispatcher's: the next one finds its Unix socket. One that does not answer is started anew,
and clears what the last one has left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from spotfleet.protocol.messages import dump, load
from spotfleet.protocol.ray_cluster import HEAD_AT, METADATA, TOKEN, RayReport, RayWish, folder_of

log = logging.getLogger(__name__)
MODULE = "spotfleet.ray.cluster.head"
AGAIN_S = 1.0  # before a supervisor that has ended is started again
SEND_AGAIN_S = 5.0
START_S = 30.0  # until a new supervisor's socket answers; then it counts as lost
END_S = 8.0
CLEAR_S = 20.0
MOST_LINE = 16 << 20


class HeadLink:
    """Connection to the supervisor of one head."""

    def __init__(self, log_file: Path, news: Callable[[], None], *, clouds: bool = False) -> None:
        """`news` is called after each report. `clouds`: this machine may be a cloud's, with a metadata server."""
        self._log_file, self._news, self._clouds = log_file, news, clouds
        self.report: RayReport | None = None
        self.problem = ""
        self._token = self._address = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._wish, self._sent_at = RayWish(), 0.0
        self._started_at = -START_S

    @property
    def active(self) -> bool:
        return bool(self._token)

    async def match(self, token: str, address: str, wish: RayWish) -> None:
        """Have a supervisor run for this cluster, and send it what is wanted."""
        if self._token and token != self._token:
            await self.clear()  # another cluster's head
        self._token, self._address = token, address
        if self._writer is None and not await self._connect():
            self._start()
            return
        now = time.monotonic()
        if wish != self._wish or now - self._sent_at >= SEND_AGAIN_S:
            self._wish, self._sent_at = wish, now
            self._send(wish)

    async def end(self) -> None:
        """End the head, its supervisor and all that they have left on this machine."""
        if not self._token:
            return
        if self._writer is not None or await self._connect():
            self._send(RayWish(stop=True))
            if self._reading is not None:
                await asyncio.wait([self._reading], timeout=END_S)
        self._disconnect()
        if self._process is not None:
            process, self._process = self._process, None
            if process.poll() is None:
                process.kill()
            await asyncio.to_thread(process.wait)
        self.report, self.problem = None, ""

    async def clear(self) -> None:
        """End the head, and remove every process and file of the cluster from this machine."""
        await self.end()
        if self._token:
            await asyncio.to_thread(_run_clear, self._environment())
        self._token = self._address = ""

    def forget(self) -> None:
        """Close the connection; the supervisor goes on, for the next dispatcher."""
        self._disconnect()

    # ----

    def _environment(self) -> dict[str, str]:
        more = {METADATA: "closed"} if self._clouds else {}
        return os.environ | {TOKEN: self._token, HEAD_AT: self._address} | more

    def _start(self) -> None:
        now = time.monotonic()
        if self._process is not None and self._process.poll() is None and now - self._started_at < START_S:
            return  # its socket does not answer yet
        if now - self._started_at < AGAIN_S:
            return
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._started_at = now
        try:
            descriptor = os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with open(descriptor, "ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", MODULE], env=self._environment(), stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True)
            self.problem = ""
        except OSError as error:
            self.problem = f"the Ray head cannot be started: {error}"

    async def _connect(self) -> bool:
        try:
            reader, self._writer = await asyncio.open_unix_connection(f"{folder_of(self._token)}/control",
                                                                      limit=MOST_LINE)
        except OSError:
            return False
        self._wish = RayWish(stop=True)  # so that the next one differs
        self._reading = asyncio.create_task(self._read(reader))
        return True

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self.report = load(RayReport, line)
                self._news()
        except (OSError, ValueError) as error:
            log.warning("ray head: %s", error)
        finally:
            self._writer = None
            if self.report is not None:
                self.report = None
                self.problem = "the supervisor of the Ray head has ended"
            self._news()

    def _send(self, wish: RayWish) -> None:
        if self._writer is not None:
            with suppress(ConnectionError):
                self._writer.write(dump(wish).encode() + b"\n")

    def _disconnect(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None


def _run_clear(environment: dict[str, str]) -> None:
    try:
        subprocess.run([sys.executable, "-m", MODULE, "--clear"], env=environment, stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=CLEAR_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("ray: what the cluster has left was not removed: %s", error)
