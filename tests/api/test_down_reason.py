"""What `down` reports of a dispatcher that starts, fails and is started again."""

from __future__ import annotations

import errno
import json
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.api.lifecycle import down
from spotfleet.errors import DispatcherUnreachable, SpotfleetError
from spotfleet.fleet.domain.events import FleetDown
from spotfleet.fleet.ledger import Ledger
from spotfleet.protocol.messages import NOT_COLLECTED
from spotfleet.transport.client import NOT_RUNNING, Ending

REFUSED = DispatcherUnreachable(f"[Errno 111] Connection refused: {NOT_RUNNING}")
REASON = DispatcherUnreachable("the dispatcher cannot start: the disk is read-only")


def test_down_gives_the_reason_that_came_between_two_failed_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(down, "PATIENCE_S", 0.3)
    monkeypatch.setattr(down, "POLL_S", 0.01)
    monkeypatch.setattr(down.cloud, "allow_access", lambda *_: None)
    answers = chain([REFUSED, REASON], repeat(REFUSED))

    def fail(**_: bool) -> None:
        raise next(answers)

    machine = SimpleNamespace(folder=SimpleNamespace(record=SimpleNamespace(reached=True)), provider=None,
                              cloud_name="f", locate=lambda: "https://127.0.0.1:1",
                              client=lambda *_, **__: SimpleNamespace(down=fail))
    with pytest.raises(SpotfleetError, match=f"this machine: {REASON}") as caught:
        down._fetch_results(machine, lambda _: None, discard=False, bring_checkpoints=False)  # type: ignore[arg-type]
    assert "--discard" in caught.value.hint


class Found(SimpleNamespace):
    """A fleet's folder and a dispatcher whose transfer fails with `error`, once half of it has arrived."""

    def __init__(self, path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(name="f", path=path, fetched=path / "fetched", archive=path / "archive",
                         ledger=path / "ledger.db", record=SimpleNamespace(reached=True))
        client = SimpleNamespace(down=lambda **_: None, ending=self.ending)
        self.machine = SimpleNamespace(folder=self, provider=None, cloud_name="f", locate=lambda: "https://127.0.0.1:1",
                                       client=lambda *_, **__: client)

        def fetch(*_: object, **__: object) -> None:
            (path / down.PART / "files/jobs").mkdir(parents=True)
            (path / down.PART / "files/jobs/log").write_text("half")
            raise error

        monkeypatch.setattr(down.transfers, "fetch", fetch)

    @staticmethod
    def ending() -> Ending:
        return Ending(True, "asked", {})

    def results(self, *, discard: bool) -> str:
        return down._fetch_results(self.machine, lambda _: None, discard, False)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [OSError(errno.ENAMETOOLONG, "File name too long"), SpotfleetError("no digest fits"),
                                   DispatcherUnreachable("it hangs")])
def test_discard_ends_a_fleet_whose_results_cannot_be_copied_and_keeps_what_has_arrived(tmp_path: Path, monkeypatch,
                                                                                       error: Exception):
    monkeypatch.setattr(down, "RESTARTS", 0)
    monkeypatch.setattr(down.cloud, "allow_access", lambda *_: None)
    found = Found(tmp_path, error, monkeypatch)
    assert str(error) in found.results(discard=True)
    assert (tmp_path / "fetched/jobs/log").read_text() == "half"
    assert json.loads((tmp_path / "fetched" / NOT_COLLECTED).read_text())["given_up"] == str(error)


def test_down_names_the_error_of_this_disk_and_offers_to_give_the_results_up(tmp_path: Path, monkeypatch):
    found = Found(tmp_path, OSError(errno.EROFS, "Read-only file system"), monkeypatch)
    with pytest.raises(SpotfleetError, match=r"cannot be copied to this machine: .*Read-only") as caught:
        found.results(discard=False)
    assert "--discard" in caught.value.hint and not (tmp_path / "fetched").exists()


def test_a_fleet_that_ended_by_itself_without_its_results_is_not_down_as_asked(tmp_path: Path, monkeypatch):
    found = Found(tmp_path, SpotfleetError(""), monkeypatch)
    end = Ledger(tmp_path / "ledger.db")
    assert down._incomplete(found) == ""  # type: ignore[arg-type]
    end.append(FleetDown(5.0, down.BY_ITSELF))
    end.close()
    assert "left no archive here" in down._incomplete(found)  # type: ignore[arg-type]
    (tmp_path / "archive").mkdir()
    assert down._incomplete(found) == ""  # type: ignore[arg-type]
    (tmp_path / "archive" / NOT_COLLECTED).write_text('{"incomplete": "the disk is broken"}')
    assert "the disk is broken" in down._incomplete(found)  # type: ignore[arg-type]
