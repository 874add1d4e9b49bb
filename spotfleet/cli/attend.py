"""What an attached `train` or `logs -f` says besides the script's own output: what the job waits for, and each change
of its workers. On stderr, so that stdout stays the script's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from spotfleet.api import Fleet
from spotfleet.cli.talk import step
from spotfleet.errors import DispatcherUnreachable, SpotfleetError
from spotfleet.messages import JobStatus
from spotfleet.model import JobState

LOOK_S = 1.0
WAITING = (JobState.QUEUED.value, JobState.STARTING.value, JobState.RECOVERING.value)


@contextmanager
def told(fleet: Fleet, job: str) -> Iterator[None]:
    """Tell, from another thread, what the job does, as long as the body runs."""
    over = threading.Event()
    teller = threading.Thread(target=_tell, args=(fleet, job, over), daemon=True)  # it may be in a long call at the end
    teller.start()
    try:
        yield
    finally:
        over.set()


def _tell(fleet: Fleet, job: str, over: threading.Event) -> None:
    last: tuple[str, ...] | None = None
    while not over.wait(LOOK_S):
        try:
            status = fleet.job(job).status()
        except DispatcherUnreachable:
            gist: tuple[str, ...] = ("unreachable",)
            line = f"job {job}: the dispatcher does not answer; training goes on without it"
        except SpotfleetError:
            return  # the fleet has ended
        else:
            gist, line = _gist(status), f"job {job} is {status.state}: {status.why}"
        if gist != last and not over.is_set():
            if last is not None or gist[0] != JobState.RUNNING.value:  # that it runs is no news at first
                step(line)
            last = gist


def _gist(status: JobStatus) -> tuple[str, ...]:
    """What is worth a line when it changes."""
    return (status.state, str(status.generation), status.why if status.state in WAITING else "")
