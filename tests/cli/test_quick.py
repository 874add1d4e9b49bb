"""What `spotfleet --help` may cost: measured by what it imports, not by a clock."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "aiohttp", "cryptography", "pydantic", "yaml", "rich", "sqlite3", "asyncio", "ssl", "boto3", "numpy",
         "google.cloud", "azure", "ray", "spotfleet.api", "spotfleet.fleet", "spotfleet.providers", "spotfleet.train"}
PROGRAM = """
import sys
from spotfleet.cli.app import run
code = run(sys.argv[1:])
print("MODULES", *sorted(sys.modules))
sys.exit(code)
"""


@pytest.mark.parametrize(("line", "libraries"), [
    ("--help", set()), ("-h", set()), ("--version", set()),
    ("train -h", {"pydantic"}), ("chaos preempt --help", {"pydantic"}),  # newer typer uses it for typed arguments
])
def test_help_imports_nothing_heavy(line, libraries):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *line.split()], capture_output=True, text=True, check=True)
    shown, _, modules = done.stdout.partition("MODULES ")
    assert shown.strip() and "spotfleet.cli.app" in modules.split()
    assert HEAVY & set(modules.split()) <= libraries


@pytest.mark.parametrize("line", ["nonsense", "up", "status --nope", "chaos preempt h --notice x", "logs --rank -1"])
def test_wrong_usage_exits_with_2_and_says_where_help_is(line):
    done = subprocess.run([sys.executable, "-m", "spotfleet", *line.split()], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and "--help" in done.stderr and "Traceback" not in done.stderr
