"""What holds for every test: nothing leaves this machine, and no process outlives the run."""

from __future__ import annotations

import os
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import psutil
import pytest

from tests.support.lanes import Lanes, is_worker

RUN_MARK = "TEST_RUN_OF_SPOTFLEET"  # in the environment of every process that a test starts, so that none is overlooked
LEFTOVERS_S = "TEST_LEFTOVERS_S"  # so long a process may take to end after the last test
NETGUARD = str(Path(__file__).parent / "netguard")

# Ray's head asks in which cloud it runs, and no setting prevents that. The guard refuses it, as anything else.
RAY_ASKS = re.compile(r"(169\.254\.169\.254:80|metadata\.google\.internal) by \d+ \(\S*/ray/dashboard/dashboard\.py ")

LONGER = 10  # times as many random histories with `scripts/test --long`


class Longer(hypothesis.settings):
    """`hypothesis.settings` for the long form of the tests."""

    def __init__(self, *args: Any, **given: Any) -> None:
        if "max_examples" in given:
            given["max_examples"] *= LONGER
        super().__init__(*args, **given)


# No example fails because the machine was busy while it ran: a test that hangs meets pytest's own limit.
hypothesis.settings.register_profile("ours", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow],
                                     derandomize=bool(os.environ.get("SPOTFLEET_SAME_EXAMPLES")))
hypothesis.settings.load_profile("ours")
if os.environ.get("SPOTFLEET_LONG"):
    hypothesis.settings.register_profile("long", max_examples=LONGER * hypothesis.settings().max_examples)
    hypothesis.settings.load_profile("long")
    hypothesis.settings = Longer  # before any test module imports it

sys.path.insert(0, NETGUARD)
TOP = str(Path(__file__).parents[1])  # so that processes that tests start can import `tests.support`
os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (NETGUARD, TOP, os.environ.get("PYTHONPATH", "")) if p)
os.environ.pop("SPOTFLEET_HOME", None)  # no test may touch the user's fleets
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The emulated cloud passes these on, too: the guard's, the mark, and the ones by which a test sets the clock.
os.environ["SPOTFLEET_LOCAL_ENV"] = ("NETGUARD_*,TEST_*,PYTEST_*,FAKETIME*,AWS_EC2_METADATA_DISABLED,AWS_CONFIG_FILE,"
                                     "AWS_SHARED_CREDENTIALS_FILE,NO_GCE_CHECK,CLOUDSDK_CONFIG")
for _name in [n for n in os.environ if n.startswith("AWS_")]:
    del os.environ[_name]  # nor an account of theirs
os.environ.update(AWS_EC2_METADATA_DISABLED="true", AWS_CONFIG_FILE=os.devnull, AWS_SHARED_CREDENTIALS_FILE=os.devnull)
for _name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", "GCE_METADATA_HOST", "SPOTFLEET_GCP_ENDPOINT"):
    os.environ.pop(_name, None)
os.environ.update(NO_GCE_CHECK="true", CLOUDSDK_CONFIG=os.devnull)


def pytest_configure(config: pytest.Config) -> None:
    if not is_worker(config):
        os.environ[RUN_MARK] = uuid.uuid4().hex
    sys.modules["netguard"] = guard = netguard()
    os.environ[guard.NAMESPACE] = guard.namespace()
    config.pluginmanager.register(Lanes(config), "lanes")


def netguard() -> ModuleType:
    """The guard of this process. One that a test run has started has it from its start."""
    begun = sys.modules.get("sitecustomize")
    if begun is not None and str(begun.__file__).startswith(NETGUARD):
        return begun
    # Loaded by path: under its own name another `sitecustomize` is in the interpreter already.
    import importlib.util

    spec = importlib.util.spec_from_file_location("netguard", Path(NETGUARD) / "sitecustomize.py")
    assert spec and spec.loader
    guard = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(guard)
    return guard


@pytest.fixture(autouse=True)
def stays_on_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Fails a test that tried to leave, also when its own code swallowed the refusal."""
    log = tmp_path_factory.getbasetemp() / "netguard.log"
    os.environ["NETGUARD_LOG"] = str(log)
    before = log.stat().st_size if log.exists() else 0
    yield log
    lines = log.read_text()[before:].splitlines(keepends=True) if log.exists() else []
    new = "".join(line for line in lines if not RAY_ASKS.search(line))
    assert not new, f"tried to leave this machine:\n{new}"


def processes_of_this_run() -> list[psutil.Process]:
    """Processes other than this one that were started, at any remove, by this test run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(RUN_MARK) == os.environ[RUN_MARK]:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue  # ended meanwhile, or not ours to look into
    return found


def describe(process: psutil.Process) -> str:
    try:
        test = process.environ().get("PYTEST_CURRENT_TEST", "collection")
        return f"  {process.pid} started in {test}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"  {process.pid} has just ended"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process that is left fails the run; it is ended, by its number. Where several share a run, the one that started
    them looks at the end."""
    if is_worker(session.config):
        return
    _, alive = psutil.wait_procs(processes_of_this_run(), timeout=float(os.environ.get(LEFTOVERS_S, 30)))
    if not alive:
        return
    lines = [describe(p) for p in alive]
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    session.exitstatus = pytest.ExitCode.TESTS_FAILED
    print("\nprocesses were left running:\n" + "\n".join(lines), file=sys.stderr)
