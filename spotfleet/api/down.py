"""`down`: bring home what the fleet made, end its machines, and prove that the provider lists none.

    asked to go down --no worker host left--> archive at home --> dispatcher terminated --> nothing listed
        --> what the fleet had besides machines removed --> closed

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
from spotfleet.api import belongings, cloud, overssh, ssh
from spotfleet.api.belongings import Cleared
from spotfleet.api.house import Busy, Folder
from spotfleet.api.machine import Machine, Progress
from spotfleet.client import Client
from spotfleet.errors import DispatcherUnreachable, SpotfleetError
from spotfleet.model import Role
from spotfleet.providers import Belonging

POLL_S = 0.3
PACKED, PART = "archive.tar.gz", ".archive.part"  # the archive on its way; of a killed `down`, the next removes them
WORKERS_GONE_S = 600.0
PATIENCE_S = 20.0  # for a dispatcher that restarts
RESTARTS = 5  # so often the patience begins anew when a dispatcher that answered is away again
SETTLE_S = 60.0  # for a cloud to let go of what an ended fleet's machines used, while another command waits
TRY_S = 2.0  # for one call, before the provider is asked whether its machine still exists


@dataclass(frozen=True)
class Down:
    fleet: str
    archive: str  # folder with what came home; "" if there was nothing
    already: bool = False
    note: str = ""
    removed: tuple[Belonging, ...] = ()  # besides machines
    proof: str = ""  # that nothing is left, as the cloud says; empty where it has nothing besides machines


def take_down(folder: Folder, progress: Progress, *, discard: bool, why: str) -> Down:
    """Return once nothing of the fleet is listed. Raises SpotfleetError, with the fleet as it was, when something
    would be lost and not `discard`. An `up` that is at work on this machine stops for it."""
    with folder.wound_up(progress):
        if folder.record.down_at:
            return Down(folder.name, _home(folder), already=True)
        machine = Machine(folder)
        note = "" if machine.closing else _gone(machine, discard) or _bring_home(machine, progress, discard)
        left, cleared = _finish(machine, why, progress, discard=discard)
        if folder.archive.exists():
            progress(f"ledger, logs, checkpoints and outputs are in {folder.archive}")
        return Down(folder.name, _home(folder), False, "; ".join(filter(None, [note, left])), cleared.removed,
                    cleared.proof)


def _gone(machine: Machine, discard: bool) -> str:
    """What is not brought home because the dispatcher's machine, one of our own, does not answer; "" if it answers, or
    if all is here. Raises SpotfleetError unless `discard`: nobody can tell what else there is."""
    folder, trouble = machine.folder, overssh.unlisted(machine.provider, machine.cloud_name)
    here = folder.fetched.exists() or not folder.record.reached
    if trouble and not discard:
        raise SpotfleetError(f"the fleet is not down{'' if here else ', and its results are not here'}: {trouble}",
                             hint=f"`spotfleet down {folder.name}` again once that machine answers, or "
                                  f"{'close the fleet without it' if here else 'give them up'} with --discard")
    return f"nothing was brought home: {trouble}" if trouble and not here else ""


def settle(folder: Folder) -> bool:
    """Close the books of a fleet that has ended by itself, what it had besides machines removed; False while a machine
    of it exists, or may be about to: one that was never reached has had no time to end itself, and its machine may not
    be listed yet."""
    try:
        with folder.locked(wait_s=0.0):
            if not folder.record.down_at:
                machine = Machine(folder)
                if not machine.closing and (not folder.record.reached or machine.left() or machine.lost()):
                    return False
                _finish(machine, "ended by itself", lambda _line: None, limit_s=SETTLE_S)
        return True
    except (Busy, overssh.Leavings):  # machines that do not answer are for `down` to tell about
        return False


def _finish(machine: Machine, why: str, progress: Progress, *, discard: bool = False, limit_s: float | None = None,
            ) -> tuple[str, Cleared]:
    """End what is left, and close the books last of all: a fleet that counts as down has everything in place.

    The answer names machines that could not be cleaned, which only `discard` takes; and what else was removed.
    """
    folder, cleared = machine.folder, Cleared()
    left: list[str] = []
    if not machine.closing:
        if not (discard and overssh.unlisted(machine.provider, machine.cloud_name)):
            machine.end(progress, orderly=folder.fetched.exists() or folder.archive.exists())
        left = overssh.part(machine.provider, folder, progress)
        if not discard:
            overssh.refuse_leavings(left, folder.name)
        cleared = belongings.clear(machine.provider, machine.cloud_name, progress, limit_s)
        ssh.remove(folder, progress)
        _put_in_place(folder)
    machine.close(why)
    return (f"something of the fleet may still be on {'; '.join(left)}. Once that answers: `spotfleet leaks`, or, if a "
            f"dispatcher lives there, `spotfleet attach {folder.name} --file FLEET.yaml` and `spotfleet down`"
            if left else ""), cleared


def _bring_home(machine: Machine, progress: Progress, discard: bool) -> str:
    """Get the archive here, workers ended; the answer says what was not brought home, "" if all is here."""
    folder, patience_s = machine.folder, 0.0 if discard else PATIENCE_S
    deadline, restarts, asked = time.monotonic() + patience_s, 0, False
    while True:
        answered = False
        url = machine.locate()
        if not url and not _comes_back(machine):
            return _without_dispatcher(folder, progress, discard)
        try:
            if not url:
                raise DispatcherUnreachable("its machine does not run")
            client = machine.client(url, TRY_S, any_version=True)
            client.down()
            answered = True
            _wait_for_workers(client, progress)
            _fetch(client, folder)
            return ""
        except DispatcherUnreachable as error:  # it restarts, or it has just ended itself
            restarts += answered
            if not asked:  # this laptop may have moved
                asked = True
                cloud.open_door(machine.provider, machine.cloud_name, progress)
            if answered and restarts <= RESTARTS:
                deadline = time.monotonic() + patience_s
            if time.monotonic() >= deadline:
                return _unreachable(error, folder, discard)
        time.sleep(POLL_S)


def _comes_back(machine: Machine) -> bool:
    """Does the dispatcher's machine exist, and has it ever answered?"""
    return machine.folder.record.reached and any(h.role is Role.DISPATCHER for h in machine.left())


