"""Well-known scripts through a kill, a join and a notice: they go on from their own checkpoints, with equal weights."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest

from spotfleet.api import Fleet, Job
from spotfleet.api.train import RestartOptions
from spotfleet.model import JobState
from spotfleet.protocol.messages import JobStatus
from tests.launched.foreign_scripts import LAUNCHED
from tests.support.e2e.e2e_stage import LIMIT_S, Stage, wait_for
from tests.support.foreign.files import edited, make_here
from tests.support.source_tree import TOP

# Only real processes of the scripts show whether they find each other.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
FOREIGN = Path(os.environ.get("SPOTFLEET_FOREIGN") or TOP.parent / "shared" / "data" / "foreign")


class Watched:
    """A job whose ranks print "weights RESTARTS STEP SUM". Lines arrive late, so each names the start that it is of."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def sums(self, rank: int = 0) -> dict[tuple[int, int], float]:
        """(start, step) -> sum of the weights, in the order of the rank's lines."""
        text = b"".join(self.job.logs(rank=rank)).decode(errors="replace")
        lines = re.findall(r"^weights (\d+) (\d+) (\S+)$", text, re.M)
        return {(int(start), int(step)): float(total) for start, step, total in lines}

    def first_steps(self) -> dict[int, int]:
        """Rank 0's first step after each start."""
        return {start: step for start, step in reversed(self.sums())}

    def status(self) -> JobStatus:
        """The status of the job, which has not ended."""
        status = self.job.status()
        assert not JobState(status.state).ended, f"{status.state}: {status.why}\n{status.error}"
        return status

    def runs(self, restarts: int, workers: int) -> bool:
        status = self.status()
        return status.restarts >= restarts and status.state == "running" and status.world_size == workers

    def advances(self, steps: int) -> bool:
        """Whether the newest start has made so many steps."""
        newest = self.status().restarts
        made = [step for start, step in self.sums() if start == newest]
        return bool(made) and made[-1] - made[0] >= steps

    def kept(self, since: float) -> bool:
        """Whether the dispatcher's copy of the checkpoints has become complete after `since`, monotonic."""
        age_s = self.status().folder_age_s
        return age_s is not None and time.monotonic() - age_s > since

    def wait_for_progress(self, every: int) -> None:
        """Wait until the newest start has saved what it can go on from, and the dispatcher has a copy of that."""
        wait_for("steps", lambda: self.advances(3 * every), 180)
        for _ in range(2):  # the host may have begun with the first one before these steps
            since = time.monotonic()
            wait_for("a copy of its checkpoints", lambda since=since: self.kept(since), 180)

    def leader(self) -> str:
        return next(w.host for w in self.status().workers if w.rank == 0)

    def common(self) -> dict[tuple[int, int], tuple[float, float]]:
        """The sums of both ranks at the steps that both have made since the newest start, by (start, step)."""
        newest = self.status().restarts
        zero, one = self.sums(0), self.sums(1)
        return {at: (zero[at], one[at]) for at in zero.keys() & one.keys() if at[0] == newest}


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_well_known_script_goes_on_from_its_own_checkpoints_after_a_join_a_kill_and_a_notice(
        stage: Stage, name: str):
    if not FOREIGN.is_dir():
        pytest.skip(f"does not apply: no files of others at {FOREIGN} (SPOTFLEET_FOREIGN)")
    entry = LAUNCHED[name]
    make_here(stage.work)
    source = FOREIGN / entry.script
    (stage.work / source.name).write_text(edited(source.read_text(), entry.edits))
    for beside in entry.beside:
        shutil.copy(source.parent / beside, stage.work)
    fleet = stage.fleet("foreign", least=1, target=1, most=2)
    options = RestartOptions(checkpoint_dir=entry.checkpoint_dir, resume_args=entry.resume_args, grace_s=5.0)
    watched = Watched(fleet.train(source.name, entry.args, np=(1, 2), detach=True, options=options))
    wait_for("a start", lambda: watched.runs(0, 1), 180)
    changes = {
        "a join": lambda: Fleet(stage.fleet_file("foreign", 1, 2, 2), home=stage.home).up(timeout_s=LIMIT_S),
        "a kill": lambda: fleet.interrupt(watched.leader(), None),
        "a notice": lambda: fleet.interrupt(watched.leader(), 30.0),
    }
    for change, make in changes.items():
        watched.wait_for_progress(entry.every)
        before = watched.status().restarts
        make()
        wait_for(f"a start of both after {change}", lambda before=before: watched.runs(before + 1, 2), 180)
        wait_for(f"steps after {change}", lambda before=before: max(watched.first_steps()) > before, 180)
        first = watched.first_steps()
        later = [step for start, step in first.items() if start > before]
        assert min(later) > first[before], f"{change} after start {before}: first steps {first}"
    wait_for("the same step on both ranks", lambda: len(watched.common()) >= 2)
    assert all(one == other for one, other in watched.common().values()), watched.common()
    watched.job.cancel()
