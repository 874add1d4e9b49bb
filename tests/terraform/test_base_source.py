"""Ways to a base's contract on the command line: a folder of Terraform's, a file, standard input. A script stands for
Terraform: the story has the real one."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from spotfleet.api.account.base import read
from spotfleet.cli.commands.write import base_of
from spotfleet.config import base
from spotfleet.errors import UsageError
from tests.config.test_base import CONTRACT

OUTPUTS = json.dumps({"vpc_id": {"value": "vpc-1"}, "spotfleet": {"sensitive": False, "value": CONTRACT}})
EXPECTED = base.parse(json.dumps(CONTRACT), "x")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("program", ["terraform", "tofu"])
def test_a_folder_is_read_by_the_program_that_is_there(programs: Path, tmp_path: Path, program: str):
    script(programs / program, f"""[ "$*" = "-chdir={tmp_path} output -json -no-color" ] && echo '{OUTPUTS}'""")
    assert read(str(tmp_path)) == EXPECTED


def test_a_folder_that_was_never_applied_says_what_to_run(programs: Path, tmp_path: Path):
    script(programs / "terraform", "echo 'Backend initialization required' >&2; exit 1")
    with pytest.raises(UsageError, match="Backend initialization required") as caught:
        read(str(tmp_path))
    assert f"terraform -chdir={tmp_path} init" in caught.value.hint
    script(programs / "terraform", "echo '{}'")
    with pytest.raises(UsageError, match="has no output `spotfleet`"):
        read(str(tmp_path))


def test_without_terraform_a_file_is_the_way(programs: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="neither `terraform` nor `tofu`") as caught:
        read(str(tmp_path))
    assert "--from-terraform base.json" in caught.value.hint


def test_a_file_and_standard_input_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "base.json"
    file.write_text(OUTPUTS)
    assert read(str(file)) == EXPECTED
    monkeypatch.setattr("sys.stdin", io.StringIO(OUTPUTS))
    assert read("-") == EXPECTED
    with pytest.raises(UsageError, match=r"there is no folder or file .*bass\.json"):
        read(str(tmp_path / "bass.json"))


@pytest.mark.parametrize(("given", "words"), [
    (("infra", "research", Path("f.yaml")), "name a base each"),
    (("infra", "", None), "a base belongs to a fleet file"),
    (("", "research", None), "a base belongs to a fleet file"),
])
def test_one_base_and_a_fleet_file_belong_together(given: tuple[Any, ...], words: str):
    with pytest.raises(UsageError, match=words):
        base_of(*given)
    assert base_of("", "", None) is None
