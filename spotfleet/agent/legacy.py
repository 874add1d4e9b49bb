"""What this host has and no dispatcher takes: kept aside while none is heard, brought to the target at the end.

    HOME/legacy/JOB-GENERATION-VERSION.ckpt    a hard link, with a `Kept` in the .json beside it, written last

Where several ranks write one checkpoint, each host has its workers' parts; of these the newest two versions are kept,
because the other parts of the newest may be lost with their hosts.

In the target (see `durable.py`) a checkpoint is where a dispatcher looks for it, and what a worker's process left, its
output folder and its log, is jobs/JOB/left/WORKER.tar.gz.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import os
import tarfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from spotfleet.agent.boot import Boot
from spotfleet.agent.bundles import folder_name
from spotfleet.codec import from_json, to_json
from spotfleet.durable import Durable, checkpoint_name, part_name
from spotfleet.messages import Checkpoint, dump

log = logging.getLogger("spotfleet.agent")

FIRST_AGAIN_S, LAST_AGAIN_S = 0.25, 5.0
STORED = 2  # of each job at most as many are left in the target by one host, which may be alone for an hour
PARTED = 2  # versions in parts that are kept here
LOST_NAMES = 5  # of files that are named when they are lost


@dataclass(frozen=True)
class Kept:
    job: str
    checkpoint: Checkpoint  # its path is ours

    @property
    def age(self) -> tuple[int, int, int]:
        """Greater counts more: of one version, that in fewer parts."""
        return self.checkpoint.generation, self.checkpoint.version, -self.checkpoint.parts

    @property
    def what(self) -> str:
        made = self.checkpoint
        part = f"part {made.part} of {made.parts} of " if made.parts > 1 else ""
        return f"{part}checkpoint {made.version}"


class Legacy:
    def __init__(self, boot: Boot, home: Path) -> None:
        self._home, self._folder, self._target = home, home / "legacy", boot.target
        in_store = "://" in boot.target  # workers write there, and no agent
        self._durable = Durable(boot.target, boot.fleet, boot.ca) if boot.target and not in_store else None
        self._no_target = f"{boot.target} takes checkpoints alone" if in_store else "the fleet has no checkpoint.target"
        self._kept = sorted(self._read(), key=lambda k: k.age)
        self._stored: list[Kept] = []  # by us, oldest first
        self._writing = threading.Lock()  # one that nobody waits for any more may still be at it
        self.trouble = ""  # why something is not in the target yet

    def kept(self) -> list[Kept]:
        """The newest checkpoint of each job that no dispatcher has taken, or parts of the newest two; oldest first."""
        return list(self._kept)

    def keep(self, job: str, made: Checkpoint) -> None:
        """A worker has written `made`, and nobody may be there to fetch it."""
        part = f"-{made.part}-{made.parts}" if made.parts > 1 else ""
        path = self._folder / f"{folder_name(job)}-{made.generation}-{made.version}{part}.ckpt"
        kept, mine = Kept(job, replace(made, path=str(path))), [k for k in self._kept if k.job == job]
        known = any(k.age > kept.age or k.checkpoint.path == str(path) for k in mine)
        if known or not made.path or made.url:
            return
        try:
            self._folder.mkdir(exist_ok=True, mode=0o700)
            path.unlink(missing_ok=True)
            os.link(made.path, path)
            _write(path.with_suffix(".json"), json.dumps(to_json(kept)))
        except OSError as error:  # such as a worker that has removed it for a newer one
            self._say(f"checkpoint {made.version} of {job}: {error}")
            return
        self._kept = sorted([*self._kept, kept], key=lambda k: k.age)
        ages = sorted({k.age for k in mine} | {kept.age})
        oldest = ages[-PARTED:][0] if made.parts > 1 else kept.age
        for old in [k for k in mine if k.age < oldest]:
            self.drop(old)

    def drop(self, kept: Kept) -> None:
        """A dispatcher has it, or newer ones are here."""
        self._kept = [k for k in self._kept if k != kept]
        self._remove(kept)

    @property
    def unstored(self) -> str:
        """What is still to be brought to the target, in words; "" without a target."""
        left = [k for k in self.kept() if k not in self._stored] if self._durable else []
        return f"{left[0].what}: {self.trouble or 'on its way'}" if left else ""

    async def store(self) -> None:
        """Bring to the target what is kept, and what will be, until cancelled."""
        again_s = FIRST_AGAIN_S
        while self._durable is not None:
            for kept in [k for k in self.kept() if k not in self._stored]:
                try:
                    await aside(lambda kept=kept: self._put(kept), self._writing)
                except OSError as error:
                    self._say(f"the target {self._target} cannot be written: {error}")
                    again_s = min(2 * again_s, LAST_AGAIN_S)
                    continue
                log.info("%s of %s is in %s", kept.what, kept.job, self._target)
                self._stored.append(kept)
                self.trouble, again_s = "", FIRST_AGAIN_S
            await asyncio.sleep(again_s)

    async def leave(self, bound_s: float) -> None:
        """Bring what ended workers left to the target, within `bound_s`, and say what is lost."""
        folders = [f for f in sorted(self._home.glob("jobs/*/workers/*")) if _files(f)]
        lost = [f"{k.what} of {k.job} ({k.checkpoint.bytes} bytes)" for k in self.kept() if k not in self._stored]
        try:
            async with asyncio.timeout(bound_s):
                while self._durable is not None and folders:
                    await aside(lambda: self._put_worker(folders[0]), self._writing)
                    del folders[0]
        except (OSError, TimeoutError) as error:
            self._say(f"the target {self._target} cannot be written: {error or type(error).__name__}")
        lost += [f"output of {f.name}: {', '.join(_files(f / 'output')[:LOST_NAMES])}" for f in folders
                 if _files(f / "output")]
        for what in lost:
            log.error("lost with this host, as no dispatcher was there and %s: %s",
                      "its target cannot be written" if self._durable else self._no_target, what)

    def _put(self, kept: Kept) -> None:
        made, durable = kept.checkpoint, self._reachable()
        if made.parts > 1:
            if durable.find(part_name(kept.job, made)) is None:
                durable.put(part_name(kept.job, made), Path(made.path))
        else:
            _put_whole(durable, kept)
        mine = [k for k in self._stored if k.job == kept.job]
        ages = sorted({k.age for k in mine} | {kept.age})
        for old in [k for k in mine if k.age not in ages[-STORED:]]:
            _drop(durable, old)

    def _put_worker(self, folder: Path) -> None:
        durable, packed = self._reachable(), folder.with_name(f"{folder.name}.tar.gz")
        with tarfile.open(packed, "w:gz", compresslevel=1) as tar:
            for name in ("output", "log"):
                if (folder / name).exists():
                    tar.add(folder / name, arcname=name)
        durable.put(f"jobs/{folder.parents[1].name}/left/{packed.name}", packed)
        packed.unlink()

    def _reachable(self) -> Durable:
        """OSError where the target is not mounted: what is made on this host's own disk is gone with it."""
        if not Path(self._target).is_dir():
            raise FileNotFoundError(f"{self._target} is no folder on this host")
        assert self._durable is not None
        return self._durable

    def _say(self, trouble: str) -> None:
        if trouble != self.trouble:
            log.warning("%s", trouble)
        self.trouble = trouble

    def _remove(self, kept: Kept) -> None:
        path = Path(kept.checkpoint.path)
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def _read(self) -> list[Kept]:
        found = []
        for path in self._folder.glob("*.json"):
            try:
                found.append(from_json(Kept, json.loads(path.read_text())))
            except ValueError as error:
                log.warning("%s is not used: %s", path, error)
        return [k for k in found if Path(k.checkpoint.path).is_file()]


def _put_whole(durable: Durable, kept: Kept) -> None:
    made = kept.checkpoint
    name = checkpoint_name(kept.job, made.version, made.generation)
    about, record = dump(replace(made, path="")).encode(), str(Path(name).with_suffix(".json"))
    there = durable.find(record)
    if there is None or there.read_bytes() != about or durable.find(name) is None:
        durable.put(name, Path(made.path))
        durable.write(record, about)


def _drop(durable: Durable, old: Kept) -> None:
    if old.checkpoint.parts > 1:
        return durable.drop(part_name(old.job, old.checkpoint))
    name = checkpoint_name(old.job, old.checkpoint.version, old.checkpoint.generation)
    durable.drop(str(Path(name).with_suffix(".json")))
    return durable.drop(name)


def aside(work: Callable[[], None], alone: threading.Lock) -> asyncio.Future[None]:
    """`work` in a thread for which the end of this process does not wait, however dead a file system is."""
    done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            with alone:
                done.set_result(work())
        except OSError as error:
            done.set_exception(error)

    threading.Thread(target=run, name="legacy", daemon=True).start()
    return asyncio.wrap_future(done)


def _files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else []


def _write(path: Path, text: str) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.replace(path)
