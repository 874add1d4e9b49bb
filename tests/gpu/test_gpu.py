"""What only a CUDA device can show. Skipped without one; how to run it on a machine that has one: bench/gpu/run.sh."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parents[2] / "bench" / "gpu"))

import alone  # noqa: E402
import several  # noqa: E402

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
def test_ranks_on_one_device_end_with_the_same_bits_after_one_was_killed(tmp_path):
    found = several.compare("cuda", tmp_path)
    assert found["bits_equal"], "\n".join(found["stories"])
    assert found["members"] == ("h0/0/1", "h3/0/1", "h2/0/1")
