"""Attacks on checkpoints by a host that writes to the target, or sends what it likes: each is refused, an event names
it, and the version before is taken."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.codec import to_json
from spotfleet.dispatcher.checkpoints.ledger_restore import SealedJob, _trained
from spotfleet.dispatcher.checkpoints.replica import Replica
from spotfleet.dispatcher.checkpoints.seals import PER_MACHINE, JobSeals, SealKey
from spotfleet.dispatcher.checkpoints.store import CheckpointStore, Outdated
from spotfleet.dispatcher.disk.jobfile import JobRecord
from spotfleet.fleet.domain.events import CheckpointLost
from spotfleet.model import CheckpointSpec, JobSpec
from spotfleet.protocol.messages import JOB_KEY, Checkpoint, WorkerReport, dump
from spotfleet.protocol.proofs import MemberProof
from spotfleet.storage.folder import FolderStore, checkpoint_name, fleet_store, quarantine_name, record_name
from tests.support.dispatcher import checkpoint_sets
from tests.support.dispatcher.fake_fleet import spec
from tests.support.dispatcher.quarantine import point

SECRET, KEY = "the fleet's secret", SealKey("the fleet's secret")
PIECE = "__0_0.distcp"
NEWEST = 5  # generation that was ordered
KEPT = (10, 20, 30)  # versions, of which 20 and 30 are kept


def data_of(version: int, job: str = "a-1") -> bytes:
    return b"state %d of %s" % (version, job.encode())


def files_of(version: int, generation: int = NEWEST, job: str = "a-1") -> dict[str, bytes]:
    return checkpoint_sets.files_of(version, generation, (data_of(version, job),))


LAYOUT = ["folder"]  # that a test uses; "tar": of checkpoints that an earlier release made


@pytest.fixture(autouse=True, params=["folder", "tar"])
def layout(request: pytest.FixtureRequest) -> str:
    LAYOUT[:] = [request.param]
    return LAYOUT[0]


def of(version: int, generation: int = NEWEST, job: str = "a-1") -> Checkpoint:
    if LAYOUT == ["tar"]:
        return point(version, data_of(version, job), generation)
    return checkpoint_sets.whole(files_of(version, generation, job))


@dataclass
class Site:
    """One job's checkpoints at one dispatcher, and the target that several machines share."""

    base: Path
    job: str = "a-1"
    machine: int = 0
    record: JobRecord = field(init=False)

    def __post_init__(self) -> None:
        self.record = JobRecord(self.job, JobSpec(self.job, run="x"), 1.0, seals=True, ordered=NEWEST)
        self.target = self.base / "target"
        self.target.mkdir(exist_ok=True)
        self.boot = SimpleNamespace(spec=spec(1, checkpoint=CheckpointSpec(target=str(self.target))), fleet="f",
                                    ca="CA", host=f"f-d-{self.machine}", fleet_secret=SECRET)
        self.store = CheckpointStore(self.base / f"{self.machine}" / self.job, 2)
        self.store.target = str(self.target)
        self.seals = JobSeals(KEY, self.machine, lambda: self.record, lambda: {JOB_KEY: f"key of {self.job}"})
        self.store.use_seals(self.seals)

    @property
    def there(self) -> FolderStore:
        return fleet_store(str(self.target), "f", "CA")

    def successor(self) -> Site:
        """The next machine, whose disk is empty; it gets the job's record as it was copied to the target."""
        found = Site(self.base, self.job, self.machine + 1)
        found.record = self.record
        return found

    def member(self, generation: int = NEWEST) -> MemberProof:
        return MemberProof(self.job, f"key of {self.job}", KEY.grant(self.job, generation))

    def keep(self, *versions: int) -> Site:
        for version in versions:
            self.receive(of(version, job=self.job))
            self.replicate()
        return self

    def receive(self, made: Checkpoint) -> None:
        async def body(data: bytes):
            yield data

        if not made.name:
            asyncio.run(self.store.put(made, lambda: 0, body(data_of(made.version, self.job))))
        for name, data in files_of(made.version, made.generation, self.job).items() if made.name else ():
            piece = replace(made, name=name, digest=checkpoint_sets.sha(data))
            asyncio.run(self.store.put(piece, lambda: 0, body(data)))

    def replicate(self) -> None:
        replica = Replica(self.boot)
        asyncio.run(replica.copy(self.job, self.store))
        replica.close()
        self.record = replace(self.record, floor=max(self.record.floor, self.store.floor))

    def restore(self) -> tuple[int, list[tuple[int, str]]]:
        """Take what is at the target, as where no worker is left; the version and the checkpoints refused."""
        replica = Replica(self.boot)
        self.store.need(True)
        asyncio.run(replica.fetch_newer(self.job, self.store))
        replica.close()
        lost = [e for e in self.store.take_news(self.job, 1.0) if isinstance(e, CheckpointLost)]
        return self.store.newest_version, [(e.version, e.why) for e in lost]

    def put(self, made: Checkpoint, data: bytes) -> None:
        """Among the kept ones."""
        stem = f"jobs/{self.job}/checkpoints/{made.version}-{made.generation}"
        if made.name:
            for name, content in checkpoint_sets.files_of(made.version, made.generation, (data,)).items():
                self.there.put(f"{stem}/{name}", [content])
        else:
            self.there.put(f"{stem}.ckpt", [data])
        self.there.put(f"{stem}.json", [dump(made).encode()])

    def leave(self, marked: Checkpoint, data: bytes) -> None:
        """In quarantine."""
        if marked.name:
            for name, content in files_of(marked.version, marked.generation, self.job).items():
                piece = replace(marked, name=name, digest=checkpoint_sets.sha(content))
                self.there.put(quarantine_name(self.job, piece), [data if name == PIECE else content])
        else:
            self.there.put(quarantine_name(self.job, marked), [data])
        self.there.put(record_name(quarantine_name(self.job, marked)), [dump(marked).encode()])

    def copy_kept(self, version: int, to: Path) -> None:
        """Copy a kept checkpoint with its record."""
        for path in self.there.folder.glob(f"jobs/{self.job}/checkpoints/{version}-{NEWEST}*"):
            if path.is_dir():
                shutil.copytree(path, to / path.name, dirs_exist_ok=True)
            else:
                to.mkdir(exist_ok=True)
                shutil.copyfile(path, to / path.name)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path).keep(*KEPT)


