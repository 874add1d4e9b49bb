"""All runs of a script and the verdict on it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from spotfleet.errors import UsageError
from spotfleet.verify import suspects
from spotfleet.verify.causes import UsualCause, apart, causes, unseeded
from spotfleet.verify.compare import RunDifference, first_difference, ranks_apart, statistics
from spotfleet.verify.scenarios import DISTURBED, Play, RecordedRun, play, undisturbed
from spotfleet.verify.world import Forker, RunSpec

FEWEST_STEPS = 6
EXACT, DIFFERS, FAILED, UNPROVEN = "exact", "differs", "failed", "not deterministic"


@dataclass(frozen=True)
class Verdict:
    """Result of a verification; `exact` only if every run reached its last step with every bit as undisturbed."""

    result: str
    text: str
    steps: int = 0
    workers: int = 0
    difference: RunDifference | None = None
    causes: tuple[UsualCause, ...] = ()
    remarks: tuple[str, ...] = ()
    runs: dict[str, str] = field(default_factory=dict)  # result of each, by name


def verify(script: Path, args: Sequence[str], workers: int, steps: int, progress: Callable[[str], None],
           only: Sequence[str] = tuple(DISTURBED)) -> Verdict:
    """Run the script undisturbed twice and through each disturbance, and compare. UsageError for wrong arguments."""
    if not script.is_file():
        raise UsageError(f"{script} is no file", hint="name a Python script that calls hvd.elastic.run")
    if workers < 2 or steps < FEWEST_STEPS:
        raise UsageError(f"{workers} workers and {steps} steps are too few",
                         hint=f"use at least 2 workers and {FEWEST_STEPS} steps")
    folder = Path(tempfile.mkdtemp(prefix="spotfleet-verify-", dir="/tmp"))  # short: it holds Unix sockets
    progress("importing torch")
    try:
        forker = Forker()
        try:
            return judge(forker, RunSpec(script.resolve(), tuple(args), workers), folder, steps, progress, only)
        finally:
            forker.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judge(forker: Forker, spec: RunSpec, folder: Path, steps: int, progress: Callable[[str], None],
          only: Sequence[str] = tuple(DISTURBED)) -> Verdict:
    """Verify with a running zygote; `folder` is empty, and its path short."""
    found = suspects.find(spec.script.read_text(errors="replace"))
    return _verdict(_Runs(forker, spec, folder, progress), found, steps, only)


class _Runs:
    def __init__(self, forker: Forker, spec: RunSpec, folder: Path, progress: Callable[[str], None]) -> None:
        self.spec, self.results, self._last = spec, {}, 0
        self._forker, self._folder, self._progress = forker, folder, progress
        self.results: dict[str, str]

    def play(self, name: str, scenario: Play, last: int) -> RecordedRun:
        self._progress(f"{name}: {last} steps with {self.spec.workers} workers")
        run = play(name, scenario, self._forker, self.spec, self._folder / name.replace(" ", "-"), last, os.environ)
        self.results[name] = f"failed: {run.error}" if run.error else f"{run.version} steps in {run.took_s:.1f} s"
        self._progress(f"{name}: {self.results[name].splitlines()[-1]}")
        return run


def _verdict(runs: _Runs, found: suspects.Suspects, steps: int, only: Sequence[str]) -> Verdict:
    first = runs.play("undisturbed", undisturbed, steps)
    workers = runs.spec.workers
    if refused := _refused(first, found):
        return replace(refused, runs=runs.results, workers=workers)
    last = min(steps, first.version)
    base = Verdict(EXACT, "", last, workers, runs=runs.results)
    if (difference := ranks_apart(first)) is not None:
        return replace(base, result=DIFFERS, text=_apart(difference), difference=difference, causes=tuple(apart()))
    again = runs.play("undisturbed again", undisturbed, last)
    if (difference := first_difference(first, again)) is not None:
        return replace(base, result=UNPROVEN, difference=difference, causes=tuple(unseeded(found)), text=(
            f"this script is not deterministic by itself: two undisturbed runs differ at step {difference.version} in "
            f"state.{difference.name}, so nothing can be said about recovery"))
    differences, remarks = [], []
    for name in only:
        run = runs.play(name, DISTURBED[name], last)
        difference = first_difference(first, run)
        if difference is not None:
            differences.append((difference, run))
            runs.results[name] = _sentence(difference)
        elif run.error or run.version < last:
            why = run.error or f"it ended after {run.version} of {last} steps"
            return replace(base, result=FAILED, text=f"{name}: {why}")
        else:
            remarks += [f"state.{n}" for n in statistics(first, run)]
    if differences:
        difference, run = differences[0]
        provisional = any(run.entered[w]["rank"] != r["rank"] or run.entered[w]["size"] != r["size"]
                          for r in run.records.values() if (w := r["worker"]) in run.entered)
        return replace(base, result=DIFFERS, text=_sentence(difference), difference=difference,
                       causes=tuple(causes(difference, found, provisional)))
    said = (f"statistics of a replaced rank are another rank's afterwards ({', '.join(dict.fromkeys(remarks))}); "
            "weights do not depend on them",) if remarks else ()
    return replace(base, remarks=said, text=f"exact: {last} steps with {workers} workers end with every bit the same, "
                   f"undisturbed and through {', '.join(only)}")


def _refused(run: RecordedRun, found: suspects.Suspects) -> Verdict | None:
    """Return the verdict on a script that cannot be verified; None otherwise."""
    if run.error:
        return Verdict(FAILED, f"the script fails undisturbed: {run.error}")
    if not run.entered:
        seen = "; its text has one, which was not called" if found.runs else ""
        return Verdict(FAILED, "the script ended without a call of hvd.elastic.run: it survives no change of "
                       f"membership{seen}",
                       causes=(UsualCause("no function is decorated with @hvd.elastic.run",
                                     "put the training loop into one; README, \"Make a script elastic\""),))
    if run.version < FEWEST_STEPS:
        return Verdict(FAILED, f"the script made {run.version} steps; {FEWEST_STEPS} are needed",
                       causes=(UsualCause("the script ends early, or a job that copies never commits",
                                     "pass arguments that make more steps; call state.commit() in each iteration"),))
    return None


def _sentence(difference: RunDifference) -> str:
    after = f" after {difference.after.text} at step {difference.after.version}" if difference.after else ""
    where = {"before": " (before the step)"}.get(difference.part.value, "")
    ranks = ", ".join(map(str, difference.ranks))
    more = f" ({difference.text})" if difference.text else ""
    on = "rank" if len(difference.ranks) == 1 else "ranks"
    return (f"state.{difference.name}{where} differs at step {difference.version} on {on} {ranks}{more}, "
            f"in the run {difference.run!r}{after}")


def _apart(difference: RunDifference) -> str:
    return (f"without any disturbance, ranks {' and '.join(map(str, difference.ranks))} hold different "
            f"state.{difference.name} after step {difference.version}")
