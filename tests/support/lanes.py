"""Lanes of a test run, by a test's own marker, and the record of what each test took.

A test without a marker stays in its process, or starts a small child and waits for its end. `processes`: starts
daemons, workers or machines and waits for conditions, with limits that a busy machine meets; two of them run at a time.
`exclusive`: measures time or changes the machine; `scripts/test` runs those alone, after all others.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

PROCESSES, EXCLUSIVE = "processes", "exclusive"
SLOTS = 2  # tests with real processes at a time
SLOTS_FOLDER = "SPOTFLEET_TEST_SLOTS"  # environment: folder of a run, for locks and for the tests that began
RESULTS = "SPOTFLEET_TEST_RESULTS"  # environment: file for the results of a run
DURATIONS = Path(__file__).parents[1] / "durations.json"
STARTS = "starts processes unmarked"  # property of a report, only while results are wanted
PROCESS_EVENTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")  # events of sys.audit


@dataclass
class Result:
    """What one test took and how it ended."""

    seconds: float = 0.0
    outcome: str = "passed"  # failed, skipped
    why: str = ""  # it was skipped
    starts: bool = False  # a process, without the marker for it


def is_worker(config: pytest.Config) -> bool:
    """Is this one of the processes that share a run (pytest-xdist), and not the one that started them?"""
    return hasattr(config, "workerinput")


def file_of(test: str) -> str:
    return test.partition("::")[0]


def read_durations() -> dict[str, float]:
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def longest_first(tests: list[str], seconds: dict[str, float]) -> list[str]:
    """Return the tests by the duration of their file, whose tests stay together; those without record first."""
    return sorted(tests, key=lambda test: (-seconds.get(file_of(test), float("inf")), file_of(test)))


class OneTry:
    """pytest plugin: no test starts twice in a run.

    pytest-xdist reports a test that ended its process as failed, and with `--dist loadfile` hands it out again with the
    rest of its file. That second time it does not run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        begun = self._folder / hashlib.sha256(item.nodeid.encode()).hexdigest()
        if begun.exists():
            return True  # done, without another report
        begun.touch()
        return None


@contextmanager
def slot(folder: Path, count: int = SLOTS, poll_s: float = 0.05) -> Iterator[None]:
    """Hold one of `count` slots. The kernel frees it when this process ends, however that happens."""
    files = [(folder / str(number)).open("w") for number in range(count)]
    try:
        while not any(_lock(file) for file in files):
            time.sleep(poll_s)
        yield
    finally:
        for file in files:
            file.close()


def _lock(file: Any) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # children do not inherit it
    except OSError:
        return False
    return True


class Lanes:
    """pytest plugin: order of the tests, slots for processes, results of the run."""

    def __init__(self, config: pytest.Config) -> None:
        self._worker = is_worker(config)
        self._results: dict[str, Result] = {}
        self._made: str | None = None
        self._starting: str | None = None  # fixture of several tests that is being set up
        self._started = False  # a process, in this test
        self._fixtures: set[str] = set()  # fixtures of several tests that start processes
        if SLOTS_FOLDER not in os.environ:
            os.environ[SLOTS_FOLDER] = self._made = tempfile.mkdtemp(prefix="test-slots-")
        self._folder = Path(os.environ[SLOTS_FOLDER])
        if RESULTS in os.environ:
            sys.addaudithook(self._audit)
        if self._worker:
            config.pluginmanager.register(OneTry(self._folder), "one try")

    def _audit(self, event: str, _: object) -> None:
        if event in PROCESS_EVENTS:
            self._started = True
            if self._starting:
                self._fixtures.add(self._starting)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._worker:
            place = {test: i for i, test in enumerate(longest_first([i.nodeid for i in items], read_durations()))}
            items.sort(key=lambda item: (item.get_closest_marker(EXCLUSIVE) is not None, place[item.nodeid]))

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # outside pytest-timeout's clock: waiting is not the test's time
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._started = False
        if item.get_closest_marker(PROCESSES) is None:
            return (yield)
        with slot(self._folder):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        before = self._starting
        if fixturedef.scope != "function":
            self._starting = f"{fixturedef.baseid}::{fixturedef.argname}"
        try:
            return (yield)
        finally:
            self._starting = before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
        report = yield
        info = getattr(item, "_fixtureinfo", None)
        shared = {f"{d.baseid}::{d.argname}" for d in chain(*info.name2fixturedefs.values())} if info else set()
        if (self._started or shared & self._fixtures) and not self._marked(item):
            report.user_properties.append((STARTS, True))
        return report

    def _marked(self, item: pytest.Item) -> bool:
        return any(item.get_closest_marker(name) for name in (PROCESSES, EXCLUSIVE))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._worker:
            return
        result = self._results.setdefault(report.nodeid, Result())
        result.seconds = round(result.seconds + report.duration, 3)
        result.starts = result.starts or (STARTS, True) in map(tuple, report.user_properties)
        if report.failed:
            result.outcome = "failed"
        elif report.skipped and result.outcome != "failed":
            result.outcome = "skipped"
            result.why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")

    def pytest_unconfigure(self) -> None:
        if self._made:
            del os.environ[SLOTS_FOLDER]
            shutil.rmtree(self._made, ignore_errors=True)
        if RESULTS in os.environ and not self._worker:
            Path(os.environ[RESULTS]).write_text(json.dumps({t: asdict(r) for t, r in self._results.items()}))
