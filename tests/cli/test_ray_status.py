"""`spotfleet ray status` as people read it, and what `spotfleet ray` answers to habits of Ray's users.

Habits: cluster files and options that `ray submit` and `ray job submit` take.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spotfleet.api import ray_cluster
from spotfleet.api.ray_cluster import RayOnFleet
from spotfleet.cli import habits
from spotfleet.cli.commands.write import workers
from spotfleet.cli.ray.command import end_text, text
from spotfleet.errors import UsageError
from spotfleet.protocol.ray_cluster import RayDriver, RayGang, RayNode, RayReport, RayRequest, RayState, RayStatus

UNKNOWN = "No such command 'x'."
ONE = RayRequest({"GPU": 1.0}, 2)
STATE = RayState(
    True, (RayNode("00"), RayNode("01", "f-1", {"CPU": 8.0, "memory": 32e9}, {"CPU": 6.0}),
           RayNode("02", "f-2", {"CPU": 8.0}, {"CPU": 8.0}, idle_s=90.0), RayNode("03", "f-3", {}, {}, draining=True)),
    (ONE,), (RayGang((RayRequest({"CPU": 4.0}), RayRequest({"CPU": 4.0}))),))
RUNS = RayStatus("ray-1", "Ray runs on 3 hosts", "10.0.0.1:6379", RayReport(STATE, 1, ray="2.60.0", python="3.11"),
                 drivers=(RayDriver("d1", "python x.py", "failed", 3, 60.0),), hosts=("f-1", "f-2", "f-3", "f-4"))


@pytest.mark.parametrize("line", [
    "job ray-1: Ray runs on 3 hosts", "head: up at 10.0.0.1:6379, Ray 2.60.0, Python 3.11",
    "dashboard: none; it needs ray[default] among `environment.packages`",
    "waiting for room: 2 x {1 GPU}; a group of 1 x {4 CPU}, 1 x {4 CPU}"])
def test_the_cluster_is_described_line_by_line(line: str):
    assert line in text(RUNS).splitlines()


def test_a_head_that_is_not_separated_from_the_dispatcher_is_warned_of_with_the_reason():
    report = replace(RUNS.report, shared="the dispatcher does not run as root")
    assert "warning" not in text(RUNS)
    assert ("warning: a program in Ray can read the dispatcher's files or credentials: the dispatcher does not run as "
            "root") in text(replace(RUNS, report=report)).replace("\n", " ")


@pytest.mark.parametrize(("host", "state"), [
    ("f-1", "busy"), ("f-2", "idle"), ("f-3", "draining"), ("f-4", "its raylet has not joined")])
def test_each_host_has_a_row_with_its_state(host: str, state: str):
    row = next(line for line in text(RUNS).splitlines() if line.startswith(host))
    assert state in row


def test_a_script_has_a_row_with_its_end():
    assert any("d1" in line and "failed (3)" in line and "python x.py" in line for line in text(RUNS).splitlines())


@pytest.mark.parametrize(("status", "state", "runs", "text_of_it"), [
    (3, "failed", True, "script d1 ended with status 3"), (3, "failed", False, "script d1 ended with status 3"),
    (137, "failed", False, "script d1 ended with status 137, as the Ray cluster has ended"),
    (137, "failed", True, "script d1 ended with status 137"),
    (15, "stopped", True, "script d1 ended with status 15: it was cancelled")])
def test_the_end_of_a_script_has_its_reason(status: int, state: str, runs: bool, text_of_it: str):
    assert end_text(RayDriver("d1", "python x.py", state, status), runs=runs) == text_of_it


def test_a_head_that_was_lost_is_said_to_be_so():
    state = RayState(False, problem="the head starts")
    lost = RayReport(state, 2, "the head's processes ended with status 1", "2.60.0", "3.11", dashboard=8265)
    lines = text(RayStatus("ray-1", "", "a:1", lost)).splitlines()
    assert "head: not up: the head starts, Ray 2.60.0, Python 3.11" in lines
    assert "head: started 2 times; the head's processes ended with status 1" in lines
    assert "dashboard: spotfleet port-forward 8265" in lines


def ray_with_a_cluster() -> RayOnFleet:
    given: Any = SimpleNamespace(ray=lambda: RayStatus("ray-1"), spec=SimpleNamespace(workdir="."))
    return RayOnFleet(given, given, {}, given)


@pytest.mark.parametrize(("words", "message", "hint"), [
    (["cluster.yaml", "train.py"], "cluster.yaml is a YAML file, not a script", "-c FLEET"),
    (["--working-dir", ".", "python", "t.py"], "ray submit has no option --working-dir", "always shipped"),
    (["--working-dir=.", "python"], "ray submit has no option --working-dir", "always shipped"),
    (["--no-wait", "python", "t.py"], "ray submit has no option --no-wait", "-d returns at once"),
    (["--runtime-env-json", "{}", "python"], "ray submit has no option --runtime-env-json", "environment.packages"),
    (["--entrypoint-num-cpus", "1"], "ray submit has no option --entrypoint-num-cpus", "leave it out"),
    (["--lr", "0.1"], "ray submit has no option --lr", "the script's own come after it")])
def test_what_rays_own_commands_take_before_the_script_is_refused_with_ours(words: list[str], message: str, hint: str):
    with pytest.raises(UsageError) as refused:
        ray_with_a_cluster().submit(words)
    assert str(refused.value) == message and hint in refused.value.hint


def test_a_submitted_script_that_saves_files_where_they_are_lost_is_named_and_so_is_what_is_not_shipped(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "t.py").write_text("import ray, torch\ntorch.save({}, 'model.pt')\n")
    shipped: Any = SimpleNamespace(sha256="a" * 64, left_out=["key.pem: a secret"])
    monkeypatch.setattr(ray_cluster, "ship_working_directory", lambda *_: shipped)
    given: Any = SimpleNamespace(ray=lambda: RayStatus("ray-1"), spec=SimpleNamespace(workdir=str(tmp_path), envs={}),
                                 start_driver=lambda bundle, start: start.command)
    lines: list[str] = []
    assert RayOnFleet(given, given, {}, given).submit([str(tmp_path / "t.py")], progress=lines.append) == "python t.py"
    assert lines[0].startswith("t.py: it saves files, and not in $SPOTFLEET_OUTPUT")
    assert lines[1:] == ["left out of the bundle: key.pem: a secret"]


@pytest.mark.parametrize(("command", "ours"), [
    ("up", "spotfleet ray start"), ("down", "spotfleet ray stop"), ("job", "spotfleet ray submit"),
    ("attach", "spotfleet ssh"), ("dashboard", "port-forward 8265")])
def test_a_command_of_ray_that_does_not_exist_here_is_answered_with_ours(command: str, ours: str):
    assert ours in habits.hint(["ray", command, "cluster.yaml"], UNKNOWN)


def test_an_error_of_another_kind_and_an_unknown_word_have_no_such_hint():
    assert habits.hint(["ray", "up"], "No such option: --x") == habits.hint(["ray", "x"], UNKNOWN) == ""


def test_a_wrong_number_of_hosts_names_its_own_option():
    with pytest.raises(UsageError, match="--hosts 3:2: expected") as refused:
        workers("3:2", "--hosts", "hosts")
    assert refused.value.hint == "--hosts 2:4 starts with 2 hosts and uses up to 4; --hosts 2 is 2:2"
