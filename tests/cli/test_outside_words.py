"""How the command line speaks of jobs whose steps nobody counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfleet.api.job import succeeded
from spotfleet.cli import render
from spotfleet.cli.commands import cost_table, write
from spotfleet.errors import JobFailed
from spotfleet.fleet.cost.meter import CostReport, JobLine
from spotfleet.protocol.messages import JobStatus

DONE = JobStatus("train-1", "train", "succeeded", "2 workers ran this script without hvd.init(): each ran all of it "
                 "alone", hint="to train together: ...")


def steps(status: JobStatus) -> str:
    heads, row = render.jobs([status]).splitlines()[:2]
    return row[:heads.index("steps") + len("steps")].split()[-1]


def test_a_job_without_counted_steps_is_not_said_to_have_made_none():
    assert write._done(DONE) == DONE.why
    assert write._done(replace(DONE, outside=60)) == f"{DONE.why} (60 steps each)"
    assert steps(DONE) == "-" == steps(replace(DONE, hint="", outside=60))
    assert {steps(replace(DONE, hint="", kind=kind)) for kind in ("restart", "command")} == {"-"}


def test_a_job_with_counted_steps_has_their_number():
    trained = replace(DONE, version=900, repeated=2, hint="")
    assert (write._done(trained), steps(trained)) == ("900 steps, 2 repeated", "900")
    assert steps(replace(DONE, hint="")) == "0"


def test_a_job_that_has_succeeded_names_the_ranks_whose_scripts_failed_after_training():
    failed = "the script failed on rank 1 after training: ValueError: no"
    trained = replace(DONE, version=12, hint="", why=f"rank 0's script has ended; {failed}", tail=failed)
    assert write._done(trained) == f"12 steps, 0 repeated; {failed}"
    assert write._done(replace(trained, version=0)) == trained.why


def test_a_failed_job_names_what_to_try_once():
    failed = replace(DONE, state="failed", why="the script failed")
    with pytest.raises(JobFailed) as raised:
        succeeded(failed)
    assert raised.value.hint == "to train together: ...; all output: `spotfleet logs train-1`"
    with pytest.raises(JobFailed) as raised:
        succeeded(failed, " -c demo")
    assert raised.value.hint.endswith("`spotfleet logs train-1 -c demo`")
    with pytest.raises(JobFailed) as raised:
        succeeded(replace(failed, why=f"the script failed: {DONE.hint}"))
    assert raised.value.hint == "all output: `spotfleet logs train-1`"


def test_a_job_that_starts_anew_as_a_whole_has_no_figure_for_repeated_steps_and_says_how_often_it_did():
    again = replace(DONE, state="running", why="generation 3 on 2 workers", kind="restart", hint="", restarts=2,
                    folder_age_s=3.0)
    heads, row, *_ = render.jobs([again]).splitlines()
    assert row[:heads.index("repeated") + len("repeated")].split()[-1] == "-"
    assert "generation 3 on 2 workers; started anew 2 times; checkpoint folder copied 3s ago" in render.jobs([again])
    assert "copied" not in render.jobs([replace(again, state="succeeded")])


def test_the_bill_gives_no_repeated_steps_and_no_loss_for_a_job_whose_steps_nobody_counts():
    counted = JobLine("a-1", "a", 100, 200, 50, 2000, 3, 7, 0)
    other = replace(counted, job="b-2", useful_steps=0, micros_per_1000_steps=None, repeated_steps=0, repeated_micros=0)
    report = CostReport(0.0, "demo", (), (counted, other), 200, 400, 0, 0, 0, 7, 0, 50, None)
    rows = {line.split()[0]: line.split() for line in cost_table.jobs(report).splitlines()}
    assert rows["a-1"][-4:-1] == ["50", "3", "$0.000007"]
    assert rows["b-2"][-4:] == ["-", "-", "-", "-"]
    assert "without the jobs whose steps nobody counts" in cost_table.report(report, ["demo-0"])
    assert "without the jobs" not in cost_table.report(replace(report, jobs=(counted,)), ["demo-0"])
