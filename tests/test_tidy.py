"""The rules of CONTRIBUTING.md and ARCHITECTURE.md that a machine can check."""

from __future__ import annotations

import ast
import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

TOP = Path(__file__).parent.parent
SRC = TOP / "spotfleet"
SOURCES = sorted(SRC.rglob("*.py"))
EVERYTHING = sorted(p for d in ("spotfleet", "tests", "examples", "bench", "scripts") for p in (TOP / d).rglob("*.py"))
DOCUMENTS = sorted([*TOP.glob("*.md"), *TOP.glob("docs/**/*.md")])

# ARCHITECTURE.md, "Layers". The longest prefix decides.
LAYERS = {f"spotfleet.{name}".rstrip("."): layer for layer, names in {
    0: "model errors config messages codec versions addresses stores",
    1: "fleet.events fleet.fold fleet.plan fleet.actions fleet.choose fleet.sightings fleet.billing "
       "fleet.cost fleet.cost_rows fleet.cost_facts fleet.cost_meters fleet.cost_groups fleet.cost_series "
       "fleet.cost_reconcile fleet.size "
       "fleet.host fleet.copies fleet.policy simulate.trace simulate.result report "
       "catalog.values catalog.table catalog.useful catalog.ranking "
       "dispatcher.membership dispatcher.schedule dispatcher.explain agent.orphan "
       "providers.local.market providers.local.book providers.local.invoice providers.local.pools "
       "providers.aws.names providers.aws.errors providers.aws.listing providers.aws.template providers.aws.policy",
    2: "fleet catalog simulate providers interruptions bundle certs client durable bootstrap ssh",
    3: "dispatcher agent train",
    4: "cli api",
}.items() for name in names.split()} | {"spotfleet": 4}  # fmt: skip
SHELLS = ("spotfleet.config", "spotfleet.errors", "spotfleet.stores")
PURE = [name for name, layer in LAYERS.items() if layer <= 1 and name not in SHELLS]
EFFECTS = {
    "aiohttp", "asyncio", "datetime", "logging", "multiprocessing", "os", "pathlib", "random", "secrets", "select",
    "shutil", "signal", "socket", "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "torch",
    "urllib", "uuid",
}  # fmt: skip
SDKS = {"boto3", "botocore", "google", "azure", "ray", "xgboost", "fabric", "obstore"}
RUN = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}  # what they read may be a program
SECRET = {"secrets", "token", "admin_token", "fleet_secret"}
HEAVY = SDKS | {"torch", "numpy", "aiohttp", "pydantic", "cryptography", "sqlite3"}
FEW_MODULES = "import argparse, asyncio, dataclasses, email.parser, http.client, json"  # 0.12 s where help takes 0.14
HELP_COST = 2.5  # times that


class Import(NamedTuple):
    name: str  # full dotted name, relative ones resolved
    at_load: bool  # runs when the module is imported: not in a function, not for type checkers alone


def module_name(path: Path) -> str:
    parts = path.relative_to(TOP).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All of the file's tree. Read once for all rules: there are thousands of tests here."""
    return list(ast.walk(ast.parse(text_of(path))))


@cache
def imports(path: Path) -> list[Import]:
    return list(_imports(nodes_of(path)[0], path, at_load=True))


