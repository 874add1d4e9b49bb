"""Count how the task files of a folder fare with `up --dryrun`: `python bench/foreign/foreign_files.py FOLDER`.

A file may hold several documents: each with something to run is a task. *plans*: `up FILE --dryrun` prints a plan with
the catalog's prices, as it is; the plan names a provider that is missing and whatever else must be done before `up`
(variables without a value, files that are not there, a container). *refused*: it says in one line what has no meaning
here. *failed*: anything else. Tasks that ask for Kubernetes or serving, or that name other clouds than AWS, are counted
apart. No credentials are used, and nothing is asked of a cloud.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spotfleet.cli.app import run

TASK_KEYS = {"run", "resources", "setup", "pool", "service"}
KUBERNETES = {"kubernetes", "k8s"}
BEFORE_UP = {"no provider": "names no provider", "a cloud that no provider here is for": "name a provider: ",
             "a Git repository": "a Git repository", "a bucket of another store": "is no object store",
             "a variable without a value": "has no value",
             "a file that is not there": "but there is none at", "a container": "is a container",
             "a bucket's name": "names no bucket", "an image with a driver": "has no driver"}


@dataclass(frozen=True)
class Outcome:
    """What became of one task."""

    task: str  # FILE, or FILE#NUMBER
    kind: str  # "plans", "refused" or "failed"
    reasons: tuple[str, ...]  # for a plan, what must be done before `up`


def tasks(folder: Path) -> Iterator[tuple[str, Path, dict[str, Any], bool]]:
    """Yield (name, file, document, whether it is the only one) for each task of the folder."""
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".yaml", ".yml")):
        documents = [d for d in yaml.safe_load_all(path.read_text()) if isinstance(d, dict)]
        for number, document in enumerate(documents, 1):
            if TASK_KEYS & set(document) and "apiVersion" not in document:
                alone = len(documents) == 1
                yield f"{path.relative_to(folder)}{'' if alone else f'#{number}'}", path, document, alone


def apart(task: dict[str, Any]) -> str:
    """Return why a task is counted apart; "" if it is not."""
    resources = task.get("resources") if isinstance(task.get("resources"), dict) else {}
    asked = [resources, *(one for key in ("any_of", "ordered") for one in resources.get(key) or [])]
    clouds = {str(one.get("infra") or one.get("cloud") or "").partition("/")[0].lower() for one in asked} - {"", "*"}
    if "service" in task:
        return "serving"
    if clouds & KUBERNETES:
        return "Kubernetes"
    return "another cloud" if clouds and "aws" not in clouds else ""


def outcome(name: str, path: Path, task: dict[str, Any], alone: bool) -> Outcome:
    """Plan the task. One of several documents is written out beside nothing else, with its paths as they are."""
    file = path
    if not alone:
        file = Path(tempfile.mkdtemp()) / path.name
        file.write_text(yaml.safe_dump(task, sort_keys=False))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(["up", str(file), "--dryrun"])
    if code == 0 and "/h in all" in out.getvalue() and "the catalog's" in out.getvalue():
        below = out.getvalue().partition("before `up`:")[2]
        return Outcome(name, "plans", tuple(what for what, words in BEFORE_UP.items() if words in below))
    said = re.sub(r"\s+", " ", err.getvalue().partition("error: ")[2].partition("hint:")[0]).replace(str(file), "")
    parts = [p.strip() for p in re.split(r"(?:^| ):\d+: ", said) if p.strip() and "problems" not in p]
    return Outcome(name, "refused" if code in (1, 2) and parts else "failed", tuple(parts) or (f"exit code {code}",))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="print each task")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        for key in [k for k in os.environ if k.startswith(("AWS_", "SPOTFLEET_"))]:
            del os.environ[key]
        os.environ |= {"HOME": home, "SPOTFLEET_HOME": f"{home}/.spotfleet", "COLUMNS": "500"}
        report([*tasks(given.folder)], each=given.all)


def report(found: list[tuple[str, Path, dict[str, Any], bool]], *, each: bool) -> None:
    counted_apart = Counter(filter(None, (apart(task) for _, _, task, _ in found)))
    outcomes = [outcome(*one) for one in found if not apart(one[2])]
    if each:
        for one in outcomes:
            print(f"{one.kind:8} {one.task}: {'; '.join(one.reasons)}")
    kinds = Counter(one.kind for one in outcomes)
    print(f"{len(found)} tasks; apart: " + ", ".join(f"{why} {n}" for why, n in counted_apart.most_common()))
    for kind in ("plans", "refused", "failed"):
        print(f"{kind:8} {kinds[kind]:4}  {100 * kinds[kind] / max(1, len(outcomes)):5.1f} %")
        ready = sum(one.kind == kind and not one.reasons for one in outcomes)
        if kind == "plans":
            print(f"{ready:13}  nothing but credentials is missing")
        for why, count in Counter(r for one in outcomes if one.kind == kind for r in one.reasons).most_common():
            print(f"{count:13}  {why[:150]}")
    if kinds["failed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
