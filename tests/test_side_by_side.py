from __future__ import annotations

from types import SimpleNamespace

import pytest
import side_by_side

TESTS = ["tests/fleet/test_plan.py::test_a", "tests/fleet/test_plan.py::test_b", "tests/fleet/test_choose.py::test_a",
         "tests/e2e/test_soak.py::test_a", "tests/e2e/test_soak.py::test_b", "tests/network/test_reach.py::test_a",
         "tests/network/test_machines.py::test_a"]
BESIDE, ALONE = TESTS[:3], TESTS[3:]


class Process:
    """One of those that share a run, as the scheduler sees it."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.given: list[str] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += [TESTS[i] for i in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


class Config(SimpleNamespace):
    def getvalue(self, name: str) -> object:
        return getattr(self, name)


class Run:
    """A run that two processes share."""

    def __init__(self) -> None:
        config = Config(tx=["popen", "popen"], dist="loadfile", option=SimpleNamespace(loadscopereorder=True))
        self.schedule = side_by_side.scheduler(config, None)
        self.processes = [self.started("a"), self.started("b")]
        self.schedule.schedule()

    def started(self, name: str) -> Process:
        process = Process(name)
        self.schedule.add_node(process)
        self.schedule.add_node_collection(process, TESTS)
        return process

    def ended(self, process: Process, test: str) -> None:
        self.schedule.mark_test_complete(process, TESTS.index(test))


def test_those_that_need_the_machine_go_to_one_process_after_the_others_each_once():
    run = Run()
    one, other = sorted((p.given for p in run.processes), key=len)
    assert sorted(one + other) == sorted(TESTS)
    assert other[-len(ALONE):] == ALONE
    assert not set(one) & set(ALONE)


@pytest.mark.parametrize("test", ALONE)
def test_one_that_ends_its_process_has_failed_and_the_others_go_on_in_a_new_one(test):
    run = Run()
    one = next(p for p in run.processes if test in p.given)
    before = one.given[:one.given.index(test)]
    for done in before:
        run.ended(one, done)
    assert run.schedule.remove_node(one) == test
    new = run.started("c")
    run.schedule.schedule()
    others = [t for p in (*run.processes, new) if p is not one for t in p.given]
    assert sorted([*others, *before, test]) == sorted(TESTS)


def test_what_is_left_waits_for_a_process_that_has_told_its_tests():
    run = Run()
    one = next(p for p in run.processes if ALONE[0] in p.given)
    new = Process("c")
    run.schedule.add_node(new)
    run.schedule.remove_node(one)
    run.schedule.schedule()
    assert new.given == []


def test_files_that_start_real_processes_run_alone_whatever_their_folder():
    assert side_by_side.alone("tests/dispatcher/test_daemon_process.py")
    assert not side_by_side.alone("tests/dispatcher/test_api.py")
    assert side_by_side.alone("tests/network/test_machines.py")
    assert not side_by_side.alone("tests/test_tidy.py")


def test_another_way_of_sharing_stays_as_pytest_xdist_has_it():
    assert side_by_side.scheduler(Config(dist="load"), None) is None
