"""`down`: fetch the fleet's results, end its machines, and verify that the provider lists none.

    `down` sent --no worker host left--> archive fetched --> dispatcher terminated --> nothing listed
        --> other cloud resources of the fleet removed --> closed

Each step may be repeated, so an interrupted `down` can be called again. Nothing waits for ever: hosts may send results
as long as bytes arrive. If none has arrived for QUIET_S, `down` stops with an error that names them, and the hosts stay
for a while (`dispatcher/lifecycle/unsent.py`); the dispatcher ends other hosts after its drain timeout. WORKERS_GONE_S
ends the wait for that with an error. `discard` gives up what does not arrive, and skips a dead dispatcher: no error of
the transfer keeps a machine.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotfleet import bundle
from spotfleet.api import cloud, transfers
from spotfleet.api.access import ssh
from spotfleet.api.account import resources
from spotfleet.api.account.resources import RemovedResources
from spotfleet.api.home import Busy, FleetDir
from spotfleet.api.lifecycle import ssh_machines
from spotfleet.api.machine import DispatcherMachine, Progress
from spotfleet.codec import from_json, to_json
from spotfleet.errors import DispatcherUnreachable, SpotfleetError
from spotfleet.fleet.ledger import Ledger
from spotfleet.model import Role
from spotfleet.protocol.archive import ArchiveFile, RefusedFile
from spotfleet.protocol.messages import NOT_COLLECTED, UnsentStatus
from spotfleet.providers import Resource
from spotfleet.storage import atomic
from spotfleet.transport.client import NOT_RUNNING, DispatcherClient, Ending
from spotfleet.words import results, size, span

POLL_S = 0.3
BY_ITSELF = "ended by itself"
PART = ".archive.part"  # draft of the archive, see `storage/mirror.py`; the next `down` goes on with it
PACKED, PACKED_PART = "archive.tar.gz", ".archive.unpacked"  # the same from a dispatcher of an earlier release
ELSEWHERE = "checkpoints-elsewhere.json"  # in the archive: checkpoints that stay at the target
UNREADABLE = f"{NOT_COLLECTED}, the list of what it lacks, cannot be read"
WORKERS_GONE_S = 600.0  # without any change; with `discard` in all, and for a copy of results that hardly moves
QUIET_S = 120.0  # without a byte of the hosts' results
LEAST_S = 10.0  # that each `down` waits for a byte, however long none has come before: there may be room now
LINE_S = 5.0  # between two lines about the same hosts
PATIENCE_S = 20.0  # for a dispatcher that restarts
RESTARTS = 5  # how often PATIENCE_S starts again after a dispatcher has answered and then failed
CLOSE_S = 60.0  # for a cloud to free the resources of an ended fleet's machines, while another command waits
TRY_S = 2.0  # for one call, before the provider's list is read to see if its machine still exists


@dataclass(frozen=True)
class DownResult:
    fleet: str
    archive: str  # folder with the fetched results; "" if there were none
    already: bool = False
    note: str = ""
    removed: tuple[Resource, ...] = ()  # resources other than machines
    proof: str = ""  # the cloud's list: nothing is left; empty where a provider has only machines
    missing: tuple[str, ...] = ()  # results that ended with a host, each in words
    partial: tuple[str, ...] = ()  # files of which the archive has only the beginning, as NAME.partial
    incomplete: str = ""  # why results are missing that nobody gave up: the dispatcher ended before they were copied
    elsewhere: tuple[str, ...] = ()  # checkpoints that stay at the target, each in words


def take_down(folder: FleetDir, progress: Progress, *, discard: bool, why: str,
              bring_checkpoints: bool = False) -> DownResult:
    """End the fleet; return once nothing of it is listed. An `up` that is running on this machine stops for it.

    Raises SpotfleetError, and leaves the fleet as it was, when results would be lost, unless `discard`. Results that
    were lost with a host are in `missing`. Checkpoints that lie at a target of the user's are not copied unless
    `bring_checkpoints`.
    """
    with folder.locked_for_down(progress):
        if folder.record.down_at:
            return DownResult(folder.name, _archive_path(folder), already=True, incomplete=_incomplete(folder))
        machine = DispatcherMachine(folder)
        note = "" if machine.closing else _unfetchable(machine, discard) or _fetch_results(machine, progress, discard,
                                                                                       bring_checkpoints)
        left, cleared = _finish(machine, why, progress, discard=discard)
        if folder.archive.exists():
            found = "records, logs, checkpoints and outputs are"
            lacks = f"; {NOT_COLLECTED} there lists what was not collected" if any(_not_collected(folder)) else ""
            progress(f"{found} in {folder.archive}{lacks}")
        notes = "; ".join(filter(None, [note, left]))
        return DownResult(folder.name, _archive_path(folder), False, notes, cleared.removed, cleared.proof,
                          *_not_collected(folder), "" if discard else _incomplete(folder), _elsewhere(folder))


def _unfetchable(machine: DispatcherMachine, discard: bool) -> str:
    """Return a note about results that cannot be fetched because the dispatcher's machine, reached over SSH, does not
    answer; "" if it answers, or if all results are here.

    Raises SpotfleetError unless `discard`: it is unknown what else is on the machine.
    """
    folder, trouble = machine.folder, ssh_machines.listing_error(machine.provider, machine.cloud_name)
    here = folder.fetched.exists() or not folder.record.reached
    if trouble and not discard:
        raise SpotfleetError(f"the fleet is not down{'' if here else ', and its results are not here'}: {trouble}",
                             hint=f"`spotfleet down {folder.name}` again once that machine answers, or "
                                  f"{'close the fleet without it' if here else 'give them up'} with --discard")
    return f"no results were copied here: {trouble}" if trouble and not here else ""


def close_if_ended(folder: FleetDir) -> bool:
    """Remove the other resources of a fleet that has ended by itself, and record its end.

    Returns False while a machine of it exists or may appear: a fleet that was never reached had no time to end itself,
    and its machine may not be listed yet.
    """
    try:
        with folder.locked(wait_s=0.0):
            if not folder.record.down_at:
                machine = DispatcherMachine(folder)
                if not machine.closing and (not folder.record.reached or machine.left() or machine.lost()):
                    return False
                _finish(machine, BY_ITSELF, lambda _line: None, limit_s=CLOSE_S)
        return True
    except (Busy, ssh_machines.LeftoverError):  # `down` reports machines that do not answer
        return False


def _finish(machine: DispatcherMachine, why: str, progress: Progress, *, discard: bool = False,
            limit_s: float | None = None,
            ) -> tuple[str, RemovedResources]:
    """End the remaining machines and remove other resources; record the end last, so that a fleet that counts as down
    is complete.

    Returns a note naming machines that could not be cleaned (only with `discard`), and the removed resources.
    """
    folder, cleared = machine.folder, RemovedResources()
    left: list[str] = []
    if not machine.closing:
        if not (discard and ssh_machines.listing_error(machine.provider, machine.cloud_name)):
            machine.end(progress, orderly=folder.fetched.exists() or folder.archive.exists())
        left = ssh_machines.clean_up(machine.provider, folder, progress)
        if not discard:
            ssh_machines.refuse_leftovers(left, folder.name)
        cleared = resources.clear(machine.provider, machine.cloud_name, progress, limit_s)
        ssh.remove(folder, progress)
        _put_in_place(folder)
    machine.close(why)
    return (f"something of the fleet may still be on {'; '.join(left)}. Once that answers: `spotfleet leaks`, or, if a "
            f"dispatcher lives there, `spotfleet attach {folder.name} --file FLEET.yaml` and `spotfleet down`"
            if left else ""), cleared


def _fetch_results(machine: DispatcherMachine, progress: Progress, discard: bool, bring_checkpoints: bool) -> str:
    """End the workers and fetch the archive; return a note about results that were not fetched, "" if all were."""
    folder, patience_s = machine.folder, 0.0 if discard else PATIENCE_S
    deadline, restarts, asked = time.monotonic() + patience_s, 0, False
    reason: DispatcherUnreachable | None = None
    while True:
        answered = False
        url = machine.locate()
        if not url and not _may_return(machine):
            return _without_dispatcher(folder, progress, discard)
        try:
            if not url:
                raise DispatcherUnreachable("its machine does not run")
            client = machine.client(url, TRY_S, any_version=True)
            client.down(discard=discard)
            answered = True
            _wait_for_workers(client, folder.name, progress, discard)
            _fetch(client, folder, progress, bring_checkpoints, WORKERS_GONE_S if discard else math.inf)
            return ""
        except DispatcherUnreachable as error:  # it is restarting, or it has just ended itself
            restarts += answered
            if reason is None or NOT_RUNNING not in str(error):  # between two starts that fail
                reason = error
            if not asked:  # this laptop's address may have changed
                asked = True
                cloud.allow_access(machine.provider, machine.cloud_name, progress)
            if answered and restarts <= RESTARTS:
                deadline = time.monotonic() + patience_s
            if time.monotonic() >= deadline:
                return _unreachable(reason, folder, discard)
        except (SpotfleetError, OSError) as error:
            if discard:
                return _given_up(folder, error)
            if isinstance(error, SpotfleetError):
                raise
            raise SpotfleetError(f"the fleet's results cannot be copied to this machine: {error}",
                                 hint="try again once the cause is gone, or give them up with --discard") from None
        time.sleep(POLL_S)


def _given_up(folder: FleetDir, error: SpotfleetError | OSError) -> str:
    """Keep what has arrived of results that cannot be copied, with the reason; return a note."""
    files = folder.path / PART / "files"
    if folder.fetched.exists():
        return f"the results here are those of an earlier `down`: {error}"
    if not files.is_dir():
        return f"no results were copied here: {error}"
    try:
        _change_not_collected(files, {"given_up": str(error)})
        _take_over(folder, files)
    except OSError as other:
        return f"no results were copied here: {error}; and what has arrived cannot be kept: {other}"
    return f"not all results were copied here: {error}"


def _may_return(machine: DispatcherMachine) -> bool:
    """Return whether the dispatcher's machine exists and its dispatcher has ever answered."""
    return machine.folder.record.reached and any(h.role is Role.DISPATCHER for h in machine.left())


