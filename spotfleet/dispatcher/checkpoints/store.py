"""Checkpoint store of a job on the dispatcher's disk: the newest `keep`, none of a replaced generation.

    checkpoints/VERSION-GENERATION/              its files, see `protocol/checkpoint_files.py`
    checkpoints/VERSION-GENERATION.json          its record with the digest of its manifest, written after it
    checkpoints/VERSION-GENERATION.corrupt       the last damaged one
    checkpoints/VERSION-GENERATION.parts/        files of one that is arriving: see `parts.py`
    checkpoints/VERSION-GENERATION.json.lost     record of one in an object store that workers could not use
    checkpoints/VERSION-GENERATION.ckpt          a tar by an earlier release, its record has the digest of the tar; read
                                                 until two releases after 0.1

A checkpoint whose files hosts have written to the mounted target has a record here with the folder's `url`, and its
files there alone. Hosts that see the target read them by themselves. It is brought to this disk before a restore by a
host that does not see the target, or once a host has asked for its files here, because those there may be damaged.

A checkpoint in an object store has a record here, but no file: workers write, check and remove it there. Its record
comes from workers' reports, and it counts as good until a worker reports that it is damaged. Otherwise it is treated
like the rest.

        arrives with its digest --> good --size or time changed, or a host reports damage--> unsure
                                     ^                                                         |
    read after a restart --> unsure -'-- `check`: the digest is right ---------- wrong, or no file --> set aside

Only a good checkpoint is offered for a restore. If one is set aside, the next older one replaces it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from spotfleet.codec import to_json
from spotfleet.dispatcher.checkpoints.parts import Parts, PieceDamaged, assemble, remove
from spotfleet.dispatcher.checkpoints.seals import JobSeals, unordered
from spotfleet.dispatcher.disk.files import receive, write_json
from spotfleet.dispatcher.disk.records import Seen, age, digest_of, lies_at_target, name_of, named, read_record, seen_at
from spotfleet.errors import DiskFull, SpotfleetError
from spotfleet.fleet.domain.events import CheckpointKept, CheckpointLost, Event
from spotfleet.protocol.checkpoint_files import MANIFEST, MANIFEST_BYTES
from spotfleet.protocol.messages import Checkpoint, WorkerReport
from spotfleet.storage import atomic
from spotfleet.storage.checkpoint_folder import problem_in

log = logging.getLogger(__name__)
LIMIT_BYTES = 256 << 30
SHA256 = re.compile("[0-9a-f]{64}")
LOOK_LIMIT_S, LOOK_S = 20.0, 0.02  # an agent waits 30 s for an answer
DOUBT_S = 30.0  # hosts' reports of damage make us read a file again at most once in this time
MOST_REFUSALS = 32  # events about refused checkpoints of one job, in this process: a host could invent names


class Outdated(SpotfleetError):
    """Refusal of a checkpoint of a replaced generation; its writer must drop it."""


class NoRoom(DiskFull):
    """Refusal of a checkpoint by a full or failing disk; its sender tries again."""


@dataclass(frozen=True)
class RestoreInstruction:
    """Instruction to workers that hold no state."""

    checkpoint: Checkpoint | None = None  # restore this one; None: start with the script's initial state
    wait: str = ""  # wait, for this reason


class CheckpointStore:
    """Checkpoints of one job. Used on the event loop; threads read large files."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = max(1, keep)
        self.problem = ""  # message for users; empty once another checkpoint was kept
        self.remark = ""  # message for users about the target
        self.target = ""  # folder where hosts that lost their dispatcher may have stored a newer one
        self.url = ""  # the job's folder in an object store, if workers write there
        self.seals: JobSeals | None = None  # None: nothing is sealed, and every generation counts
        self.floor = 0  # see `JobRecord.floor`
        self.probe = ""  # what the target's probe has; "" until it is there
        self.mounted = False  # all hosts of the job see the target
        self.to_look = True  # hosts may have written files to the target that are not in place
        self.written = self.looked = 0  # files that hosts wrote there; files that a listing has included
        self._probes: dict[str, str] = {}  # as hosts have read it
        self._doubted: Checkpoint | None = None  # at the target: a host could not read it there
        self.awaited = False  # the target had one at the takeover: read it before any restart from scratch
        self.seeking = ""
        self.seeks_since = 0.0  # monotonic
        self._needed = self._searched = False
        self._good: dict[str, Seen] = {}  # names whose digest was right, with size and time of the file then
        self._checked_at: dict[str, float] = {}
        self._news: list[Callable[[str, float], Event]] = []
        self._useless = {(name_of(c), c.digest) for c in map(read_record, folder.glob("*.json.lost")) if c is not None}
        self._refused: set[tuple[str, str]] = set()
        self._joining = asyncio.Lock()
        self.parts = Parts(folder)
        self._kept = self._load()

    def use_seals(self, seals: JobSeals) -> None:
        """Seal what is kept from now on. What is here already is sealed in memory: this disk is ours."""
        self.seals = seals
        for kept in self._kept:
            seals.note(kept.serial)
        self._kept = [seals.sealed(kept) for kept in self._kept]

    def relocate(self, folder: Path) -> None:
        """Use `folder`, to which this one was renamed."""
        self.folder, self.parts = folder, Parts(folder)

    @property
    def newest(self) -> Checkpoint | None:
        """The newest known checkpoint. Its file is read only when it is needed or has changed."""
        return self._kept[-1] if self._kept else None

    @property
    def newest_version(self) -> int:
        """Version of the newest checkpoint; 0: none is kept."""
        return self._kept[-1].version if self._kept else 0

    @property
    def kept(self) -> tuple[Checkpoint, ...]:
        """All kept checkpoints, oldest first."""
        return tuple(self._kept)

    def find(self, version: int) -> Path | None:
        """Return the folder of this version, or its tar; None when it is not kept."""
        kept = next((c for c in self._kept if c.version == version and self.path(c).exists()), None)
        return self.path(kept) if kept else None

    def path(self, checkpoint: Checkpoint) -> Path:
        """Return the folder of a checkpoint, or the tar of an earlier release."""
        return self.folder / f"{name_of(checkpoint)}{'' if checkpoint.name else '.ckpt'}"

    def need(self, needed: bool) -> None:
        """Set whether no worker holds the job's state. Then the target is read again before anything is offered."""
        if needed and not self._needed:
            self._searched, self.seeking = not self.target, f"reads {self.target} for a newer checkpoint"
            self.seeks_since = time.monotonic()
        self._needed = needed

    @property
    def seeks(self) -> bool:
        return self._needed and (not self._searched or self.to_bring is not None)

    @property
    def to_bring(self) -> Checkpoint | None:
        """The newest checkpoint if its files lie at the target and are needed here."""
        newest = self.newest
        wanted = newest is not None and lies_at_target(newest) and (not self.mounted or newest == self._doubted)
        return newest if self._needed and wanted else None

    def receive_probe(self, host: str, probe: str) -> None:
        """Record what a host has read as the target's probe."""
        self._probes[host] = probe

    def look_at_hosts(self, hosts: Iterable[str]) -> None:
        """Update `mounted`: whether each of `hosts`, those of the job, sees the target that the dispatcher sees."""
        seen = [self._probes.get(host, "") for host in hosts]
        marks = self.seals is not None and not self.seals.takes_unsealed  # without them no host may write there
        self.mounted = marks and bool(self.probe and seen) and all(probe == self.probe for probe in seen)

    def doubt(self, version: int) -> None:
        """Record that a host has asked here for a checkpoint that lies at the target."""
        newest = self.newest
        if newest is not None and newest.version == version and lies_at_target(newest):
            self._doubted = newest

    def mark_searched(self) -> None:
        self._searched = True

    def offer(self) -> RestoreInstruction:
        """Return the current instruction for a restore."""
        if self.seeks:
            return RestoreInstruction(wait=self.seeking)
        newest = self.newest
        if newest is not None and lies_at_target(newest):
            return RestoreInstruction(replace(newest, url=""))
        if newest is not None and not self.is_good(newest):
            return RestoreInstruction(wait=f"reads checkpoint {newest.version} to see that it is whole")
        return RestoreInstruction(newest)

    # ---- arrival

    async def has_come_to_target(self, offered: Checkpoint, fence: int) -> bool:
        """Record that a host has written a file of a checkpoint to the target, and wait until the checkpoint is kept if
        it is whole now; return False if that takes longer than LOOK_LIMIT_S. Raises Outdated as `put` does."""
        self._refuse_outdated(offered, fence)
        self._refuse_unordered(offered)
        self.to_look, self.written = True, self.written + 1
        mine, until = self.written, time.monotonic() + LOOK_LIMIT_S
        while self.looked < mine and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
        return self.looked >= mine

    async def put(self, offered: Checkpoint, fence: Callable[[], int],
                  chunks: AsyncIterator[bytes]) -> Checkpoint | None:
        """Keep `offered`, a file of a checkpoint or a tar, once its bytes are here and have its digest. Returns the
        checkpoint that is whole by it, None while other files are missing. Raises Outdated for generations below
        `fence`, NoRoom when the disk refuses; then no data remains."""
        self._refuse_outdated(offered, fence())
        self._refuse_unordered(offered)
        same = next((c for c in self._kept if name_of(c) == name_of(offered)), None)
        if same is not None and self.is_good(same) and (offered.name or same.digest == offered.digest):
            async for _ in chunks:  # resent after a lost answer; the sender expects its body to be read
                pass
            return None if offered.name else same
        try:
            receiving = self._receive_piece if offered.name else self._receive
            return await receiving(offered, fence, chunks)
        except BaseException as error:
            if not offered.name and all(name_of(c) != name_of(offered) for c in self._kept):
                self.path(offered).unlink(missing_ok=True)
            if isinstance(error, ConnectionError) or not isinstance(error, (OSError, DiskFull)):
                raise  # the sender's end
            self.problem = f"checkpoint {offered.version} cannot be kept: {getattr(error, 'strerror', '') or error}"
            raise NoRoom(f"{self.problem} ({self.folder})", hint="make room on the dispatcher's disk") from error

    async def _receive_piece(self, offered: Checkpoint, fence: Callable[[], int],
                             chunks: AsyncIterator[bytes]) -> Checkpoint | None:
        self._refuse_overtaken(offered)
        if self.parts.holds(offered):
            async for _ in chunks:
                pass
        else:
            arrival = self.parts.arrival(offered)
            limit_bytes = MANIFEST_BYTES if offered.name == MANIFEST else LIMIT_BYTES
            await receive(chunks, arrival, limit_bytes, offered.digest)
            try:
                self._refuse_outdated(offered, fence())
                self._refuse_overtaken(offered)
                self.parts.keep(offered, arrival)
                self.to_look = self.to_look or bool(self.target)  # other files of it may be at the target
            finally:
                arrival.unlink(missing_ok=True)
        return await self.join(offered, fence)

    async def join(self, wanted: Checkpoint, fence: Callable[[], int]) -> Checkpoint | None:
        """Make the checkpoint to which `wanted` belongs whole, if all its files are here; None if some are missing or
        that was done already. Raises Outdated, or OSError without room for names."""
        async with self._joining:
            found = [one for one in self.parts.ready() if name_of(one.manifest) == name_of(wanted)]
            if not found:
                return None
            draft = self.folder / f".{name_of(wanted)}.joined.part"  # `files.sweep` knows such names
            try:
                whole = await asyncio.to_thread(assemble, found[0], draft)
                self._refuse_outdated(whole, fence())
                self._refuse_overtaken(whole)
                remove(self.path(whole))  # damaged; its files are in the draft again
                atomic.rename(draft, self.path(whole), sync=False)  # `add` syncs the folder
                self.add(whole)
                self.parts.has_joined(whole)
            except PieceDamaged as error:
                if found[0].manifest not in [one.manifest for one in self.parts.ready()]:
                    return None  # a newer checkpoint arrived meanwhile, and these files were removed
                self.lose(error.piece, error.what)
                self.parts.forget(error.piece)
                return None
            finally:
                remove(draft)
            return whole

    def add_at_target(self, whole: Checkpoint, fence: int) -> None:
        """Add a checkpoint whose files are at the target alone. Raises Outdated, or OSError without room for its
        record."""
        self._refuse_outdated(whole, fence)
        self._refuse_overtaken(whole)
        self.add(whole)
        self.parts.has_joined(whole)

    @property
    def slow(self) -> str:
        """Message for users while hosts are slower than the interval of checkpoints; else empty."""
        times = self.parts.stretch
        return f"hosts bring checkpoints slower than they are made: {times} times the interval for now" * (times > 1)

    def prune_parts(self, fence: int) -> None:
        """Drop pieces that can never become whole: a later generation or a newer checkpoint exists."""
        newest = age(self.newest) if self.newest else (fence, -1)
        self.parts.prune(lambda its: its[0] < fence or its <= newest)

    async def _receive(self, offered: Checkpoint, fence: Callable[[], int], chunks: AsyncIterator[bytes]) -> Checkpoint:
        size = await receive(chunks, self.path(offered), LIMIT_BYTES, offered.digest)
        kept = replace(offered, bytes=size, path="")
        self._refuse_outdated(kept, fence())  # a newer one may have begun or arrived during the transfer
        self.add(kept)
        return kept

    def receive_reports(self, reports: Iterable[WorkerReport], fence: int, generation: int) -> None:
        """Process workers' reports about checkpoints in the object store, which repeat. `generation`: the newest."""
        reports = list(reports) if self.url else []
        for made in [r.checkpoint for r in reports if r.checkpoint is not None]:
            if not self._is_news(made, fence):
                continue
            by_number = self.seals is None or self.seals.takes_unsealed
            if not (made.generation <= generation if by_number else self._was_ordered(made)):
                self.refuse(made, unordered(made))
            else:
                self._note(replace(made, path="", part=0, parts=1))
        for report in [r for r in reports if r.damaged is not None]:
            for kept in [c for c in self._kept if c.url and _is(c, report.damaged)]:
                why = f": {report.damaged_why}" if report.damaged_why else ""
                self.set_aside(kept, f"{report.worker} could not use it{why}")

    def _is_news(self, made: Checkpoint, fence: int) -> bool:
        own = made.url.startswith(f"{self.url}/") and ".." not in made.url and made.parts == 1
        if not own or not SHA256.fullmatch(made.digest) or (name_of(made), made.digest) in self._useless:
            return False
        overtaken = len(self._kept) >= self.keep and age(made) < age(self._kept[0])
        floor = max(fence, self.newest.generation if self.newest else 0)
        return not overtaken and made.generation >= floor and all(name_of(c) != name_of(made) for c in self._kept)

    def _note(self, made: Checkpoint) -> None:
        try:
            self.add(made)
        except (OSError, DiskFull) as error:
            self.problem = f"checkpoint {made.version} cannot be written down: {error}"  # the worker reports it again
            return
        self._news.append(lambda job, unix: CheckpointKept(unix, job, made.version, made.generation, made.digest,
                                                           made.bytes, made.url))

    def _refuse_unordered(self, offered: Checkpoint) -> None:
        if not self._was_ordered(offered):
            self.refuse(offered, unordered(offered))
            raise Outdated(f"a checkpoint of generation {offered.generation} is refused: {unordered(offered)}",
                           hint="the host that sends it may be compromised: `spotfleet revoke HOST`")

    def _was_ordered(self, made: Checkpoint) -> bool:
        return self.seals is None or self.seals.was_ordered(made)

    def _refuse_outdated(self, offered: Checkpoint, fence: int) -> None:
        newest = self.newest
        floor = max(fence, newest.generation if newest else 0)
        if offered.generation < floor:
            raise Outdated(f"a checkpoint of generation {offered.generation} is refused: generation {floor} has begun",
                           hint="this worker was replaced; it should end")

    def _refuse_overtaken(self, part: Checkpoint) -> None:
        newest = self.newest
        if newest is not None and age(part) <= age(newest):
            raise Outdated(f"a file of checkpoint {part.version} is refused: checkpoint {newest.version} is kept",
                           hint="the newer one counts")

    def add(self, kept: Checkpoint) -> None:
        """Add a checkpoint whose verified files are at `path`, or which is in an object store."""
        kept = self.seals.sealed(kept) if self.seals is not None else kept
        write_json(self._record(kept), to_json(kept))
        self._good[name_of(kept)] = seen_at(self.path(kept)) or (0, 0)
        others = [c for c in self._kept if c.version != kept.version]
        dropped = [c for c in self._kept if c.version == kept.version and name_of(c) != name_of(kept)]
        ordered = sorted([*others, kept], key=age)
        self._kept = ordered[-self.keep:]
        self.problem = ""
        for old in [*dropped, *ordered[:-self.keep]]:
            self._forget(old)
        self.prune_parts(kept.generation)

    # ---- verification

    def is_good(self, checkpoint: Checkpoint) -> bool:
        return bool(checkpoint.url) or self._good.get(name_of(checkpoint)) == seen_at(self.path(checkpoint)) is not None

    def unsure(self) -> list[Checkpoint]:
        """Return the checkpoints whose digest must be checked, newest first."""
        return [c for c in reversed(self._kept) if not self.is_good(c)]

    def report_damaged(self, version: int, digest: str, now: float) -> None:
        """Record that a host found the data of this version damaged. `now` is monotonic."""
        for kept in self._kept:
            checked_at = self._checked_at.get(name_of(kept), now - DOUBT_S)
            if (kept.version, kept.digest) == (version, digest) and now - checked_at >= DOUBT_S:
                self.recheck(kept)
                self._checked_at[name_of(kept)] = now

    def recheck(self, checkpoint: Checkpoint) -> None:
        """Mark the checkpoint as unsure, so that its file is read again."""
        self._good.pop(name_of(checkpoint), None)

    async def check(self, checkpoint: Checkpoint) -> bool:
        """Read the file and return whether it is whole; set a damaged one aside."""
        path = self.path(checkpoint)
        before = seen_at(path)
        try:
            problem = await asyncio.to_thread(_problem, path, checkpoint)
        except OSError as error:
            log.warning("%s: %s", path, error)
            problem = f"its file {path.name} is unreadable: {error.strerror or error}"
        if checkpoint not in self._kept or seen_at(path) != before:
            return self.is_good(checkpoint)  # pruned meanwhile, or replaced by another file, which has its own check
        if not problem:
            if before is not None:
                self._good[name_of(checkpoint)] = before
            return True
        self.set_aside(checkpoint, problem)
        return False

    def set_aside(self, checkpoint: Checkpoint, why: str) -> None:
        self._kept = [c for c in self._kept if c != checkpoint]
        self.lose(checkpoint, why)
        path = self.path(checkpoint)
        for older in self.folder.glob("*.corrupt"):
            remove(older)
        if path.exists():
            atomic.rename(path, path.with_name(f"{path.name}.corrupt"), sync=False)
        if checkpoint.url and not lies_at_target(checkpoint):  # its writer goes on reporting it
            self._useless.add((name_of(checkpoint), checkpoint.digest))
            record = self._record(checkpoint)
            atomic.rename(record, record.with_suffix(".json.lost"), sync=False)
        self._forget(checkpoint)

    def refuse(self, checkpoint: Checkpoint, why: str) -> None:
        """Record that a checkpoint which somebody has put forward does not count, once."""
        key = (name_of(checkpoint), checkpoint.digest)
        if key not in self._refused and len(self._refused) < MOST_REFUSALS:
            self._refused.add(key)
            self.lose(checkpoint, why, "is refused:")

    def take_news(self, job: str, unix: float) -> list[Event]:
        """Return the events since the last call: checkpoints set aside, or added in an object store."""
        news, self._news = self._news, []
        return [event(job, unix) for event in news]

    def lose(self, checkpoint: Checkpoint, why: str, verdict: str = "was set aside, for") -> None:
        """Record the loss of a checkpoint, as event and as message."""
        newest = self.newest
        then = f"{newest.version} is the newest whole one" if newest else "no whole one is left"
        self.problem = f"checkpoint {checkpoint.version} {verdict} {why}; {then}"
        self._news.append(lambda job, unix: CheckpointLost(unix, job, checkpoint.version, checkpoint.generation,
                                                           checkpoint.digest, why))
        log.error("%s: %s", self.folder, self.problem)

    # ---- disk

    def _record(self, checkpoint: Checkpoint) -> Path:
        return self.folder / f"{name_of(checkpoint)}.json"

    def _forget(self, checkpoint: Checkpoint) -> None:
        remove(self.path(checkpoint))
        self._record(checkpoint).unlink(missing_ok=True)
        self._good.pop(name_of(checkpoint), None)
        self._checked_at.pop(name_of(checkpoint), None)

    def _load(self) -> list[Checkpoint]:
        """Load the checkpoints, wherever the last process was killed. A record without its file, or a file without its
        record, is a rest of pruning if `keep` newer ones exist, else damage."""
        records = {p.stem: read_record(p) for p in self.folder.glob("*.json")}
        found = sorted((c for name, c in records.items() if c is not None and name_of(c) == name), key=age)
        self._kept = [c for c in found if c.url or self.path(c).exists()][-self.keep:]
        oldest = age(self._kept[0]) if len(self._kept) == self.keep else (-1, -1)
        names = {*records, *(p.stem for p in self.folder.glob("*.ckpt")), *(p.name for p in self.folder.glob("*-*"))}
        ready = {name_of(one.manifest) for one in self.parts.ready()}  # killed before the record: made whole again
        for rest in filter(None, map(named, sorted(names - {name_of(c) for c in self._kept}))):
            rest = replace(rest, name=MANIFEST if (self.folder / name_of(rest)).is_dir() else "")
            if age(rest) < oldest or name_of(rest) in ready:
                self._forget(rest)
            elif (record := records.get(name_of(rest))) is not None:
                self.set_aside(rest, f"its file {self.path(record).name} is missing")
            else:
                self.set_aside(rest, f"its record {name_of(rest)}.json cannot be read")
        self.prune_parts(0)
        return self._kept


def _is(one: Checkpoint, other: Checkpoint | None) -> bool:
    return other is not None and (name_of(one), one.digest) == (name_of(other), other.digest)


def _problem(path: Path, checkpoint: Checkpoint) -> str:
    """Return what is wrong with the files of a checkpoint, as a clause; "" if nothing is. Blocking."""
    if not path.exists():
        return f"its file {path.name} is missing"
    if path.is_dir():
        problem = problem_in(path, checkpoint.digest)
        return problem and f"its file {path.name}/{problem}"
    found = digest_of(path)
    return "" if found == checkpoint.digest else \
        f"its file {path.name} has sha256 {found[:12]}, not the one that it came with"
