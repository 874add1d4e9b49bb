"""Which tests a change reaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.impact import needs_of, reached
from tests.support.source_tree import Tree

FILES = {
    "spotfleet/__init__.py": "",
    "spotfleet/plan.py": "from spotfleet.model import Host\n",
    "spotfleet/model.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from spotfleet import typed\n",
    "spotfleet/typed.py": "",
    "spotfleet/lazy.py": "",
    "spotfleet/run.py": "def f():\n    from . import lazy\n",
    "spotfleet/deep/__init__.py": "",
    "spotfleet/deep/part.py": "",
    "spotfleet/providers/aws/launch.py": "",
    "spotfleet/providers/__init__.py": "from importlib.metadata import entry_points\n",
    "spotfleet/providers/local.py": "",
    "pyproject.toml": '[project]\nname = "a"\n[project.entry-points."p"]\nlocal = "spotfleet.providers.local:L"\n'
                      'aws = "spotfleet.providers.aws.launch:A"\n',
    "scripts/story.py": "",
    "tests/conftest.py": "",
    "tests/fleet/conftest.py": "",
    "tests/fleet/worlds.py": "import spotfleet.plan\n",
    "tests/fleet/test_plan.py": "from worlds import World\n",
    "tests/fleet/test_run.py": "import spotfleet.run\n",
    "tests/cli/test_module.py": '"""Not `spotfleet.lazy`."""\nRUN = ["python", "-m", "spotfleet.deep.part"]\n',
    "tests/cli/test_story.py": 'SCRIPT = "story.py"\n',
    "tests/cli/test_providers.py": "import spotfleet.providers\n",
    "tests/aws/test_aws.py": "import spotfleet.providers.aws.launch\n",
    "tests/support/cli/cli_user.py": "import subprocess\n",
    "tests/cli/test_user.py": "from tests.support.cli.cli_user import User\n",
    "tests/e2e/test_whole.py": "import pytest\npytestmark = pytest.mark.processes\n",
    "bench/silence.py": "",
}
EVERY = {file for file in FILES if "/test_" in file}
WHOLE = {"tests/e2e/test_whole.py", "tests/cli/test_user.py"}  # start processes, or a helper does


@pytest.fixture
def graph(tmp_path: Path) -> dict[str, set[str]]:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return needs_of(Tree(tmp_path))


@pytest.mark.parametrize(("changed", "tests"), [
    ("spotfleet/model.py", {"tests/fleet/test_plan.py", *WHOLE}),  # through a helper of the folder
    ("spotfleet/lazy.py", {"tests/fleet/test_run.py", *WHOLE}),  # imported inside a function
    ("spotfleet/typed.py", WHOLE),  # for type checkers alone
    ("spotfleet/deep/__init__.py", {"tests/cli/test_module.py", *WHOLE}),  # around a module that a string names
    ("scripts/story.py", {"tests/cli/test_story.py"}),
    # By an entry point, of which `spotfleet/providers/__init__.py` reads.
    ("spotfleet/providers/local.py", {"tests/cli/test_providers.py", "tests/aws/test_aws.py", *WHOLE}),
    ("spotfleet/providers/aws/launch.py", {"tests/aws/test_aws.py"}),  # a tier's own code
    ("tests/fleet/conftest.py", {"tests/fleet/test_plan.py", "tests/fleet/test_run.py"}),
    ("tests/fleet/test_plan.py", {"tests/fleet/test_plan.py"}),
    ("tests/fleet/test_deleted.py", set()),
    ("bench/silence.py", set()),
    ("docs/clouds/aws.md", set()),
    ("tests/mutants/mutants.toml", set()),
    ("tests/conftest.py", EVERY),
])
def test_a_change_reaches_the_tests_that_need_the_file(graph, changed, tests):
    assert reached(graph, {changed}) == tests


@pytest.mark.parametrize("changed", ["pyproject.toml", "spotfleet/catalog/data/aws.csv", "spotfleet/deleted.py",
                                     ".ci/run", "tests/fleet/helper_that_was_deleted.py"])
def test_a_file_of_which_nothing_is_known_may_reach_any_test(graph, changed):
    assert reached(graph, {changed, "spotfleet/plan.py"}) is None