def _unreachable(error: DispatcherUnreachable, folder: FleetDir, discard: bool) -> str:
    if not folder.record.reached:
        return ""  # it never answered, so it has no job
    if discard:
        return _given_up(folder, error)
    raise SpotfleetError(f"the fleet's results cannot be copied to this machine: {error}",
                         hint="try again, or give them up with --discard") from None


def _without_dispatcher(folder: FleetDir, progress: Progress, discard: bool) -> str:
    """Return "" if an autostop has left the archive or there was nothing to fetch. Otherwise the results are lost:
    return a note with `discard`, else raise SpotfleetError."""
    if folder.archive.exists() or folder.fetched.exists() or not folder.record.reached:
        return ""
    if discard:
        progress("the dispatcher is gone; its jobs' results are given up")
        return "no results were copied here: the dispatcher is gone"
    kept = folder.record.spec.checkpoint
    then = f"goes on from {kept.folder}" if kept.folder else "saves what hosts hold"
    left = f". Its jobs' checkpoints stay at {kept.url}" if kept.url else ""
    raise SpotfleetError("the dispatcher's machine is gone, and with it the fleet's results",
                         hint=f"`spotfleet up FILE` {then}; or close the fleet with --discard{left}")


def _wait_for_workers(client: DispatcherClient, fleet: str, progress: Progress, discard: bool) -> None:
    begun = changed_at = time.monotonic()
    before, reported, reported_at = Ending(False, "", {}), "", begun
    while True:
        end, now = client.ending(), time.monotonic()
        if end.down and not end.left:
            return
        if (end.left, _bytes(end)) != (before.left, _bytes(before)):
            changed_at = now
        line = _line(end)
        if line != reported and (end.left != before.left or now - reported_at >= LINE_S):
            progress(line)
            reported, reported_at = line, now
        before = end
        if not discard and now - begun >= LEAST_S and (stuck := _stuck(end)):
            raise _not_sent(stuck, fleet)
        if now - (begun if discard else changed_at) >= WORKERS_GONE_S:
            raise SpotfleetError(f"after {WORKERS_GONE_S:g} s there are still {', '.join(end.left)}: {end.why}",
                                 hint="`spotfleet down` again, or --discard to end all machines now")
        time.sleep(POLL_S)


