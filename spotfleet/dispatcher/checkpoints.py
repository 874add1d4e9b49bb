"""A job's checkpoints on the dispatcher's disk: the newest `keep`, and none of a generation that has been replaced.

    checkpoints/VERSION-GENERATION.ckpt
    checkpoints/VERSION-GENERATION.json          its record with the digest, written after it
    checkpoints/VERSION-GENERATION.ckpt.corrupt  the last one that was set aside
    checkpoints/VERSION-GENERATION.parts/        parts of one that several ranks write: `parts.py` joins them
    checkpoints/VERSION-GENERATION.json.lost     one in an object store that workers could not use

Those in an object store have a record here and no file: workers write, check and remove them there. They come by
reports, are good until a worker says otherwise, and in all else stand among the others.

        arrives with its digest --> good --size or time has changed, or a host doubts it--> unsure
                                     ^                                                         |
    read after a restart --> unsure -'-- `check`: the digest is right ---------- wrong, or no file --> set aside

Only a good one is offered for a restore. Where one is set aside the next older takes its place.
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
from spotfleet.dispatcher.files import receive, write_json
from spotfleet.dispatcher.parts import PartDamaged, Parts, join
from spotfleet.dispatcher.records import Seen, age, digest_of, name_of, named, read_record, seen_at
from spotfleet.errors import DiskFull, SpotfleetError
from spotfleet.fleet.events import CheckpointKept, CheckpointLost, Event
from spotfleet.messages import Checkpoint, WorkerReport

log = logging.getLogger(__name__)
LIMIT_BYTES = 256 << 30
SHA256 = re.compile("[0-9a-f]{64}")
DOUBT_S = 30.0  # a host's doubts make us read a file again so often at most


class Outdated(SpotfleetError):
    """The checkpoint belongs to a generation that has been replaced; its writer must not go on with it."""


class NoRoom(DiskFull):
    """The disk does not take it; it is not kept, and its sender tries again."""


@dataclass(frozen=True)
class Offer:
    """What workers that hold no state shall do."""

    checkpoint: Checkpoint | None = None  # restore this one; None: begin with what the script builds
    wait: str = ""  # neither yet: what for


class CheckpointStore:
    """Belongs to the event loop; large files are read in threads."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = max(1, keep)
        self.problem = ""  # what a user should know; empty once another has been kept
        self.remark = ""  # what a user should know of the target
        self.target = ""  # where hosts that lost their dispatcher may have left a newer one
        self.url = ""  # the job's folder in an object store, if workers write there
        self.awaited = False  # one lay there when this machine took over: nothing is begun anew before it is asked
        self.seeking = ""
        self.seeks_since = 0.0  # monotonic
        self._needed = self._looked = False
        self._good: dict[str, Seen] = {}  # names whose digest was right, and what they looked like then
        self._checked_at: dict[str, float] = {}
        self._news: list[Callable[[str, float], Event]] = []
        self._useless = {(name_of(c), c.digest) for c in map(read_record, folder.glob("*.json.lost")) if c is not None}
        self._joining = asyncio.Lock()
        self.parts = Parts(folder)
        self._kept = self._load()

    @property
    def newest(self) -> Checkpoint | None:
        """As far as is known: a file is read when it is needed, or has changed."""
        return self._kept[-1] if self._kept else None

    @property
    def newest_version(self) -> int:
        """0: none is kept."""
        return self._kept[-1].version if self._kept else 0

    @property
    def kept(self) -> tuple[Checkpoint, ...]:
        """Oldest first."""
        return tuple(self._kept)

    def find(self, version: int) -> Path | None:
        """The file of this version; None when it is not kept."""
        kept = next((c for c in self._kept if c.version == version and self.path(c).is_file()), None)
        return self.path(kept) if kept else None

    def path(self, checkpoint: Checkpoint) -> Path:
        return self.folder / f"{name_of(checkpoint)}.ckpt"

    def need(self, needed: bool) -> None:
        """Does nobody hold the job's state? Then the target is looked at once more, before anything is offered."""
        if needed and not self._needed:
            self._looked, self.seeking = not self.target, f"looks for a newer checkpoint at {self.target}"
            self.seeks_since = time.monotonic()
        self._needed = needed

    @property
    def seeks(self) -> bool:
        return self._needed and not self._looked

    def has_looked(self) -> None:
        self._looked = True

    def offer(self) -> Offer:
        """What to restore now."""
        if self.seeks:
            return Offer(wait=self.seeking)
        newest = self.newest
        if newest is not None and not self.is_good(newest):
            return Offer(wait=f"reads checkpoint {newest.version} to see that it is whole")
        return Offer(newest)

    # ---- arrival

    async def put(self, offered: Checkpoint, fence: Callable[[], int], chunks: AsyncIterator[bytes]) -> Checkpoint:
        """Keep `offered` once its bytes are here and have its digest; Outdated for generations below `fence`, NoRoom
        when the disk refuses. Nothing is left of what is not kept. The last part of one returns the whole."""
        self._refuse_outdated(offered, fence())
        same = next((c for c in self._kept if name_of(c) == name_of(offered)), None)
        if same is not None and self.is_good(same) and (offered.parts > 1 or same.digest == offered.digest):
            async for _ in chunks:  # sent again after a lost answer; the sender expects its body to be read
                pass
            return same if offered.parts == 1 else offered
        try:
            receiving = self._receive if offered.parts == 1 else self._receive_part
            return await receiving(offered, fence, chunks)
        except BaseException as error:
            if all(name_of(c) != name_of(offered) for c in self._kept):
                self.path(offered).unlink(missing_ok=True)
            if isinstance(error, ConnectionError) or not isinstance(error, (OSError, DiskFull)):
                raise  # the sender's end
            self.problem = f"checkpoint {offered.version} cannot be kept: {getattr(error, 'strerror', '') or error}"
            raise NoRoom(f"{self.problem} ({self.folder})", hint="make room on the dispatcher's disk") from error

    async def _receive_part(self, offered: Checkpoint, fence: Callable[[], int],
                            chunks: AsyncIterator[bytes]) -> Checkpoint:
        self._refuse_overtaken(offered)
        if self.parts.holds(offered):
            async for _ in chunks:
                pass
        else:
            arrival = self.parts.arrival(offered)
            await receive(chunks, arrival, LIMIT_BYTES, offered.digest)
            try:
                self._refuse_outdated(offered, fence())
                self._refuse_overtaken(offered)
                offered = self.parts.keep(offered, arrival)
            finally:
                arrival.unlink(missing_ok=True)
        return await self.join(offered, fence) or offered

    async def join(self, wanted: Checkpoint, fence: Callable[[], int]) -> Checkpoint | None:
        """Make the checkpoint that `wanted` is a part of whole, if all parts are here; None if somebody else has or
        some are missing. Outdated, or OSError or DiskFull where there is no room, as for a whole one."""
        async with self._joining:
            found = [p for p in self.parts.ready() if name_of(p[0]) == name_of(wanted)]
            if not found:
                return None
            draft = self.folder / f".{name_of(wanted)}.joined.part"  # `files.sweep` knows such names
            try:
                whole = await asyncio.to_thread(join, found[0], draft)
                self._refuse_outdated(whole, fence())
                self._refuse_overtaken(whole)
                draft.replace(self.path(whole))
                self.add(whole)
                self.parts.has_joined(whole)
            except PartDamaged as error:
                if found[0] not in self.parts.ready():
                    return None  # a newer one has come meanwhile, and these went
                self.problem = str(error)
                log.error("%s: %s", self.folder, error)
                self.parts.forget(error.part)
                return None
            finally:
                draft.unlink(missing_ok=True)
            return whole

    @property
    def slow(self) -> str:
        """What a user should know, where hosts do not keep up."""
        times = self.parts.stretch
        return f"hosts bring checkpoints slower than they are made: {times} times the interval for now" * (times > 1)

    def prune_parts(self, fence: int) -> None:
        """Drop those that can never become whole: their generation, or they, were overtaken."""
        newest = age(self.newest) if self.newest else (fence, -1)
        self.parts.prune(lambda its: its[0] < fence or its <= newest)

    async def _receive(self, offered: Checkpoint, fence: Callable[[], int], chunks: AsyncIterator[bytes]) -> Checkpoint:
        size = await receive(chunks, self.path(offered), LIMIT_BYTES, offered.digest)
        kept = replace(offered, bytes=size, path="")
        self._refuse_outdated(kept, fence())  # a newer one may have come, or begun, while this one was on its way
        self.add(kept)
        return kept

    def hear(self, reports: Iterable[WorkerReport], fence: int, generation: int) -> None:
        """Take what workers say of checkpoints in the object store; each says it again and again. `generation`: the
        newest there is."""
        reports = list(reports) if self.url else []
        for made in [r.checkpoint for r in reports if r.checkpoint is not None]:
            if self._is_news(made, fence) and made.generation <= generation:
                self._note(replace(made, path="", part=0, parts=1))
        for report in [r for r in reports if r.damaged is not None]:
            for kept in [c for c in self._kept if c.url and _is(c, report.damaged)]:
                self.set_aside(kept, f"{report.worker} could not use it")

    def _is_news(self, made: Checkpoint, fence: int) -> bool:
        ours = made.url.startswith(f"{self.url}/") and ".." not in made.url and made.parts == 1
        if not ours or not SHA256.fullmatch(made.digest) or (name_of(made), made.digest) in self._useless:
            return False
        overtaken = len(self._kept) >= self.keep and age(made) < age(self._kept[0])
        floor = max(fence, self.newest.generation if self.newest else 0)
        return not overtaken and made.generation >= floor and all(name_of(c) != name_of(made) for c in self._kept)

    def _note(self, made: Checkpoint) -> None:
        try:
            self.add(made)
        except (OSError, DiskFull) as error:
            self.problem = f"checkpoint {made.version} cannot be written down: {error}"  # it is told again
            return
        self._news.append(lambda job, unix: CheckpointKept(unix, job, made.version, made.generation, made.digest,
                                                           made.bytes, made.url))

    def _refuse_outdated(self, offered: Checkpoint, fence: int) -> None:
        newest = self.newest
        floor = max(fence, newest.generation if newest else 0)
        if offered.generation < floor:
            raise Outdated(f"a checkpoint of generation {offered.generation} is refused: generation {floor} has begun",
                           hint="this worker was replaced; it should end")

    def _refuse_overtaken(self, part: Checkpoint) -> None:
        newest = self.newest
        if newest is not None and age(part) <= age(newest):
            raise Outdated(f"a part of checkpoint {part.version} is refused: checkpoint {newest.version} is kept",
                           hint="the newer one counts")

    def add(self, kept: Checkpoint) -> None:
        """Its file lies at `path` and has been found right, or it lies in an object store."""
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

    # ---- trust

    def is_good(self, checkpoint: Checkpoint) -> bool:
        return bool(checkpoint.url) or self._good.get(name_of(checkpoint)) == seen_at(self.path(checkpoint)) is not None

    def unsure(self) -> list[Checkpoint]:
        """Those whose digest is to be checked, newest first."""
        return [c for c in reversed(self._kept) if not self.is_good(c)]

    def doubt(self, version: int, digest: str, now: float) -> None:
        """A host could not make this version out of what we send. `now` is monotonic."""
        for kept in self._kept:
            checked_at = self._checked_at.get(name_of(kept), now - DOUBT_S)
            if (kept.version, kept.digest) == (version, digest) and now - checked_at >= DOUBT_S:
                self.suspect(kept)
                self._checked_at[name_of(kept)] = now

    def suspect(self, checkpoint: Checkpoint) -> None:
        """Have it read again."""
        self._good.pop(name_of(checkpoint), None)

    async def check(self, checkpoint: Checkpoint) -> bool:
        """Read the file; whether it is whole. One that is not is set aside."""
        path = self.path(checkpoint)
        before = seen_at(path)
        try:
            found = await asyncio.to_thread(digest_of, path)
        except FileNotFoundError:
            found = ""
        except OSError as error:
            log.warning("%s: %s", path, error)
            found = f"unreadable: {error.strerror or error}"
        if checkpoint not in self._kept or seen_at(path) != before:
            return self.is_good(checkpoint)  # pruned meanwhile, or another file: that one is looked at by itself
        if found == checkpoint.digest:
            if before is not None:
                self._good[name_of(checkpoint)] = before
            return True
        self.set_aside(checkpoint, f"its file {_said(found)}")
        return False

    def set_aside(self, checkpoint: Checkpoint, why: str) -> None:
        self._kept = [c for c in self._kept if c != checkpoint]
        self.lose(checkpoint, why)
        path = self.path(checkpoint)
        for older in self.folder.glob("*.corrupt"):
            older.unlink(missing_ok=True)
        if path.exists():
            path.replace(path.with_name(f"{path.name}.corrupt"))
        if checkpoint.url:  # its writer goes on reporting it
            self._useless.add((name_of(checkpoint), checkpoint.digest))
            self._record(checkpoint).replace(self._record(checkpoint).with_suffix(".json.lost"))
        self._forget(checkpoint)

    def take_news(self, job: str, unix: float) -> list[Event]:
        """What has been set aside, or noted of an object store, since the last call."""
        news, self._news = self._news, []
        return [event(job, unix) for event in news]

    def lose(self, checkpoint: Checkpoint, why: str) -> None:
        """Remember to tell of one that is of no use any more."""
        newest = self.newest
        then = f"{newest.version} is the newest whole one" if newest else "no whole one is left"
        self.problem = f"checkpoint {checkpoint.version} was set aside, for {why}; {then}"
        self._news.append(lambda job, unix: CheckpointLost(unix, job, checkpoint.version, checkpoint.generation,
                                                           checkpoint.digest, why))
        log.error("%s: %s", self.folder, self.problem)

    # ---- disk

    def _record(self, checkpoint: Checkpoint) -> Path:
        return self.folder / f"{name_of(checkpoint)}.json"

    def _forget(self, checkpoint: Checkpoint) -> None:
        self.path(checkpoint).unlink(missing_ok=True)
        self._record(checkpoint).unlink(missing_ok=True)
        self._good.pop(name_of(checkpoint), None)
        self._checked_at.pop(name_of(checkpoint), None)

    def _load(self) -> list[Checkpoint]:
        """What lies here, whatever the last process was killed at: a record without its file or the other way round is
        a rest of pruning if `keep` newer ones are there, else damage."""
        records = {p.stem: read_record(p) for p in self.folder.glob("*.json")}
        found = sorted((c for name, c in records.items() if c is not None and name_of(c) == name), key=age)
        self._kept = [c for c in found if c.url or self.path(c).is_file()][-self.keep:]
        oldest = age(self._kept[0]) if len(self._kept) == self.keep else (-1, -1)
        names = {*records, *(p.stem for p in self.folder.glob("*.ckpt"))} - {name_of(c) for c in self._kept}
        joined = {name_of(parts[0]) for parts in self.parts.ready()}  # killed before the record: it is joined again
        for rest in filter(None, map(named, sorted(names))):
            if age(rest) < oldest or name_of(rest) in joined:
                self._forget(rest)
            else:
                readable = records.get(name_of(rest)) is not None
                self.set_aside(rest, "its file is missing" if readable else "its record cannot be read")
        self.prune_parts(0)
        return self._kept


def _is(one: Checkpoint, other: Checkpoint | None) -> bool:
    return other is not None and (name_of(one), one.digest) == (name_of(other), other.digest)


def _said(found: str) -> str:
    if not found:
        return "is missing"
    return f"has sha256 {found[:12]}, not the one that it came with" if len(found) == 64 else f"is {found}"
