"""`jobs --prune` shows what it will remove, names outputs that were never copied, and asks."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest
import typer

from spotfleet.cli import event_text
from spotfleet.cli.commands import write
from spotfleet.errors import UsageError
from spotfleet.fleet.domain.events import JobsPruned, event_to_json
from spotfleet.protocol.messages import EndedJob

JOBS = [EndedJob(f"t-{n}", "t", "succeeded", 3600.0, 24_000, 2000 if n == 30 else 0) for n in range(1, 31)]


class FakeFleet:
    """A fleet whose ended jobs are JOBS."""

    pruned: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        self.name = name or "f"

    def ended_jobs(self, keep: int) -> list[EndedJob]:
        return JOBS[: len(JOBS) - keep + 1]

    def prune(self, jobs: list[str]) -> list[str]:
        FakeFleet.pruned = jobs
        return jobs[1:]


@pytest.fixture(autouse=True)
def fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeFleet.pruned = []
    monkeypatch.setattr(write, "Fleet", FakeFleet)


def test_it_names_the_jobs_with_outputs_that_were_never_copied(capsys):
    write.prune("", keep=1, yes=True, as_json=False)
    shown = capsys.readouterr()
    assert "t-1 " in shown.out and "t-20 " in shown.out and "t-21 " not in shown.out and "t-30 " in shown.out
    words = " ".join(shown.err.split())
    assert "the files of 30 jobs will be removed from the dispatcher's disk, 720.0 kB" in words
    assert "outputs of 1 job were never copied and will be lost, 2.0 kB: `spotfleet outputs t-30` copies them" in words
    assert "removed: the files of 29 jobs; 1 job stayed" in words
    assert FakeFleet.pruned == [job.job for job in JOBS]


def test_without_a_yes_nothing_is_removed():
    with pytest.raises(UsageError, match="no terminal"):
        write.prune("", keep=1, yes=False, as_json=False)
    assert FakeFleet.pruned == []


def test_a_no_removes_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write, "confirm", lambda question, yes: False)
    with pytest.raises(typer.Exit):
        write.prune("", keep=1, yes=False, as_json=False)
    assert FakeFleet.pruned == []


def test_programs_get_every_job_that_is_removed(capsys):
    write.prune("", keep=1, yes=True, as_json=True)
    assert [row["job"] for row in json.loads(capsys.readouterr().out)] == [job.job for job in JOBS]


def test_with_nothing_to_remove_it_says_so_and_asks_nothing(capsys):
    write.prune("", keep=31, yes=False, as_json=True)
    shown = capsys.readouterr()
    assert json.loads(shown.out) == [] and "nothing to remove" in shown.err and FakeFleet.pruned == []


def test_the_event_of_a_prune_names_what_had_not_been_copied():
    jobs = tuple(job.job for job in JOBS)
    row = {**event_to_json(JobsPruned(0.0, jobs, 720_000, ("t-30",))), "ledger": "dispatcher"}
    assert event_text.line(row).split("  ", 1)[1].split(None, 1)[1] == (
        "the files of t-1, t-2, t-3, t-4 and 26 others are removed, 720 kB: `jobs --prune`; the outputs of t-30 had "
        "not been copied")