def _unreachable(error: DispatcherUnreachable, folder: Folder, discard: bool) -> str:
    if not folder.record.reached:
        return ""  # it never answered, so it has no job
    if discard:
        return f"nothing was brought home: {error}"
    raise SpotfleetError(f"the fleet's results cannot be brought home: {error}",
                         hint="try again, or give them up with --discard") from None


def _without_dispatcher(folder: Folder, progress: Progress, discard: bool) -> str:
    """An autostop has left the archive; or there was nothing to bring; or it is lost."""
    if folder.archive.exists() or folder.fetched.exists() or not folder.record.reached:
        return ""
    if discard:
        progress("the dispatcher is gone; its jobs' results are given up")
        return "nothing was brought home: the dispatcher is gone"
    kept = folder.record.spec.checkpoint
    then = f"goes on from {kept.folder}" if kept.folder else "saves what hosts hold"
    left = f". Its jobs' checkpoints stay at {kept.url}" if kept.url else ""
    raise SpotfleetError("the dispatcher's machine is gone, and with it the fleet's results",
                         hint=f"`spotfleet up FILE` {then}; or close the fleet with --discard{left}")


def _wait_for_workers(client: Client, progress: Progress) -> None:
    deadline, told = time.monotonic() + WORKERS_GONE_S, ""
    while True:
        end = client.ending()
        if end.down and not end.left:
            return
        line = f"going down: {', '.join(f'{host} ({state})' for host, state in end.left.items()) or end.why}"
        if line != told:
            progress(line)
            told = line
        if time.monotonic() >= deadline:
            raise SpotfleetError(f"after {WORKERS_GONE_S:g} s there are still {', '.join(end.left)}: {end.why}",
                                 hint="`spotfleet down` again, or --discard to end all machines now")
        time.sleep(POLL_S)


def _fetch(client: Client, folder: Folder) -> None:
    """The archive, unpacked; whole or not at all."""
    packed, part = folder.path / PACKED, folder.path / PART
    with packed.open("wb") as out:
        os.chmod(packed, 0o600)
        client.archive(out)
    shutil.rmtree(part, ignore_errors=True)
    try:
        bundle.extract(packed, part)
    except ValueError as error:
        raise SpotfleetError(f"the fleet's archive cannot be unpacked: {error}",
                             hint=f"`spotfleet down {folder.name}` fetches it again; it lies in {packed}") from None
    shutil.rmtree(folder.fetched, ignore_errors=True)
    part.rename(folder.fetched)
    packed.unlink()


def _put_in_place(folder: Folder) -> None:
    """What was fetched takes the place of what an ending dispatcher may have left; nobody writes there any more."""
    if folder.fetched.exists():
        shutil.rmtree(folder.archive, ignore_errors=True)
        folder.fetched.rename(folder.archive)
    (folder.path / PACKED).unlink(missing_ok=True)
    shutil.rmtree(folder.path / PART, ignore_errors=True)


def _home(folder: Folder) -> str:
    return str(folder.archive) if folder.archive.exists() else ""
