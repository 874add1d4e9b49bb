"""Terraform on a module, with the recorded schemas in the providers' place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.terraform.schema import plugin

COMMAND_S = 300.0


def why_not() -> str:
    """Return why the modules cannot be validated here; "" where they can."""
    return "" if shutil.which("terraform") else "there is no terraform on PATH"


@dataclass(frozen=True)
class SchemaRun:
    """Terraform's commands in folders of configurations. Nothing is written into these folders."""

    scratch: Path
    reattach: str

    def run(self, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
        data = self.scratch / "data" / str(folder).strip("/").replace("/", "-")
        env = {k: v for k, v in os.environ.items() if not k.startswith("TF_")} | {
            "TF_REATTACH_PROVIDERS": self.reattach, "TF_DATA_DIR": str(data), "TF_IN_AUTOMATION": "1",
            "CHECKPOINT_DISABLE": "1", "TF_CLI_CONFIG_FILE": os.devnull}
        return subprocess.run(["terraform", f"-chdir={folder}", *command], env=env, text=True, capture_output=True,
                              timeout=COMMAND_S, check=False)

    def init(self, folder: Path) -> None:
        done = self.run(folder, "init", "-backend=false", "-input=false", "-no-color")
        assert done.returncode == 0, f"{folder}: {done.stdout}\n{done.stderr}"

    def findings(self, folder: Path) -> list[str]:
        """Return what `terraform validate` finds."""
        self.init(folder)
        answer = json.loads(self.run(folder, "validate", "-json").stdout)
        return [_words(found) for found in answer["diagnostics"]]

    def tested(self, folder: Path) -> TestReport:
        """Run the module's own tests."""
        self.init(folder)
        done = self.run(folder, "test", "-json", "-verbose")
        return TestReport([json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], done.stderr)


@dataclass(frozen=True)
class TestReport:
    """Answer of `terraform test`."""

    messages: list[dict[str, Any]]
    errors: str
    __test__ = False

    @property
    def passed(self) -> int:
        return self._summary()["passed"]

    @property
    def failed(self) -> list[str]:
        """The failures, in words; empty where every run passed."""
        found = self.errors_by_file()
        summary = self._summary()
        return [f"{file}: {text}" for file, texts in found.items() for text in texts] or (
            [] if summary["status"] == "pass" else [str(summary)])

    def errors_by_file(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for message in self.messages:
            if message["type"] == "diagnostic" and message["diagnostic"]["severity"] == "error":
                found.setdefault(message.get("@testfile", ""), []).append(_words(message["diagnostic"]))
        return found

    def planned(self, run: str) -> dict[str, dict[str, Any]]:
        """Return the planned values of a run's resources by address."""
        return {change["address"]: change["change"]["after"] for change in self._plan(run)["resource_changes"]}

    def planned_outputs(self, run: str) -> dict[str, Any]:
        return {name: change["after"] for name, change in self._plan(run)["output_changes"].items()}

    def output_keys(self, run: str, name: str) -> set[str]:
        """Return the keys of an output that is an object, also those whose values are not known yet."""
        change = self._plan(run)["output_changes"][name]
        return {key for side in ("after", "after_unknown") for key in change.get(side) or ()}

    def runs(self) -> list[str]:
        """Return the names of the runs whose plans are whole: those that expect a failure stop before the output."""
        return [m["@testrun"] for m in self.messages
                if m["type"] == "test_plan" and "spotfleet" in m["test_plan"].get("output_changes", {})]

    def _plan(self, run: str) -> dict[str, Any]:
        [plan] = [m["test_plan"] for m in self.messages if m["type"] == "test_plan" and m["@testrun"] == run]
        return plan

    def _summary(self) -> dict[str, Any]:
        found = [m["test_summary"] for m in self.messages if m["type"] == "test_summary"]
        assert found, f"{self.errors}\n{self.messages[-3:]}"
        return found[-1]


def _words(found: dict[str, Any]) -> str:
    where = found.get("range") or {}
    return (f"{where.get('filename', '')}:{where.get('start', {}).get('line', '')}: {found['summary']}: "
            f"{found.get('detail', '')}")


@contextmanager
def started(scratch: Path) -> Iterator[SchemaRun]:
    with plugin.served(scratch) as reattach:
        yield SchemaRun(scratch, reattach)
