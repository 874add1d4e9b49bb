"""Put each fault of `mutants.toml` into a copy of the tree and run the test that must fail then.

    python -m tests.mutants.run [--slice 1/4] [WORDS ...]     only those whose name or file contains one of the words

Prints a line for each: killed, SURVIVED (the test is too weak) or BROKEN (the list no longer fits the code). The status
is 0 only if all are killed.

Each process (SPOTFLEET_PROCESSES) has one compiled copy, in which it restores a file after each fault. The tests of one
file run once together without any fault; only if that fails, one by one. A slice has every N-th file of tests.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

TOP = Path(__file__).parents[2]
LIST = Path(__file__).parent / "mutants.toml"
COPIED = ("spotfleet", "tests", "bench", "examples", "scripts", "ami", "terraform", "pyproject.toml")
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


def mutants(listed: Path = LIST) -> list[Mutant]:
    return [Mutant(**entry) for entry in tomllib.loads(listed.read_text())["mutant"]]


def groups_of(listed: list[Mutant], words: list[str], part: int = 1, parts: int = 1) -> list[list[Mutant]]:
    """Return the faults that the words name by the file of their tests, of these each `parts`-th from the `part`-th."""
    by_file: dict[str, list[Mutant]] = {}
    for mutant in listed:
        if not words or any(w in mutant.name or w in mutant.file for w in words):
            by_file.setdefault(mutant.test.partition("::")[0], []).append(mutant)
    return list(by_file.values())[part - 1 :: parts]


def copy_of_the_tree(folder: Path, top: Path = TOP) -> None:
    leave = shutil.ignore_patterns("__pycache__", ".hypothesis", "*.egg-info")
    for name in COPIED:
        source = top / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=leave)
        elif source.exists():
            shutil.copy(source, folder / name)


@cache
def warm() -> subprocess.Popen[str]:
    """Return this process's `warm.py`, which ends with it."""
    return subprocess.Popen([sys.executable, str(Path(__file__).with_name("warm.py"))], text=True, cwd="/",
                            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def run_tests(folder: Path, *tests: str, bytecode: bool = False, cold: bool = False) -> int:
    """Return pytest's status in the copy: 0 all pass, 1 some fail. `cold`: in a process of its own from the start."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    if not bytecode:  # only unchanged files may leave any behind
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    arguments = ["-x", "-n0", "-p", "no:cacheprovider", f"--timeout={LIMIT_S}", *tests]
    if not cold:
        server = warm()
        assert server.stdin and server.stdout
        server.stdin.write(json.dumps({"folder": str(folder), "arguments": arguments, "environment": environment,
                                       "limit_s": 2 * LIMIT_S}) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())
    try:
        return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=folder, env=environment,
                              stdin=subprocess.DEVNULL, timeout=2 * LIMIT_S, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, check=False).returncode
    except subprocess.TimeoutExpired:
        return 1


@contextmanager
def seeded(mutant: Mutant, folder: Path) -> Iterator[None]:
    """Hold the fault in the copy. AssertionError: it does not fit the code."""
    path = folder / mutant.file
    whole = path.read_text()
    try:
        path.write_text(mutant.sown(whole))
        yield
    finally:
        path.write_text(whole)


@cache
def own_copy() -> Path:
    """Return this process's copy of the tree, compiled; whoever started the process removes it."""
    folder = Path(tempfile.mkdtemp(prefix="tree-", dir=os.environ["SPOTFLEET_MUTANTS"]))
    copy_of_the_tree(folder)
    compile_all(folder)
    return folder


def compile_all(folder: Path) -> None:
    """Compile a copy, checked by hash, since a fault may change a file twice in a second, and not its size."""
    compileall.compile_dir(folder, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


def verdicts(of_one_file: list[Mutant]) -> list[str]:
    """killed, SURVIVED or BROKEN, for faults whose tests are in one file.

    A test that fails in a process with loaded packages runs cold: it may look at what is loaded.
    """
    folder = own_copy()
    tests = list(dict.fromkeys(m.test for m in of_one_file))
    cold, failing = set(), set()
    if run_tests(folder, *tests, bytecode=True) != 0:
        cold = {test for test in tests if run_tests(folder, test) != 0}
        failing = {test for test in cold if run_tests(folder, test, cold=True) != 0}
    return [verdict(m, folder, fails_anyway=m.test in failing, cold=m.test in cold) for m in of_one_file]


def verdict(mutant: Mutant, folder: Path, *, fails_anyway: bool, cold: bool) -> str:
    try:
        with seeded(mutant, folder):
            if fails_anyway:
                return "BROKEN: the test fails without the fault, too"
            return "SURVIVED" if run_tests(folder, mutant.test, cold=cold) == 0 else "killed"
    except AssertionError as wrong:
        return f"BROKEN: {wrong}"


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", default="1/1", metavar="K/N", help="the K-th of N parts")
    parser.add_argument("words", nargs="*")
    return parser.parse_args(given)


def main(given: list[str]) -> int:
    wanted = arguments(given)
    part, parts = (int(number) for number in wanted.slice.split("/"))
    groups = groups_of(mutants(), wanted.words, part, parts)
    todo = sum(len(group) for group in groups)
    begun, alive = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        os.environ["SPOTFLEET_MUTANTS"] = folder
        with get_context("spawn").Pool(int(os.environ.get("SPOTFLEET_PROCESSES", os.cpu_count() or 1))) as pool:
            for group, found in zip(groups, pool.imap(verdicts, groups), strict=True):
                for mutant, said in zip(group, found, strict=True):
                    file = mutant.file.removeprefix("spotfleet/")
                    print(f"{said:9} {file}: {mutant.name} -> {mutant.test}", flush=True)
                    if said != "killed":
                        alive.append(mutant.name)
    print(f"{todo - len(alive)} of {todo} faults killed, {time.monotonic() - begun:.0f} s")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
