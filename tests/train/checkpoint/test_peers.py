"""Files of a checkpoint that hosts exchange: each has a share, all get all, and what becomes of it when it breaks."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.protocol.checkpoint_files import CheckpointFile, parse_manifest, share_of
from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage import verified
from spotfleet.train.checkpoint import peers
from spotfleet.train.checkpoint.peers import FileSend, announcement, complete, plan
from spotfleet.train.checkpoint.restore import NoRoomHere
from spotfleet.worker.errors import CommBroken
from tests.support.dispatcher.checkpoint_sets import files_of, whole, write

PIECES = [bytes([n]) * size for n, size in enumerate((90_000, 70_001, 50_000, 0))]
FILES = files_of(20, pieces=PIECES)
LISTED = parse_manifest(FILES["manifest.json"]).files
HOSTS = ("h0", "h1", "h2")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(peers, "CHUNK_BYTES", 20_000)


class Host:
    """A host's folder with its share, as its agent has downloaded it."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        write({name: FILES[name] for name in ("manifest.json", *names)}, folder)
        self.folder, self.named = folder, replace(whole(FILES), path=str(folder))
        self.lacked, self.moved = 0, 0

    def lacks(self) -> None:
        self.lacked += 1

    def complete(self, group) -> None:
        def progress(size: int) -> None:
            self.moved += size

        complete(group, self.named, self.lacks, progress)

    @property
    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.iterdir()}


@pytest.fixture
def hosts(tmp_path: Path) -> list[Host]:
    """Three hosts with their shares."""
    return [Host(tmp_path / host, share_of(LISTED, HOSTS, host)) for host in HOSTS]


def formed(ranks, hosts: list[Host]):
    """A generation with one rank on each host, which have announced what they have."""
    made = ranks(len(hosts), form=False)
    for group, host in zip(made.groups, hosts, strict=True):
        group.announces = announcement(host.named)
    assert made.each(lambda group: group.form()) == [None] * len(hosts)
    return made


def test_shares_hold_every_file_once_and_are_as_equal_as_files_allow():
    sizes = [("a", 500), ("b", 300), ("c", 200), ("d", 150), ("e", 140), ("f", 0)]
    files = {name: CheckpointFile(size, "") for name, size in sizes}
    shares = {host: share_of(files, ("z", "x", "y"), host) for host in "xyz"}
    assert shares == {"x": ["a"], "y": ["b", "e"], "z": ["c", "d", "f"]}
    assert share_of(files, ("only",), "only") == ["a", "b", "c", "d", "e", "f"]


def test_all_hosts_have_all_files_though_each_has_downloaded_its_share(ranks, hosts):
    made = formed(ranks, hosts)
    assert made.each(lambda group: hosts[group.rank].complete(group)) == [None] * 3
    assert [host.files for host in hosts] == [FILES] * 3
    assert all(verified.is_noted(host.folder, host.named.digest) for host in hosts)
    assert all(host.moved > 0 and host.lacked == 0 for host in hosts)


def test_a_host_that_has_all_only_sends_and_one_without_the_checkpoint_takes_no_part(ranks, tmp_path: Path):
    hosts = [Host(tmp_path / "all", list(LISTED)), Host(tmp_path / "none", []), Host(tmp_path / "not", [])]
    made = ranks(3, form=False)
    for group, host in zip(made.groups, hosts[:2], strict=False):
        group.announces = announcement(host.named)
    made.each(lambda group: group.form())
    assert made.each(lambda group: hosts[group.rank].complete(group) if group.rank < 2 else None) == [None] * 3
    assert hosts[1].files == FILES and list(hosts[2].files) == ["manifest.json"]


def words(*names: list[str]) -> list[str]:
    """Announcements of ranks whose hosts have these files."""
    order = sorted(LISTED)
    return [f"{whole(FILES).digest}:{sum(1 << order.index(n) for n in its):x}" for its in names]


def test_one_rank_exchanges_for_its_host_and_files_come_from_those_with_the_least_to_send():
    all_, none = list(LISTED), list[str]()
    found = plan(LISTED, whole(FILES).digest, [*words(none, none, all_), "", *words(all_)], ["a", "a", "b", "a", "c"])
    assert dict(found.leaders) == {"a": 0, "b": 2, "c": 4} and not found.missing
    by_sender = {s: sum(LISTED[x.name].bytes for x in found.sends if x.sender == s) for s in (2, 4)}
    assert {x.name for x in found.sends} == set(LISTED) and {x.receivers for x in found.sends} == {(0,)}
    assert by_sender == {2: 90_000 + 0 + len(FILES[".metadata"]), 4: 70_001 + 50_000}


def test_what_no_host_has_is_missing_and_another_checkpoint_is_none():
    order = sorted(LISTED)
    found = plan(LISTED, whole(FILES).digest, [*words(order[:1], order[1:2]), f"{'0' * 64}:ff"], ["a", "b", "c"])
    assert set(found.sends) == {FileSend(order[0], 0, (1,)), FileSend(order[1], 1, (0,))}
    assert set(found.missing) == set(order[2:])


