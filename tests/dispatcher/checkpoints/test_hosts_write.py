"""Checkpoints whose files hosts write to the mounted target by themselves: the dispatcher judges them, puts them in
place and seals them, and nothing else there counts."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet.dispatcher.checkpoints import replica as replica_module
from spotfleet.dispatcher.checkpoints.archive_files import ArchiveFiles, TargetGlance, _newest_checkpoint
from spotfleet.dispatcher.checkpoints.replica import Replica
from spotfleet.dispatcher.checkpoints.seals import SealKey
from spotfleet.dispatcher.checkpoints.store import CheckpointStore, Outdated
from spotfleet.dispatcher.checkpoints.target_folder import MOST_ARRIVING
from spotfleet.dispatcher.disk.records import lies_at_target
from spotfleet.protocol.messages import Checkpoint
from spotfleet.protocol.proofs import MemberProof
from spotfleet.storage.folder import ARRIVING, PROBE, arriving_name
from tests.dispatcher.checkpoints import test_planted
from tests.dispatcher.checkpoints.test_planted import NEWEST, Site
from tests.support.dispatcher.checkpoint_sets import files_of, read, sha, whole

PIECES = (b"rank 0's", b"rank 1's")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(test_planted, "LAYOUT", ["folder"])
    return Site(tmp_path).keep(20)


def made(site: Site, version: int, generation: int = NEWEST, proof: MemberProof | None = None) -> dict[str, bytes]:
    return files_of(version, generation, PIECES, proof or site.member(generation))


def write(site: Site, files: dict[str, bytes], but: str = "") -> Checkpoint:
    """Write the files as hosts do; return the checkpoint."""
    found = whole(files)
    for name, data in files.items():
        if name != but:
            site.there.put(arriving_name(site.job, replace(found, name=name, digest=sha(data))), [data])
    return found


def take(site: Site, fence: int = 0) -> Checkpoint | None:
    """Take what has arrived, as often as there is something to look at; return what was taken."""
    replica, found, site.store.to_look = Replica(site.boot), None, True
    while site.store.to_look:
        found = asyncio.run(replica.take(site.job, site.store, lambda: fence)) or found
    replica.close()
    return found


def in_place(site: Site, version: int, generation: int = NEWEST) -> dict[str, bytes]:
    return read(site.there.path(f"jobs/{site.job}/checkpoints/{version}-{generation}"))


def arriving(site: Site) -> list[str]:
    return site.there.names(f"jobs/{site.job}/{ARRIVING}")


def test_what_hosts_have_written_is_put_in_place_sealed_and_restored_by_another_dispatcher(site: Site):
    files = made(site, 30)
    found = write(site, files)
    taken = take(site)
    assert taken is not None and lies_at_target(taken) and taken.digest == found.digest
    assert taken.bytes == sum(map(len, files.values())) and in_place(site, 30) == files and arriving(site) == []
    assert site.store.newest_version == 30 and not site.store.path(taken).exists()
    site.replicate()
    assert [c.version for c in site.store.kept] == [20, 30] and in_place(site, 30) == files
    again = CheckpointStore(site.store.folder, 2)  # the same machine, started anew
    assert lies_at_target(again.newest) and again.newest.version == 30
    assert site.successor().restore() == (30, [])


def test_the_dispatcher_prunes_what_hosts_have_written(site: Site):
    for version in (30, 40, 50):
        write(site, made(site, version))
        assert take(site).version == version
        site.replicate()
    kept = {name.split("/")[3].partition(".")[0] for name in site.there.names(f"jobs/{site.job}/checkpoints")}
    assert kept == {f"40-{NEWEST}", f"50-{NEWEST}"} and [c.version for c in site.store.kept] == [40, 50]


def test_nothing_counts_before_all_files_are_there_also_where_some_came_to_the_dispatcher(site: Site):
    files = made(site, 30)
    found = write(site, files, but="__1_0.distcp")
    assert take(site) is None and site.store.newest_version == 20 and not site.store.to_look

    async def body():
        yield files["__1_0.distcp"]

    piece = replace(found, name="__1_0.distcp", digest=sha(files["__1_0.distcp"]))
    assert asyncio.run(site.store.put(piece, lambda: 0, body())) is None
    assert site.store.to_look and take(site).version == 30 and in_place(site, 30) == files


class Killed(Exception):
    """The dispatcher ends here."""


def test_a_dispatcher_that_is_killed_anywhere_on_the_way_takes_it_the_next_time(site: Site, monkeypatch):
    """It is killed before each change of a name at the target, and on its own disk."""
    change, killed = Path.replace, True
    for ends_at in range(40):
        version, left = 30 + ends_at, ends_at
        files = made(site, version)
        write(site, files)

        def counted(source: Path, target: Path) -> Path:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return change(source, target)

        monkeypatch.setattr(Path, "replace", counted)
        try:
            take(site)
            killed = False
        except Killed:
            pass
        monkeypatch.setattr(Path, "replace", change)
        site.store = CheckpointStore(site.store.folder, 2)  # a new process
        site.store.use_seals(site.seals)
        take(site)
        assert site.store.newest_version == version
        assert in_place(site, version) == files and arriving(site) == []
        site.replicate()
        assert site.store.newest_version == version
        if not killed:
            break
    assert ends_at >= 5 and not killed


def unmarked(site: Site) -> dict[str, bytes]:
    return made(site, 90, proof=MemberProof())


def of_another_job(site: Site) -> dict[str, bytes]:
    return made(site, 90, proof=replace(site.member(), key="the key of b-1"))


def of_a_generation_that_was_not_ordered(site: Site) -> dict[str, bytes]:
    return made(site, 90, NEWEST + 1, replace(site.member(), grant=SealKey("other").grant(site.job, NEWEST + 1)))


@pytest.mark.parametrize("plant", [unmarked, of_another_job, of_a_generation_that_was_not_ordered])
def test_files_that_no_worker_of_the_job_wrote_in_an_ordered_generation_are_refused(site: Site, plant):
    write(site, plant(site))
    assert take(site) is None and take(site) is None
    assert site.store.newest_version == 20 and "is refused" in site.store.problem
    assert len(site.store.take_news(site.job, 1.0)) == 1
    write(site, made(site, 95 if plant is not of_a_generation_that_was_not_ordered else 30))
    assert take(site) is not None


def test_an_older_one_that_is_put_there_again_and_one_of_a_replaced_generation_do_not_count(site: Site):
    write(site, made(site, 30))
    take(site)
    write(site, made(site, 25))
    write(site, made(site, 30))
    assert take(site) is None and site.store.newest_version == 30 and arriving(site) == []
    write(site, made(site, 40))
    assert take(site, fence=NEWEST + 1) is None and arriving(site) == []
    with pytest.raises(Outdated):
        asyncio.run(site.store.has_come_to_target(whole(made(site, 40)), NEWEST + 1))
    ordered = made(site, 40, NEWEST + 1, replace(site.member(), grant=""))
    with pytest.raises(Outdated, match="ordered"):
        asyncio.run(site.store.has_come_to_target(whole(ordered), 0))


def test_a_new_dispatcher_takes_nothing_older_than_what_is_sealed_there(site: Site):
    write(site, made(site, 30))
    take(site)
    successor = site.successor()
    write(successor, made(site, 25))
    assert take(successor) is None and arriving(site) == [] and successor.store.newest is None
    assert successor.restore() == (30, [])


def test_a_host_is_answered_once_the_dispatcher_has_looked(site: Site, monkeypatch):
    """The job's end follows the answer, and nothing is taken after that."""
    found, replica = write(site, made(site, 30)), Replica(site.boot)

    async def main() -> None:
        answer = asyncio.create_task(site.store.has_come_to_target(found, 0))
        await asyncio.sleep(0)
        assert not answer.done() and site.store.to_look
        await replica.take(site.job, site.store, lambda: 0)
        assert await answer is True and site.store.newest_version == 30
        monkeypatch.setattr("spotfleet.dispatcher.checkpoints.store.LOOK_LIMIT_S", 0.0)
        assert await site.store.has_come_to_target(found, 0) is False

    asyncio.run(main())
    replica.close()


