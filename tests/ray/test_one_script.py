"""One submitted script that uses three libraries of a Ray cluster, while a node of it drains."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from spotfleet.ray.drains import drain_node
from tests.ray.conftest import ADDRESS, eventually

SCRIPT = Path(__file__).parents[2] / "examples" / "ray_pipeline.py"
MISSING = [name for name in ("dask", "pandas", "pyarrow") if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300),
              pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")]


def trains(process: psutil.Process) -> bool:
    try:
        return "TrainingActor.train" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def test_a_script_goes_from_dask_to_elastic_training_to_tune_through_a_notice(cluster, tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]),
           "RAY_AIR_NEW_OUTPUT": "0"}
    with (tmp_path / "log").open("w") as log:
        script = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--address", cluster.address, "--node-ip", ADDRESS, "--workers", "2", "2"],
            env=env, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            lines = []
            for line in script.stdout:
                lines.append(line)
                if line.startswith("{'step': 20,"):
                    node = eventually(lambda: next((n for n in cluster.nodes if any(
                        trains(p) for p in cluster.workers_of(n))), None))
                    # so short that the worker leaves at once
                    assert drain_node(cluster.address, node.node_id, "spot notice", 4.0)
            assert script.wait(timeout=120) == 0, (tmp_path / "log").read_text()[-3000:]
        finally:
            script.kill()
            script.wait()
    assert lines[0] == "prepared 4096 rows\n"
    found = json.loads(lines[-1])
    assert (found["rows"], found["repeated"], found["trials"]) == (4096, 0, 2)
    assert any("leaves (notice)" in change for change in found["changes"]), found["changes"]
    assert found["lr"] in (0.001, 0.01) and found["loss"] < 0.5
