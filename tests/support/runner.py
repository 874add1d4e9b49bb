"""Command line of `scripts/test`: lint, then tests by tier, each with its minutes and its verdict.

    scripts/test                     lint and the tier `core`
    scripts/test --tier clouds       this tier (repeat it for several); tiers: tests/support/tiers.py
    scripts/test --attack            the tier `attack`, seven minutes; prints what each kind tried, kept and broke
    scripts/test --all               lint and every tier
    scripts/test --changed           lint and the tests that the change since `main` reaches, in doubt all
    scripts/test --touched           lint, core and each tier that the change reaches, in doubt all
    scripts/test --require TIER      besides: fail if a test of this tier is skipped, or if it has none
    scripts/test --second-try        besides: run one or two failed tests of a tier once more, alone; what then
                                     passes is listed as flaky, and the run passes
    scripts/test --lint              ruff and tests/lint
    scripts/test --record [PATH]     all tiers or PATH; writes tests/durations.json
    scripts/test PATH ...            these tests, in one process
    scripts/test --long              every tier in its long form, 100,000 histories and all seeded faults: four to five
                                     hours on two quiet cores, half of it for the faults

Other arguments are pytest's. SPOTFLEET_TEST_PROCESSES: how many processes share a tier (2).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.impact import needs_of, reached
from tests.support.lanes import DURATIONS, EXCLUSIVE, RESULTS, Result, file_of, read_durations
from tests.support.source_tree import TOP, read_tree
from tests.support.tiers import CORE, TIERS, tier_of

SUMMARY = "SPOTFLEET_TEST_SUMMARY"  # environment: file for the table, to be shown again later
PROCESSES = "SPOTFLEET_TEST_PROCESSES"
LONG = "SPOTFLEET_LONG"
LINT = "lint"
NO_TESTS = 5  # pytest's status
SHARE = ("--dist", "loadfile", "--no-loadscope-reorder")  # whole files, since some set up much for all their tests
MEMORY, ROOM = Path("/dev/shm"), 4 << 30  # bytes; the tier `core` takes about one gigabyte
MAY_BE_SKIPPED = re.compile(r"SPOTFLEET_LONG|--long|long form|Skipped: does not apply")
SECOND_TRIES = 2  # failed tests of a tier: more are no coincidence
GROWN, GROWN_S = 3, 5  # a file that takes so many times as long, and so much longer, is worth a line
UNMARKED_S = 2  # a test that starts processes may do so without its marker if it takes less
HISTORIES = "tests.sim.many_histories"
LONG_RUNS = ((HISTORIES, "membership", "100000"), (HISTORIES, "planner", "10000"), (HISTORIES, "fleet", "1000"),
             ("tests.mutants.run",))


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    mode: str = CORE  # core, lint, all, changed, touched, tiers or paths
    tiers: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    record: bool = False
    long: bool = False
    second_try: bool = False
    rest: tuple[str, ...] = ()  # pytest's


@dataclass
class Verdict:
    """What a tier did."""

    name: str
    seconds: float = 0.0
    failed: bool = False
    broken: bool = False  # pytest itself ended otherwise than with tests that passed or failed
    results: dict[str, Result] = field(default_factory=dict)
    flaky: list[str] = field(default_factory=list)  # tests that failed once, and passed alone

    def count(self, outcome: str) -> int:
        return sum(result.outcome == outcome for result in self.results.values())


def parse(arguments: list[str], exists: Callable[[str], bool] = os.path.exists) -> Request:
    """Return the request. SystemExit: it names an unknown tier, or tiers and paths."""
    mode, given, todo = "", {"--tier": [], "--require": []}, list(arguments)
    flags, rest = set(), []
    while todo:
        argument = todo.pop(0)
        if argument in given:
            name = todo.pop(0) if todo else ""
            if name not in TIERS:
                raise SystemExit(f"scripts/test: {argument} takes one of: {', '.join(TIERS)}")
            given[argument].append(name)
        elif argument == "--attack":
            given["--tier"].append("attack")
        elif argument in ("--lint", "--all", "--changed", "--touched"):
            mode = argument.removeprefix("--")
        elif argument in ("--record", "--long", "--second-try"):
            flags.add(argument)
        else:
            rest.append(argument)
    if any(exists(argument.partition("::")[0]) for argument in rest):
        if mode or given["--tier"] or given["--require"]:
            raise SystemExit("scripts/test: name tiers or paths, not both")
        mode = "paths"
    elif not mode:
        mode = "tiers" if given["--tier"] or given["--require"] else "all" if flags - {"--second-try"} else CORE
    return Request(mode, tuple(given["--tier"]), tuple(given["--require"]), "--record" in flags, "--long" in flags,
                   "--second-try" in flags, tuple(rest))


def choose(request: Request, tests: Iterable[str], hit: Callable[[], set[str] | None]) -> dict[str, list[str]]:
    """Return the test files to run by tier. `hit()` are those that the change reaches; None: in doubt, all."""
    files = set(tests)
    if request.mode in ("changed", "touched"):
        by_change = hit()
        if by_change is not None and request.mode == "changed":
            files &= by_change
        wanted = TIERS.keys() if by_change is None else {CORE, *map(tier_of, by_change)}
    else:
        wanted = {CORE: {CORE}, "all": TIERS.keys(), "tiers": request.tiers}[request.mode]
    wanted = {*wanted, *request.require}
    return {tier: sorted(file for file in files if tier_of(file) == tier) for tier in TIERS if tier in wanted}


def lanes_of(files: list[str], rest: tuple[str, ...], processes: str,
             exclusive: list[str]) -> list[tuple[list[str], list[str]]]:
    """Return the options and the files of each pytest run of a tier: shared by processes, then the exclusive tests
    alone. `exclusive`: the files that have such tests; to collect all others again takes a quarter of a minute."""
    rest, chosen = _without_marker_expression(rest)
    both = f"({chosen}) and " if chosen else ""
    runs = [(["-n", processes, *SHARE, "-m", f"{both}not {EXCLUSIVE}", *rest], files)]
    if exclusive:
        runs.append((["-n", "0", "-m", f"{both}{EXCLUSIVE}", *rest], exclusive))
    return runs


def _without_marker_expression(rest: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    if "-m" not in rest[:-1]:
        return rest, ""
    at = rest.index("-m")
    return rest[:at] + rest[at + 2 :], rest[at + 1]


def missed(verdict: Verdict) -> list[str]:
    """Return why a tier that was required did not run whole."""
    skipped = [f"{test}: {result.why}" for test, result in verdict.results.items()
               if result.outcome == "skipped" and not MAY_BE_SKIPPED.search(result.why)]
    ran = verdict.count("passed") + verdict.count("failed")
    return skipped if ran else [*skipped, "no test of this tier ran"]


def table(verdicts: list[Verdict], not_run: list[str], seconds: float) -> str:
    """Return the last lines of a run; the very last is in the form of pytest's own."""
    lines = [f"{'tier':<12}{'passed':>8}{'failed':>8}{'skipped':>9}{'minutes':>9}  verdict"]
    for v in verdicts:
        counts = f"{v.count('passed'):>8}{v.count('failed'):>8}{v.count('skipped'):>9}"
        lines.append(f"{v.name:<12}{counts}{v.seconds / 60:>9.1f}  {'FAILED' if v.failed else 'passed'}")
    lines += [f"flaky: {test} failed once and passed alone" for v in verdicts for test in v.flaky]
    if not_run:
        lines.append(f"not run: {', '.join(not_run)} (scripts/test --all runs every tier)")
    counts = {outcome: sum(v.count(outcome) for v in verdicts) for outcome in ("failed", "passed", "skipped")}
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) or "no tests ran"
    if not counts["failed"] and any(v.failed for v in verdicts):
        said = f"FAILED: {', '.join(v.name for v in verdicts if v.failed)}; {said}"
    return "\n".join([*lines, f"===== {said} in {seconds:.2f}s ====="])