def test_a_file_with_the_size_of_the_manifest_and_other_bytes_is_found_before_it_is_used(site: Site):
    files = made(site, 30)
    found = write(site, files, but="__1_0.distcp")
    site.there.put(arriving_name(site.job, replace(found, name="__1_0.distcp", digest=sha(PIECES[1]))), [b"r?nk 1's"])
    assert take(site).version == 30
    site.replicate()
    site.store.mounted = True
    site.store.need(True)
    site.store.mark_searched()
    assert site.store.offer().checkpoint.version == 30 and not site.store.seeks
    site.store.doubt(20)
    assert not site.store.seeks
    site.store.doubt(30)  # a host has asked here for it
    assert site.store.seeks
    version, lost = site.restore()
    assert (version, [v for v, _ in lost]) == (20, [30]) and "__1_0.distcp" in lost[0][1]


def test_hosts_that_do_not_see_the_target_get_it_from_the_dispatcher(site: Site):
    files = made(site, 30)
    write(site, files)
    take(site)
    site.replicate()
    site.store.need(True)
    assert site.store.seeks and site.store.offer().wait
    assert site.restore() == (30, [])
    assert not site.store.seeks and site.store.offer().checkpoint.url == ""
    assert read(site.store.find(30)) == files


@pytest.mark.parametrize("gone", ["json", "forged"])
def test_one_whose_seal_is_gone_from_the_target_is_not_brought_back(site: Site, gone: str):
    write(site, made(site, 30))
    take(site)
    site.replicate()
    record = site.there.path(f"jobs/{site.job}/checkpoints/30-{NEWEST}.json")
    if gone == "json":
        record.unlink()
    else:
        record.write_text(record.read_text().replace('"seal": "', '"seal": "0'))
    version, lost = site.restore()
    assert version == 20 and {v for v, _ in lost} == {30}