def _bytes(end: Ending) -> list[tuple[str, str, str, int]]:
    return [(u.host, u.job, u.kind, u.bytes) for u in end.unsent]


def _line(end: Ending) -> str:
    sends = {u.host: f"{end.left[u.host]}, still holds {results(u.kind, u.bytes, u.job)}"
             for u in reversed(end.unsent) if u.host in end.left}
    return "going down: " + (", ".join(f"{h} ({sends.get(h, state)})" for h, state in end.left.items()) or end.why)


def _stuck(end: Ending) -> tuple[UnsentStatus, ...]:
    """Return the results that do not arrive, if nothing else is left to wait for. A host that ends soon, such as one
    whose agent is silent, is waited for."""
    if set(end.left) != {u.host for u in end.unsent}:
        return ()
    waits = all(u.stays_s is not None and u.stays_s > QUIET_S and u.quiet_s >= QUIET_S for u in end.unsent)
    return end.unsent if waits else ()


def _not_sent(stuck: tuple[UnsentStatus, ...], fleet: str) -> SpotfleetError:
    held = "; ".join(f"{u.host} still holds {results(u.kind, u.bytes, u.job)}" for u in stuck)
    whys = "; ".join(dict.fromkeys(u.why for u in stuck if u.why))
    stays_s = min(u.stays_s or 0.0 for u in stuck)
    return SpotfleetError(
        f"not all results are here: {held}, and nothing has arrived for {span(min(u.quiet_s for u in stuck))}"
        + (f" ({whys})" if whys else ""),
        hint=f"`spotfleet down {fleet}` again once the cause is gone, or --discard to give them up; the machines stay "
             f"(and cost) for {span(stays_s)} more, then these results are lost")


