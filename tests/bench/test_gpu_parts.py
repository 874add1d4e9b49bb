"""The parts of bench/gpu, tried over gloo. They need nothing but torch and numpy, and one that fails is reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).parents[2]
GPU = TOP / "bench" / "gpu"
sys.path.append(str(GPU))

import cycle  # noqa: E402
import ranks  # noqa: E402
import run  # noqa: E402
import surface  # noqa: E402

# Only torch, numpy and their requirements can be imported, as on a machine where nothing else is installed.
BARE = '''
import importlib.machinery, importlib.metadata, re, sys
names, seen = ["torch", "numpy"], set()
while names:
    name = names.pop().lower().replace("_", "-")
    if name not in seen:
        seen.add(name)
        try:
            wanted = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        names += [re.match(r"[\\w.-]+", w)[0] for w in wanted if "extra ==" not in w]
tops = importlib.metadata.packages_distributions()
barred = {top for top, owners in tops.items()
          if not {o.lower().replace("_", "-") for o in owners} & (seen | {"spotfleet", "setuptools"})}

class Filtered(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in barred else super().find_spec(name, path, target)

sys.meta_path[:] = [Filtered if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
'''


def good(**fields: Any) -> dict[str, Any]:
    return {"digests": ["aa", "aa"], "exits": {"h0/0/1": 0, "h1/0/1": -9, "h3/0/1": 0}, "pause_ms": {"h0/0/1": 90.0},
            "repeated": {"h0/0/1": 1}, "generations": [], **fields}


@pytest.mark.processes  # the parts start real ranks
@pytest.mark.timeout(1500)
def test_all_parts_pass_over_gloo_without_other_packages(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(BARE)
    barred = subprocess.run([sys.executable, "-c", "import pytest"], capture_output=True, text=True, timeout=300,
                            env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert "No module named 'pytest'" in barred.stderr
    rows = tmp_path / "rows.jsonl"
    done = subprocess.run([sys.executable, GPU / "run.py", "--device", "cpu", "--short", "--rows", rows,
                           "--limit", "100000"], cwd=tmp_path, text=True, capture_output=True, timeout=1400,
                          env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["part"] for row in found if row["row"] == "end"] == list(run.LIMITS_S)
    assert all(row["ok"] for row in found)


@pytest.mark.parametrize("bad", [
    good(digests=["aa", "bb"]),
    good(digests=["bb", "bb"]),
    good(exits={"h0/0/1": 75, "h1/0/1": -9}),
    good(exits={"h0/0/1": 0, "h1/0/1": 0}),
    good(pause_ms={"h0/0/1": 60_000.0}),
    {"error": "not within 60 s"},
])
def test_a_row_is_ok_only_with_equal_bits_proper_ends_and_short_pauses(bad):
    assert ranks.judged("a kill", good(), {"h1/0/1"}, {"aa"})["ok"]
    assert not ranks.judged("a kill", bad, {"h1/0/1"}, {"aa"})["ok"]


def test_memory_that_each_generation_loses_is_not_ok():
    mib = 1 << 20
    steady, leaking = [1000 * mib] * 50, [(10_000 - 10 * n) * mib for n in range(50)]
    for memory, ok in ((steady, True), (leaking, False), ([], True), ([0], True)):
        assert cycle.is_good({"wrong": 0, "lost_mib": cycle.lost_mib(memory)}) is ok
    assert not cycle.is_good({"wrong": 1, "lost_mib": 0.0})


def options(tmp_path: Path) -> Namespace:
    return Namespace(device="cuda", short=True, rows=tmp_path / "rows.jsonl")


def test_a_part_that_hangs_costs_its_own_time_and_nothing_that_it_started_stays(tmp_path, monkeypatch):
    script = tmp_path / "hangs.py"
    script.write_text(f"import subprocess, sys, time\n"
                      f"child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
                      f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
                      f"time.sleep(1000)\n")
    monkeypatch.setattr(run, "__file__", str(script))

    class Started(subprocess.Popen):
        def wait(self, timeout=None):
            end = time.monotonic() + 60
            while timeout and not (tmp_path / "pid").exists() and time.monotonic() < end:
                time.sleep(0.01)  # so that there is something to kill
            return super().wait(timeout)

    monkeypatch.setattr(run.subprocess, "Popen", Started)
    monkeypatch.setitem(run.LIMITS_S, "kill", 1)
    run.watch("kill", options(tmp_path))
    assert [(r["row"], r["ok"], r["why"]) for r in run.read(tmp_path / "rows.jsonl")] == [
        ("end", False, "not within 1 s")]
    child = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    deadline = time.monotonic() + 20
    while child.exists() and " Z " not in child.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not child.exists() or " Z " in child.read_text()


def test_a_part_whose_process_dies_is_not_ok(tmp_path, monkeypatch):
    script = tmp_path / "dies.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setattr(run, "__file__", str(script))
    run.watch("form", options(tmp_path))
    (row,) = run.read(tmp_path / "rows.jsonl")
    assert not row["ok"] and str(-signal.SIGKILL) in row["why"]


def test_the_command_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    rows, ran = tmp_path / "rows.jsonl", []

    def watch(part: str, given: Namespace) -> None:
        ran.append(part)
        run.write(given.rows, {"part": part, "row": "end", "ok": part != "kill"})

    monkeypatch.setattr(run, "watch", watch)
    rows.write_text('{"part": "surface", "row": "end", "ok": true}\n'
                    '{"part": "quiet", "row": "first", "ok": true}\n{"par')
    monkeypatch.setattr(sys, "argv", ["run.py", "--rows", str(rows), "--limit", str(run.LIMITS_S["quiet"] + 5)])
    assert run.main() == 1 and ran == ["quiet"]  # no time is left for the next
    monkeypatch.setattr(sys, "argv", ["run.py", "--rows", str(rows)])
    assert run.main() == 1 and ran == list(run.LIMITS_S)[1:]  # one is not ok
    monkeypatch.setattr(sys, "argv", ["run.py", "--rows", str(rows), "kill"])
    assert run.main() == 1 and ran[-1] == "kill" and sum(r["part"] == "kill" for r in run.read(rows)) == 1


def test_all_parts_fit_into_the_time_of_one_card():
    assert max(run.LIMITS_S.values()) <= 240 and sum(run.LIMITS_S.values()) <= 21.5 * 60


def test_the_names_to_check_are_those_that_the_group_uses():
    used = surface.used()
    assert {("ProcessGroupNCCL", "abort"), ("ProcessGroupNCCL", "get_error"), ("ProcessGroupNCCL", "shutdown"),
            ("ProcessGroupNCCL", "eager_connect_single_device"), ("ProcessGroupNCCL.Options", "config"),
            ("ProcessGroupNCCL.Options", "_timeout"), ("torch.distributed", "ProcessGroupNCCL")} <= used


def test_torch_has_each_name_that_the_nccl_group_uses():
    if not surface.has_nccl():
        assert "torch.distributed.ProcessGroupNCCL" in surface.missing()
        pytest.skip("this build of torch has no NCCL")
    assert surface.missing() == []
