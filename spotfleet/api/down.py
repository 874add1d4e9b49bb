"""`down`: bring home what the fleet made, end its machines, and prove that the provider lists none.

    asked to go down --no worker host left--> archive at home --> dispatcher terminated --> nothing listed

Each step may be repeated, so an interrupted `down` is simply called again. What frees it when stuck: hosts that do
not drain are terminated by the dispatcher after its drain timeout; WORKERS_GONE_S ends the wait for that with an
error; a dispatcher that is dead is passed over with `discard`.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass

from spotfleet import bundle
from spotfleet.api.house import Busy, Folder
from spotfleet.api.machine import Machine, Progress
from spotfleet.client import Client
from spotfleet.errors import DispatcherUnreachable, SpotfleetError
from spotfleet.model import CloudState, Role

POLL_S = 0.3
WORKERS_GONE_S = 600.0
PATIENCE_S = 20.0  # for a dispatcher that restarts
SELF_END_S = 60.0  # for a dispatcher that ends itself, after it stopped answering


@dataclass(frozen=True)
class Down:
    fleet: str
    archive: str  # folder with what came home; "" if there was nothing
    already: bool = False
    note: str = ""


def take_down(folder: Folder, progress: Progress, *, discard: bool, why: str) -> Down:
    """Return once nothing of the fleet is listed. Raises SpotfleetError, with the fleet as it was, when something
    would be lost and not `discard`."""
    with folder.locked():
        record = folder.record
        if record.down_at:
            return Down(folder.name, _home(folder), already=True)
        machine = Machine(folder)
        note = "" if discard and not record.reached else _bring_home(machine, progress, discard)
        machine.end(why, progress, workers_too=True)
        return Down(folder.name, _home(folder), note=note)


def settle(folder: Folder) -> bool:
    """Close the books of a fleet that has ended by itself; False while something of it exists."""
    try:
        with folder.locked(wait_s=0.0):
            if not folder.record.down_at:
                machine = Machine(folder)
                if machine.left():
                    return False
                machine.end("ended by itself", lambda _line: None)
        return True
    except Busy:
        return False


def _bring_home(machine: Machine, progress: Progress, discard: bool) -> str:
    """Get the archive here, workers ended; the answer says what was not brought home, "" if all is here."""
    folder = machine.folder
    url = machine.locate()
    if not url:
        return _without_dispatcher(machine, progress, discard)
    client = machine.client(url, PATIENCE_S if not discard else 3.0)
    try:
        client.down()
        _wait_for_workers(client, progress)
        _fetch(client, folder)
        progress(f"ledger, logs, checkpoints and outputs are in {folder.archive}")
        return ""
    except DispatcherUnreachable as error:
        if _ended_itself(machine):
            return ""
        if discard:
            return f"nothing was brought home: {error}"
        raise SpotfleetError(f"the fleet's results cannot be brought home: {error}",
                             hint="try again, or give them up with --discard") from None


def _without_dispatcher(machine: Machine, progress: Progress, discard: bool) -> str:
    folder = machine.folder
    if folder.archive.exists() or not folder.record.reached:
        return ""
    waiting = [h for h in machine.left() if h.role is Role.DISPATCHER]
    if discard:
        progress("the dispatcher is gone; its jobs' results are given up")
        return "nothing was brought home: the dispatcher is gone"
    state = f"is {waiting[-1].state.value}" if waiting else "is gone"
    raise SpotfleetError(f"the dispatcher's machine {state}, so the fleet's results cannot be brought home",
                         hint="try again if it may come back, or give them up with --discard")


def _ended_itself(machine: Machine) -> bool:
    """Did an autostop leave the archive and end the machine while we asked?"""
    deadline = time.monotonic() + SELF_END_S
    while machine.folder.archive.exists() and time.monotonic() < deadline:
        if all(h.state is CloudState.TERMINATED or h.role is not Role.DISPATCHER for h in machine.left()):
            return True
        time.sleep(POLL_S)
    return False


def _wait_for_workers(client: Client, progress: Progress) -> None:
    deadline, told = time.monotonic() + WORKERS_GONE_S, ""
    while True:
        status = client.status()
        left = [h for h in status.hosts if h.role == Role.WORKER.value]
        if status.state == "down" and not left:
            return
        line = f"going down: {', '.join(f'{h.host} ({h.state})' for h in left) or status.why}"
        if line != told:
            progress(line)
            told = line
        if time.monotonic() >= deadline:
            names = ", ".join(h.host for h in left)
            raise SpotfleetError(f"after {WORKERS_GONE_S:g} s there are still {names}: {status.why}",
                                 hint="`spotfleet down` again, or --discard to end all machines now")
        time.sleep(POLL_S)


def _fetch(client: Client, folder: Folder) -> None:
    """The archive, unpacked; whole or not at all."""
    packed, part = folder.path / "archive.tar.gz", folder.path / ".archive.part"
    with packed.open("wb") as out:
        os.chmod(packed, 0o600)
        client.archive(out)
    shutil.rmtree(part, ignore_errors=True)
    bundle.extract(packed, part)
    shutil.rmtree(folder.archive, ignore_errors=True)
    part.rename(folder.archive)
    packed.unlink()


def _home(folder: Folder) -> str:
    return str(folder.archive) if folder.archive.exists() else ""
