"""Messages of an attached `train` or `logs -f`: what the job waits for, the lines of its `setup` before its first start
on one host, and each change of its workers.

On stderr, so that stdout has the script's output alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from spotfleet.api import Fleet, Job
from spotfleet.api.reports import SETUP
from spotfleet.cli.console import print_message, print_step
from spotfleet.errors import DispatcherUnreachable, SpotfleetError
from spotfleet.model import JobState
from spotfleet.protocol.messages import JobStatus
from spotfleet.transport.client import DispatcherClient

POLL_S = 1.0
REASON_S = 3.0  # a new job has a state or a reason to wait within one step of the dispatcher
WAITING = (JobState.QUEUED.value, JobState.STARTING.value, JobState.RECOVERING.value)


@contextmanager
def print_progress(fleet: Fleet, job: str) -> Iterator[None]:
    """Print the job's progress from another thread while the body runs."""
    over = threading.Event()
    thread = threading.Thread(target=_poll, args=(fleet, job, over), daemon=True)  # it may be in a long call at the end
    thread.start()
    try:
        yield
    finally:
        over.set()


def report_queued(job: Job) -> None:
    """Print what a job that has just been submitted waits for, if it does not start at once."""
    end = time.monotonic() + REASON_S
    while (status := job.status()).state == JobState.QUEUED.value and not status.why and time.monotonic() < end:
        time.sleep(REASON_S / 20)
    if status.state == JobState.QUEUED.value:
        print_message(f"job {job.id} is queued: {status.why or 'it waits for hosts'}")


class SetupOutput:
    """Output of a job's `setup` as it comes, from the first host that has run it."""

    def __init__(self, job: str) -> None:
        self._job, self._log, self._offset, self._rest = job, "", 0, b""

    def lines(self, client: DispatcherClient) -> list[str]:
        """Return the whole lines that are new."""
        self._log = self._log or next((name for name in client.log_workers(self._job) if name.endswith(SETUP)), "")
        if not self._log:
            return []
        for chunk in client.stream(self._job, self._offset, worker=self._log, follow=False):
            self._rest, self._offset = self._rest + chunk.data, chunk.offset
        *whole, self._rest = self._rest.split(b"\n")
        host = self._log.removesuffix(SETUP)
        return [f"setup on {host}: {line.decode(errors='replace')}" for line in whole]


def _poll(fleet: Fleet, job: str, over: threading.Event) -> None:
    last: tuple[str, ...] | None = None
    setup, starts = SetupOutput(job), True
    while not over.wait(POLL_S):
        try:
            status = fleet.job(job).status()
            if starts:  # once more after its start, for the last lines
                starts = status.state in (JobState.QUEUED.value, JobState.STARTING.value)
                for line in setup.lines(fleet.client):
                    print_step(line)
        except DispatcherUnreachable:
            gist: tuple[str, ...] = ("unreachable",)
            line = f"job {job}: the dispatcher does not answer; training goes on without it"
        except SpotfleetError:
            return  # the fleet has ended
        else:
            gist, line = _gist(status), f"job {job} is {status.state}: {status.why}"
        if gist != last and not over.is_set():
            # A job that runs at first is no news, once it has begun to train.
            if last is not None or gist[0] != JobState.RUNNING.value or not status.version:
                print_step(line)
            last = gist


def _gist(status: JobStatus) -> tuple[str, ...]:
    """Return the values whose change is printed."""
    return (status.state, str(status.generation), status.why if status.state in WAITING else "")