def by_file(results: dict[str, Result]) -> dict[str, float]:
    """Return the seconds of each test file whose tests did not fail."""
    seconds: dict[str, float] = {}
    for test, result in results.items():
        seconds[file_of(test)] = seconds.get(file_of(test), 0) + result.seconds
    failed = {file_of(test) for test, result in results.items() if result.outcome == "failed"}
    return {file: round(s, 1) for file, s in sorted(seconds.items()) if file not in failed}


def grown(before: dict[str, float], now: dict[str, float]) -> list[str]:
    return [f"{file} takes {s:.0f} s instead of {before[file]:.0f} s" for file, s in now.items()
            if file in before and s > GROWN * before[file] and s > before[file] + GROWN_S]


# ---- the shell


def changed_files(top: Path = TOP) -> set[str] | None:
    """Return the files that differ from where this branch left `main`; None: no other branch to compare with."""

    def git(*arguments: str) -> list[str]:
        try:
            done = subprocess.run(["git", *arguments], cwd=top, capture_output=True, text=True, check=False)
        except FileNotFoundError:  # no git here
            return []
        return done.stdout.splitlines() if done.returncode == 0 else []

    head = git("rev-parse", "HEAD")
    for branch in ("origin/main", "main"):
        base = git("merge-base", "HEAD", branch)
        if base and (base != head or git("status", "--porcelain")):
            new = git("ls-files", "--others", "--exclude-standard")
            return {*git("diff", "--name-only", "--no-renames", base[0]), *new}
    return None


