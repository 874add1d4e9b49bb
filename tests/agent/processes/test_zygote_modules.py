"""Which modules a zygote imports before it forks: all of some packages, however deep, also where one is broken."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from spotfleet.agent.processes.zygote import modules_of


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("warm_one", "warm_one/inner", "warm_one/broken", "warm_two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "module.py").write_text("raise AssertionError('nobody has asked for it')\n")
    (tmp_path / "warm_one" / "broken" / "__init__.py").write_text("raise OSError('a library that does not load')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return tmp_path


def test_all_modules_of_all_packages_are_named_and_of_one_that_cannot_be_imported_only_itself(packages: Path):
    assert list(modules_of(("warm_missing", "warm_one", "warm_two"))) == [
        "warm_one", "warm_one.broken", "warm_one.inner", "warm_one.inner.module", "warm_one.module",
        "warm_two", "warm_two.module"]


def test_every_file_of_the_runtime_is_named():
    package = Path(__file__).parents[3] / "spotfleet"
    files = {path.relative_to(package).with_suffix("") for name in ("worker", "train")
             for path in (package / name).rglob("*.py")}
    names = {f"spotfleet.{'.'.join(f.parts)}".removesuffix(".__init__") for f in files}
    assert set(modules_of(("spotfleet.worker", "spotfleet.train"))) == names
