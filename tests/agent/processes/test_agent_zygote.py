"""The zygote with torch in it: the agent joins before it is warm, and workers start in moments after."""

from __future__ import annotations

import re
import time

import pytest

from spotfleet.protocol.messages import Exit
from tests.support.agent.agent_stage import HOST, Stage

pytest.importorskip("torch")
pytestmark = pytest.mark.processes

FIRST, SECOND = f"{HOST}/0/1", f"{HOST}/1/1"


def test_the_agent_joins_while_torch_is_imported_and_forks_in_moments_after(warm_stage: Stage, record_property):
    warm_stage.boot()
    assert "importing torch" in warm_stage.dispatcher.seen[0][1].why
    warm_stage.dispatcher.wait(lambda r: r.why == "", limit_s=120)
    assert re.search(r"is warm after .* \(torch: True, threads: 1\)", warm_stage.agent_log.read_text())
    warm_stage.job("import sys, time\nprint('torch._dynamo' in sys.modules, time.monotonic())\nimport torch, numpy\n"
                   "print(torch.get_num_threads(), torch.initial_seed())\nprint(numpy.random.rand())\n")
    begun = time.monotonic()
    warm_stage.order(FIRST, SECOND)
    for name in (FIRST, SECOND):
        assert warm_stage.dispatcher.wait_worker(name, lambda w: w.exit).exit == Exit(0, done=True)
    first, second = (warm_stage.log(n).splitlines() for n in (FIRST, SECOND))
    record_property("order_to_script_s", round(float(first[0].split()[1]) - begun, 4))
    print(f"orders to the script's first line: {float(first[0].split()[1]) - begun:.3f} s")
    assert first[0].startswith("True") and first[1].startswith("1 ")
    assert first[1] != second[1] and first[2] != second[2]  # no two workers draw the same numbers


def test_threads_of_torch_follow_the_users_setting(warm_stage: Stage):
    warm_stage.boot()
    ended = warm_stage.run("import torch\nprint(torch.get_num_threads())\nx = torch.ones(500, 500)\nx @ x\n",
                           envs={"OMP_NUM_THREADS": "2"})
    assert ended.exit == Exit(0, done=True) and warm_stage.log() == "2\n"
