"""The laptop's power fails right after a step of `up` or `down`: its files are there, and whole."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pytest

from spotfleet.api.home import FleetDir, FleetRecord, Home, Keys
from spotfleet.api.lifecycle import down
from spotfleet.model import FleetSpec
from spotfleet.protocol.archive import ArchiveFile, ArchiveHead, line
from spotfleet.storage.mirror import Piece
from tests.support.power_cut import ForgetfulDisk

CA = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


FILES = {"ledger.db": b"all events", "jobs/one-1/outputs/h@0@1/a": b"a result"}


class EarlierDispatcher:
    """A dispatcher of the release before, with an archive of two files."""

    streams = 1

    def archive_manifest(self, **_: object) -> None:
        return None

    def archive(self, out: BinaryIO) -> None:
        with tarfile.open(fileobj=out, mode="w:gz") as tar:
            for name, data in FILES.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))

    def persistent(self) -> EarlierDispatcher:
        return self

    def close(self) -> None:
        """There is no connection."""


class Dispatcher(EarlierDispatcher):
    """One with a manifest."""

    def archive_manifest(self, **_: object) -> Iterator[bytes]:
        files = [ArchiveFile(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in FILES.items()]
        return map(line, [ArchiveHead(2, 18, 0.0), *files, None])

    def archive_pieces(self, pieces: Sequence[Piece], **_: object) -> bytes:
        return b"".join(FILES[piece.key][piece.start:piece.end] for piece in pieces)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch):
    with ForgetfulDisk(monkeypatch) as found:
        yield found


@pytest.fixture
def fleet(tmp_path: Path, disk: ForgetfulDisk) -> FleetDir:
    folder = Home(tmp_path / "home").folder("f")
    folder.make(FleetRecord(FleetSpec("f"), "f", 1000.0), Keys("admin", "secret", "cert", "key"), CA)
    return folder


def after(disk: ForgetfulDisk, tmp_path: Path) -> FleetDir:
    return Home(disk.cut(tmp_path, tmp_path / "cut") / "home").folder("f")


def test_a_new_fleet_is_known_before_its_first_machine_starts(disk: ForgetfulDisk, fleet: FleetDir, tmp_path: Path):
    left = after(disk, tmp_path)
    assert (left.record, left.keys, left.ca) == (fleet.record, fleet.keys, CA)


def test_a_changed_record_stays_changed(disk: ForgetfulDisk, fleet: FleetDir, tmp_path: Path):
    fleet.update(url="https://127.0.0.1:1", down_at=2000.0)
    fleet.forget_secrets()
    left = after(disk, tmp_path)
    assert (left.record.url, left.is_down) == ("https://127.0.0.1:1", True)


@pytest.mark.parametrize("dispatcher", [Dispatcher(), EarlierDispatcher()])
def test_fetched_results_are_here_before_the_dispatchers_machine_ends(disk: ForgetfulDisk, fleet: FleetDir,
                                                                     tmp_path: Path, dispatcher: EarlierDispatcher):
    down._fetch(dispatcher, fleet, lambda _line: None, False, 60.0)  # type: ignore[arg-type]
    left = after(disk, tmp_path)
    assert (left.fetched / "jobs/one-1/outputs/h@0@1/a").read_bytes() == b"a result"
    assert (left.fetched / "ledger.db").exists()
    down._put_in_place(fleet)
    assert (Home(disk.cut(tmp_path, tmp_path / "again") / "home").folder("f").archive
            / "jobs/one-1/outputs/h@0@1/a").read_bytes() == b"a result"


def test_an_ended_fleet_whose_name_is_used_again_is_kept(disk: ForgetfulDisk, fleet: FleetDir, tmp_path: Path):
    moved = Home(tmp_path / "home").move_to_old(fleet)
    left = Home(disk.cut(tmp_path, tmp_path / "cut") / "home")
    assert [kept.name for kept in left.old_fleets()] == [moved.name]
    assert not left.folder("f").exists
