"""`scripts/test`: which tests a command line names, and what the last lines say of them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support import runner
from tests.support.lanes import Result
from tests.support.runner import (
    SHARE,
    Request,
    Verdict,
    by_file,
    changed_files,
    choose,
    files_in_memory,
    grown,
    lanes_of,
    missed,
    parse,
    table,
    try_again,
)
from tests.support.tiers import CORE, TIERS, tier_of

TESTS = ["tests/fleet/test_plan.py", "tests/providers/aws/test_aws_launch.py", "tests/network/test_reach.py"]


def parsed(*arguments: str) -> Request:
    return parse(list(arguments), exists=lambda name: name in (*TESTS, "tests/fleet"))


@pytest.mark.parametrize(("given", "request_"), [
    ([], Request(CORE)),
    (["-k", "cost", "-x"], Request(CORE, rest=("-k", "cost", "-x"))),
    (["--lint"], Request("lint")),
    (["--all"], Request("all")),
    (["--changed"], Request("changed")),
    (["--touched", "-x"], Request("touched", rest=("-x",))),
    (["--second-try"], Request(CORE, second_try=True)),
    (["--touched", "--second-try"], Request("touched", second_try=True)),
    (["--tier", "clouds", "--tier", "attack"], Request("tiers", ("clouds", "attack"))),
    (["--attack"], Request("tiers", ("attack",))),
    (["--require", "clouds"], Request("tiers", (), ("clouds",))),
    (["--touched", "--require", "machines"], Request("touched", (), ("machines",))),
    (["--record"], Request("all", record=True)),
    (["--record", "tests/fleet"], Request("paths", record=True, rest=("tests/fleet",))),
    (["--long"], Request("all", long=True)),
    (["tests/fleet/test_plan.py::test_a[1]"], Request("paths", rest=("tests/fleet/test_plan.py::test_a[1]",))),
])
def test_a_command_line_is_understood(given, request_):
    assert parsed(*given) == request_


@pytest.mark.parametrize("given", [["--tier", "cloud"], ["--tier"], ["--require", "tests/fleet"]])
def test_a_tier_that_there_is_not_is_refused_with_the_list(given):
    with pytest.raises(SystemExit, match="core, clouds, engines"):
        parsed(*given)


def test_a_test_file_has_one_tier_by_the_longest_prefix_and_core_without_any():
    assert [tier_of(file) for file in TESTS] == [CORE, "clouds", "machines"]
    assert tier_of("tests/providers/aws/test_aws_gang_machines.py") == "machines"
    assert tier_of("tests/new/test_it.py") == CORE


@pytest.mark.parametrize("given", [["--all", "tests/fleet"], ["--require", "clouds", "tests/fleet", "-x"]])
def test_tiers_and_paths_together_are_refused(given):
    with pytest.raises(SystemExit, match="not both"):
        parsed(*given)


@pytest.mark.parametrize(("request_", "hit", "tiers"), [
    (Request(CORE), None, {CORE: TESTS[:1]}),
    (Request("all"), None, {CORE: TESTS[:1], "clouds": TESTS[1:2], "machines": TESTS[2:]}),
    (Request("tiers", ("machines",)), None, {"machines": TESTS[2:]}),
    (Request("tiers", (), ("clouds",)), None, {"clouds": TESTS[1:2]}),
    (Request("changed"), {TESTS[1]}, {CORE: [], "clouds": TESTS[1:2]}),
    (Request("changed"), None, {CORE: TESTS[:1], "clouds": TESTS[1:2], "machines": TESTS[2:]}),
    (Request("touched"), {TESTS[1]}, {CORE: TESTS[:1], "clouds": TESTS[1:2]}),
    (Request("touched"), set(), {CORE: TESTS[:1]}),
    (Request("touched"), None, {CORE: TESTS[:1], "clouds": TESTS[1:2], "machines": TESTS[2:]}),
])
def test_a_request_chooses_files_by_tier_and_in_doubt_all(request_, hit, tiers):
    chosen = choose(request_, TESTS, lambda: hit)
    assert {tier: files for tier, files in chosen.items() if files or tier in tiers} == tiers
    assert list(chosen) == [tier for tier in TIERS if tier in chosen]


def test_exclusive_tests_run_by_themselves_after_the_others():
    assert lanes_of(["e.py", "f.py"], ("-x",), "2", ["f.py"]) == [
        (["-n", "2", *SHARE, "-m", "not exclusive", "-x"], ["e.py", "f.py"]),
        (["-n", "0", "-m", "exclusive", "-x"], ["f.py"])]
    assert lanes_of(["f.py"], (), "3", []) == [(["-n", "3", *SHARE, "-m", "not exclusive"], ["f.py"])]


def test_the_files_of_core_are_in_memory_until_its_end_where_there_is_room(tmp_path):
    with files_in_memory(CORE, tmp_path, room=1) as (option,):
        folder = Path(option.removeprefix("--basetemp="))
        assert folder.is_relative_to(tmp_path) and not folder.exists() and folder.parent.is_dir()
        folder.mkdir()
    assert list(tmp_path.iterdir()) == []
    for tier, memory, room in (("machines", tmp_path, 1), (CORE, tmp_path, 1 << 60), (CORE, tmp_path / "none", 1)):
        with files_in_memory(tier, memory, room) as options:
            assert options == []


def test_a_marker_expression_of_the_user_holds_besides():
    first, second = lanes_of(["f.py"], ("-m", "processes or slow", "-x"), "2", ["f.py"])
    assert first[0][5:] == ["-m", "(processes or slow) and not exclusive", "-x"]
    assert second[0][2:] == ["-m", "(processes or slow) and exclusive", "-x"]


def test_a_required_tier_must_run_and_skip_nothing_but_long_forms_and_what_does_not_apply():
    whole = {"a": Result(), "b": Result(outcome="skipped", why="Skipped: the long form: SPOTFLEET_LONG=1"),
             "c": Result(outcome="skipped", why="Skipped: does not apply: prices do not change")}
    assert missed(Verdict(CORE, results=whole)) == []
    no_sshd = Result(outcome="skipped", why="Skipped: needs sshd")
    assert missed(Verdict(CORE, results=whole | {"d": no_sshd})) == ["d: Skipped: needs sshd"]
    assert missed(Verdict(CORE)) == ["no test of this tier ran"]


def test_the_table_has_a_verdict_for_each_tier_and_names_those_that_did_not_run():
    core = Verdict(CORE, 90, results={"a": Result(), "b": Result(outcome="skipped")})
    clouds = Verdict("clouds", 30, failed=True, results={"c": Result(outcome="failed")})
    lines = table([Verdict("lint", 6), core, clouds], ["machines"], 126).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["lint", "0", "0", "0", "0.1", "passed"], ["core", "1", "0", "1", "1.5", "passed"],
        ["clouds", "0", "1", "0", "0.5", "FAILED"]]
    assert lines[4].startswith("not run: machines ")
    assert lines[5] == "===== 1 failed, 1 passed, 1 skipped in 126.00s ====="


def test_the_last_line_shows_a_failure_without_a_failed_test():
    assert table([Verdict("lint", failed=True)], [], 1).endswith("===== FAILED: lint; no tests ran in 1.00s =====")


def second(outcomes: dict[str, str], tried: list[str], failed: bool = False):
    """Stand-in for a run of pytest: the tests that it is given end as `outcomes` has them."""

    def run(arguments: list[str], verdict: Verdict) -> None:
        tried.extend(arguments[2:])
        verdict.results = {test: Result(1, outcomes[test]) for test in arguments[2:] if test in outcomes}
        verdict.failed = failed or "failed" in outcomes.values()

    return run


def failed_tier(*tests: str, broken: bool = False) -> Verdict:
    return Verdict("machines", 60, True, broken, {"a.py::test_z": Result(1)} | {t: Result(1, "failed") for t in tests})


def test_a_test_that_failed_and_passes_alone_is_listed_as_flaky_and_the_tier_has_passed():
    verdict, tried = failed_tier("a.py::test_x", "a.py::test_y"), []
    try_again(verdict, second({"a.py::test_x": "passed", "a.py::test_y": "passed"}, tried))
    assert tried == ["a.py::test_x", "a.py::test_y"]
    assert not verdict.failed and verdict.count("passed") == 3
    said = table([verdict], [], 60).splitlines()
    assert "flaky: a.py::test_x failed once and passed alone" in said
    assert said[-1] == "===== 3 passed in 60.00s ====="


@pytest.mark.parametrize(("outcomes", "failed"), [
    ({"a.py::test_x": "failed"}, True),
    ({"a.py::test_x": "skipped"}, False),  # not what it was
    ({}, False),  # it did not run
    ({"a.py::test_x": "passed"}, True),  # pytest itself failed
])
def test_a_tier_has_failed_if_its_failed_test_does_not_pass_alone(outcomes, failed):
    verdict = failed_tier("a.py::test_x")
    try_again(verdict, second(outcomes, [], failed))
    assert verdict.failed


@pytest.mark.parametrize("verdict", [
    failed_tier("a.py::test_x", "a.py::test_y", "a.py::test_w"),  # three are no coincidence
    failed_tier("a.py::test_x", broken=True),
    failed_tier(),  # failed without a failed test
    Verdict("machines", 60, False, False, {"a.py::test_z": Result(1)}),
])
def test_nothing_is_tried_again_after_many_failures_or_another_trouble(verdict):
    was, tried = verdict.failed, []
    try_again(verdict, second({}, tried))
    assert (tried, verdict.failed, verdict.flaky) == ([], was, [])


def test_durations_are_of_files_whose_tests_passed_and_great_growth_is_told():
    results = {"a.py::t1": Result(1.0), "a.py::t2": Result(2.04), "b.py::t": Result(9.0, "failed")}
    assert by_file(results) == {"a.py": 3.0}
    assert grown({"a.py": 1.0, "b.py": 3.0, "c.py": 10.0}, {"a.py": 5.5, "b.py": 12.0, "c.py": 29.0, "d.py": 99.0}) == [
        "b.py takes 12 s instead of 3 s"]


def test_a_record_keeps_the_files_that_did_not_run_and_drops_those_that_are_gone(tmp_path, monkeypatch, capsys):
    durations = tmp_path / "durations.json"
    here = str(Path(__file__).relative_to(runner.TOP))
    durations.write_text(json.dumps({here: 1.0, "tests/gone/test_a.py": 2.0}))
    monkeypatch.setattr(runner, "DURATIONS", durations)
    monkeypatch.setattr(runner, "read_durations", lambda: json.loads(durations.read_text()))
    results = {f"{here}::test_a": Result(30.0, starts=True), "tests/test_netguard.py::test_a": Result(2.0)}
    runner.record([Verdict(CORE, results=results)])
    assert json.loads(durations.read_text()) == {here: 30.0, "tests/test_netguard.py": 2.0}
    printed = capsys.readouterr().out
    assert f"{here} takes 30 s instead of 1 s" in printed
    assert f"{here}::test_a starts processes for 30 s and has no marker" in printed


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=folder, check=True,
                   capture_output=True)


def commit(folder: Path, name: str) -> None:
    (folder / name).write_text(name)
    git(folder, "add", "-A")
    git(folder, "commit", "-m", name)


def test_a_change_is_all_since_the_branch_left_main_with_what_is_not_committed(tmp_path):
    git(tmp_path, "init", "-b", "main")
    commit(tmp_path, "first")
    assert changed_files(tmp_path) is None  # main itself: nothing to compare with
    (tmp_path / "first").write_text("other")
    assert changed_files(tmp_path) == {"first"}
    git(tmp_path, "checkout", "-b", "work")
    commit(tmp_path, "second")
    git(tmp_path, "checkout", "main")
    commit(tmp_path, "of main alone")
    git(tmp_path, "checkout", "work")
    (tmp_path / "third").touch()
    assert changed_files(tmp_path) == {"first", "second", "third"}


def test_without_another_branch_or_git_nothing_is_known_of_a_change(tmp_path):
    assert changed_files(tmp_path) is None
    git(tmp_path, "init", "-b", "landing")
    commit(tmp_path, "first")
    assert changed_files(tmp_path) is None