def test_a_target_that_looks_empty_without_its_mount_costs_no_checkpoint(site: Site, monkeypatch):
    monkeypatch.setattr(replica_module, "AGAIN_S", 0.0)
    monkeypatch.setattr(replica_module, "LOOK_AGAIN_S", 0.0)
    write(site, made(site, 30))
    take(site)
    site.replicate()
    replica, away = Replica(site.boot), site.target.with_name("away")
    asyncio.run(replica.show_probe())
    first = replica.probe
    asyncio.run(replica.show_probe())
    assert replica.probe == first
    site.store._kept = [c for c in site.store.kept if lies_at_target(c)]
    site.target.rename(away)
    site.target.mkdir()  # the mount point
    asyncio.run(replica.show_probe())
    assert replica.probe not in ("", first)  # hosts on the mount send checkpoints to the dispatcher

    def look() -> None:
        asyncio.run(replica.copy(site.job, site.store))
        site.store.need(True)
        asyncio.run(replica.fetch_newer(site.job, site.store))

    look()
    assert [c.version for c in site.store.kept] == [30] and "is it mounted?" in site.store.remark and site.store.seeks
    shutil.rmtree(site.target)
    away.rename(site.target)
    look()
    replica.close()
    assert [c.version for c in site.store.kept] == [30] and not site.store.seeks


def test_hosts_that_write_slower_than_checkpoints_are_made_do_not_fill_the_target(site: Site):
    for version in range(30, 30 + MOST_ARRIVING + 2):
        write(site, made(site, version), but=".metadata")
    take(site)
    stems = {name.split("/")[3] for name in arriving(site)}
    assert len(stems) == MOST_ARRIVING and f"30-{NEWEST}.parts" not in stems and site.store.parts.stretch == 2


def test_only_while_every_host_of_the_job_reads_the_dispatchers_probe_they_write_there(site: Site):
    store, replica = site.store, Replica(site.boot)
    asyncio.run(replica.show_probe())
    replica.close()
    store.probe = replica.probe
    assert site.there.path(PROBE).read_text() == replica.probe

    def mounted(**probes: str) -> bool:
        for host, probe in probes.items():
            store.receive_probe(host, probe)
        store.look_at_hosts(["a", "b"])
        return store.mounted

    assert not mounted() and not mounted(a=replica.probe)
    assert mounted(b=replica.probe) and not mounted(b="another folder's") and not mounted(b="")
    assert mounted(b=replica.probe)
    store.look_at_hosts([])
    assert not store.mounted
    site.record = replace(site.record, seals=False)  # its workers put no marks on what they write
    assert not mounted()
    store.probe = ""
    assert not mounted(a="", b="")


def test_the_archive_names_it_at_the_target_or_copies_it_from_there(site: Site):
    files = made(site, 30)
    write(site, files)
    take(site)
    job = site.store.folder.parent / "jobs" / site.job
    job.mkdir(parents=True)
    site.store.folder.rename(job / "checkpoints")
    place = str(site.there.path(f"jobs/{site.job}/checkpoints/30-{NEWEST}"))
    (named,) = _newest_checkpoint(job, {}, TargetGlance(site.there), lambda: None)
    assert (named.key, named.at) == (f"jobs/{site.job}/checkpoints/30-{NEWEST}", place)
    copied = _newest_checkpoint(job, {}, None, lambda: None)
    assert {f.key.rpartition("/")[2] for f in copied} == set(files) and not any(f.at for f in copied)
    keys = [f"jobs/{site.job}/checkpoints/30-{NEWEST}/{name}" for name in files]
    contents = ArchiveFiles(site.store.folder.parent, None).contents(keys)  # type: ignore[arg-type]
    assert [b"".join(c.read(0, c.size())) for c in contents] == list(files.values())