def kept_record(site: Site, version: int) -> Checkpoint:
    (found,) = [c for c in site.store.kept if c.version == version]
    return found


def planted(site: Site) -> None:
    site.put(of(90), data_of(90))


def sealed_by_itself(site: Site) -> None:
    site.put(SealKey("another secret").sealed(site.job, of(90), PER_MACHINE), data_of(90))


def record_of_other_bytes(site: Site) -> None:
    true = kept_record(site, 30)
    site.put(replace(true, digest=of(90).digest), data_of(90))


def record_of_an_older_one(site: Site) -> None:
    kept = site.there.path(f"jobs/{site.job}/checkpoints")
    shutil.copyfile(kept / f"20-{NEWEST}.json", kept / f"30-{NEWEST}.json")
    if LAYOUT == ["tar"]:
        shutil.copyfile(kept / f"20-{NEWEST}.ckpt", kept / f"30-{NEWEST}.ckpt")
    else:
        shutil.copytree(kept / f"20-{NEWEST}", kept / f"30-{NEWEST}", dirs_exist_ok=True)


def other_bytes(site: Site) -> None:
    tar = checkpoint_name(site.job, 30, NEWEST)
    site.there.put(tar if LAYOUT == ["tar"] else f"{tar.removesuffix('.ckpt')}/{PIECE}", [b"other bytes"])


def another_jobs(site: Site) -> None:
    other = Site(site.base, "b-2").keep(50)
    site.put(kept_record(other, 50), data_of(50, "b-2"))


def left_by_no_member(site: Site) -> None:
    site.leave(of(90), data_of(90))


def left_by_another_jobs_member(site: Site) -> None:
    site.leave(Site(site.base, "b-2").member().marked(of(90)), data_of(90))


def left_in_no_generation(site: Site) -> None:
    forged = replace(site.member(40), grant=KEY.grant(site.job, NEWEST))  # the only one that it was given
    site.leave(forged.marked(of(90, 40)), data_of(90))


def left_with_other_bytes(site: Site) -> None:
    site.leave(site.member().marked(of(90)), b"other bytes")


def another_manifest(site: Site) -> None:
    """Its pieces lie beside it, and the record is the dispatcher's."""
    for name, content in checkpoint_sets.files_of(30, NEWEST, (b"other bytes",)).items():
        site.there.put(f"jobs/{site.job}/checkpoints/30-{NEWEST}/{name}", [content])
    site.there.delete(checkpoint_name(site.job, 30, NEWEST))


