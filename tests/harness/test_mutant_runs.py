"""How seeded faults are run: which, in which copy, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants import run
from tests.mutants.run import Mutant, groups_of, verdicts


def mutant(name: str, test: str, new: str = "x = 2") -> Mutant:
    return Mutant(name, "spotfleet/a.py", "x = 1", new, test)


LISTED = [mutant("a", "t1.py::a"), mutant("b", "t2.py::a"), mutant("c", "t1.py::b"), mutant("d", "t3.py::a"),
          mutant("e", "t1.py::a", "x = 3")]


def names(groups: list[list[Mutant]]) -> list[str]:
    return ["".join(m.name for m in group) for group in groups]


def test_slices_are_disjoint_and_together_all_and_keep_a_file_of_tests_together():
    assert names(groups_of(LISTED, [])) == ["ace", "b", "d"]
    assert names(groups_of(LISTED, [], 1, 2)) == ["ace", "d"]
    assert names(groups_of(LISTED, [], 2, 2)) == ["b"]
    assert names(groups_of(LISTED, ["b", "d"])) == ["b", "d"]


class Copy:
    """A copy whose tests fail where they say so."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "spotfleet" / "a.py"
        self.path.parent.mkdir()
        self.path.write_text("x = 1\n")
        self.folder = folder
        self.runs: list[tuple[str, ...]] = []
        self.failing: dict[str, set[str]] = {}  # test -> texts at which it fails
        self.failing_warm: dict[str, set[str]] = {}  # where packages are loaded

    def run_tests(self, folder: Path, *tests: str, bytecode: bool = False, cold: bool = False) -> int:
        text = self.path.read_text().strip()
        assert not (bytecode and text == "x = 2"), "a fault would leave bytecode"
        self.runs.append((text, *tests, *(["cold"] if cold else [])))
        warm = {} if cold else self.failing_warm
        return int(any(text in self.failing.get(test, ()) or text in warm.get(test, ()) for test in tests))


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    made = Copy(tmp_path)
    monkeypatch.setattr(run, "own_copy", lambda: made.folder)
    monkeypatch.setattr(run, "run_tests", made.run_tests)
    return made


def test_the_tests_of_a_file_run_once_without_a_fault_and_the_copy_is_whole_again(copy):
    copy.failing = {"t1.py::a": {"x = 2", "x = 3"}}
    assert verdicts(groups_of(LISTED, [])[0]) == ["killed", "SURVIVED", "killed"]
    assert copy.runs == [("x = 1", "t1.py::a", "t1.py::b"), ("x = 2", "t1.py::a"), ("x = 2", "t1.py::b"),
                         ("x = 3", "t1.py::a")]
    assert copy.path.read_text() == "x = 1\n"


def test_a_test_that_fails_without_the_fault_kills_nothing_and_spoils_no_other_test(copy):
    copy.failing = {"t1.py::a": {"x = 1", "x = 2", "x = 3"}, "t1.py::b": {"x = 2"}}
    said = verdicts(groups_of(LISTED, [])[0])
    assert said == ["BROKEN: the test fails without the fault, too", "killed",
                    "BROKEN: the test fails without the fault, too"]


def test_a_test_that_fails_where_packages_are_loaded_runs_in_a_process_of_its_own(copy):
    copy.failing, copy.failing_warm = {"t1.py::a": {"x = 2"}}, {"t1.py::a": {"x = 1", "x = 2", "x = 3"}}
    assert verdicts(groups_of(LISTED, [])[0]) == ["killed", "SURVIVED", "SURVIVED"]
    assert copy.runs[3:] == [("x = 1", "t1.py::a", "cold"), ("x = 2", "t1.py::a", "cold"), ("x = 2", "t1.py::b"),
                             ("x = 3", "t1.py::a", "cold")]


def test_a_fault_that_does_not_fit_the_code_is_broken(copy):
    copy.path.write_text("x = 1\nx = 1\n")
    assert verdicts([LISTED[0]]) == ["BROKEN: a: the old text occurs 2 times in spotfleet/a.py"]


@pytest.fixture
def ends_its_process() -> Iterator[None]:
    yield
    if run.warm.cache_info().currsize:
        with run.warm() as server:
            assert server.stdin
            server.stdin.close()
        run.warm.cache_clear()


@pytest.mark.usefixtures("ends_its_process")
@pytest.mark.parametrize("cold", [False, True])
def test_a_small_tree_with_a_fault_really_fails(tmp_path, cold):
    (tmp_path / "test_a.py").write_text("from a import x\ndef test_x():\n    assert x == 1\n")
    (tmp_path / "a.py").write_text("x = 1\n")
    run.compile_all(tmp_path)
    assert run.run_tests(tmp_path, "test_a.py", bytecode=True, cold=cold) == 0
    with run.seeded(Mutant("m", "a.py", "x = 1", "x = 2", "test_a.py"), tmp_path):
        # though the file has its old size and perhaps its old time
        assert run.run_tests(tmp_path, "test_a.py", cold=cold) == 1
    assert run.run_tests(tmp_path, "test_a.py", cold=cold) == 0