def _fetch(client: DispatcherClient, folder: FleetDir, progress: Progress, bring_checkpoints: bool,
           patience_s: float) -> None:
    """Fetch the archive, atomically. What an interrupted call has fetched counts. Raises SpotfleetError for a link so
    slow that almost nothing arrives in `patience_s`."""
    part = folder.path / PART
    found = transfers.fetch(client, part, progress, "copying the results here", seed=lambda key: folder.fetched / key,
                            bring_checkpoints=bring_checkpoints, patience_s=patience_s)
    if found is None:
        return _fetch_packed(client, folder)
    elsewhere = [] if bring_checkpoints else [*found.elsewhere]
    brought = {file.key: transfers.bring(file, part / "stores" / file.key, progress, folder.fetched / file.key)
               for file in found.elsewhere if bring_checkpoints}
    for key, files in brought.items():
        (found.files / key).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        atomic.rename(files, found.files / key, sync=False)  # `_take_over` syncs all
    (found.files / ELSEWHERE).unlink(missing_ok=True)
    if elsewhere:
        atomic.write(found.files / ELSEWHERE, json.dumps([to_json(file) for file in elsewhere], indent=1))
    if found.refused:
        _change_not_collected(found.files, {"refused": to_json(found.refused)})
    _take_over(folder, found.files)
    shutil.rmtree(part)


