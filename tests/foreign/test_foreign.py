"""Scripts in forms that others have made common, at three workers through a kill and a notice.

Real workers: the forms matter for what a process keeps, and only a new process has none of it.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from spotfleet.verify.verdict import Verdict, judge
from spotfleet.verify.world import Forker, RunSpec
from tests.foreign.files import FILES
from tests.foreign.standins import EXACT, STANDINS, ForeignScript
from tests.support.foreign.files import make_here
from tests.support.source_tree import TOP

pytestmark = pytest.mark.processes
SCRIPTS = Path(__file__).parent / "scripts"
FOREIGN = Path(os.environ.get("SPOTFLEET_FOREIGN") or TOP.parent / "shared" / "data" / "foreign")
STEPS, WORKERS, LIMIT_S = 9, 3, 120.0


@pytest.fixture(scope="module")
def forker():
    made = Forker()
    yield made
    made.close()


@pytest.fixture
def check(forker, tmp_path, monkeypatch):
    """check(entry, folder): the verdict on a script of `folder` is that of its entry."""
    monkeypatch.chdir(tmp_path)
    make_here(tmp_path)

    def run(entry: ForeignScript, folder: Path) -> None:
        text = entry.text((folder / entry.script).read_text())
        path = tmp_path / "script.py"
        path.write_text(text)
        for name in entry.beside:
            shutil.copy(folder / Path(entry.script).parent / name, tmp_path)
        with tempfile.TemporaryDirectory(prefix="sf-", dir="/tmp") as work:
            spec = RunSpec(path, entry.args, WORKERS, LIMIT_S)
            verdict = judge(forker, spec, Path(work), STEPS, lambda line: None, ("kill", "notice"))
        assert verdict.result == entry.verdict, verdict
        if entry.verdict == EXACT:
            assert verdict.steps == STEPS
            return
        told = told_by(verdict)
        line = next(n for n, found in enumerate(text.splitlines(), 1) if entry.line in found)
        assert re.search(entry.message, told), told
        assert re.search(rf'script\.py(:|", line | line )[\d, ]*\b{line}\b', told), told

    return run


def told_by(verdict: Verdict) -> str:
    """Return what a user reads of a refusal: the error, or the likeliest cause of a difference with its lines."""
    causes = verdict.causes[:1] if verdict.difference else ()
    return "\n".join([verdict.text, *(f"{c.text} script.py line {', '.join(map(str, c.lines))}" for c in causes)])


@pytest.mark.parametrize("name", STANDINS)
def test_a_script_in_a_common_form_is_exact_or_refused_with_the_line_to_change(check, name):
    check(STANDINS[name], SCRIPTS)


@pytest.mark.parametrize("name", FILES)
def test_a_well_known_script_is_exact_or_refused_with_the_line_to_change(check, name):
    if not FOREIGN.is_dir():
        pytest.skip(f"does not apply: no files of others at {FOREIGN} (SPOTFLEET_FOREIGN)")
    check(FILES[name], FOREIGN)