def _imports(node: ast.AST, path: Path, at_load: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import():
                yield from (Import(alias.name, at_load) for alias in child.names)
            case ast.ImportFrom():
                base = _base(child, path)
                yield from (Import(_target(base, alias.name), at_load) for alias in child.names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from _imports(child, path, at_load=False)
            case ast.If() if "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            case _:
                yield from _imports(child, path, at_load)


def _base(node: ast.ImportFrom, path: Path) -> str:
    if not node.level:
        return node.module or ""
    parts = path.relative_to(TOP).with_suffix("").parts[: -node.level]
    return ".".join([*parts, *([node.module] if node.module else [])])


@cache
def _target(base: str, name: str) -> str:
    """`from base import name` means a module of that name where there is one, else a value in `base`."""
    path = TOP / Path(*f"{base}.{name}".split("."))
    return f"{base}.{name}" if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file() else base


@cache
def layer(name: str) -> int:
    return LAYERS[next(n for n in sorted(LAYERS, key=len, reverse=True) if name == n or name.startswith(n + "."))]


MODULES = {module_name(p) for p in SOURCES}


def ours(found: list[Import]) -> set[str]:
    """The modules of this package among `found`, without the values that stand in them."""
    return {i.name for i in found if i.name in MODULES}


def each(paths: list[Path]):
    return pytest.mark.parametrize("path", paths, ids=lambda p: str(p.relative_to(TOP)))


@each(SOURCES)
def test_imports_point_down_the_layers(path):
    if path == SRC / "__init__.py":
        return  # re-exports the API lazily
    here = module_name(path)
    up = {name for name in ours(imports(path)) - {"spotfleet"} if layer(name) > layer(here)}
    assert not up, f"{here} is in layer {layer(here)}"


@each(sorted(SRC.glob("agent/**/*.py")) + sorted(SRC.glob("dispatcher/**/*.py")))
def test_agent_and_dispatcher_meet_in_messages_only(path):
    here = module_name(path).split(".")[1]
    others = {"agent", "dispatcher", "train"} - {here}
    crossing = {n for n in ours(imports(path)) if n.count(".") and n.split(".")[1] in others}
    assert not {n for n in crossing if layer(n) > 1}


@each(sorted(SRC.glob("train/**/*.py")))
def test_the_runtime_imports_nothing_of_ours_but_the_bottom_layer(path):
    outside = {n for n in ours(imports(path)) - {"spotfleet"} if not n.startswith("spotfleet.train")}
    assert not {n for n in outside if layer(n) > 0 or n.startswith("spotfleet.config")}


@each(sorted(SRC.glob("train/**/*.py")))
def test_the_runtime_needs_torch_and_the_standard_library_only(path):
    allowed = {*sys.stdlib_module_names, "torch", "numpy", "spotfleet"}
    assert not {i.name.split(".")[0] for i in imports(path)} - allowed


@each([p for p in SOURCES if not p.is_relative_to(SRC / "train")])
def test_torch_is_imported_by_the_runtime_only(path):
    assert not {i.name for i in imports(path) if i.name.split(".")[0] == "torch"}


@each(SOURCES)
def test_an_sdk_is_imported_where_it_is_used_only(path):
    assert not {i.name for i in imports(path) if i.at_load and i.name.split(".")[0] in SDKS}


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_imports_nothing_that_has_effects(name):
    folder = TOP / Path(*name.split("."))
    paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    assert not {i.name for p in paths for i in imports(p) if i.name.split(".")[0] in EFFECTS}


def test_no_modules_import_each_other_in_a_circle():
    edges = {module_name(p): ours([i for i in imports(p) if i.at_load]) - {module_name(p)} for p in SOURCES}
    while leaves := {name for name, needs in edges.items() if not needs & edges.keys()}:
        edges = {name: needs for name, needs in edges.items() if name not in leaves}
    assert not edges


@each(EVERYTHING)
def test_a_file_and_its_functions_fit_in_the_head(path):
    assert len(text_of(path).splitlines()) <= 400
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name


@each(EVERYTHING)
def test_no_error_is_hidden(path):
    for node in nodes_of(path):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            silent = all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
            assert not (broad and silent), f"line {node.lineno}"


@each(EVERYTHING)
def test_nothing_is_left_to_do_later(path):
    marks = re.findall(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|NotImplemented" r"Error)\b", text_of(path))
    assert not marks


@each(SOURCES)
def test_no_value_shows_a_secret_when_it_is_printed(path):
    for kind in (n for n in nodes_of(path) if isinstance(n, ast.ClassDef)):
        fields = {ast.unparse(f.target): ast.unparse(f) for f in kind.body if isinstance(f, ast.AnnAssign)}
        said = any(isinstance(f, ast.FunctionDef) and f.name == "__repr__" for f in kind.body)
        shown = [name for name in SECRET & fields.keys() if "repr=False" not in fields[name]]
        assert said or not shown or "pydantic" in str(imports(path)), kind.name


@each(SOURCES)
def test_bytes_become_objects_only_where_the_book_says_who_vouches_for_them(path):
    """`docs/security.md`, "Pickles", names each file that may run what it reads."""
    name = str(path.relative_to(TOP))
    calls = {ast.unparse(n) for n in nodes_of(path) if isinstance(n, ast.Call)}
    runs = [c for c in calls if re.match(rf"({'|'.join(RUN)}|torch|np|numpy)\.(load|loads|open|Unpickler)\(", c)]
    imported = {i.name for i in imports(path)} & RUN
    told = f"| `{name}` |" in text_of(TOP / "docs" / "security.md").partition("## Pickles")[2]
    assert told == bool(runs or imported)
    assert not [c for c in runs if c.startswith("torch.") and "weights_only=True" not in c]


def test_every_error_class_has_a_reaction_or_a_cause():
    classes = [n.name for n in ast.parse((SRC / "errors.py").read_text()).body if isinstance(n, ast.ClassDef)]
    used = "\n".join(text_of(p) for p in SOURCES if p.name != "errors.py")
    assert [c for c in classes if not re.search(rf"\b{c}\b", used)] == []


def test_every_path_in_the_map_of_the_layers_exists():
    for name in LAYERS:
        path = TOP / Path(*name.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), name


@each(DOCUMENTS)
def test_links_and_named_files_in_a_document_exist(path):
    text = path.read_text()
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text)
    assert not [link for link in links if not (path.parent / link).exists()]
    named = re.findall(r"`((?:spotfleet|examples|scripts|tests|docs|bench)/[\w./-]+\w)`", text)
    assert not [name for name in named if not (TOP / name).exists()]


HELP = """
import json, sys
sys.argv = ["spotfleet", "--help"]
from spotfleet.cli import main
try:
    main()
finally:
    print("MODULES " + json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def test_help_imports_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stderr.rpartition("MODULES ")[2])
    assert not {name.split(".")[0] for name in loaded} & HEAVY


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