def _fetch_packed(client: DispatcherClient, folder: FleetDir) -> None:
    """Fetch the archive as .tar.gz, from a dispatcher of an earlier release."""
    packed, part = folder.path / PACKED, folder.path / PACKED_PART
    with open(os.open(packed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        client.archive(out)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(mode=0o700)
    refused: list[tuple[str, str, str]] = []
    try:
        bundle.extract(packed, part, refused=refused)
    except ValueError as error:
        raise SpotfleetError(f"the fleet's archive cannot be unpacked: {error}",
                             hint=f"`spotfleet down {folder.name}` fetches it again; it lies in {packed}") from None
    for path in part.rglob("*"):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o700)
    if refused:
        _change_not_collected(part, {"refused": [to_json(RefusedFile(*found)) for found in refused]})
    _take_over(folder, part)
    packed.unlink()


def _change_not_collected(files: Path, more: dict[str, Any]) -> None:
    """Add `more` to the list of what the archive in `files` lacks."""
    atomic.write(files / NOT_COLLECTED, json.dumps({**_lacks(files), **more}, indent=1),
                 sync=False)  # `_take_over` syncs all


def _lacks(files: Path) -> dict[str, Any]:
    """Return the list of what the archive in `files` lacks. The dispatcher wrote it, so it may be unreadable."""
    path, found = files / NOT_COLLECTED, None
    if not path.is_file():
        return {"lost": [], "partial_files": []}
    with suppress(ValueError, RecursionError):
        found = json.loads(path.read_text())
    return found if isinstance(found, dict) else {"lost": [], "partial_files": [], "incomplete": UNREADABLE}


def _take_over(folder: FleetDir, files: Path) -> None:
    """Make `files` the fetched results, durably: the dispatcher's copy ends with its machine, which is next."""
    atomic.sync_tree(files)
    shutil.rmtree(folder.fetched, ignore_errors=True)
    atomic.rename(files, folder.fetched)


def _put_in_place(folder: FleetDir) -> None:
    """Replace the archive of an ending dispatcher, if there is one, by the fetched one. By now nothing else writes
    there."""
    if folder.fetched.exists():
        shutil.rmtree(folder.archive, ignore_errors=True)
        atomic.rename(folder.fetched, folder.archive)
    (folder.path / PACKED).unlink(missing_ok=True)
    for part in (PART, PACKED_PART):
        shutil.rmtree(folder.path / part, ignore_errors=True)


def _not_collected(folder: FleetDir) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the results that the archive lacks, and the files in it of which the end is missing, in words."""
    try:
        return _in_words(_lacks(folder.archive))
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError):
        return (f"the results that {folder.archive / NOT_COLLECTED} names: it cannot be read",), ()


def _in_words(listed: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    lost = [f"{results(e['what'], e['bytes'], e['job'])} " +
            (f"(a copy is in {e['kept_at']})" if e["kept_at"] else f"(lost with {e['host']})") for e in listed["lost"]]
    refused = listed.get("refused", [])
    lost += [f"{f['name']!r} ({f['why']})" for f in refused if not f["at"]]
    torn = [f"the end of {f['file']!r} of {f['worker']} in {f['job']}" + (f", now {f['at']!r}" if "at" in f else "")
            for f in listed["partial_files"]] + ["the ends of more files"] * listed.get("more_partial_files", False)
    torn += [f"{f['name']!r} under its name ({f['why']}): it is {f['at']}" for f in refused if f["at"]]
    return tuple(lost), tuple(torn)


def _incomplete(folder: FleetDir) -> str:
    """Return why the archive is not whole although nobody has given up the results; "" if it is."""
    if why := _lacks(folder.archive).get("incomplete"):
        return f"the archive is incomplete: {why}"
    if not folder.record.reached or folder.archive.exists() or folder.fetched.exists() or not folder.ledger.exists():
        return ""
    end = Ledger(folder.ledger)
    try:
        down = end.state().down
    finally:
        end.close()
    return "the fleet ended by itself and left no archive here: its results are lost" if (
        down is not None and down.why == BY_ITSELF) else ""


def _elsewhere(folder: FleetDir) -> tuple[str, ...]:
    """Return the checkpoints that the archive names only, in words."""
    path = folder.archive / ELSEWHERE
    found = from_json(tuple[ArchiveFile, ...], json.loads(path.read_text())) if path.is_file() else ()
    return tuple(f"checkpoint {file.key.split('/')[-1].removesuffix('.ckpt')} of {file.key.split('/')[1]} "
                 f"({size(file.bytes)}) stays at {file.at}" for file in found)


def _archive_path(folder: FleetDir) -> str:
    return str(folder.archive) if folder.archive.exists() else ""
