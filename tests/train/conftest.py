from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from spotfleet.protocol.messages import Assignment
from spotfleet.train import current, default_group, runtime
from spotfleet.train.comm.gloo import GlooGroup
from spotfleet.train.gradients.optimizer_tag import OptimizerList
from spotfleet.worker import store
from spotfleet.worker.store import open_store
from tests.support.train import thread_fleet
from tests.support.train.train_stage import Fleet, Zygote


@pytest.fixture(autouse=True)
def no_store_left():
    """Bootstrap stores serve as long as their process, which here is that of all tests."""
    yield
    store.close_all()


@pytest.fixture(scope="session")
def zygote():
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def fleets(tmp_path, zygote):
    """Make fleets: fleets(script, ...); all their processes are gone when the test ends."""
    made: list[Fleet] = []

    def make(script: str, **options) -> Fleet:
        folder = tmp_path / f"fleet{len(made)}"
        folder.mkdir()
        made.append(Fleet(zygote, folder, script, **options))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()


@pytest.fixture
def alone(monkeypatch):
    """The runtime of a script that was started by hand, initialised."""
    for name in ("SOCKET", "WORKER", "JOB", "ADDRESS", "WORK"):
        monkeypatch.delenv(f"SPOTFLEET_{name}", raising=False)
    monkeypatch.setattr(runtime, "_runtime", runtime.Runtime())
    runtime.current().init()
    yield runtime.current()
    default_group.leave()


class Ranks:
    """A generation whose ranks are threads of this process."""

    def __init__(self, size: int, kind=GlooGroup, form: bool = True, **options) -> None:
        self._store, address = open_store("127.0.0.1", "key")
        members = tuple(f"h{r}/0/1" for r in range(size))
        self.groups = [kind(Assignment(1, r, members, address), "job", "127.0.0.1", "key", **options)
                       for r in range(size)]
        if form:
            self.each(lambda group: group.form())

    def each(self, work, limit_s: float = 30.0) -> list:
        """work(group) at the same time on every rank; results or exceptions, by rank."""
        results: list = [TimeoutError(f"no answer within {limit_s} s")] * len(self.groups)

        def one(rank: int) -> None:
            try:
                results[rank] = work(self.groups[rank])
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                results[rank] = error

        threads = [threading.Thread(target=one, args=(r,), daemon=True) for r in range(len(self.groups))]
        for t in threads:
            t.start()
        for t in threads:
            t.join(limit_s)
        return results

    def close(self) -> None:
        for group in self.groups:
            group.abort()
            group.retire().join(10)


@pytest.fixture
def ranks():
    """ranks(n): n threads that hold one generation, over gloo or `kind`, whose `options` each rank's group gets."""
    made: list[Ranks] = []

    def make(size: int, kind=GlooGroup, **options) -> Ranks:  # form=False: the test forms the generation
        made.append(Ranks(size, kind, **options))
        return made[-1]

    yield make
    for r in made:
        r.close()


def bare_runtime(group) -> SimpleNamespace:
    """What collectives and distributed optimizers use of a runtime, outside of `elastic.run`."""
    return SimpleNamespace(
        group=group, initialized=True, state=None, optimizers=OptimizerList(), place=SimpleNamespace(rank=group.rank),
        weight=lambda: None, require_group=lambda what: group, round_begins=lambda o: None,
        round_ended=lambda o, change, save: None, step_factor=lambda o: 1.0, step_begins=lambda o: True,
        step_ended=lambda o: None)


@pytest.fixture
def several(ranks, monkeypatch):
    """several(n)(work): results of work(group) on n ranks whose `hvd` calls, each in its thread, use that rank's group.

    What `work` raises is raised here.
    """
    here = threading.local()
    monkeypatch.setattr(current, "_find", lambda: here.runtime)

    def make(size: int = 2):
        made = ranks(size)

        def each(work, limit_s: float = 60.0) -> list:
            def one(group):
                here.runtime = bare_runtime(group)
                return work(group)
            found = made.each(one, limit_s)
            for result in found:
                if isinstance(result, Exception):
                    raise result
            return found

        return each

    return make


@pytest.fixture
def threads(monkeypatch):
    """threads(script, founders, spares): a running ThreadFleet, gone when the test ends."""
    thread_fleet.install(monkeypatch)
    made: list[thread_fleet.ThreadFleet] = []

    def make(script, founders: int = 2, spares: int = 0, kind=thread_fleet.ThreadFleet):
        made.append(kind(script, founders, spares))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()
