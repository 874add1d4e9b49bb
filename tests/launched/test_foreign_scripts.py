"""Well-known scripts through a kill, a join and a notice: they go on from their own checkpoints, with equal weights."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest

from spotfleet.api import Job
from spotfleet.api.train import RestartOptions
from tests.launched.foreign_scripts import LAUNCHED
from tests.support.e2e.e2e_stage import Stage, wait_for
from tests.support.foreign.files import edited, make_here
from tests.support.source_tree import TOP

# Only real processes of the scripts show whether they find each other.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
FOREIGN = Path(os.environ.get("SPOTFLEET_FOREIGN") or TOP.parent / "shared" / "data" / "foreign")


class Watched:
    """A job whose ranks print "weights STEP SUM"."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def steps(self, rank: int = 0) -> list[tuple[int, float]]:
        text = b"".join(self.job.logs(rank=rank)).decode(errors="replace")
        return [(int(step), float(total)) for step, total in re.findall(r"^weights (\d+) (\S+)$", text, re.M)]

    def runs(self, restarts: int, workers: int) -> bool:
        status = self.job.status()
        assert not self.job.state.ended, f"{status.state}: {status.why}\n{status.error}"
        return status.restarts >= restarts and status.state == "running" and status.world_size == workers

    def kept(self, since: float) -> bool:
        """Whether the dispatcher's copy of the checkpoints is younger than `since`, monotonic."""
        age_s = self.job.status().folder_age_s
        return age_s is not None and time.monotonic() - age_s > since

    def after(self, count: int) -> list[tuple[int, float]]:
        """Rank 0's lines after the first `count`."""
        return self.steps()[count:]

    def leader(self) -> str:
        return next(w.host for w in self.job.status().workers if w.rank == 0)


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_well_known_script_goes_on_from_its_own_checkpoints_after_a_kill_and_a_notice(stage: Stage, name: str):
    if not FOREIGN.is_dir():
        pytest.skip(f"does not apply: no files of others at {FOREIGN} (SPOTFLEET_FOREIGN)")
    entry = LAUNCHED[name]
    make_here(stage.work)
    source = FOREIGN / entry.script
    (stage.work / source.name).write_text(edited(source.read_text(), entry.edits))
    for beside in entry.beside:
        shutil.copy(source.parent / beside, stage.work)
    fleet = stage.fleet("foreign", least=1, target=2)
    options = RestartOptions(checkpoint_dir=entry.checkpoint_dir, resume_args=entry.resume_args, grace_s=5.0)
    watched = Watched(fleet.train(source.name, entry.args, np=(1, 2), detach=True, options=options))
    wait_for("a checkpoint", lambda: watched.runs(0, 2) and watched.kept(0.0), 180)
    for number, notice_s in enumerate((None, 30.0)):
        restarts, count = watched.job.status().restarts, len(watched.steps())
        fleet.interrupt(watched.leader(), notice_s)
        wait_for("a start after it", lambda restarts=restarts: watched.runs(restarts + 1, 2), 180)
        since = time.monotonic()
        wait_for("steps", lambda count=count: watched.after(count), 180)
        wait_for("a checkpoint", lambda since=since: watched.kept(since), 180)
        assert watched.after(count)[0][0] > 1, f"trouble {number}: it began at its first step again"
    wait_for("the same step on both ranks", lambda: len(common(watched)) >= 2)
    assert all(one == other for one, other in common(watched).values()), common(watched)
    watched.job.cancel()


def common(watched: Watched) -> dict[int, tuple[float, float]]:
    """The newest sums of both ranks at the steps that both have made last."""
    ranks = [dict(watched.steps(rank)[-10:]) for rank in (0, 1)]
    return {step: (ranks[0][step], ranks[1][step]) for step in ranks[0].keys() & ranks[1].keys()}
