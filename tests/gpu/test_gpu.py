"""Checks that only a CUDA device can make. Skipped without one; on a machine that has one: bench/gpu/run.py."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
GPU = Path(__file__).parents[2] / "bench" / "gpu"
sys.path.append(str(GPU))

import alone  # noqa: E402
import run  # noqa: E402

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
pytestmark = pytest.mark.processes


@needs_cuda
def test_a_communicator_is_aborted_and_made_again_without_loss_of_memory():
    found = alone.reform(Namespace(times=20))
    assert found["lost_mib"] < 64


@needs_cuda
def test_an_abort_behind_a_running_kernel_fails_the_wait_and_leaves_a_device_that_works():
    found = alone.spin(Namespace())
    assert found["wait_failed"] and found["works_after"] and found["abort_call_ms"] < 100


@needs_cuda
@pytest.mark.timeout(400)
@pytest.mark.parametrize("part", list(run.LIMITS_S))
def test_three_ranks_on_one_card_pass(part, tmp_path):
    rows = tmp_path / "rows.jsonl"
    done = subprocess.run([sys.executable, GPU / "run.py", "--short", "--rows", rows, part], text=True,
                          capture_output=True, timeout=380)
    bad = [row for row in map(json.loads, rows.read_text().splitlines()) if not row["ok"]]
    assert done.returncode == 0 and not bad, json.dumps(bad, indent=1) + done.stderr
