"""What `spotfleet --help` costs. It measures CPU time, so nothing else may run."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

pytestmark = pytest.mark.exclusive

HELP = "import sys; sys.argv = ['spotfleet', '--help']; from spotfleet.cli import main; main()"
FEW_MODULES = "import argparse, asyncio, dataclasses, email.parser, http.client, json"  # 0.12 s where help takes 0.14
HELP_COST = 2.5  # times that


def test_help_takes_less_than_a_blink_of_cpu():
    """The least of several runs, since neighbours on the same cores make any one of them dearer; as many times what
    other imports cost, since machines differ."""
    def cpu_s(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    ours, others = zip(*((cpu_s(HELP), cpu_s(FEW_MODULES)) for _ in range(5)), strict=True)
    assert min(ours) < HELP_COST * min(others)
