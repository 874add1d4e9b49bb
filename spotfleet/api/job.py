"""Handle of one job of a fleet. It holds only the job's name, so any process can make one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from spotfleet.errors import JobFailed, SpotfleetError
from spotfleet.model import JobState
from spotfleet.protocol.messages import JobStatus

if TYPE_CHECKING:
    from spotfleet.transport.client import DispatcherClient, LogChunk

POLL_S = 0.5


class Job:
    def __init__(self, client: DispatcherClient, job: str) -> None:
        self._client = client
        self.id = job

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    @property
    def state(self) -> JobState:
        return JobState(self.status().state)

    def status(self) -> JobStatus:
        return self._client.job(self.id)

    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Return once the job has succeeded. Raises JobFailed (with rank 0's traceback) when it has failed or was
        cancelled, TimeoutError when it has not ended in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not JobState((status := self.status()).state).ended:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {self.id} is {status.state} after {timeout_s:g} s: {status.why}")
            time.sleep(POLL_S)
        return succeeded(status)

    def logs(self, *, follow: bool = False, rank: int = 0, worker: str = "", tail: int | None = None,
             since_s: float = 0.0) -> Iterator[bytes]:
        """Yield the output of the worker that has `rank`, whichever process that is, or of one worker; with `follow`
        until the job has ended. `tail`: only the last lines so far; `since_s`: only output of the last seconds."""
        start = self._client.log_start(self.id, rank=rank, worker=worker, tail=tail, since_s=since_s) \
            if tail is not None or since_s else 0
        return (chunk.data for chunk in self.chunks(start, follow=follow, rank=rank, worker=worker))

    def all_logs(self, *, follow: bool = False, tail: int | None = None, since_s: float = 0.0,
                 ) -> Iterator[tuple[int, bytes]]:
        """Yield (rank, output) of all ranks; arguments as for `logs`."""
        left = dict.fromkeys(range(self.status().max_workers), 0)
        if tail is not None or since_s:
            left = {rank: self._client.log_start(self.id, rank=rank, tail=tail, since_s=since_s) for rank in left}
        while left:
            quiet = True
            for rank, offset in list(left.items()):
                chunk = self._client.logs(self.id, offset, rank=rank)
                left[rank], quiet = chunk.offset, quiet and not chunk.data
                if chunk.data:
                    yield rank, chunk.data
                if chunk.end or not (follow or chunk.data):
                    del left[rank]
            if follow and quiet and left:
                time.sleep(POLL_S)

    def chunks(self, offset: int = 0, *, follow: bool, rank: int = 0, worker: str = "") -> Iterator[LogChunk]:
        """Yield the same as `logs`, each piece with the offset at which to continue."""
        return self._client.stream(self.id, offset, rank=rank, worker=worker, follow=follow)

    def cancel(self) -> None:
        """Request the job's cancellation. An ended job stays as it is."""
        self._client.cancel(self.id)


def succeeded(status: JobStatus, where: str = "") -> JobStatus:
    """`status` of an ended job, or JobFailed. `where`: the option that names its fleet, where a command needs it."""
    if status.state == JobState.SUCCEEDED.value:
        return status
    if status.state == JobState.CANCELLED.value:
        raise JobFailed(f"job {status.job} was cancelled: {status.why}", hint="start it again with `spotfleet train`")
    if status.state == JobState.FAILED.value:
        text = f"job {status.job} failed: {status.why}"
        error = f"\n{status.error.rstrip()}" if status.error and status.error.strip() not in text else ""
        hint = status.hint if status.hint and status.hint not in text else ""
        output = f"all output: `spotfleet logs {status.job}{where}`"
        raise JobFailed(text + error, hint=f"{hint}; {output}" if hint else output)
    raise SpotfleetError(f"job {status.job} is {status.state}: {status.why}",
                         hint=f"`spotfleet logs -f {status.job}` attaches to it again")
