"""Sow each fault of `mutants.toml` in a copy of the tree and run the test that must see it.

    python tests/mutants/run.py [WORDS ...]     only those whose name or file contains one of the words

Prints a line for each: killed, SURVIVED (the test is too weak) or BROKEN (the list no longer fits the code). The status
is 0 only if all are killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

TOP = Path(__file__).parents[2]
LIST = Path(__file__).parent / "mutants.toml"
COPIED = ("spotfleet", "tests", "bench", "examples", "scripts", "ami", "pyproject.toml")
LIMIT_S = 300  # a fault that makes its test hang is seen, too


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    test: str  # pytest's node id

    def sown(self, text: str) -> str:
        times = text.count(self.old)
        assert times == 1, f"{self.name}: the old text occurs {times} times in {self.file}"
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    return [Mutant(**entry) for entry in tomllib.loads(LIST.read_text())["mutant"]]


def copy_of_the_tree(folder: Path) -> None:
    leave = shutil.ignore_patterns("__pycache__", ".hypothesis", "*.egg-info")
    for name in COPIED:
        source = TOP / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=leave)
        elif source.exists():
            shutil.copy(source, folder / name)


def run_tests(folder: Path, *tests: str) -> int:
    """pytest's status in the copy: 0 all pass, 1 some fail."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", f"--timeout={LIMIT_S}", *tests]
    try:
        return subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, timeout=2 * LIMIT_S,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode
    except subprocess.TimeoutExpired:
        return 1


def verdict(mutant: Mutant) -> str:
    """killed, SURVIVED or BROKEN, in a copy of its own."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        copy_of_the_tree(folder)
        path = folder / mutant.file
        whole = path.read_text()
        try:
            path.write_text(mutant.sown(whole))
        except AssertionError as wrong:
            return f"BROKEN: {wrong}"
        if run_tests(folder, mutant.test) == 0:
            return "SURVIVED"
        path.write_text(whole)
        return "killed" if run_tests(folder, mutant.test) == 0 else "BROKEN: the test fails without the fault, too"


def main(words: list[str]) -> int:
    chosen = [m for m in mutants() if not words or any(w in m.name or w in m.file for w in words)]
    begun, alive = time.monotonic(), []
    with get_context("spawn").Pool(int(os.environ.get("SPOTFLEET_PROCESSES", os.cpu_count() or 1))) as pool:
        for mutant, said in zip(chosen, pool.imap(verdict, chosen), strict=True):
            print(f"{said:9} {mutant.file.removeprefix('spotfleet/')}: {mutant.name} -> {mutant.test}", flush=True)
            if said != "killed":
                alive.append(mutant.name)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} faults killed, {time.monotonic() - begun:.0f} s")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
