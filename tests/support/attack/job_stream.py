"""Stream of short jobs, submitted while something else happens, and what must be true of them afterwards."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from dataclasses import dataclass, field

from spotfleet.errors import SpotfleetError
from tests.support.attack.attack_scripts import NOTING, logged
from tests.support.attack.live import LIMIT_S, LiveFleet, eventually
from tests.support.attack.tally import Tally

SUBMITTERS = 2


@dataclass
class Submitted:
    """What the submitters know."""

    acknowledged: dict[str, str] = field(default_factory=dict)  # key of a job -> its name
    unanswered: list[str] = field(default_factory=list)  # keys
    lasts_s: dict[str, float] = field(default_factory=dict)


class JobStream:
    """Submitters in threads of their own, from `start` to `stop`."""

    def __init__(self, live: LiveFleet, seed: int) -> None:
        self.live, self.seed = live, seed
        self.script = f"noting{seed}.py"
        (live.stage.work / self.script).write_text(NOTING)
        self.notes = live.stage.work.parent / f"notes-{seed}"  # outside the working directory
        self.notes.touch()
        self.submitted = Submitted()
        self._enough = threading.Event()
        self._threads = [threading.Thread(target=self._submit, args=(number,), daemon=True)
                         for number in range(SUBMITTERS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join(LIMIT_S)

    def run(self, jobs: int, lasts_s: float) -> None:
        """Instead of `start` and `stop`: run so many jobs, SUBMITTERS at a time."""
        for number in range(jobs):
            self._submit_one(f"s{self.seed}-{number}", lasts_s)
            if number % SUBMITTERS == SUBMITTERS - 1:
                eventually("the end of the jobs so far", self.live.ended)

    def _submit(self, number: int) -> None:
        dice = random.Random(f"{self.seed}/{number}")
        for count in itertools.count():
            if self._enough.is_set():
                return
            self._submit_one(f"s{self.seed}-{number}-{count}", round(dice.uniform(0.1, 1.0), 1))
            self._enough.wait(dice.uniform(0.2, 1.0))

    def _submit_one(self, key: str, lasts_s: float) -> None:
        self.submitted.lasts_s[key] = lasts_s
        try:
            self.submitted.acknowledged[key] = self.live.run(self.script, key, lasts_s, self.notes).id
        except SpotfleetError:
            self.submitted.unanswered.append(key)

    # ---- what must hold

    def check(self, tally: Tally) -> None:
        """Each acknowledged job has run exactly once, with all its output; what was refused has not run."""
        eventually("the end of all jobs", self.live.ended, 2 * LIMIT_S)
        given = self.submitted.acknowledged
        known = {job.job: job for job in self.live.fleet.client.jobs()}
        tally.check("jobs were acknowledged", given)
        tally.none("an acknowledged job is known", {k: job for k, job in given.items() if job not in known}, len(given))
        tally.none("an acknowledged job succeeds", {
            key: f"{known[job].state}: {known[job].why} {known[job].error[-200:]}" for key, job in given.items()
            if job in known and known[job].state != "succeeded"}, len(given))
        begun, ended = self._noted("start"), self._noted("end")
        tally.none("an acknowledged job runs exactly once", {
            key: f"{begun[key]} starts, {ended[key]} ends" for key in given if (begun[key], ended[key]) != (1, 1)},
            len(given))
        tally.none("a job runs at most once", {key: count for key, count in begun.items() if count > 1})
        self._check_events(tally)
        self._check_results(tally)
        tally.note(f"{len(given)} jobs acknowledged, {len(self.submitted.unanswered)} submissions without answer")

    def _noted(self, word: str) -> Counter[str]:
        lines = [line.split() for line in self.notes.read_text().splitlines()]
        return Counter(key for said, key in lines if said == word)

    def _check_events(self, tally: Tally) -> None:
        events = self.live.fleet.events()
        ours = set(self.submitted.acknowledged.values())
        facts = Counter((e["job"], e["kind"], e.get("state", "")) for e in events
                        if e["kind"] == "JobSubmitted" or (e["kind"] == "JobChanged" and e["state"] == "succeeded"))
        tally.none("the ledger holds each job's submission and end once", {
            job: {f"{kind} {state}": n for (name, kind, state), n in facts.items() if name == job} for job in ours
            if (facts[job, "JobSubmitted", ""], facts[job, "JobChanged", "succeeded"]) != (1, 1)}, len(ours))
        numbers = sorted(e["seq"] for e in events if e["ledger"] == "dispatcher")
        tally.check("the ledger has no gap", numbers == list(range(numbers[0], numbers[0] + len(numbers))))

    def _check_results(self, tally: Tally) -> None:
        logs, outputs = {}, {}
        for key, job in self.submitted.acknowledged.items():
            found = b"".join(self.live.fleet.job(job).logs()).decode()
            if found != logged(key, self.submitted.lasts_s[key]):
                logs[key] = f"{job}: {found[-200:]!r}"
            into = self.live.stage.work.parent / "results" / job
            self.live.fleet.outputs(job, into)
            texts = [path.read_text() for path in sorted(into.rglob("*")) if path.is_file()]
            if texts != [f"result of {key}\n" * 100]:
                outputs[key] = f"{job}: {[len(text) for text in texts]} bytes"
        tally.none("a log is whole", logs, len(self.submitted.acknowledged))
        tally.none("an output is whole", outputs, len(self.submitted.acknowledged))
