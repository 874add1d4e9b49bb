"""One job through random trouble on machines over SSH, compared with plain torch bit for bit: see chaos_ssh.py."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.support.network.machines import why_not

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="takes ten minutes; `scripts/test --long` runs it")
def test_random_trouble_on_machines_over_ssh_changes_no_bit_and_leaves_them_as_they_were(tmp_path: Path):
    from tests.network.chaos_ssh import trouble

    seed = random.randrange(10**6)
    print(f"seed {seed}")
    trouble(tmp_path, seed, events=60)