@contextmanager
def files_in_memory(tier: str, memory: Path = MEMORY, room: int = ROOM) -> Iterator[list[str]]:
    """Yield pytest's option for a folder in memory, where the thousands of syncs of the tier `core` take no time; []
    for the other tiers, whose machines and containers mount folders, and where memory has too little room."""
    if tier != CORE or not has_room(memory, room):
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="sf-", dir=memory, ignore_cleanup_errors=True) as folder:
        yield [f"--basetemp={folder}/t"]


def has_room(folder: Path, room: int) -> bool:
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    runs_programs = not found.f_flag & os.ST_NOEXEC
    return found.f_bavail * found.f_frsize >= room and runs_programs and os.access(folder, os.W_OK)


def pytest_run(arguments: list[str], verdict: Verdict) -> None:
    """Run pytest and add what came of it."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="test-results-") as folder:
        path = Path(folder) / "results.json"
        status = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=TOP, stdin=subprocess.DEVNULL,
                                env=os.environ | {RESULTS: str(path)}, check=False).returncode
        found = json.loads(path.read_text()) if path.exists() else {}
    verdict.results |= {test: Result(**result) for test, result in found.items()}
    verdict.seconds += time.monotonic() - begun
    verdict.failed |= status not in (0, NO_TESTS)
    verdict.broken |= status not in (0, 1, NO_TESTS)


def try_again(verdict: Verdict, run: Callable[[list[str], Verdict], None] = pytest_run) -> None:
    """Run the failed tests of a tier alone, unless they are too many or pytest itself failed."""
    failed = [test for test, result in verdict.results.items() if result.outcome == "failed"]
    if not verdict.failed or verdict.broken or not 0 < len(failed) <= SECOND_TRIES:
        return
    print(f"\n== {verdict.name}: {len(failed)} failed, once more alone", flush=True)
    again = Verdict(verdict.name)
    run(["-n", "0", *failed], again)
    verdict.seconds += again.seconds
    verdict.flaky = [t for t in failed if t in again.results and again.results[t].outcome == "passed"]
    for test in verdict.flaky:
        verdict.results[test].outcome = "passed"
    verdict.failed = again.failed or len(verdict.flaky) < len(failed)


def run_lint(whole: bool) -> Verdict:
    verdict, begun = Verdict(LINT), time.monotonic()
    verdict.failed = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=TOP, check=False).returncode != 0
    verdict.seconds = time.monotonic() - begun
    if whole:
        pytest_run(["-n", "0", "tests/lint"], verdict)
    return verdict


def run_tier(tier: str, files: list[str], rest: tuple[str, ...]) -> Verdict:
    verdict = Verdict(tier)
    exclusive = [file for file in files if f"mark.{EXCLUSIVE}" in (TOP / file).read_text()]
    for options, of in lanes_of(files, rest, os.environ.get(PROCESSES, "2"), exclusive):
        print(f"\n== {tier}: pytest {' '.join(options)} ({len(of)} files)", flush=True)
        with files_in_memory(tier) as memory:
            pytest_run([*memory, *options, *of], verdict)
    return verdict


def run_paths(rest: tuple[str, ...]) -> Verdict:
    verdict = Verdict("named")
    pytest_run(["-n", os.environ.get(PROCESSES, "0"), *SHARE, *rest], verdict)
    return verdict


def run_long_histories() -> Verdict:
    verdict, begun = Verdict("histories"), time.monotonic()
    for command in LONG_RUNS:
        verdict.failed |= subprocess.run([sys.executable, "-m", *command], cwd=TOP, check=False).returncode != 0
    verdict.seconds = time.monotonic() - begun
    return verdict


def record(verdicts: list[Verdict]) -> None:
    """Write the durations of the files that ran, and print what a reader should see."""
    results = {test: result for v in verdicts if v.name != LINT for test, result in v.results.items()}
    before, now = read_durations(), by_file(results)
    kept = {file: s for file, s in before.items() if (TOP / file).exists()}
    DURATIONS.write_text(json.dumps(dict(sorted((kept | now).items())), indent=0) + "\n")
    print(*grown(before, now), sep="\n")
    for test, result in results.items():
        if result.starts and result.seconds > UNMARKED_S:
            print(f"{test} starts processes for {result.seconds:.0f} s and has no marker")


def all_tests(top: Path = TOP) -> list[str]:
    """Return the test files of all tiers: those of `tests/lint` run as lint."""
    found = sorted(path.relative_to(top).as_posix() for path in (top / "tests").rglob("test_*.py"))
    return [file for file in found if not file.startswith("tests/lint/")]


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    request, begun = parse(arguments), time.monotonic()
    verdicts = [run_lint(whole=request.mode != "paths")]
    rest = request.rest
    if request.long:
        os.environ[LONG] = "1"
        rest = ("--timeout=3600", *rest)
        if request.mode == "all" and not request.rest:
            verdicts.append(run_long_histories())
    if request.mode == "paths":
        verdicts.append(run_paths(rest))
    chosen: dict[str, list[str]] = {}
    if request.mode not in ("paths", LINT):
        chosen = _chosen(request)
    for tier, files in chosen.items():
        verdict = run_tier(tier, files, rest) if files else Verdict(tier)
        if request.second_try:
            try_again(verdict)
        if tier in request.require and (why := missed(verdict)):
            print(f"\n{tier} was required:", *why, sep="\n  ")
            verdict.failed = True
        if files or verdict.failed:
            verdicts.append(verdict)
    if request.record:
        record(verdicts)
    not_run = [] if request.mode in ("paths", LINT) else _not_run(chosen)
    said = table(verdicts, not_run, time.monotonic() - begun)
    print(f"\n{said}", flush=True)
    if SUMMARY in os.environ:
        Path(os.environ[SUMMARY]).write_text(said + "\n")
    return int(any(v.failed for v in verdicts))


def _chosen(request: Request) -> dict[str, list[str]]:
    def hit() -> set[str] | None:
        changed = changed_files()
        return None if changed is None else reached(needs_of(read_tree()), changed)

    return choose(request, all_tests(), hit)


def _not_run(chosen: dict[str, list[str]]) -> list[str]:
    """Return the tiers that have tests and were not chosen whole."""
    missing = {tier_of(file) for file in set(all_tests()) - {file for files in chosen.values() for file in files}}
    return [f"{tier} (in part)" if chosen.get(tier) else tier for tier in TIERS if tier in missing]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
