"""Rules of CONTRIBUTING.md and ARCHITECTURE.md that a machine can check, one test for each."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import fleet_file_page
from tests.lint import code_rules, document_rules, fault_rules, import_rules
from tests.lint.layers import SDKS
from tests.support.source_tree import Tree, read_tree

Rule = Callable[[Tree], list[str]]
HEAVY = SDKS | {"torch", "numpy", "aiohttp", "pydantic", "cryptography", "sqlite3"}
HELP = """
import json, sys
sys.argv = ["spotfleet", "--help"]
from spotfleet.cli import main
try:
    main()
finally:
    print("MODULES " + json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
LATER = "# TO" + "DO: later\n"
LONG = "def long():\n" + "    pass\n" * 60
FAULT = '[[mutant]]\nname = "{0}"\nfile = "{1}"\nold = "x = 1"\nnew = "x = 2"\ntest = "{2}"\n'
TEST_FAULTS = "tests/mutants/mutants.toml"

# For each rule a tree that breaks it, and the place that it must name.
REFUSED: list[tuple[Rule, dict[str, str], str]] = [
    (import_rules.imports_point_down_the_layers,
     {"spotfleet/model.py": "import spotfleet.cli\n", "spotfleet/cli/__init__.py": ""}, "spotfleet/model.py:1"),
    (import_rules.agent_and_dispatcher_share_only_messages,
     {"spotfleet/agent/a.py": "from spotfleet.dispatcher import b\n", "spotfleet/dispatcher/b.py": ""},
     "spotfleet/agent/a.py:1"),
    (import_rules.an_engine_imports_only_itself_and_what_workers_share,
     {"spotfleet/train/a.py": "def f():\n    import spotfleet.transport.client\n", "spotfleet/transport/client.py": ""},
     "spotfleet/train/a.py:2"),
    (import_rules.the_worker_knows_no_engine,
     {"spotfleet/worker/a.py": "def f():\n    import spotfleet.train.b\n", "spotfleet/train/b.py": ""},
     "spotfleet/worker/a.py:2"),
    (import_rules.a_pure_module_imports_nothing_that_has_effects, {"spotfleet/a.py": "import os\n"},
     "spotfleet/a.py:1"),
    (import_rules.the_runtime_needs_only_torch_and_the_standard_library,
     {"spotfleet/train/a.py": "import os\nimport requests\n"}, "spotfleet/train/a.py:2"),
    (import_rules.only_the_runtime_imports_torch,
     {"spotfleet/agent/a.py": "def f():\n    import torch.distributed\n"}, "spotfleet/agent/a.py:2"),
    (import_rules.only_its_own_folder_imports_ray,
     {"spotfleet/dispatcher/a.py": "def f():\n    import ray.exceptions\n"}, "spotfleet/dispatcher/a.py:2"),
    (import_rules.an_sdk_is_imported_inside_functions_only,
     {"spotfleet/providers/a.py": "try:\n    from google.cloud import compute\nexcept ImportError:\n    raise\n"},
     "spotfleet/providers/a.py:2"),
    (import_rules.a_pure_module_imports_nothing_that_has_effects,
     {"spotfleet/report/a.py": "import math\nimport time\n"}, "spotfleet/report/a.py:2"),
    (import_rules.every_module_in_the_table_of_layers_exists, {"spotfleet/model.py": ""}, "tests/lint/layers.py:1"),
    (import_rules.modules_do_not_import_each_other_in_a_circle,
     {"spotfleet/a.py": "import spotfleet.b\n", "spotfleet/b.py": "import spotfleet.a\n"}, "spotfleet/b.py:1"),
    (import_rules.modules_do_not_import_each_other_in_a_circle,
     {"spotfleet/a.py": "import spotfleet.b\n",
      "spotfleet/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import a\n"},
     "spotfleet/b.py:3"),
    (import_rules.modules_do_not_import_each_other_in_a_circle,
     {"spotfleet/a.py": "import spotfleet.b\n", "spotfleet/b.py": "import spotfleet.c\n",
      "spotfleet/c.py": "def f():\n    from .a import value\n"}, "spotfleet/c.py:2"),
    (import_rules.modules_do_not_import_each_other_in_a_circle,
     {"spotfleet/a.py": "import spotfleet.b\n",
      "spotfleet/b.py": "import importlib\ndef f():\n    importlib.import_module('spotfleet.a')\n"},
     "spotfleet/b.py:3"),
    (import_rules.folders_do_not_import_each_other_in_a_circle,
     {"spotfleet/a/b/x.py": "import spotfleet.a.c.y\n", "spotfleet/a/b/z.py": "",
      "spotfleet/a/c/y.py": "import spotfleet.a.b.z\n"},
     "spotfleet/a/c/y.py:1"),
    (import_rules.areas_do_not_import_each_other_in_a_circle,
     {"spotfleet/a/x.py": "import spotfleet.b.c.y\n", "spotfleet/b/c/y.py": "",
      "spotfleet/b/z.py": "import spotfleet.a.x\n"},
     "spotfleet/b/z.py:1"),
    (code_rules.the_core_names_no_cloud,
     {"spotfleet/api/a.py": "if x.provider == 'gcp':\n    pass\n", "spotfleet/providers/aws/b.py": "NAME = 'aws'\n"},
     "spotfleet/api/a.py:1"),
    (code_rules.the_core_names_no_cloud,
     {"spotfleet/dispatcher/a.py": "import os\nfrom spotfleet.providers.aws import x\n"},
     "spotfleet/dispatcher/a.py:2"),
    (code_rules.a_function_is_short, {"spotfleet/a.py": "x = 1\n" + LONG}, "spotfleet/a.py:2"),
    (code_rules.no_error_is_hidden, {"tests/a.py": "try:\n    f()\nexcept Exception:\n    pass\n"}, "tests/a.py:3"),
    (code_rules.nothing_is_left_to_do_later, {"bench/a.py": "x = 1\n" + LATER}, "bench/a.py:2"),
    (code_rules.a_comment_names_what_it_is_about, {"bench/a.py": "# limit\n# of time\nx = 1  # Of a step\n"},
     "bench/a.py:3"),
    (code_rules.a_comment_names_what_it_is_about, {"spotfleet/a.py": "x = 1\n# of a step\ny = 2\n"},
     "spotfleet/a.py:2"),
    (code_rules.a_class_name_is_unique_in_the_product,
     {"spotfleet/a.py": "class Unheard:\n    pass\n", "spotfleet/b.py": "\nclass Unheard:\n    pass\n"},
     "spotfleet/b.py:2"),
    (code_rules.a_printed_value_shows_no_secret,
     {"spotfleet/a.py": "class Login:\n    user: str\n    token: str = ''\n"}, "spotfleet/a.py:1"),
    (code_rules.unpickling_is_listed_in_the_security_document,
     {"spotfleet/a.py": "import pickle\nx = pickle.loads(b'')\n"}, "spotfleet/a.py:1"),
    (code_rules.unpickling_is_listed_in_the_security_document,
     {"spotfleet/a.py": "x = 1\n", "docs/security.md": "## Pickles\n| `spotfleet/a.py` | nobody |\n"},
     "spotfleet/a.py:1"),
    (code_rules.unpickling_is_listed_in_the_security_document,
     {"spotfleet/a.py": "import torch\ntorch.load('x')\n",
      "docs/security.md": "## Pickles\n| `spotfleet/a.py` | us |\n"},
     "spotfleet/a.py:2"),
    (code_rules.a_file_is_renamed_by_the_one_helper,
     {"spotfleet/a.py": "x.replace('a', 'b')\natomic.rename(x, y)\nx.replace(y)\n"}, "spotfleet/a.py:3"),
    (code_rules.a_file_is_renamed_by_the_one_helper,
     {"spotfleet/a.py": "import os\nos.rename(x, y)\n"}, "spotfleet/a.py:2"),
    (code_rules.the_command_line_calls_nothing_that_only_linux_has,
     {"spotfleet/cli/a.py": "import os\nos.sched_getaffinity(0)\n", "spotfleet/agent/a.py": "os.pipe2(0)\n"},
     "spotfleet/cli/a.py:2"),
    (code_rules.every_error_class_is_used, {"spotfleet/errors.py": "class Lost(Exception):\n    pass\n"},
     "spotfleet/errors.py:1"),
    (code_rules.a_folder_is_small, {f"spotfleet/x/f{n}.py": "" for n in range(16)}, "spotfleet/x:1"),
    (code_rules.a_folder_is_small, {f"docs/f{n}.md": "" for n in range(26)}, "docs:1"),
    (document_rules.links_in_a_document_lead_somewhere, {"docs/a.md": "\n[b](b.md)\n"}, "docs/a.md:2"),
    (document_rules.files_that_a_document_names_exist, {"README.md": "`spotfleet/a.py`\n"}, "README.md:1"),
    (document_rules.nothing_is_installed_by_a_name_that_is_not_published,
     {"docs/a.md": "\n`pip install 'spotfleet[aws]'`\n"}, "docs/a.md:2"),
    (document_rules.nothing_is_installed_by_a_name_that_is_not_published,
     {"spotfleet/a.py": "X = 'pip install --upgrade spotfleet'\n"}, "spotfleet/a.py:1"),
    (document_rules.recorded_durations_name_test_files, {"tests/durations.json": '{"tests/test_a.py": 1}'},
     "tests/durations.json:1"),
    (fault_rules.a_seeded_fault_fits_the_code,
     {TEST_FAULTS: FAULT.format("a", "spotfleet/a.py", "tests/test_a.py::test_a"), "spotfleet/a.py": "x = 3\n"},
     f"{TEST_FAULTS}:2"),
    (fault_rules.the_test_of_a_seeded_fault_exists,
     {TEST_FAULTS: FAULT.format("a", "spotfleet/a.py", "tests/test_a.py::test_b"),
      "tests/test_a.py": "def test_a(): ...\n"},
     f"{TEST_FAULTS}:2"),
    (fault_rules.each_seeded_fault_has_a_name_of_its_own,
     {TEST_FAULTS: 2 * FAULT.format("a", "spotfleet/a.py", "tests/test_a.py::test_a")}, f"{TEST_FAULTS}:1"),
    (fault_rules.every_file_that_decides_has_a_seeded_fault,
     {TEST_FAULTS: FAULT.format("a", "a.py", "tests/test_a.py")}, f"{TEST_FAULTS}:1"),
    (fault_rules.the_default_tests_kill_each_seeded_fault,
     {TEST_FAULTS: "\n" + FAULT.format("a", "spotfleet/fleet/planner/plan.py", "tests/fakes/test_a.py::test_a")},
     f"{TEST_FAULTS}:3"),
    (fault_rules.each_known_fault_is_still_killed_elsewhere, {"spotfleet/a.py": ""}, "tests/lint/known.py:1"),
    (fault_rules.each_change_to_code_of_a_tier_reaches_it, {"spotfleet/train/a.py": ""}, "spotfleet/train/a.py:1"),
    (fault_rules.the_table_of_tiers_names_what_exists, {"spotfleet/a.py": ""}, "tests/support/tiers.py:1"),
]
RULES = list(dict.fromkeys(rule for rule, *_ in REFUSED))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_nothing_offends(rule: Rule):
    offenders = rule(read_tree())
    assert not offenders, "\n" + "\n".join(f"{offender} [{rule.__name__}]" for offender in offenders)


@pytest.mark.parametrize(("rule", "files", "place"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_each_rule_refuses_its_fault(rule: Rule, files: dict[str, str], place: str, tmp_path: Path):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    offenders = rule(Tree(tmp_path))
    assert place in [re.match(r"\S+:\d+", offender)[0] for offender in offenders]


def test_the_page_of_the_fleet_files_keys_is_up_to_date():
    assert fleet_file_page.PAGE.read_text() == fleet_file_page.page(), "run python scripts/fleet_file_page.py"


def test_every_rule_is_applied():
    written = {function for module in (code_rules, document_rules, fault_rules, import_rules)
               for name, function in vars(module).items()
               if getattr(function, "__module__", "") == module.__name__ and not name.startswith("_")
               and function.__annotations__ == {"tree": "Tree", "return": "list[str]"}}
    assert written == set(RULES)


def test_help_imports_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stderr.rpartition("MODULES ")[2])
    assert not {name.split(".")[0] for name in loaded} & HEAVY