def a_part_of_another_job(site: Site) -> None:
    other = Site(site.base, "b-2")
    site.leave(site.member().marked(point(90, b"one", NEWEST, 0, 2)), b"one")
    site.leave(other.member().marked(point(90, b"two", NEWEST, 1, 2)), b"two")


def a_part_with_other_bytes(site: Site) -> None:
    site.leave(site.member().marked(point(90, b"one", NEWEST, 0, 2)), b"one")
    site.leave(site.member().marked(point(90, b"two", NEWEST, 1, 2)), b"too")


@pytest.mark.parametrize(("attack", "version", "refused", "why"), [
    (planted, 30, 90, "its record carries no seal of this fleet's dispatcher for a-1"),
    (sealed_by_itself, 30, 90, "its record carries no seal of this fleet's dispatcher for a-1"),
    (record_of_other_bytes, 20, 30, "its record carries no seal of this fleet's dispatcher for a-1"),
    (record_of_an_older_one, 20, 30, "its record is that of 20-5"),
    (other_bytes, 20, 30, "has another digest"),
    (another_jobs, 30, 50, "its record carries no seal of this fleet's dispatcher for a-1"),
    (left_by_no_member, 30, 90, "it carries no mark of a worker of a-1"),
    (left_by_another_jobs_member, 30, 90, "it carries no mark of a worker of a-1"),
    (left_in_no_generation, 30, 90, "no dispatcher of this fleet has ordered its generation 40"),
    (left_with_other_bytes, 30, 90, "has another digest"),
    (a_part_of_another_job, 30, 90, "it carries no mark of a worker of a-1"),
    (a_part_with_other_bytes, 30, 90, "has another digest"),
    (another_manifest, 20, 30, "manifest.json, has another digest"),
], ids=lambda value: value.__name__ if callable(value) else "")
def test_what_a_host_puts_at_the_target_is_refused_and_the_version_before_is_taken(
        site: Site, attack: Callable[[Site], None], version: int, refused: int, why: str):
    if attack is another_manifest and LAYOUT == ["tar"]:
        pytest.skip("a tar has no manifest")
    attack(site)
    found, lost = site.successor().restore()
    assert (found, [v for v, _ in lost]) == (version, [refused])
    assert why in lost[0][1]


def test_a_refusal_is_a_message_for_people_until_the_next_checkpoint_is_kept(site: Site):
    planted(site)
    later = site.successor()
    later.store.refuse(of(90), "it carries no mark")
    assert later.store.problem == "checkpoint 90 is refused: it carries no mark; no whole one is left"
    later.keep(40)
    assert later.store.problem == ""


@pytest.mark.parametrize(("name", "record"), [
    ("\u00b2-1", {}), ("9" * 200 + "-1", {}), ("90-5", {"mark": "\ud800", "seal": "\ud800"}),
    ("90-5", {"digest": "\x1b[2J"}), ("90-5", {"digest": "x" * 100_000}), ("90-5", {"serial": 10**1000}),
    ("90-5", {"part": -1, "parts": -7}), ("90-5", {"name": "../../../ledger"}), ("90-5", {"name": ".metadata"}),
])
@pytest.mark.parametrize("folder", ["checkpoints", "quarantine"])
def test_no_name_or_record_at_the_target_stops_the_dispatcher(site: Site, name: str, record: dict, folder: str):
    stem = f"jobs/a-1/{folder}/{name}"
    site.there.put(f"{stem}.ckpt", [data_of(90)])
    site.there.put(f"{stem}/.metadata", [data_of(90)])
    site.there.put(f"{stem}.json", [json.dumps({**to_json(of(90)), **record}).encode()])
    later = site.successor()
    assert later.restore()[0] == 30
    later.keep(40)
    assert later.successor().restore()[0] == 40


