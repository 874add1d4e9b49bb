"""Checkpoint downloads: a worker that must restore receives its assignment only once the file is on this host.

Where several hosts restore it, each downloads a share of its files, and the workers exchange the rest in their
generation's group (`train/checkpoint/peers.py`). So each byte leaves the dispatcher, or is read at the target, once.
The members of the newest generation share it if this host is among them, else all hosts of the job. A new generation
may need more files here, and a worker whose peers lack some has all of them fetched.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from spotfleet.agent.transfer import FIRST_BACKOFF_S, LAST_BACKOFF_S, RETRYABLE, Transfers
from spotfleet.errors import DiskFull, SpotfleetError
from spotfleet.protocol.checkpoint_files import MANIFEST, CheckpointFile, share_of
from spotfleet.protocol.messages import Checkpoint, DamagedCheckpoint, WorkerOrders
from spotfleet.retry import Backoff
from spotfleet.storage import atomic, verified

log = logging.getLogger("spotfleet.agent")

TRIES = 3  # with a wrong digest, or broken off in a row, before it is reported to the dispatcher
HOST_TRIES = 6  # with a wrong digest while the orders name the same file: the dispatcher has found its own whole
SPOILT = 3  # times that a file which came whole was changed or removed here, before this host is blamed
FULL_S = 20.0  # wait for a full disk, before the workers are ended and this host is blamed
AGAIN_S = 30.0  # period after TRIES, while the orders name the same file: the dispatcher may have recovered it


Hosts = tuple[str, ...]  # those that share a checkpoint; () if each has all of it
States = tuple[verified.State | None, ...]


@dataclass(frozen=True)
class _Wanted:
    """A checkpoint, and how much of it."""

    checkpoint: Checkpoint
    hosts: Hosts = ()
    own: str = ""

    def same(self, other: Checkpoint) -> bool:
        return (self.checkpoint.version, self.checkpoint.digest) == (other.version, other.digest)

    def share(self, files: Mapping[str, CheckpointFile]) -> list[str]:
        return share_of(files, self.hosts, self.own)


@dataclass(frozen=True)
class _Here:
    """A checkpoint or a share of it on this host, as it was when it came."""

    wanted: _Wanted
    path: Path
    names: tuple[str, ...]  # files of a share, in the folder `path`; () if all of it is here
    states: States
    files: Mapping[str, CheckpointFile]  # all of the checkpoint's, if a share is here

    def unchanged(self) -> bool:
        return None not in self.states and _states(self.path, self.names) == self.states

    def suffices(self, wanted: _Wanted) -> bool:
        return not self.names or (bool(wanted.hosts) and set(wanted.share(self.files)) <= set(self.names))


class CheckpointDownloads:
    """Downloads of one checkpoint per job, shared by the job's workers on this host.

        wanted --fetch, again with backoff--> here       ended by a newer `restore`, or by none
           ^ |-- no room on this host for FULL_S: `blame` ends the job's workers here, and another host is tried
           | '-- TRIES times another digest, or broken off: `damaged` until another file is wanted; fetched each
           |     AGAIN_S. HOST_TRIES times another digest: `blame`, as with no room
           '---- the file here was changed or removed: a worker found it damaged. SPOILT times: `blame`
    """

    def __init__(self, transfers: Transfers, folder: Callable[[str], Path], changed: Callable[[], None],
                 blame: Callable[[str, str], None]) -> None:
        """`blame`: called with the job and the reason when this host cannot hold the checkpoint: another one may."""
        self._transfers = transfers
        self._folder = folder
        self._changed, self._blame = changed, blame
        self._fetching: dict[str, tuple[_Wanted, asyncio.Task[None]]] = {}
        self._here: dict[str, _Here] = {}
        self._lacking: dict[str, str] = {}  # digest of the newest one of which peers lack files
        self._damaged: dict[str, DamagedCheckpoint] = {}
        self._received: dict[str, int] = {}  # bytes received of the current download
        self._full: dict[str, str] = {}
        self._spoilt: dict[str, tuple[Checkpoint, int]] = {}  # the newest file that was changed here, and how often

    def why(self, job: str) -> str:
        wanted = self._fetching.get(job)
        if wanted is None:
            return ""
        damaged = ", which is damaged" if job in self._damaged else ""
        full = f", for which there is no room: {self._full[job]}" if job in self._full else ""
        return f"fetching checkpoint {wanted[0].checkpoint.version}{damaged}{full}"

    def fetched(self, job: str) -> int:
        """Return the bytes received so far, in the transfer that got furthest; 0 without a download."""
        return self._received.get(job, 0) if job in self._fetching else 0

    def damaged(self) -> tuple[DamagedCheckpoint, ...]:
        """Return the checkpoints that cannot be fetched whole, for the report."""
        return tuple(self._damaged.values())

    def resolve(self, job: str, orders: WorkerOrders, delivered: WorkerOrders, host: str = "",
                lacks: str = "") -> WorkerOrders:
        """Return `orders` as they may be sent now to a worker of `host` that last received `delivered`, and reports
        that its peers lack files of the checkpoint with the digest `lacks`."""
        if orders.restore is None or orders.restore.url:  # a worker reads it from the object store itself
            self._drop(job)
            return orders
        if lacks:
            self._lacking[job] = lacks
        wanted = self._wanted(job, orders.restore, orders, host)
        held = self._here.get(job)
        if held and held.wanted.same(wanted.checkpoint):
            if not held.unchanged():
                del self._here[job]
                self._count_spoilt(job, wanted.checkpoint)
            elif held.suffices(wanted):
                return replace(orders, restore=replace(wanted.checkpoint, path=str(held.path)))
        self._fetch(job, wanted)
        return replace(orders, restore=None, assignment=delivered.assignment)

    def _wanted(self, job: str, checkpoint: Checkpoint, orders: WorkerOrders, host: str) -> _Wanted:
        members = {m.partition("/")[0] for m in orders.assignment.members} if orders.assignment else set()
        hosts = members if host in members else {*orders.sharers}
        shared = orders.sharers and checkpoint.name and self._lacking.get(job) != checkpoint.digest
        return _Wanted(checkpoint, tuple(sorted(hosts)), host) if shared and len(hosts) > 1 and host in hosts \
            else _Wanted(checkpoint)

    def forget(self, job: str) -> None:
        """Drop the job's download: no worker of it is here any more."""
        self._drop(job)

    def _count_spoilt(self, job: str, wanted: Checkpoint) -> None:
        before, times = self._spoilt.get(job, (wanted, 0))
        self._spoilt[job] = wanted, times = wanted, 1 + (times if _Wanted(before).same(wanted) else 0)
        if times >= SPOILT:
            self._blame(job, f"checkpoint {wanted.version} arrived damaged here: it came whole {times} times, and its "
                             "file was changed on this host's disk each time")

    def _drop(self, job: str) -> None:
        self._damaged.pop(job, None)
        self._full.pop(job, None)
        self._received.pop(job, None)
        self._lacking.pop(job, None)
        if fetching := self._fetching.pop(job, None):
            fetching[1].cancel()

    def _fetch(self, job: str, shared: _Wanted) -> None:
        fetching, lacking = self._fetching.get(job), self._lacking.get(job, "")
        if fetching and fetching[0].same(shared.checkpoint) and fetching[0].hosts == shared.hosts:
            return
        self._drop(job)
        if lacking == shared.checkpoint.digest:
            self._lacking[job] = lacking
        self._fetching[job] = (shared, asyncio.create_task(self._download(job, shared)))

    async def _download(self, job: str, shared: _Wanted) -> None:
        wanted, folder = shared.checkpoint, self._folder(job) / "restore"
        target = folder / f"{wanted.version}-{wanted.digest[:16]}{'' if wanted.name else '.pt'}"
        backoff, wrong, broken, full_since, here = Backoff(FIRST_BACKOFF_S, LAST_BACKOFF_S), 0, 0, 0.0, 0

        def on_bytes(size: int) -> None:
            nonlocal here
            here += size
            self._received[job] = max(here, self._received.get(job, 0))

        while True:
            here = 0
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                for left in folder.glob("*.part"):
                    if left.name != f"{target.name}.part":
                        verified.remove(left)  # the beginning of another one
                here_now = await self._bring(job, shared, target, on_bytes)
                break
            except RETRYABLE as error:
                log.warning("checkpoint %s of %s: %s; trying again", wanted.version, job, error)
                broken = broken + 1 if isinstance(error, aiohttp.ClientPayloadError) else 0
            except DiskFull as error:  # the checkpoint is not to blame
                log.warning("checkpoint %s of %s: %s; trying again", wanted.version, job, error)
                full_since = full_since if job in self._full else time.monotonic()
                self._full[job] = str(error)
                if time.monotonic() - full_since >= FULL_S:
                    self._blame(job, f"checkpoint {wanted.version} finds no room here: {error}")
                    full_since = time.monotonic()
            except SpotfleetError as error:
                wrong += 1
                log.warning("checkpoint %s of %s: %s; that was try %d", wanted.version, job, error, wrong)
            if wrong == HOST_TRIES:
                self._blame(job, f"checkpoint {wanted.version} arrived damaged here {wrong} times, and the "
                                 "dispatcher's file is whole")
            if TRIES in (wrong, broken):  # a file that breaks off at each try cannot be read there
                self._damaged[job] = DamagedCheckpoint(job, wanted.version, wanted.digest)
                self._changed()
            pause_s = backoff.next_s()
            await asyncio.sleep(AGAIN_S if max(wrong, broken) >= TRIES else pause_s)
        older = self._here.get(job)
        self._here[job] = here_now
        self._fetching.pop(job, None)
        for entries in (self._damaged, self._full, self._received):
            entries.pop(job, None)
        if older and older.path != here_now.path:
            verified.remove(older.path)
        self._changed()

    async def _bring(self, job: str, wanted: _Wanted, target: Path, on_bytes: Callable[[int], None]) -> _Here:
        """Download all of a checkpoint to `target`, or a share of it to its draft."""
        draft, listed = target.with_name(f"{target.name}.part"), dict[str, CheckpointFile]()
        if target.is_dir():  # by an earlier agent, or changed since: the files that are right are used
            verified.remove(target) if draft.exists() else atomic.rename(target, draft, sync=False)
        if not wanted.hosts:
            await self._transfers.checkpoint(job, wanted.checkpoint, target, on_bytes)
            states = _states(target)
            _note(target, wanted.checkpoint.digest)
            return _Here(wanted, target, (), states, {})

        def share(files: Mapping[str, CheckpointFile]) -> list[str]:
            listed.update(files)
            return wanted.share(files)

        names = (MANIFEST, *await self._transfers.checkpoint_share(job, wanted.checkpoint, draft, on_bytes, share))
        return _Here(wanted, draft, names, _states(draft, names), listed)


def _note(target: Path, digest: str) -> None:
    """Spare the workers here the comparison of the digest; without a note each compares it."""
    try:
        verified.note(target, digest)
    except OSError as error:
        log.warning("%s: %s", target, error)


def _states(path: Path, names: tuple[str, ...] = ()) -> States:
    return tuple(_file_state(path / name) for name in names) or (_file_state(path),)


def _file_state(path: Path) -> verified.State | None:
    try:
        return verified.state_of(path)
    except OSError:
        return None