def test_a_host_that_waits_for_its_other_rank_returns_with_all_files(hosts, monkeypatch):
    monkeypatch.setattr(peers, "NOTE_S", 0.0)
    host, aborted = hosts[0], threading.Event()

    def check() -> None:
        if aborted.is_set():
            raise CommBroken("a peer was lost")

    group = SimpleNamespace(rank=1, hosts=("a", "a", "b"), raise_if_aborted=check,
                            announced=words([], [], list(LISTED)))
    waiting = threading.Thread(target=host.complete, args=(group,))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    for name in LISTED:
        (host.folder / name).write_bytes(FILES[name])
    waiting.join(30)
    assert not waiting.is_alive()
    (host.folder / "__0_0.distcp").unlink()
    aborted.set()
    with pytest.raises(CommBroken):
        host.complete(group)


def broken(ranks, hosts: list[Host], work: Callable[[object], None]) -> list[object]:
    """Results by rank. The first error ends the generation everywhere, as orders of the dispatcher do: sometimes gloo
    forgets an operation whose peer has just gone."""
    made = formed(ranks, hosts)

    def one(group) -> None:
        try:
            work(group)
        except Exception:
            for other in made.groups:
                other.abort()
            raise

    return made.each(one)


def test_a_file_that_nobody_has_ends_the_generation_and_all_of_it_is_asked_for(ranks, hosts):
    gone = share_of(LISTED, HOSTS, "h1")[0]
    (hosts[1].folder / gone).unlink()
    found = broken(ranks, hosts, lambda group: hosts[group.rank].complete(group))
    assert [type(error) for error in found] == [CommBroken] * 3 and gone in str(found[0])
    assert [host.lacked for host in hosts] == [1] * 3


def test_a_file_that_arrives_changed_is_not_kept_and_all_of_it_is_asked_for(ranks, hosts):
    changed = "__1_0.distcp"
    sender = next(i for i, host in enumerate(hosts) if (host.folder / changed).exists())
    (hosts[sender].folder / changed).write_bytes(FILES[changed][:-1] + b"?")
    found = broken(ranks, hosts, lambda group: hosts[group.rank].complete(group))
    others = [i for i in range(3) if i != sender]
    assert [type(found[i]) for i in others] == [CommBroken] * 2, found
    assert found[sender] is None or isinstance(found[sender], CommBroken)  # all was sent before the others ended
    assert any(hosts[i].lacked for i in others) and not hosts[sender].lacked
    assert not any((hosts[i].folder / changed).exists() for i in others)
    assert not any(verified.is_noted(hosts[i].folder, hosts[i].named.digest) for i in others)


def test_a_rank_lost_in_the_middle_costs_nothing_that_has_arrived(ranks, hosts, monkeypatch):
    """The next generation goes on with the files that are whole: here also with those of the lost host."""
    whole_now: list[Path] = []

    def rename(draft: Path, path: Path, sync: bool) -> None:
        draft.rename(path)
        whole_now.append(path)

    monkeypatch.setattr(peers, "atomic", SimpleNamespace(rename=rename))
    keep = peers._File.append

    def append(self, data) -> None:
        if whole_now:
            raise CommBroken("lost")  # as one of them is
        keep(self, data)

    monkeypatch.setattr(peers._File, "append", append)
    found = broken(ranks, hosts, lambda group: hosts[group.rank].complete(group))
    assert all(isinstance(error, CommBroken) for error in found), [repr(error)[:200] for error in found]
    left = [set(host.files) for host in hosts]
    assert whole_now and all(path.read_bytes() == FILES[path.name] for path in whole_now)
    monkeypatch.setattr(peers._File, "append", keep)
    assert not any(name.endswith(".peer") for names in left for name in names)
    for name in LISTED:  # what the lost host had downloaded, its successors download now
        if not any(name in names for names in left[:2]):
            (hosts[0].folder / name).write_bytes(FILES[name])
    again = formed(ranks, hosts[:2])
    assert again.each(lambda group: hosts[group.rank].complete(group)) == [None] * 2
    assert [host.files for host in hosts[:2]] == [FILES] * 2


def test_a_host_without_room_is_blamed_and_the_others_form_anew(ranks, hosts, monkeypatch):
    def append(self, data) -> None:
        if "h1" in str(self._path):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(peers._File, "append", append)
    found = broken(ranks, hosts, lambda group: hosts[group.rank].complete(group))
    assert isinstance(found[1], NoRoomHere) and found[1].blame_host and "No space" in str(found[1])
    assert isinstance(found[0], CommBroken) and isinstance(found[2], CommBroken)


def test_only_what_its_manifest_names_whole_is_announced(tmp_path: Path):
    host = Host(tmp_path / "h", sorted(LISTED)[:3])
    (host.folder / sorted(LISTED)[0]).write_bytes(b"short")
    assert announcement(host.named) == words(sorted(LISTED)[1:3])[0]
    assert announcement(replace(host.named, url="s3://b/x")) == announcement(replace(host.named, path="")) == ""
    assert announcement(Checkpoint(20, "0" * 64, 0, 1, path=str(host.folder))) == ""