@pytest.mark.parametrize(("removed", "version"), [((30,), 20), ((20, 30), 0)])
def test_a_version_that_newer_ones_had_replaced_is_not_rolled_back_to(tmp_path: Path, removed: tuple[int, ...],
                                                                      version: int):
    site = Site(tmp_path).keep(10)
    kept = site.there.path(f"jobs/{site.job}/checkpoints")
    site.copy_kept(10, tmp_path / "old")
    site.keep(20, 30)
    assert not list(kept.glob("10-*"))
    for path in [path for gone in removed for path in kept.glob(f"{gone}-*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(tmp_path / "old", kept, dirs_exist_ok=True)
    found, lost = site.successor().restore()
    assert (found, [v for v, _ in lost]) == (version, [10])
    assert "newer ones had replaced it" in lost[0][1]


def test_numbers_of_seals_grow_through_restarts_and_takeovers(site: Site):
    before = [c.serial for c in site.store.kept]
    again = Site(site.base)  # the same machine
    assert [c.serial for c in again.store.kept] == before
    again.keep(40)
    later = site.successor()
    later.restore()
    later.keep(50)
    numbers = [*before, kept_record(again, 40).serial, kept_record(later, 50).serial]
    assert numbers == sorted(set(numbers)) and numbers[-1] > PER_MACHINE > numbers[-2]


def test_a_seal_is_given_above_the_floor_where_this_disk_has_lost_all(site: Site):
    shutil.rmtree(site.store.folder)
    again = Site(site.base)
    again.record = site.record
    again.receive(of(40))
    assert kept_record(again, 40).serial > site.record.floor > 0


@pytest.mark.parametrize("generation", [NEWEST, NEWEST + 1])  # the next was ordered after the record's last copy
def test_what_an_orphan_left_is_taken_by_the_next_dispatcher_and_leaves_quarantine(site: Site, generation: int):
    if LAYOUT == ["folder"]:
        site.leave(site.member(generation).marked(of(90, generation)), data_of(90))
    for part, data in enumerate((b"one", b"two") if LAYOUT == ["tar"] else ()):
        site.leave(site.member(generation).marked(point(90, data, generation, part, 2)), data)
    later = site.successor()
    assert later.restore() == (90, [])
    assert kept_record(later, 90).seal and not kept_record(later, 90).mark
    later.replicate()
    assert later.there.names("jobs/a-1/quarantine") == []
    assert later.successor().restore() == (90, [])


def test_names_at_the_target_do_not_raise_a_jobs_fence_unless_they_count(site: Site):
    planted(site)
    left_in_no_generation(site)
    site.put(of(7, 70), data_of(7))
    job = SealedJob(site.record, {JOB_KEY: "key of a-1"})
    assert _trained(site.there, site.boot, job) == NEWEST
    site.leave(site.member(8).marked(of(95, 8)), data_of(95))
    assert _trained(site.there, site.boot, job) == 8


def test_checkpoints_of_a_job_from_before_the_seals_count_until_one_is_sealed(tmp_path: Path):
    site = Site(tmp_path)
    site.record = replace(site.record, seals=False)
    site.put(of(10), data_of(10))
    for part, data in enumerate((b"one", b"two")):  # by hosts of that release
        made = point(20, data, NEWEST, part, 2)
        site.there.put(f"jobs/a-1/checkpoints/20-{NEWEST}.parts/{part}-2-{made.digest}", [data])
    later = site.successor()
    assert later.restore() == (20, [])
    later.replicate()
    planted(site)
    found, lost = later.successor().restore()
    assert (found, [v for v, _ in lost]) == (20, [90])


def test_of_a_generation_that_was_never_ordered_nothing_is_taken_from_a_host(site: Site):
    with pytest.raises(Outdated, match="no dispatcher of this fleet has ordered its generation 6"):
        site.receive(of(90, NEWEST + 1))
    assert [e.version for e in site.store.take_news("a-1", 1.0)] == [90]
    site.receive(site.member(NEWEST + 1).marked(of(90, NEWEST + 1)))  # ordered by the dispatcher before
    assert site.store.newest_version == 90


def test_a_host_that_invents_names_cannot_fill_the_ledger(site: Site):
    for version in range(100, 200):
        with pytest.raises(Outdated):
            site.receive(of(version, 40))
    assert 0 < len(site.store.take_news("a-1", 1.0)) < 50


def test_of_a_generation_that_was_never_ordered_nothing_counts_in_an_object_store(tmp_path: Path):
    site = Site(tmp_path)
    site.store.url = "s3://bucket/a-1"

    def report(made: Checkpoint) -> None:
        named = replace(made, url=f"s3://bucket/a-1/{made.version}-{made.generation}")
        site.store.receive_reports([WorkerReport("h/0/1", "a-1", checkpoint=named)], 0, 10**6)  # hosts have claimed so

    report(of(20))
    report(of(90, NEWEST + 1))
    assert [c.version for c in site.store.kept] == [20]
    assert [e.version for e in site.store.take_news("a-1", 1.0) if isinstance(e, CheckpointLost)] == [90]
    report(site.member(NEWEST + 1).marked(of(95, NEWEST + 1)))
    assert site.store.newest_version == 95 and json.loads((site.store.folder / "95-6.json").read_text())["seal"]
